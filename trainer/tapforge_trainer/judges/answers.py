"""Reads a model's answer: 0, 1, or unreadable. Pure.

- What counts is the last JSON object with a `score`, or the last line `score: N`, whichever comes later. N is 0 or 1;
  everything else is unreadable. There is no default.
- With a key, only an object or a line that has the question's key counts: `{"key": "3fa9c1d2", "score": 1}` or
  `score 3fa9c1d2: 1`. Text on a screen or in a goal can't know it, so copied text is not a score.
- An object stands at the beginning of its line or after plain words, never inside a quotation or inside another object;
  after one that is broken nothing is read, because it may go on there.
- What a model thinks (`<think>...</think>`) is not an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from .verdicts import shortened

#: characters from which on an answer is not read
LONGEST: Final = 32_768
_LINE: Final = re.compile(
    r"^[ \t*_#]{0,8}score[ \t*_]{0,8}(?P<key>[0-9a-f]{8})?[ \t*_]{0,8}"
    r"[:=][ \t*_]{0,8}(?P<value>[01])(\.0)?[ \t*_.]{0,8}$",
    re.IGNORECASE,
)
#: what may stand before an object on its line
_WORDS: Final = re.compile(r"[\w\s:*#.-]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` None: unreadable, and `reason` says why."""

    value: float | None
    reason: str


class _Repeated(ValueError):
    """An object that has a name twice says two things."""


def form(key: str | None) -> str:
    """The form of an answer, as prompts show it."""
    named = "" if key is None else f'"key": "{key}", '
    return f'{{{named}"reason": "one or two sentences", "score": 0 or 1}}'


def read_answer(text: str, key: str | None) -> Answer:
    """`key`: what the question's form had; None: an answer needs none."""
    if len(text) > LONGEST:
        return Answer(None, f"the answer has {len(text)} characters, more than {LONGEST}")
    _thought, mark, said = text.rpartition("</think>")
    if not mark and "<think>" in said:
        return Answer(None, "the answer is a thought that doesn't end")
    found: Answer | None = None
    other = False
    for candidate in _candidates(said):
        if isinstance(candidate, str):
            return Answer(None, candidate)
        given, value, reason = candidate
        if key is not None and given != key:
            other = True
        elif isinstance(value, bool) or not isinstance(value, int | float) or value not in (0, 1):
            found = Answer(None, f"the score is {shortened(repr(value), 40)}, expected 0 or 1")
        else:
            found = Answer(float(value), shortened(reason))
    if found is not None:
        return found
    missing = "a score without the question's key" if other else "no score"
    return Answer(None, shortened(f"{missing} in: {said.strip() or 'an empty answer'}"))


def _candidates(text: str) -> Iterator[tuple[str | None, Any, str] | str]:
    """Key, value and reason of each score, in order; a text: why nothing can be read from here on."""
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        brace = line.find("{")
        if brace >= 0 and _WORDS.fullmatch(line[:brace]):
            try:
                value, after = _DECODER.raw_decode(text, at + brace)
            except _Repeated as error:
                yield str(error)
                return
            except (ValueError, RecursionError):
                yield "the answer has a JSON object that is broken"
                return
            if "score" in value:
                given = value.get("key")
                yield given if isinstance(given, str) else None, value["score"], str(value.get("reason", ""))
            at = after
            continue
        if match := _LINE.match(line.rstrip("\r")):
            yield match["key"] and match["key"].lower(), int(match["value"]), text[max(0, at - 2000) : at]
        at = end + 1


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Repeated("the answer has a JSON object that says one thing twice")
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once)
