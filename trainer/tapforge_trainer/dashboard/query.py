"""Questions to an index as SQL: filters, order and pages of episodes, from the words of an address. Pure.

    template=two_panels&outcome=failure&steps=3..5&advantage=..-0.5&stream.judge=1..&q=wifi&sort=-advantage&offset=200

Names are looked up in tables and values are bound: no part of an address becomes SQL.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from .scan import searchable

_RECORDING: Final = "(select r.name from recordings r where r.id = e.recording)"
#: fields that are compared as words; given several times: any of them
WORDS: Final = {
    "recording": _RECORDING, "name": "e.name", "group": "e.grp", "task": "e.task", "template": "e.template",
    "outcome": "e.outcome", "reason": "e.reason", "phone": "e.phone",
}  # fmt: skip
#: fields that are numbers: one, or a range A..B of which either end may be left out
NUMBERS: Final = {
    "update": 'e."update"', "steps": "e.steps", "tokens": "e.tokens", "score": "e.score", "reward": "e.reward",
    "advantage": "e.advantage", "staleness": "e.staleness", "parse_errors": "e.parse_errors", "attempt": "e.attempt",
    "seconds": "e.seconds", "version": "e.newest",
}  # fmt: skip
SORTED: Final = {**WORDS, **NUMBERS, "started": "e.started", "goal": "e.goal"}
#: conditions of one question
_MOST_WORDS: Final = 200
#: episodes of a page
MOST: Final = 500
_STREAM: Final = "stream."
_NAMES: Final = re.compile(r"[\w.-]{1,100}")
_OTHERS: Final = ("q", "sort", "offset", "limit", "token")

_FROM: Final = " from episodes e"
#: what a row of the list shows
_SHOWN: Final = (
    f'e.name, {_RECORDING} as recording, e.grp as "group", e.task, e.template, e.goal, e.outcome, e.reason, e.score, '
    "e.message, e.steps, e.tokens, e.parse_errors, e.phone, e.attempt, e.newest as version, e.started, "
    'e.seconds, e."update", '
    "e.staleness, e.reward, e.advantage, e.streams"
)


class BadQuery(ValueError):
    """What was asked can't be read. The message names the word and what it may be."""


@dataclass(slots=True)
class Query:
    where: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    order: str = "e.started desc, e.id desc"
    offset: int = 0
    limit: int = 100

    @property
    def _where(self) -> str:
        return f" where {' and '.join(self.where)}" if self.where else ""

    def rows(self) -> tuple[str, list[Any]]:
        sql = f"select {_SHOWN}{_FROM}{self._where} order by {self.order} limit ? offset ?"
        return sql, [*self.values, self.limit, self.offset]

    def count(self) -> tuple[str, list[Any]]:
        return f"select count(*) as count{_FROM}{self._where}", self.values

    def facet(self, name: str, most: int = 200) -> tuple[str, list[Any]]:
        """Values of a field with how many episodes have them, the most frequent first."""
        counted = f"select {WORDS[name]} as value, count(*) as count{_FROM}{self._where}"
        sql = f"{counted} group by 1 order by 2 desc, 1 limit ?"
        return sql, [*self.values, most]


def read(words: Iterable[tuple[str, str]]) -> Query:
    """Of the words of an address. Raises BadQuery."""
    query, any_of = Query(), dict[str, list[str]]()
    for number, (name, value) in enumerate(words):
        if number == _MOST_WORDS:
            raise BadQuery(f"more than {_MOST_WORDS} words are asked for at once")
        if name in WORDS:
            any_of.setdefault(name, []).append(value)
        elif name in NUMBERS:
            _between(query, NUMBERS[name], name, value)
        elif name.startswith(_STREAM):
            if not _NAMES.fullmatch(stream := name.removeprefix(_STREAM)):
                raise BadQuery(f"{name!r} is not a name of a reward stream")
            query.values.append(f'$."{stream}"')
            _between(query, "json_extract(e.streams, ?)", name, value)
        elif name == "q":
            _search(query, value)
        elif name == "sort":
            query.order = _order(value)
        elif name in ("offset", "limit"):
            setattr(query, name, _whole(name, value))
        elif name not in _OTHERS:
            known = ", ".join([*WORDS, *NUMBERS, f"{_STREAM}NAME", *_OTHERS[:-1]])
            raise BadQuery(f"episodes have no field {name[:40]!r}; there are {known}")
    for name, values in any_of.items():
        marks = ", ".join("?" * len(values))
        if name == "recording":  # by its number: one look-up, not one for each episode
            query.where.append(f"e.recording in (select id from recordings where name in ({marks}))")
        else:
            query.where.append(f"{WORDS[name]} in ({marks})")
        query.values += values
    query.limit = min(query.limit, MOST)
    return query


def as_row(found: Any) -> dict[str, Any]:
    row = dict(found)
    row["streams"] = json.loads(row["streams"]) if row["streams"] else {}
    return row


def _between(query: Query, column: str, name: str, value: str) -> None:
    """The value of a stream's name is bound already, once for each comparison."""
    bound = query.values.pop() if "?" in column else None
    low, dots, high = value.partition("..")
    parts = [(">=", low), ("<=", high)] if dots else [("=", value)]
    given = [(sign, text) for sign, text in parts if text.strip()]
    if not given:
        raise BadQuery(f"{name}={value!r} is neither a number nor a range such as 2..5, 2.. or ..5")
    for sign, text in given:
        query.where.append(f"{column} {sign} ?")
        query.values += [*([] if bound is None else [bound]), _number(name, text)]


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise BadQuery(f"{name}={text[:40]!r} is neither a number nor a range such as 2..5, 2.. or ..5") from error
    if not math.isfinite(number):
        raise BadQuery(f"{name}={text[:40]!r} is not finite")
    return number


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise BadQuery(f"{name}={text[:40]!r} is not a whole number from 0 on")
    return int(text)


def _order(value: str) -> str:
    name, falling = value.removeprefix("-"), value.startswith("-")
    if name.startswith(_STREAM) and _NAMES.fullmatch(name.removeprefix(_STREAM)):
        column = f"json_extract(e.streams, '$.\"{name.removeprefix(_STREAM)}\"')"
    elif name in SORTED:
        column = SORTED[name]
    else:
        raise BadQuery(
            f"sort={value[:40]!r}: episodes are sorted by {', '.join(SORTED)} or {_STREAM}NAME; - for falling"
        )
    # Episodes without a value come last, whichever way.
    return f"{column} is null, {column}{' desc' if falling else ''}, e.id"


def _search(query: Query, text: str) -> None:
    """Every word, or its beginning, in goal, answers, notes or judges' words."""
    words = re.findall(r"[^\W_]+", searchable(text[:500]))
    if not words:
        return
    query.where.append("e.id in (select abs(rowid) from words where words match ?)")
    query.values.append(" AND ".join(f'"{word}"*' for word in words[:20]))
