"""A model's tool call -> action, strictly. Families that write calls as text have parsers of their own, with the same
failures (`uitars.py`, `aguvis.py`).

Promises:
- The action comes from exactly one <tool_call>...</tool_call> block that stands after the reasoning: after the last
  </think>. Words outside the block never become an action, and a block inside unfinished reasoning doesn't count.
- Of families that write <thinking> before the call and <conclusion> after it (`parse_framed_call`), the call stands
  after the last </thinking>, and a call in the conclusion is one too many.
- Everything else is a `ParseFailure` that names what is wrong: never an exception, never another action.
- The block holds one JSON object and nothing else. Duplicate keys, NaN, Infinity, unknown names, missing or extra
  fields are failures; so is text after the block, and so are bytes that were not UTF-8 (they decode to U+FFFD).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, NoReturn

from tapforge_envs.protocol import Action

from .coordinates import Plane
from .tools import Tool

FailureKind = Literal[
    "cut_off",  # the answer reached the token limit
    "aborted",  # the engine gave the answer up
    "reasoning",  # the reasoning has no end
    "no_tool_call",
    "no_action",  # of models that write calls as text: no line says one
    "several_tool_calls",
    "several_actions",  # the same, of models that write calls as text
    "broken_block",  # tags in the wrong order, text after the block, broken characters
    "json",
    "shape",  # JSON, but not {"name": ..., "arguments": {...}}
    "action",  # unknown action, wrong fields, value outside its range
    "unsupported_action",  # an action that the environment doesn't have, or refuses
]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_THINKING_OPEN, _THINKING_CLOSE = "<thinking>", "</thinking>"
_CONCLUSION_OPEN, _CONCLUSION_CLOSE = "<conclusion>", "</conclusion>"


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """An answer that is not an action. `kind` is for counting, `detail` for people."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def parse_call(text: str, tool: Tool, plane: Plane) -> Action | ParseFailure:
    """The action of a complete answer. `plane`: the image that the model saw, for its coordinates."""
    spoken = without_reasoning(text)
    if spoken is None:
        return ParseFailure("reasoning", f"{_THINK_OPEN} is never closed")
    opened, closed = spoken.count(_OPEN), spoken.count(_CLOSE)
    if opened == 0:
        return ParseFailure("no_tool_call", f"the answer has no {_OPEN}")
    if opened > 1 or closed > 1:
        return ParseFailure("several_tool_calls", f"{opened} {_OPEN} and {closed} {_CLOSE}; exactly one is allowed")
    _, _, rest = spoken.partition(_OPEN)
    block, closing, after = rest.partition(_CLOSE)
    if not closing:
        return ParseFailure("broken_block", f"{_CLOSE} {'stands before ' + _OPEN if closed else 'is missing'}")
    if after and not after.isspace():
        return ParseFailure("broken_block", f"{len(after.strip())} characters of text after {_CLOSE}")
    if "\ufffd" in block:
        return ParseFailure("broken_block", "the tool call holds bytes that are not UTF-8")
    return _parse_block(block, tool, plane)


def parse_framed_call(text: str, tool: Tool, plane: Plane, *, conclusion: bool) -> Action | ParseFailure:
    """The same of a family that thinks between <thinking> and </thinking>; `conclusion`: it may say after the call,
    between <conclusion> and </conclusion>, what it did."""
    said = without_thinking(text)
    if said is None:
        return ParseFailure("reasoning", f"{_THINKING_OPEN} is never closed")
    if conclusion and (cut := _before_conclusion(said)) is not None:
        said = said[:cut]
    return parse_call(said, tool, plane)


def without_thinking(text: str) -> str | None:
    """What was said after the last </thinking>; None when thinking was begun and never ended."""
    said = text.rpartition(_THINKING_CLOSE)[2]
    return None if _THINKING_OPEN in said else said


def conclusion_of(text: str) -> str | None:
    """What a framed answer says of itself after its call."""
    said = without_thinking(text)
    cut = None if said is None else _before_conclusion(said)
    if said is None or cut is None:
        return None
    return said[cut:].strip().removeprefix(_CONCLUSION_OPEN).removesuffix(_CONCLUSION_CLOSE).strip()


def _before_conclusion(said: str) -> int | None:
    """Where the conclusion begins, if the answer ends with one that stands after the call and holds none."""
    if not said.rstrip().endswith(_CONCLUSION_CLOSE):
        return None
    begins = said.rfind(_CONCLUSION_OPEN)
    if begins < 0 or begins < said.rfind(_CLOSE) or begins < said.rfind(_OPEN):
        return None
    return begins


def without_reasoning(text: str) -> str | None:
    """What was said after the last </think>; None when reasoning was begun and never ended."""
    spoken = text.rpartition(_THINK_CLOSE)[2]
    return None if _THINK_OPEN in spoken else spoken


def _parse_block(block: str, tool: Tool, plane: Plane) -> Action | ParseFailure:
    try:
        call = _DECODER.decode(block)
    except RecursionError:
        return ParseFailure("json", "nested too deeply")
    except ValueError as error:
        return ParseFailure("json", str(error)[:200])
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return ParseFailure("shape", 'the tool call is not an object of exactly "name" and "arguments"')
    if call["name"] != tool.name:
        return ParseFailure("shape", f"the tool's name is {ascii(call['name'])[:60]} instead of {tool.name!r}")
    arguments = call["arguments"]
    if not isinstance(arguments, dict):
        return ParseFailure("shape", f"arguments are a {type(arguments).__name__} instead of an object")
    try:
        return tool.read(arguments, plane)
    except ValueError as error:
        return ParseFailure("action", str(error))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {ascii(twice)[:60]} occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
