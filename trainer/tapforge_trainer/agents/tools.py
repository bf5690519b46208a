"""A tool that a model calls with JSON arguments: one table says which actions it has, and everything else follows.

Rules:
- `forms` says which fields each action has, and which of them may be left out. Others are not allowed.
- What other published prompts of a family ask for is read and neither shown nor written: `aliases`, `unshown` actions
  and a form's `unshown` fields.
- The schema that the model is shown is derived from the table, in the shape of Qwen's chat format.
- `read` raises ValueError with a message that names the field and the value; nothing is guessed or clamped.
- `format` is the canonical answer. Text that holds a marker of the answer format is written with \\u escapes, so that a
  parser always finds the block's real borders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import TypeVar

from pydantic import ValidationError

from tapforge_envs.protocol import Action

from .coordinates import Plane, is_number, short

T = TypeVar("T")

#: the longest hold or wait
MAX_SECONDS = 60
#: strings with a meaning in the answer format (the model may also have them as single tokens)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<thinking>", "</thinking>", "<|")


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of one action besides `action`, and its description for the model."""

    fields: tuple[str, ...]
    description: str
    #: fields that may be missing
    optional: tuple[str, ...] = ()
    #: further fields that are read and that the prompt does not list
    unshown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The fields of one call, all of them allowed ones. Every method raises ValueError that names field and value."""

    values: Mapping[str, object]
    plane: Plane

    def has(self, field: str) -> bool:
        return field in self.values

    def point(self, field: str = "coordinate") -> tuple[float, float]:
        return self.plane.point(self.values[field], field)

    def number(self, field: str, low: float = 0, high: float = MAX_SECONDS) -> float:
        value = self.values[field]
        if is_number(value) and low <= value <= high:
            return float(value)
        raise ValueError(f"{field} {short(value)} is not a number from {low:g} to {high:g}")

    def flag(self, field: str) -> bool:
        """1 or 0; a field that is missing is 0."""
        value = self.values.get(field, 0)
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        raise ValueError(f"{field} {short(value)} is neither 0 nor 1")

    def text(self, field: str = "text") -> str:
        value = self.values[field]
        if isinstance(value, str):
            return value
        raise ValueError(f"{field} {short(value)} is not a string")

    def choice(self, field: str, known: Mapping[str, T]) -> T:
        value = self.values[field]
        if isinstance(value, str) and value in known:
            return known[value]
        raise ValueError(f"unknown {field} {short(value)}; known are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    forms: Mapping[str, Form]
    #: the action of a call of this name whose fields are the form's
    build: Callable[[str, Arguments], Action]
    #: the canonical arguments; None: the tool has no word for the action
    arguments: Callable[[Action, Plane], dict[str, object] | None]
    description: Callable[[Plane], str]
    #: schema of every field that a form may name
    fields: Callable[[Plane], Mapping[str, dict]]
    #: other names that the family's models have for an action; they are read and never written
    aliases: Mapping[str, str] = attribute(default_factory=dict)
    #: actions that are read and that the prompt does not list
    unshown: frozenset[str] = frozenset()

    @property
    def shown(self) -> dict[str, Form]:
        """The actions that the prompt lists."""
        return {name: form for name, form in self.forms.items() if name not in self.unshown}

    def schema(self, plane: Plane) -> dict:
        """The tool as a function signature."""
        needed_by: dict[str, list[str]] = {}
        allowed_by: dict[str, list[str]] = {}
        shown = self.shown
        for name, form in shown.items():
            for field in (*form.fields, *form.optional):
                (needed_by if field in form.fields else allowed_by).setdefault(field, []).append(name)
        listed = "\n".join(f"* {name}: {form.description}" for name, form in shown.items())
        properties: dict[str, dict] = {"action": {"type": "string", "enum": list(shown), "description": listed}}
        schemas = self.fields(plane)
        for field in dict.fromkeys((*needed_by, *allowed_by)):
            schema = schemas[field]
            told = [str(schema["description"])] if "description" in schema else []
            told += ["required by " + ", ".join(needed_by[field])] if field in needed_by else []
            told += ["allowed with " + ", ".join(allowed_by[field])] if field in allowed_by else []
            properties[field] = {**schema, "description": "; ".join(told)}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description(plane),
                "parameters": {"type": "object", "properties": properties, "required": ["action"]},
            },
        }

    def read(self, arguments: Mapping[str, object], plane: Plane) -> Action:
        """The action that decoded JSON arguments say. Raises ValueError that names what is wrong."""
        name = arguments.get("action")
        name = self.aliases.get(name, name) if isinstance(name, str) else name
        if not isinstance(name, str) or name not in self.forms:
            raise ValueError(f"unknown action {short(name)}; known are {', '.join(self.forms)}")
        form = self.forms[name]
        missing = [field for field in form.fields if field not in arguments]
        if missing:
            raise ValueError(f"action {name} lacks {', '.join(missing)}")
        allowed = ("action", *form.fields, *form.optional, *form.unshown)
        extra = [field for field in arguments if field not in allowed]
        if extra:
            raise ValueError(f"action {name} has no field {', '.join(short(field) for field in extra)}")
        try:
            return self.build(name, Arguments(arguments, plane))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"action {name}: {where} {short(first['input'])}: {first['msg']}") from error

    def write(self, action: Action, plane: Plane) -> dict[str, object]:
        """The canonical arguments. Raises ValueError for an action that the tool has no word for."""
        found = self.arguments(action, plane)
        if found is None:
            raise ValueError(
                f"{self.name} has no word for the action {action.type!r}; use one of {', '.join(self.shown)}"
            )
        return found

    def format(self, action: Action, plane: Plane) -> str:
        """The canonical call, in its tags. Raises ValueError for an action that the tool has no word for."""
        body = json.dumps({"name": self.name, "arguments": self.write(action, plane)}, ensure_ascii=False)
        if "<" in body and any(marker in body for marker in MARKERS):
            body = body.replace("<", "\\u003c")  # only strings hold a "<"
        if "\ufffd" in body:
            body = body.replace("\ufffd", "\\ufffd")  # raw, it is what broken bytes decode to
        return f"<tool_call>\n{body}\n</tool_call>"


def seconds(value: float) -> int | float:
    """As models write it."""
    return int(value) if value.is_integer() else value


#: one short word per action, for histories of few tokens
_WORDS = {
    "tap": "click",
    "long_press": "press",
    "double_tap": "double",
    "open_app": "open",
    "app_switch": "menu",
    "ask_user": "ask",
    "terminate": "stop",
    "right_click": "right",
    "middle_click": "middle",
    "triple_click": "triple",
}


def short_name(action: Action | None) -> str:
    """The action in one word; None, an answer that could not be parsed, is "invalid"."""
    return "invalid" if action is None else _WORDS.get(action.type, action.type)
