"""What the index keeps of a recording: one small row per episode, its rewards, and the groups. Reads each line once.

Promises: a row says where its episode is, so that nothing else is read to show it. Half a line at the end is left for
the next time; a broken line elsewhere is an error with its place. Pure, but for the file that is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tapforge_envs.protocol import Task

from ..recording.lines import unpack
from ..recording.reader import RecordingError
from ..recording.segments import read_lines

#: characters that are written without spaces between words: each is a word of the search
_IDEOGRAPHS: Final = re.compile(r"([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff])")
#: of an episode's answers that are searched
_MOST_TEXT: Final = 20_000


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """`offset` and `length`: its bytes in the segment, steps included."""

    name: str
    group: str
    task: str
    template: str
    goal: str
    outcome: str
    reason: str
    score: float | None
    message: str
    steps: int
    #: of all answers
    tokens: int
    #: answers that were not actions
    parse_errors: int
    #: what the environment gave, over all steps
    environment: float
    phone: str
    attempt: int
    #: oldest and newest policy version of its tokens
    oldest: int | None
    newest: int | None
    started: float
    seconds: float
    offset: int
    length: int
    #: what the text search looks at
    words: str
    #: of rewards that came with the episode, as in `RewardsRow`
    rewards: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RewardsRow:
    """Of an episode that came before."""

    name: str
    rewards: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GroupRow:
    name: str
    order: int
    version: int
    dropped: str | None
    episodes: tuple[str, ...]


Row = EpisodeRow | RewardsRow | GroupRow


@dataclass(slots=True)
class _Steps:
    count: int = 0
    tokens: int = 0
    parse_errors: int = 0
    environment: float = 0.0
    oldest: int | None = None
    newest: int | None = None
    texts: list[str] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        self.count += 1
        self.tokens += len(line["ids"])
        self.environment += line["reward"]
        self.parse_errors += line["parse_error"] is not None
        if versions := unpack(line["versions"]):
            self.oldest = min(versions) if self.oldest is None else min(self.oldest, *versions)
            self.newest = max(versions) if self.newest is None else max(self.newest, *versions)
        self.texts += filter(None, (line["text"], line["note"], line["parse_error"], line["app"]))


def rows(path: Path, start: int) -> Iterator[tuple[Row, int]]:
    """Each with the offset at which the next one begins: reading can go on from there. Raises RecordingError."""
    begin = end = start
    steps = _Steps()
    for raw in read_lines(path, start):
        if not raw.endswith(b"\n") or b"\0" in raw:
            return
        end += len(raw)
        if raw.startswith(b'{"kind":"ui_tree"'):
            continue
        try:
            line = json.loads(raw)
            kind = line["kind"]
            if kind == "step":
                steps.take(line)
                continue
            if kind == "episode":
                yield _episode(line, steps, begin, end - begin), end
            elif kind == "rewards":
                yield RewardsRow(line["id"], line["rewards"]), end
            elif kind == "group":
                yield (
                    GroupRow(line["id"], line["order"], line["version"], line["dropped"], tuple(line["episodes"])),
                    end,
                )
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: broken record before byte {end}: {error!r}") from error
        begin, steps = end, _Steps()


def _episode(line: dict[str, Any], steps: _Steps, offset: int, length: int) -> EpisodeRow:
    task = Task.model_construct(**line["task"])
    waiting = bool(line.get("awaits_rewards"))
    return EpisodeRow(
        name=line["id"],
        group=line["group"],
        task=storable(task.key),
        template=storable(task.template),
        goal=storable(task.goal),
        outcome="waiting" if waiting else line["outcome"] or "stopped",
        reason=line["reason"],
        score=line["score"],
        message=storable(line["message"]),
        steps=line["steps"],
        tokens=steps.tokens,
        parse_errors=steps.parse_errors,
        environment=steps.environment,
        phone=line["slot"],
        attempt=line["attempt"],
        oldest=steps.oldest,
        newest=steps.newest,
        started=line["started"],
        seconds=line["ended"] - line["started"],
        offset=offset,
        length=length,
        words=searchable(" ".join((task.goal, line["message"], *steps.texts))[:_MOST_TEXT]),
        rewards=line.get("rewards"),
    )


def searchable(text: str) -> str:
    """With spaces around characters of scripts that have none."""
    return _IDEOGRAPHS.sub(r" \1 ", storable(text))


def storable(text: str) -> str:
    """With ? for half a character (a lone surrogate), which models write in JSON's escapes and no database takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def streams_of(rewards: dict[str, Any]) -> dict[str, float]:
    """By stream: the sum over the steps that have a verdict."""
    return {
        name: sum(value for value in values if value is not None)
        for name, values in rewards["streams"].items()
        if any(value is not None for value in values)
    }
