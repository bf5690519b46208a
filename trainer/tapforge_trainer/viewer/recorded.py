"""From recordings on disk to a replay.

Credits are computed again from the recorded groups: `build_batch` is pure, so with the rules of the run and the groups
of the same update these are the advantages that it used. Where the beginning of a recording was removed, updates may
seem to begin elsewhere; only estimators that look at a whole batch notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..batch import BatchRules, Credit, batches_of, build_batch
from ..frames.frame import FrameError
from ..recording.frames import FrameMissing, FrameStore, NotRecorded
from ..recording.reader import Recording
from ..records import GroupRecord
from .replay import Replay
from .selection import pick_groups

_NO_CREDITS = (
    "Advantages are not shown: the learner read the answers before it made them, and no recording has what it read; "
    "`tapforge relearn --gradients` reads them again."
)


def replay_of(
    *,
    title: str,
    rules: BatchRules,
    per_update: int = 1,
    later: Sequence[tuple[int, BatchRules]] = (),
    training: Path | None = None,
    before: Path | None = None,
    after: Path | None = None,
    facts: Mapping[str, str] | None = None,
    practised: Mapping[str, Mapping[str, Any]] | None = None,
    max_pairs: int = 16,
    max_groups: int = 6,
) -> Replay:
    """Each folder holds a recording; several may be the same. `per_update`: groups that an update takes;
    `later`: rules of the run's later stages, each with the order of the first group that it issued."""
    recordings = {folder: Recording(folder) for folder in (training, before, after) if folder is not None}
    groups = recordings[training].settled() if training else []
    lacks = recordings[training].frames.lacks if training else ""
    # Those whose screens were recorded; all of them where that is none.
    seen = [group for group in groups if _shows(recordings[training], group)] if training and lacks else groups
    shown = pick_groups(seen or groups, max_groups)
    return Replay(
        title=title,
        frame=from_any([recording.frames for recording in recordings.values()]),
        facts=facts or {},
        practised=practised or {},
        before=list(recordings[before].episodes()) if before else (),
        after=list(recordings[after].episodes()) if after else (),
        groups=shown,
        groups_total=len(groups),
        lacks=" ".join(
            [
                *([f"{len(seen)} of {len(groups)} groups have all their screens: {lacks}."] if lacks else []),
                *([_NO_CREDITS] if groups and rules.reads else []),
            ]
        ),
        lossy=next((kind for r in recordings.values() if (kind := r.frames.lossy)), ""),
        credits=[
            credit
            for some, of_stage in _by_stage(groups, rules, later)
            for credit in _credits(some, shown, of_stage, per_update)
        ],
        states=rules.states,
        max_pairs=max_pairs,
        max_groups=max_groups,
    )


def _by_stage(
    groups: Sequence[GroupRecord], rules: BatchRules, later: Sequence[tuple[int, BatchRules]]
) -> list[tuple[list[GroupRecord], BatchRules]]:
    begins = [*later, (math.inf, rules)]
    found = [([group for group in groups if group.order < begins[0][0]], rules)]
    for (begin, of_stage), (end, _) in pairwise(begins):
        found.append(([group for group in groups if begin <= group.order < end], of_stage))
    return found


def _credits(
    groups: Sequence[GroupRecord], shown: Sequence[GroupRecord], rules: BatchRules, per_update: int
) -> list[Credit]:
    if rules.reads:  # no model is loaded to look at a run
        return []
    wanted = {group.id for group in shown}
    batches = [batch for batch in batches_of(groups, per_update) if wanted & {group.id for group in batch}]
    return [credit for batch in batches for credit in build_batch(batch, rules).credits]


def _shows(recording: Recording, group: GroupRecord) -> bool:
    """Whether every screen of the group is there to be looked at."""
    names = {step.frames[-1] for episode in group.episodes for step in episode.steps if step.frames}
    return all(map(recording.frames.shows, names))


def from_any(stores: Sequence[FrameStore]) -> Callable[[str], bytes]:
    """The frame of whichever store has it."""

    def frame(sha256: str) -> bytes:
        errors: list[FrameError] = []
        for store in stores:
            try:
                return store.get(sha256)
            except FrameError as error:
                errors.append(error)
        # What is broken, else what was left out, else that no store has it.
        broken = [why for why in errors if not isinstance(why, FrameMissing)]
        left_out = [why for why in errors if isinstance(why, NotRecorded)]
        for why in (*broken, *left_out):
            raise why
        raise FrameError("; ".join(map(str, errors)))

    return frame
