"""YAML text -> plain data plus the line of every value, read the way Kubernetes reads it; and back.

Differences from PyYAML's defaults, each because the same file has to mean the same thing on a cluster:
`1e-6` is a number, `y` and `n` are booleans, dates and `1:30` stay strings, a key that is written twice is an error.
Sizes are bounded, so that a hostile file (aliases of aliases) ends as an error. What is written quotes every text that
any of the two would read as something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from .errors import Problem, SpecError, shorten
from .shapes import Path

#: bytes; etcd takes no larger object either
MAX_BYTES = 1_500_000
MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document: its data, and the line (from 1) of every path in it."""

    data: Any
    lines: dict[Path, int]


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own table of implicit types; see the module."""

    bool_values: ClassVar[dict[str, bool]] = {**yaml.SafeLoader.bool_values, "y": True, "n": False}


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in table if not tag.endswith((":timestamp", ":float", ":int", ":value"))]
    for first, table in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors; quotes a text that PyYAML, this module or kubectl would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these line breaks of Unicode into spaces unless they are escaped
    style = '"' if set(text) & set("\r\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)

# `.inf` and `.nan` are not numbers here, as in JSON
_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o?[0-7]+|0b[01]+)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$")
_BOOL = re.compile(r"^[yYnN]$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("yYnN"))
    _side.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
# kubectl finds numbers in more texts than this module does (`09`, `0x_1`): whatever may look like one is quoted
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\.?[0-9][0-9a-fA-FxXoO_.+-]*$"), list("-+.0123456789")
)


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML in the order it has; `parse` reads it back."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse(text: str, source: str) -> list[Document]:
    """All documents of a text, empty ones left out. Raises SpecError with the line of what can't be read."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise SpecError(source, [Problem(f"the file has {size:,} bytes, more than {MAX_BYTES:,}")])
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = Problem(f"not valid YAML: character {error.character!r} is not allowed", place=f"line {line}")
        raise SpecError(source, [problem]) from error
    try:
        documents = []
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                documents.append(_Reader(loader, source).document(node))
        return [d for d in documents if d.data is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        context = f" ({error.context})" if error.context else ""
        raise SpecError(source, [Problem(f"not valid YAML: {error.problem}{context}", place=place)]) from error
    except RecursionError as error:
        raise SpecError(source, [Problem("is nested too deeply")]) from error
    finally:
        loader.dispose()


def scalar(text: str, source: str) -> Any:
    """The value of an override: any YAML, usually a number or a word. Raises SpecError, also where there is none."""
    documents = parse(text, source)
    if len(documents) > 1:
        raise SpecError(source, [Problem(f"the value {text!r} has several YAML documents")])
    if not documents and (not text.strip() or text.lstrip().startswith("#")):
        raise SpecError(source, [Problem("has no value (an unset shell variable?); give one, or null", place=source)])
    return documents[0].data if documents else None


_MERGE = "tag:yaml.org,2002:merge"
#: JSON's types
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class _Reader:
    """One document's nodes -> data, lines and everything that is wrong with its keys."""

    def __init__(self, loader: _Loader, source: str):
        self.loader = loader
        self.source = source
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.visits = 0

    def document(self, node: yaml.Node) -> Document:
        data = self.read(node, (), node.start_mark.line + 1)
        if self.problems:
            raise SpecError(self.source, self.problems)
        return Document(data, self.lines)

    def read(self, node: yaml.Node, path: Path, line: int) -> Any:
        self.lines[path] = line
        if node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.problems.append(Problem(f"the tag {shorten(tag)} is not supported; remove it", path, f"line {line}"))
            return None
        with self.entered(node, path, line):
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, i), item.start_mark.line + 1) for i, item in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode):
                pairs = self.pairs(node, path)
                return {key: self.read(value, (*path, key), at) for key, (value, at) in pairs.items()}
            try:
                return self.loader.construct_object(node)
            except (ValueError, KeyError):  # the tag is written out (`!!int x`), or a number has thousands of digits
                kind = node.tag.rsplit(":", 1)[-1]
                self.problems.append(Problem(f"{shorten(node.value)} can't be read as {kind}", path, f"line {line}"))
                return None

    def pairs(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, int]]:
        """Key -> (value, line of the key), with `<<` carried out: what is written here wins over what is merged."""
        merged: dict[str, tuple[yaml.Node, int]] = {}
        own: dict[str, tuple[yaml.Node, int]] = {}
        for key_node, value in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                for base in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    if isinstance(base, yaml.MappingNode):
                        with self.entered(base, path, line):
                            merged.update(self.pairs(base, path))
                    else:
                        self.problems.append(Problem("`<<` takes a mapping or a list of them", path, f"line {line}"))
                continue
            key = self.loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = shorten(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or a mapping"
                self.problems.append(Problem(f"{shown} as a key is not text; quote it", path, f"line {line}"))
            elif key in own:
                first = own[key][1]
                self.problems.append(Problem(f"is written twice, first in line {first}", (*path, key), f"line {line}"))
            else:
                own[key] = (value, line)
        return {**merged, **own}

    @contextmanager
    def entered(self, node: yaml.Node, path: Path, line: int) -> Iterator[None]:
        """Ends anchors that contain themselves, and aliases of aliases of aliases."""
        self.visits += 1
        if self.visits > MAX_VALUES:
            raise SpecError(
                self.source, [Problem(f"the file has more than {MAX_VALUES:,} values", place=f"line {line}")]
            )
        if id(node) in self.open:
            raise SpecError(self.source, [Problem("the anchor contains itself", path, f"line {line}")])
        self.open.add(id(node))
        try:
            yield
        finally:
            self.open.discard(id(node))
