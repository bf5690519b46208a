"""What may be written at a path of an object, for people: `tapforge explain`. Pure.

Everything comes from the kind's CRD: type, unit and meaning, bounds, default and rules, as the API server knows them.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from .crd import KINDS, crd
from .wording import rule_of

Schema = dict[str, Any]

_WIDTH: Final = 100


class UnknownField(ValueError):
    """No field has this path; says which was probably meant."""


def explain(words: str, *, recursive: bool = False) -> str:
    """`words`: [KIND.]PATH as in a file, such as `spec.rollout.groupSize` or `emulatorpool.spec.health`; "" is a
    TrainingRun. `recursive`: the names below it as a tree, instead of one level with all that is known. Raises
    UnknownField."""
    kind, path = _kind_and_path(words)
    node, found = schema_of(kind), list[str]()
    for name in path:
        node, step = _below(kind, node, found, name)
        found += step
    if recursive:
        return "\n".join([_head(kind, found, node), *_tree(node, 1)])
    return "\n".join(_page(kind, found, node))


@cache
def schema_of(kind: str) -> Schema:
    """Of the whole object, as the CRD has it."""
    schema: Schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def kind_of(words: str) -> str:
    """Of a field's path as `explain` takes it."""
    return _kind_and_path(words)[0]


def _kind_and_path(words: str) -> tuple[str, list[str]]:
    parts = [part for part in words.replace("[]", "").split(".") if part]
    names = {name: kind for kind, others in KINDS.items() for name in (kind.lower(), *others)}
    if parts and parts[0].lower() in names:
        return names[parts[0].lower()], parts[1:]
    return "TrainingRun", parts


def _below(kind: str, node: Schema, path: Sequence[str], name: str) -> tuple[Schema, list[str]]:
    """The field of that name, through the items of a list."""
    inner = node.get("items", node)
    fields = inner.get("properties", {})
    if name in fields:
        return fields[name], [name]
    where = ".".join((kind, *path))
    if not fields or is_free(inner):
        what = "is passed through as it is" if is_free(inner) else f"is a single value ({type_of(node)})"
        raise UnknownField(f"{where} {what}: {name} is not known here")
    elsewhere = [".".join(found) for found in _paths(schema_of(kind)) if found[-1].lower() == name.lower()]
    near = difflib.get_close_matches(name.lower(), [one.lower() for one in fields], n=1, cutoff=0.6)
    meant = [one for one in fields if near and one.lower() == near[0]] or elsewhere[:3]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(fields)}"
    raise UnknownField(f"{where} has no field {name}; {hint}")


def _paths(node: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in node.get("items", node).get("properties", {}).items():
        yield (*path, name)
        yield from _paths(field, (*path, name))


# --- for people -------------------------------------------------------------------------------------------------------


def _page(kind: str, path: Sequence[str], node: Schema) -> Iterator[str]:
    yield _head(kind, path, node)
    yield from _wrapped(said(node), 2)
    inner = node.get("items", node)
    for rule in inner.get("x-kubernetes-validations", ()):
        yield from _wrapped(f"rule: {rule['message']}", 2)
    fields = inner.get("properties", {})
    for name, field in fields.items():
        must = ", required" if name in inner.get("required", ()) else ""
        yield f"\n  {name}  <{type_of(field)}>{must}"
        yield from _wrapped(said(field), 6)
    if not fields and is_free(inner):
        yield from _wrapped("anything: it is passed through as it is", 2)


def _head(kind: str, path: Sequence[str], node: Schema) -> str:
    return f"{'.'.join((kind, *path))}  <{type_of(node)}>"


def _tree(node: Schema, depth: int) -> Iterator[str]:
    for name, field in node.get("items", node).get("properties", {}).items():
        yield f"{'  ' * depth}{name}  <{type_of(field)}>"
        yield from _tree(field, depth + 1)


def said(node: Schema) -> str:
    """Description, with the bounds. Descriptions of single values end with their default (`crd.py`)."""
    bounds = _bounds(node)
    return node.get("description", "") + (f" ({bounds})" if bounds else "")


def _bounds(node: Schema) -> str:
    if words := node.get("enum"):
        return "one of " + ", ".join(json.dumps(word).strip('"') for word in words)
    low = _bound(node, "minimum", "more than", "at least")
    high = _bound(node, "maximum", "less than", "at most")
    items = f"at most {node['maxItems']:,} items" if "maxItems" in node else ""
    text = rule_of(node["pattern"]) if "pattern" in node else ""
    if not text and node.get("maxLength"):
        text = f"at most {node['maxLength']:,} characters"
    return ", ".join(filter(None, (low, high, items, text)))


def _bound(node: Schema, key: str, open_: str, closed: str) -> str:
    if key not in node:
        return ""
    return f"{open_ if node.get(f'exclusive{key.capitalize()}') else closed} {node[key]:,}"


def type_of(node: Schema) -> str:
    """In one or a few words."""
    kind = node.get("type")
    if kind == "array":
        return f"list of {type_of(node['items'])}"
    if kind == "object":
        values = node.get("additionalProperties")
        return f"map of {type_of(values)}" if isinstance(values, dict) else "object"
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    return str(kind or "anything")


def is_free(node: Schema) -> bool:
    """Whether it is passed through, whatever it holds."""
    return bool(node.get("x-kubernetes-preserve-unknown-fields"))


def _wrapped(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)
