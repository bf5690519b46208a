"""A prompt that a model wants word by word: a Jinja file of the user's (`spec.model.adapter.promptFile`).

- The blocks `system` and `user` are the texts of these two messages; a file without blocks is the user's text. A block
  that the file lacks is the adapter's own.
- Its variables are `VARIABLES`. Others are errors, when the file is read; so is all that fails for a made-up episode.
- As in chat templates, the line's end after a tag and the blanks before one are dropped, and so is the file's last one.
- What the file itself says may hold the family's markup (`Dialect.markup`) as tokens; what a variable says is always
  plain text. Neither can become structure of the chat: that is the chat template's.
- Jinja runs in a sandbox: the file can render, and nothing else.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tapforge_envs.protocol import Back

from ..frames.frame import FittedFrame
from .agent import Prepared, Turn
from .chat import IMAGE, Markup, Part
from .coordinates import Grid, Plane
from .mobile_use import MOBILE_USE
from .template_language import as_json

VARIABLES: Final = {
    "goal": "what the task asks for",
    "step": "number of this step, from 1",
    "history": "all earlier steps: number, text (the model's answer), understood",
    "steps": "those of them that are not shown as turns of their own",
    "tools": "list of the tool's schema; empty for adapters whose answers are not tool calls",
    "screen": "the screen as the model sees it: screen.width and screen.height, pixels",
    "coordinates": "what the numbers of a place may be, in words",
    "app": 'the app in front, "" where the environment does not say',
    "added": "what adapter.context adds as text",
    "image": "where the screen stands in the user's text; without it at the end",
}
_BLOCKS: Final = ("system", "user")


@dataclass(frozen=True, slots=True)
class PromptVariables:
    """What a prompt is about. `first`: the first earlier step that is a turn of its own, from 0."""

    goal: str
    history: Sequence[Turn]
    first: int
    first_text: int
    plane: Plane
    tools: Sequence[dict]
    app: str | None
    added: str


@dataclass(frozen=True, slots=True)
class _Image:
    """The value of `image`."""


class PromptFileError(ValueError):
    """A prompt file that can't be used. The message names it."""


class PromptFile:
    """Raises PromptFileError for a file that can't be read or rendered, and for names that there are none of."""

    def __init__(self, path: Path, *, image_allowed: bool):
        import jinja2
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.path = path
        self._names = {name for name in VARIABLES if image_allowed or name != "image"}
        self._use(secrets.token_hex(16))
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=self._finalize
        )
        environment.filters["tojson"] = as_json
        try:
            source = path.read_text(encoding="utf-8")
            #: variables that it names
            self.used = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (OSError, UnicodeDecodeError) as error:
            raise PromptFileError(f"the prompt file {path} can't be read: {error}") from error
        except jinja2.TemplateError as error:
            raise PromptFileError(f"the prompt file {path} is not a Jinja template: {error}") from error
        if unknown := sorted(self.used - self._names):
            listed = ", ".join(sorted(self._names))
            raise PromptFileError(f"the prompt file {path} names {', '.join(unknown)}; known are {listed}")
        others = sorted(set(self._template.blocks) - set(_BLOCKS))
        if others:
            raise PromptFileError(
                f"the prompt file {path} has blocks {', '.join(others)}; known are {', '.join(_BLOCKS)}"
            )
        found = []
        for mark in (secrets.token_hex(16), secrets.token_hex(16)):
            self._use(mark)
            self._template = environment.from_string(source)  # the mark is around constants, too
            found.append([self._probe(steps) for steps in (0, 3)])
        if found[0] != found[1]:
            raise self._filtered()
        self.has_system = "system" in self._template.blocks
        self.has_user = "user" in self._template.blocks or not self._template.blocks

    def _use(self, mark: str) -> None:
        self._mark = mark
        self._open, self._close, self._image = f"{mark}(", f"{mark})", f"{mark}#"
        self._cut = re.compile(f"({mark}[()#])")

    def _probe(self, steps: int) -> tuple[tuple[Part, ...], ...]:
        """Renders both texts for a made-up episode, so that what can't work is found before anything starts."""
        seen = Prepared(FittedFrame("probe", b"", 28, 28), 1)
        history = [Turn(seen, "answer", Back())] * steps
        plane = Plane(Grid(999), 28, 28)
        about = PromptVariables("goal", history, steps, 0, plane, [MOBILE_USE.schema(plane)], "app", "added")
        found = []
        if "system" in self._template.blocks:
            found.append(self.system(about))
        if "user" in self._template.blocks or not self._template.blocks:
            found.append(self.user(about))
        return tuple(found)

    def system(self, about: PromptVariables) -> tuple[Part, ...]:
        parts = self._rendered("system", about)
        if IMAGE in parts:
            raise PromptFileError(f"the prompt file {self.path} puts the image into the system message")
        return parts

    def user(self, about: PromptVariables) -> tuple[Part, ...]:
        return self._rendered("user" if self._template.blocks else None, about)

    def _rendered(self, block: str | None, about: PromptVariables) -> tuple[Part, ...]:
        import jinja2

        context = self._template.new_context(self._values(about))
        root = self._template.root_render_func if block is None else self._template.blocks[block]
        try:
            text = "".join(root(context))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise PromptFileError(f"the prompt file {self.path} can't be rendered: {error}") from error
        return self._parts(text.removesuffix("\n") if block is None else text)

    def _values(self, about: PromptVariables) -> dict[str, Any]:
        def told(number: int, turn: Turn) -> dict[str, Any]:
            return {"number": number, "text": turn.text.strip(), "understood": turn.action is not None}

        history = [told(number, turn) for number, turn in enumerate(about.history, start=1)]
        values = {
            "goal": about.goal,
            "step": len(history) + 1,
            "history": history,
            "steps": history[about.first_text : about.first],
            "tools": list(about.tools),
            "screen": {"width": about.plane.width, "height": about.plane.height},
            "coordinates": about.plane.words(),
            "app": about.app or "",
            "added": about.added,
            "image": _Image(),
        }
        return {name: value for name, value in values.items() if name in self._names}

    def _finalize(self, value: object) -> object:
        """Puts unguessable words around what variables say."""
        if isinstance(value, _Image):
            return self._image
        return f"{self._open}{value}{self._close}"

    def _filtered(self) -> PromptFileError:
        return PromptFileError(
            f"the prompt file {self.path} passes text with a variable's value through a filter or a test: filter the "
            "variable itself, as in {{ goal | upper }}"
        )

    def _parts(self, text: str) -> tuple[Part, ...]:
        parts: list[Part] = []
        depth = 0
        for piece in self._cut.split(text):
            if piece == self._open:
                depth += 1
            elif piece == self._close:
                depth -= 1
            elif piece == self._image:
                if IMAGE in parts:
                    raise PromptFileError(f"the prompt file {self.path} names image twice")
                parts.append(IMAGE)
            elif self._mark in piece.lower():
                raise self._filtered()
            elif piece:
                parts.append(piece if depth else Markup(piece))
            if depth < 0:
                raise self._filtered()
        if depth:
            raise self._filtered()
        return tuple(parts)
