"""What is asked of a model that proposes tasks: Jinja files, which users replace.

- `propose`, `rewrite` and `check` are the three questions. A screen that belongs to one comes before its text.
- A variable about the phone or a goal is one JSON string, as in judges' prompts: it can't end its quotation.
- `form` is the form of the answer, which a file has to say. `data` is all of it as one line of JSON, for endpoints that
  compute.
- Jinja runs in a sandbox: a file can render, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from ..judges.prompt_file import Plain, PromptError, quoted

Kind = Literal["propose", "rewrite", "check"]
KINDS: Final[tuple[Kind, ...]] = ("propose", "rewrite", "check")
VARIABLES: Final[Mapping[Kind, frozenset[str]]] = {
    "propose": frozenset({"app", "apps", "count", "infeasible", "there", "form", "data"}),
    "rewrite": frozenset({"goal", "form", "data"}),
    "check": frozenset({"goal", "app", "apps", "form", "data"}),
}
#: at least one of these is in a file: else it doesn't say what is asked
_NEEDED: Final[Mapping[Kind, tuple[str, ...]]] = {
    "propose": ("count", "data"), "rewrite": ("goal", "data"), "check": ("goal", "data"),
}  # fmt: skip
FORMS: Final[Mapping[Kind, str]] = {
    "propose": '{"tasks": ["...", "..."]}',
    "rewrite": '{"task": "..."}',
    "check": '{"possible": true} or {"possible": false}',
}
#: what an endpoint that computes is asked with
SIMULATED: Final = "simulated-phone"
_DATA_ALONE: Final = "{{ data }}\n"


def source(kind: Kind, folder: Path | None, simulated: bool) -> str:
    """`folder`: of the user's files, of which any may be missing. Raises PromptError."""
    if simulated:
        return _DATA_ALONE
    own = None if folder is None else folder / f"{kind}.jinja"
    if own is None or not own.exists():
        return files(__package__).joinpath("prompts", f"{kind}.jinja").read_text(encoding="utf-8")
    try:
        return own.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompt file {own} can't be read: {error}") from error


class Prompts:
    """Raises PromptError for a file that can't be used."""

    def __init__(self, folder: Path | None = None, simulated: bool = False):
        if folder is not None and not folder.is_dir():
            raise PromptError(f"{folder} is not a folder; it holds propose.jinja, rewrite.jinja and check.jinja")
        texts = {kind: source(kind, folder, simulated) for kind in KINDS}
        self._templates = {kind: _compiled(kind, text) for kind, text in texts.items()}
        #: of all three
        self.digest = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()

    def render(self, kind: Kind, variables: Mapping[str, Any]) -> str:
        """Raises PromptError."""
        import jinja2

        data = Plain(quoted({"kind": kind, **variables}))
        given = {name: variables.get(name) for name in VARIABLES[kind]}
        try:
            text: str = self._templates[kind].render({**given, "form": Plain(FORMS[kind]), "data": data})
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise PromptError(f"the prompt {kind} can't be rendered: {error}") from error
        return text.strip()


def _compiled(kind: Kind, text: str) -> Any:
    import jinja2
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_finalized
    )
    environment.filters["join"] = lambda values, by="": Plain(by.join(quoted(value) for value in values))
    try:
        used = meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        raise PromptError(f"the prompt {kind} is not a Jinja template: {error}") from error
    if unknown := sorted(used - VARIABLES[kind]):
        raise PromptError(
            f"the prompt {kind} names {', '.join(unknown)}; known are {', '.join(sorted(VARIABLES[kind]))}"
        )
    if not used & set(_NEEDED[kind]):
        raise PromptError(f"the prompt {kind} names none of {', '.join(_NEEDED[kind])}: it doesn't say what is asked")
    if not used & {"form", "data"}:
        raise PromptError(f"the prompt {kind} doesn't say the form of an answer: {{{{ form }}}}")
    return template


def _finalized(value: object) -> str:
    if isinstance(value, Plain):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return quoted(value)


def answer_of(text: str, name: str) -> Any:
    """What the last JSON object of an answer that has it says under `name`. Raises ValueError."""
    end = text.rfind("}")
    decoder = json.JSONDecoder()
    for start in range(end, -1, -1):
        if text[start] == "{":
            try:
                found, _ = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and name in found:
                return found[name]
    raise ValueError(f"it has no JSON object with {name!r}")
