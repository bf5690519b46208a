"""Reads what `recorder.py` wrote, whole or by name.

Promises:
1. Equal records come back, floats bit for bit, in the order in which they were written.
2. A last line that was cut off, and steps whose episode was never finished, are dropped and said (`Recording.dropped`);
   they never make the rest unreadable. A broken line elsewhere is an error with its number.
3. `find` reads the index and then the bytes of the episodes that are asked for, nothing else of the segments.
4. Recordings of earlier versions (one file, `rollout.jsonl`) are read as well.
5. An episode comes with its rewards, which were written after it; without, where they were never written.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..records import EpisodeRecord, EpisodeRewards, GroupRecord, StepRecord
from .frames import FrameStore
from .lines import decode_episode, decode_group, decode_rewards, decode_step, decode_ui_tree
from .segments import Entry, Series, read_lines, read_ranges

log = logging.getLogger(__name__)

FRAMES = "frames"
#: how the lines begin that come before an episode's own
_BEFORE = (b'{"kind":"step"', b'{"kind":"ui_tree"')
#: of a line that the index says too
_FACTS = {"episode": ("group",), "rewards": (), "group": ("order",)}


#: episodes, and rewards of episodes that came before, by name of the episode
_Found = tuple[dict[str, EpisodeRecord], dict[str, EpisodeRewards]]


class RecordingError(Exception):
    """The recording can't be written or read. The message names the path and the remedy."""


def _scan(path: Path, start: int) -> Iterator[Entry]:
    """An entry is an episode with its UI trees and steps, its rewards, or a group."""
    begin = end = start
    for raw in read_lines(path, start):
        if _cut_off(raw):
            return
        end += len(raw)
        if raw.startswith(_BEFORE):
            continue
        try:
            line = json.loads(raw)
            facts = {name: line[name] for name in _FACTS[line["kind"]]}
            yield Entry(line["kind"], line["id"], begin, end - begin, facts)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: broken record before byte {end}: {error!r}") from error
        begin = end


#: the segments of the records
RECORDS = Series("rollout", ".jsonl", _scan)


class Recording:
    """`frames` gives the images; `dropped` says what was cut off, once the end has been read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.frames = FrameStore(folder / FRAMES)
        self.dropped: str | None = None

    @property
    def exists(self) -> bool:
        return bool(RECORDS.numbers(self.folder))

    @property
    def pruned(self) -> bool:
        """Whether old segments were removed: groups whose episodes were in them are left out."""
        numbers = RECORDS.numbers(self.folder)
        return bool(numbers) and (numbers[0] > 1 or numbers[-1] - numbers[0] >= len(numbers))

    def episodes(self) -> Iterator[EpisodeRecord]:
        """In the order in which they ended."""
        for record, _ in self._records():
            if isinstance(record, EpisodeRecord):
                yield record

    def groups(self, dropped: bool = False) -> Iterator[GroupRecord]:
        """In the order in which they were settled; those that were dropped only on demand."""
        for record, why in self._records():
            if isinstance(record, GroupRecord) and (dropped or why is None):
                yield record

    def settled(self, prompts: bool = True) -> list[GroupRecord]:
        """What updates took, in its order: of each place in the order the group that was settled there last, and none
        where that one was dropped. A run that was resumed has played again what came after its checkpoint, groups under
        other names and groups with some of their episodes. Whatever was lost beyond the last place that was played
        again is there as well, and what waited for its update when the run ended. Without `prompts` theirs are empty,
        which takes a fraction of the memory."""
        last: dict[int, GroupRecord | None] = {}
        for record, why in self._records(prompts):
            if isinstance(record, GroupRecord):
                last[record.order] = record if why is None else None
        return [group for _, group in sorted(last.items()) if group is not None]

    def ui_trees(self) -> Iterator[tuple[str, str]]:
        """Name (sha256) and text of every UI tree that a step names; each segment has its own."""
        seen: set[str] = set()
        for where, line in self._lines():
            if line.get("kind") == "ui_tree" and line.get("sha256") not in seen:
                try:
                    name, tree = decode_ui_tree(line)
                except (KeyError, ValueError, zlib.error) as error:
                    raise RecordingError(f"{where}: broken UI tree: {error}") from error
                seen.add(name)
                yield name, tree

    def find(self, names: Collection[str]) -> dict[str, EpisodeRecord]:
        """The episodes of these names, as far as they are there; of one that is there twice, the later. The newest
        segments are looked through first, until all are found."""
        left, found = set(names), dict[str, EpisodeRecord]()
        rewards = dict[str, EpisodeRewards]()
        for number in reversed(RECORDS.numbers(self.folder)):
            if not left:
                break
            own, later = self._find_in(number, left)
            rewards = later | rewards
            found |= {name: _with(episode, rewards.get(name)) for name, episode in own.items()}
            left -= own.keys()
        return found

    def members(self, groups: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The names of the episodes of these groups, in the groups' own order, as far as the groups are there. The
        newest segments are looked through first, until all are found."""
        left, found = set(groups), dict[str, tuple[str, ...]]()
        for number in reversed(RECORDS.numbers(self.folder)):
            if not left:
                break
            path = RECORDS.path(self.folder, number)
            try:
                entries = [e for e in RECORDS.entries(self.folder, number) if e.kind == "group" and e.name in left]
                for entry, data in read_ranges(path, entries):
                    found[entry.name] = tuple(json.loads(data)["episodes"])
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise RecordingError(f"the recording {path} can't be read: {error!r}") from error
            left -= found.keys()
        return found

    def is_complete(self, episode: EpisodeRecord) -> bool:
        """Whether all frames that its steps name are there as the model saw them: whether it can be learned from."""
        return all(map(self.frames.has, episode.frames))

    def _find_in(self, number: int, names: Collection[str]) -> _Found:
        path = RECORDS.path(self.folder, number)
        try:
            entries = RECORDS.entries(self.folder, number)
            found = _read(path, entries, names)
            if found is None:
                log.warning("the index of %s is another segment's: the segment is read", path)
                found = _read(path, list(_scan(path, 0)), names)
        except OSError as error:
            raise RecordingError(f"the recording {path} can't be read: {error}") from error
        if found is None:
            raise RecordingError(f"{path} changes while it is read: another process writes there")
        return found

    def _records(self, prompts: bool = True) -> Iterator[tuple[EpisodeRecord | GroupRecord, str | None]]:
        pruned = self.pruned
        awaiting: dict[str, EpisodeRecord] = {}
        steps: dict[str, list[StepRecord]] = {}
        settled: dict[str, tuple[GroupRecord, str | None]] = {}
        by_id: dict[str, EpisodeRecord] = {}
        for where, line in self._lines():
            try:
                kind = line["kind"]
                if kind == "step":
                    step = decode_step(line)
                    if not prompts:
                        step = replace(step, generation=replace(step.generation, prompt_ids=()))
                    steps.setdefault(line["episode"], []).append(step)
                elif kind == "episode":
                    episode = by_id[line["id"]] = _episode(line, steps.pop(line["id"], ()))
                    if episode.awaits_rewards:
                        awaiting[episode.id] = episode
                    else:
                        yield episode, None
                elif kind == "rewards":
                    if line["id"] in awaiting:
                        episode = by_id[line["id"]] = awaiting.pop(line["id"]).rewarded(decode_rewards(line))
                        yield episode, None
                elif kind == "group":
                    if pruned and not by_id.keys() >= set(line["episodes"]):
                        continue
                    group, why = decode_group(line, tuple(by_id[i] for i in line["episodes"])), line["dropped"]
                    # A run that was resumed writes down once more what it had at hand.
                    if settled.get(group.id) != (group, why):
                        settled[group.id] = group, why
                        yield group, why
                elif kind != "ui_tree":
                    raise ValueError(f"unknown kind {kind!r}")
            except (KeyError, TypeError, ValueError) as error:
                raise RecordingError(f"{where}: broken record: {error}") from error
        yield from ((episode, None) for episode in awaiting.values())
        if steps and self.dropped is None:
            self.dropped = f"{self.folder}: steps of {', '.join(steps)}, whose end was never written"

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Where a line is, for errors, and what it says."""
        self.dropped = None
        numbers = RECORDS.numbers(self.folder)
        if not numbers:
            raise RecordingError(f"the recording {RECORDS.path(self.folder, 1)} can't be read: it is not there")
        for segment in numbers:
            path = RECORDS.path(self.folder, segment)
            try:
                for number, raw in enumerate(read_lines(path), start=1):
                    if segment == numbers[-1] and _cut_off(raw):
                        self.dropped = f"{path}:{number}: the last line was cut off after {len(raw)} bytes"
                        log.warning("%s; it is left out", self.dropped)
                        return
                    try:
                        line = json.loads(raw)
                    except ValueError as error:
                        raise RecordingError(f"{path}:{number}: not JSON: {error}") from error
                    yield f"{path}:{number}", line
            except OSError as error:
                raise RecordingError(f"the recording {path} can't be read: {error}") from error


def _cut_off(raw: bytes) -> bool:
    """Half a line, or pages that a power failure kept from the disk: JSON has no zero bytes."""
    return not raw.endswith(b"\n") or b"\0" in raw


def _episode(line: dict[str, Any], steps: Collection[StepRecord]) -> EpisodeRecord:
    if len(steps) != line["steps"]:
        raise ValueError(f"episode {line['id']} has {len(steps)} steps, its line says {line['steps']}")
    return decode_episode(line, tuple(steps))


def _with(episode: EpisodeRecord, rewards: EpisodeRewards | None) -> EpisodeRecord:
    return episode if rewards is None or not episode.awaits_rewards else episode.rewarded(rewards)


def _read(path: Path, entries: list[Entry], names: Collection[str]) -> _Found | None:
    """None: an entry is not what it says."""
    wanted = {(entry.kind, entry.name): entry for entry in entries if entry.name in names and entry.kind != "group"}
    found, rewards = dict[str, EpisodeRecord](), dict[str, EpisodeRewards]()
    for entry, data in read_ranges(path, sorted(wanted.values(), key=lambda entry: entry.offset)):
        try:
            *before, last = map(json.loads, data.splitlines())
            if (last["kind"], last["id"]) != (entry.kind, entry.name):
                return None
            if entry.kind == "rewards":
                rewards[entry.name] = decode_rewards(last)
            else:
                found[entry.name] = _episode(last, [decode_step(line) for line in before if line["kind"] == "step"])
        except (KeyError, TypeError, ValueError):
            return None
    return found, rewards
