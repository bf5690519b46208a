"""From recordings on disk to a replay.

Credits are computed again from the recorded groups: `build_batch` is pure and groups do not depend on each other, so
with the rules of the run these are the advantages that its updates used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..batch import BatchRules, build_batch
from ..frames import FrameError
from ..rollout.frames import FrameStore
from ..rollout.recording import Recording
from .replay import Replay
from .selection import pick_groups


def replay_of(
    *,
    title: str,
    rules: BatchRules,
    training: Path | None = None,
    before: Path | None = None,
    after: Path | None = None,
    facts: Mapping[str, str] | None = None,
    max_pairs: int = 16,
    max_groups: int = 6,
) -> Replay:
    """Each folder holds a recording; several may be the same."""
    recordings = {folder: Recording(folder) for folder in (training, before, after) if folder is not None}
    groups = list(recordings[training].groups()) if training else []
    shown = pick_groups(groups, max_groups)
    return Replay(
        title=title,
        frame=_from_any([recording.frames for recording in recordings.values()]),
        facts=facts or {},
        before=list(recordings[before].episodes()) if before else (),
        after=list(recordings[after].episodes()) if after else (),
        groups=shown,
        groups_total=len(groups),
        credits=build_batch(shown, rules).credits,
        max_pairs=max_pairs,
        max_groups=max_groups,
    )


def _from_any(stores: Sequence[FrameStore]) -> Callable[[str], bytes]:
    def frame(sha256: str) -> bytes:
        errors = []
        for store in stores:
            try:
                return store.get(sha256)
            except FrameError as error:
                errors.append(str(error))
        raise FrameError("; ".join(errors))

    return frame
