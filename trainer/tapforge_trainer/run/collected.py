"""What `tapforge collect` has played, read from its recordings, and the data set of what is kept of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tapforge_envs.protocol import Outcome

from ..agents.chat_agent import ChatAgent
from ..data.convert import Bad, Converted, Row, convert
from ..data.folder import ABOUT, UNFINISHED
from ..data.sources.recording import row_of
from ..recording.reader import Recording
from ..records import EpisodeRecord
from ..teachers.answers import AnswerStatistics
from ..teachers.ledger import Ledger

_PLAYED: Final = "played"
#: of the recording of a part, which says its prefix in names of episodes
_RECORDING: Final = "rollout"
#: of episodes that are kept, the share that is expected at least when the next part is cut
_SHARE: Final = 0.1


def recording_of(folder: Path, part: int, *, make: bool = False) -> Path:
    place = folder / _PLAYED / f"{part:06d}"
    if make:
        place.mkdir(parents=True, exist_ok=True)
    return place / _RECORDING


# --- what was played --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    part: int
    episode: str


@dataclass
class Found:
    #: in the order of their tasks
    kept: list[_Kept] = field(default_factory=list)
    #: numbers of tasks with a valid episode
    done: set[int] = field(default_factory=set)
    valid: int = 0
    #: what those that are kept say
    contents: set[str] = field(default_factory=set)
    #: of all that were not kept
    reasons: Counter[str] = field(default_factory=Counter)
    answers: AnswerStatistics = field(default_factory=AnswerStatistics)

    @property
    def share(self) -> float:
        """That is expected to be kept."""
        return max(_SHARE, len(self.kept) / self.valid) if self.valid else 1.0


def found_in(folder: Path, ledger: Ledger, keep: str) -> Found:
    found = Found()
    for part, numbers in ledger.parts.items():
        recording = Recording(recording_of(folder, part))
        for episode in recording.episodes() if recording.exists else ():
            found.answers.take(episode)
            if not episode.valid:
                found.reasons[episode.reason.value] += 1
                continue
            number = numbers[int(episode.group.rpartition("-")[2])]
            found.valid += 1
            if not (keep == "all" or episode.outcome is Outcome.SUCCESS) or number in found.done:
                found.reasons[f"failure ({episode.reason.value})"] += 1
            elif (says := _says(episode)) in found.contents:
                found.reasons["says what another one says"] += 1
            else:
                found.contents.add(says)
                found.kept.append(_Kept(number, part, episode.id))
            found.done.add(number)
    found.kept.sort(key=lambda one: one.number)
    return found


def _says(episode: EpisodeRecord) -> str:
    """Equal for episodes of which a data set takes one (`data/episodes.py:Episode.content`)."""
    steps = [(step.frames[-1], step.action) for step in episode.steps]
    return hashlib.sha256(json.dumps([episode.task.goal, steps], sort_keys=True).encode()).hexdigest()


def lines_of(chat: ChatAgent, ledger: Ledger, found: Found) -> Iterator[str]:
    """What became of it, for people."""
    answers = found.answers
    yield (
        f"{ledger.answers:,} answers, {ledger.prompt_tokens:,} + {ledger.answer_tokens:,} tokens, "
        f"{len(found.kept):,} of {found.valid:,} episodes are kept"
    )
    for reason, count in found.reasons.most_common():
        yield f"not kept: {count:,} x {reason}"
    yield from (f"no action: {line}" for line in answers.unread.lines())
    yield from (f"request failed: {line}" for line in ledger.failed.lines())
    if looks := answers.convention(chat.dialect.coordinates):
        yield (
            f"{answers.places:,} places go up to {answers.most:g} and look like --coordinates {looks}; asked for were "
            f"numbers {chat.dialect.coordinates.range(2)}"
        )


# --- the data set -----------------------------------------------------------------------------------------------------


def written(folder: Path, kept: list[_Kept], keep: str, asked: Mapping[str, Any]) -> Converted:
    """Written anew each time: what an earlier command wrote of fewer episodes is replaced."""
    (folder / UNFINISHED).touch()
    (folder / ABOUT).unlink(missing_ok=True)
    return convert(_rows(folder, kept, asked["model"]), "teacher", folder, {**asked, "keep": keep}, max_bad=0.1)


def _rows(folder: Path, kept: list[_Kept], model: str) -> Iterator[Row | Bad]:
    """Without the ids of answers, which are no tokens of any model."""
    by_part: dict[int, set[str]] = {}
    for one in kept:
        by_part.setdefault(one.part, set()).add(one.episode)
    for part, names in by_part.items():
        recording = Recording(recording_of(folder, part))
        trees = dict(recording.ui_trees())
        for episode in recording.episodes():
            if episode.id in names:
                row = row_of(recording, episode, trees, f"{folder.name}/{part:06d}")
                if isinstance(row, Row):
                    row = replace(row, model=model, steps=[replace(step, ids=()) for step in row.steps])
                yield row
