"""A selection of a run's episodes as one file: the page of `replay.html`, or an animated picture (`animation.py`).

The question is the one of the list (`query.py`), so what the page shows filtered and sorted is what the file holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

from ..batch import Credit
from ..recording.frames import FrameStore
from ..recording.reader import RecordingError
from ..records import EpisodeRecord, GroupRecord
from ..viewer.animation import Style, animate
from ..viewer.recorded import from_any
from ..viewer.replay import Replay, replay_html
from .opened import OpenRun
from .query import BadQuery
from .stored import NotThere

#: episodes of a file unless `limit` says otherwise, and at most: screens make up its size, about 0.1 MB each
USUAL: Final = 30
MOST: Final = 100
#: screens after which no further episode is begun: of a hundred long ones the file would be larger than a browser opens
MOST_SCREENS: Final = 1000
#: pictures of an animated one after which no further episode is begun: each is shown for seconds
MOST_PICTURES: Final = 100
#: of one episode, all of which are in memory at once: 2 MB each
LONGEST: Final = 500
#: words that choose nothing
_NO_CHOICE: Final = ("limit", "offset", "token")


@dataclass(frozen=True, slots=True)
class Exported:
    data: bytes
    #: episodes in it, and found in all
    episodes: int
    total: int
    #: characters that the font of an animated picture lacks
    lacks: str = ""


def words_of(address: str) -> list[tuple[str, str]]:
    """Of `outcome=failure&q=wifi`, in which "?" and "#" are letters, or of the whole address of a list, whose words are
    behind them. Raises BadQuery for the address of another page, which chooses nothing."""
    if not re.match("https?://|#/", address):
        return parse_qsl(address.removeprefix("?"), keep_blank_values=True)
    server, _, page = address.partition("#")
    place, _, words = (page or server).partition("?")
    if not place.endswith(("/episodes", "/export")):
        raise BadQuery(f"{place[:200]!r} is not the address of a list of episodes")
    return parse_qsl(words, keep_blank_values=True)


@dataclass(frozen=True, slots=True)
class _Found:
    """The episodes of a question, by group, in the order of the list."""

    groups: list[GroupRecord]
    credits: list[Credit]
    stores: list[FrameStore]
    total: int
    #: what was asked for, in words
    chosen: str

    @property
    def episodes(self) -> int:
        return sum(len(group.episodes) for group in self.groups)


def exported(run: OpenRun, words: Iterable[tuple[str, str]], style: Style | None = None) -> Exported:
    """As a page, or with `style` as an animated picture. Raises NotThere where no episode is like that, BadQuery,
    RecordingError, FontUnreadable."""
    if style is not None:
        found = _found(run, list(words), 1, MOST_PICTURES, each_once=False)
        episodes = [episode for group in found.groups for episode in group.episodes]
        if (steps := max(len(episode.steps) for episode in episodes)) > LONGEST:
            raise BadQuery(
                f"an episode of {steps} steps is not animated, only of {LONGEST} at most: export it as a page"
            )
        made = animate(episodes, from_any(found.stores), style)
        return Exported(made.data, found.episodes, found.total, made.lacks)
    found = _found(run, list(words), USUAL, MOST_SCREENS, each_once=True)
    replay = Replay(
        f"{run.folder.resolve().name}: {found.episodes} of {found.total} episodes",
        from_any(found.stores),
        groups=found.groups,
        credits=found.credits,
        lossy=next((store.lossy for store in found.stores if store.lossy), ""),
        max_groups=len(found.groups),
        selection=found.chosen,
    )
    return Exported(replay_html(replay).encode(), found.episodes, found.total)


def _found(run: OpenRun, asked: Sequence[tuple[str, str]], usual: int, most_screens: int, *, each_once: bool) -> _Found:
    """`each_once`: a screen counts once, however many steps show it."""
    number = next((value for name, value in reversed(asked) if name == "limit"), str(usual))
    most = str(min(MOST, int(number))) if number.isascii() and number.isdecimal() else number  # that is refused
    found = run.episodes([*(pair for pair in asked if pair[0] != "limit"), ("limit", most)])
    if not (rows := found["episodes"]):
        raise NotThere("no episode is like that, or it is not read yet")
    groups: list[GroupRecord] = []
    credits: list[Credit] = []
    screens, steps = set[str](), 0
    for (recording, group), some in groupby(rows, key=lambda row: (row["recording"], row["group"])):
        records = []
        for row in some:
            if (len(screens) if each_once else steps) >= most_screens:
                break
            record, of_steps = run.record(recording, row["name"])
            screens |= {step.frames[-1] for step in record.steps if step.frames}
            steps += len(record.steps)
            # The recording is part of the name: an evaluation may play an episode of the same name.
            name = f"{recording}/{record.id}"
            records.append(replace(record, id=name))
            credits += [Credit(name, **asdict(credit)) for credit in of_steps]
        if not records:
            break
        groups.append(_group(f"{recording}/{group}", len(groups), records))
    stores = run.stores({row["recording"] for row in rows})
    chosen = " and ".join(f"{name} {value}" for name, value in asked if name not in _NO_CHOICE and value) or "all"
    return _Found(groups, credits, stores, found["total"], chosen)


def export(folder: Path, words: Iterable[tuple[str, str]], style: Style | None = None) -> Exported:
    """Of a run's folder, whose recording is read into its index before. Raises as `exported`, and
    ConfigurationError."""
    run = OpenRun(folder)
    try:
        run.facets()
        while run.work():
            pass
        if run.trouble:
            raise RecordingError(run.trouble)
        return exported(run, words, style)
    finally:
        run.close()


def _group(name: str, place: int, records: Sequence[EpisodeRecord]) -> GroupRecord:
    versions = [version for record in records for step in record.steps for version in step.generation.versions]
    return GroupRecord(name, place, records[0].task, min(versions, default=0), tuple(records))
