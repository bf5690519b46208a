"""A judge's prompt: a Jinja file, and what it becomes for an episode.

- The blocks `system` and `user` are the texts of these two messages; a file without blocks is the user's text.
- Variables are those of `conventions.VARIABLES`. A file that names another one, lacks one that its convention needs,
  leaves out a screen or shows it twice is refused when it is read, by rendering it for a made-up episode.
- A variable about the episode is a JSON string in the text, written so that it can't end its quotation,
  begin a line, or be a chat template's markup, whatever filters the file uses.
- A screen is an image where the file says `{{ screen.image }}`, and never text.
- Jinja runs in a sandbox: the file can render, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from .conventions import CONVENTIONS, VARIABLES, Convention

_BLOCKS: Final = ("system", "user")
#: a piece of a message: text, or which of the screens
Piece = str | int


class PromptError(ValueError):
    """A prompt that can't be used. The message names its file."""


class Plain(str):
    """Text of ours, which is not quoted."""

    __slots__ = ()


class Image(int):
    """A screen, by its place among those that are shown."""

    __slots__ = ()


def quoted(value: object) -> str:
    """JSON in one line of printable characters, without a `<`, with which markup begins."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if c.isprintable() and c != "<" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "\\u003c" if character == "<" else json.dumps(character)[1:-1] if ord(character) > 127 else " "


def our_source(name: str) -> str:
    """The file of one of our prompts."""
    return files(__package__).joinpath("prompts", f"{name}.jinja").read_text(encoding="utf-8")


class Prompt:
    """`digest` is that of the file's text. Raises PromptError."""

    def __init__(self, name: str, path: Path | None = None):
        import jinja2
        from jinja2 import meta, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.name = name
        self.convention: Convention = CONVENTIONS[name]
        self._what = f"the judge's prompt file {path}" if path is not None else f"the judge's prompt {name}"
        self._mark = secrets.token_hex(16)
        self._cut = re.compile(rf"{self._mark}\((\d+)\)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=self._finalize
        )
        environment.filters["tojson"] = lambda value: Plain(quoted(value))
        try:
            source = our_source(name) if path is None else path.read_text(encoding="utf-8")
            tree = environment.parse(source)
            used = meta.find_undeclared_variables(tree)
            self._template = environment.from_string(source)
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{self._what} can't be read: {error}") from error
        except jinja2.TemplateError as error:
            raise PromptError(f"{self._what} is not a Jinja template: {error}") from error
        known = VARIABLES[self.convention.kind]
        if tree.find(nodes.FilterBlock) is not None:
            raise PromptError(
                f"{self._what} has a filter block, which would take what a variable says out of its quotation: filter "
                "the variable itself, as in {{ goal | upper }}"
            )
        if unknown := sorted(used - set(known)):
            raise PromptError(f"{self._what} names {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if lacking := sorted(self.convention.needs - used):
            raise PromptError(f"{self._what} doesn't name {', '.join(lacking)}: a {name} prompt needs it")
        if others := sorted(set(self._template.blocks) - set(_BLOCKS)):
            raise PromptError(f"{self._what} has blocks {', '.join(others)}; known are {', '.join(_BLOCKS)}")
        if self._template.blocks and "user" not in self._template.blocks:
            raise PromptError(f"{self._what} has no block user: the screens stand there")
        self.digest = hashlib.sha256(source.encode()).hexdigest()

    def check(self, variables: Mapping[str, Any], images: int) -> None:
        """Renders it for a made-up episode of so many screens."""
        system, user = self.render(variables)
        said = "".join(piece for piece in (*system, *user) if isinstance(piece, str))
        if "form" in self.convention.needs and str(variables["form"]) not in said:
            raise PromptError(f"{self._what} doesn't say the form of an answer: {{{{ form }}}} stands there as it is")
        if any(isinstance(piece, int) for piece in system):
            raise PromptError(f"{self._what} puts a screen into the system message; screens stand in the user's")
        placed = [piece for piece in user if isinstance(piece, int)]
        if self.convention.screens != "none" and sorted(placed) != list(range(images)):
            raise PromptError(
                f"{self._what} shows {len(placed)} images of {images} screens: each is shown once, with .image"
            )

    def render(self, variables: Mapping[str, Any]) -> tuple[list[Piece], list[Piece]]:
        """The system's and the user's message. Raises PromptError."""
        blocks = self._template.blocks
        system = self._rendered("system", variables) if "system" in blocks else []
        return system, self._rendered("user" if blocks else None, variables)

    def _rendered(self, block: str | None, variables: Mapping[str, Any]) -> list[Piece]:
        import jinja2

        context = self._template.new_context(dict(variables))
        root = self._template.root_render_func if block is None else self._template.blocks[block]
        try:
            text = "".join(root(context))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise PromptError(f"{self._what} can't be rendered: {error}") from error
        pieces = self._cut.split(text.strip())
        return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces) if place % 2 or piece.strip()]

    def _finalize(self, value: object) -> str:
        if isinstance(value, Image):
            return f"{self._mark}({int(value)})"
        if isinstance(value, Plain):
            return str(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return quoted(value)
