"""Everything a rollout produced, on disk: segments of records, and the frames that they name.

    FOLDER/rollout-000001.jsonl, ...     append-only, a new one from 64 MiB on; beside each its index (`segments.py`)
    FOLDER/frames/                       `frames.py`
    FOLDER/learner-000001.jsonl, ...     `learner_tokens.py`

Promises:
1. An episode is written as one block (its frames first, then the UI trees that its segment doesn't have yet, its steps,
   its own line), its rewards after it where they come later, a group after its episodes.
2. `sync` returns when all that was written would survive a power failure, frames first. It is called once per batch,
   before the batch is handed out.
3. What is read (`reader.py`) is what was written; half an episode at the end is cut off by the next writer and said.
4. A full disk is an error that names the path; what was written before stays readable.
5. The recording is at most `Retention.max_bytes` large after `sync`, but for what is spared: packs of frames are
   removed first, then segments of the learner's tokens, then segments of records, the oldest first, and of none the
   newest.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ..frames.frame import FittedFrame
from ..records import EpisodeRecord, EpisodeRewards, GroupRecord
from .frames import FrameWriter
from .learner_tokens import LEARNER, LearnerTokens, block
from .lines import encode_episode, encode_group, encode_rewards, encode_step, encode_ui_tree
from .reader import FRAMES, RECORDS, Recording, RecordingError
from .retention import Retention
from .segments import Entry, SegmentWriter

log = logging.getLogger(__name__)

#: bytes of records from which on a segment is full
SEGMENT_BYTES = 64 << 20


class Recorder:
    """Writes. One writer per folder; not for use from several threads at once."""

    def __init__(
        self,
        folder: Path,
        retention: Retention | None = None,
        *,
        spared: Callable[[], Collection[str]] = frozenset,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        """`spared`: names of the episodes that checkpoints need, of which nothing is removed."""
        self._folder = folder
        self._retention = retention or Retention()
        self._spared = spared
        self._too_large = False
        self._segment_bytes = self._retention.segment_bytes(segment_bytes)
        #: of the learner's tokens, once there are any: measurements have none
        self._learner: SegmentWriter | None = None
        #: names of the UI trees that this recorder wrote into the newest segment
        self._trees: set[str] = set()
        try:
            # Not the run's own folder: one that was taken over must not come back (cluster/storage.py).
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            self._frames = FrameWriter(folder / FRAMES, self._retention)
            self._records = SegmentWriter(folder, RECORDS, self._segment_bytes)
        except OSError as error:
            raise self._failure(error) from error

    @property
    def path(self) -> Path:
        """The segment that is appended to."""
        return self._records.path

    def keeps(self, group: str) -> bool:
        """Whether the frames of this group's episodes are recorded; of others none need be given."""
        return self._retention.keeps(group)

    def episode(
        self, record: EpisodeRecord, frames: Mapping[str, FittedFrame], ui_trees: Mapping[str, str] | None = None
    ) -> None:
        """`frames` and `ui_trees`: those that the steps name; trees by the sha256 of their text."""
        self._begin()
        try:
            if self.keeps(record.group):
                for frame in frames.values():
                    self._frames.put(frame)
        except OSError as error:
            raise self._failure(error, self._folder / FRAMES) from error
        trees = {name: tree for name, tree in (ui_trees or {}).items() if name not in self._trees}
        lines = [encode_ui_tree(name, tree) for name, tree in trees.items()]
        block = b"".join([*lines, *map(encode_step, record.steps), encode_episode(record)])
        self._append(block, Entry("episode", record.id, 0, len(block), {"group": record.group}))
        self._trees.update(trees)

    def rewards(self, episode: str, rewards: EpisodeRewards) -> None:
        """Of an episode that was written without."""
        self._begin()
        line = encode_rewards(episode, rewards)
        self._append(line, Entry("rewards", episode, 0, len(line), {}))

    def group(self, record: GroupRecord, dropped: str | None = None) -> None:
        self._begin()
        line = encode_group(record, dropped)
        self._append(line, Entry("group", record.id, 0, len(line), {"order": record.order}))

    def learner_tokens(self, update: int, episodes: Sequence[LearnerTokens]) -> None:
        """What the learner computed of the episodes that an update trained on."""
        self._begin()
        try:
            if self._learner is None:
                self._learner = SegmentWriter(self._folder, LEARNER, self._segment_bytes)
            self._learner.room()
            self._learner.append(*block(update, episodes))
        except OSError as error:
            raise self._failure(error, self._learner.path if self._learner else None) from error

    def sync(self) -> None:
        """Waits until all that was written would survive a power failure."""
        if self._records.closed:
            return
        try:
            self._frames.sync()
            self._records.sync()
            if self._learner is not None:
                self._learner.sync()
            if self._retention.max_bytes is not None:
                self._prune(self._retention.max_bytes)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._frames.close()
            self._records.close()
            if self._learner is not None:
                self._learner.close()

    def _begin(self) -> None:
        if self._records.closed:
            raise RecordingError(f"{self.path} is closed, by close() or by an error that was raised before")
        try:
            if self._records.room():
                self._trees.clear()
        except OSError as error:
            raise self._failure(error) from error

    def _append(self, block: bytes, entry: Entry) -> None:
        try:
            self._records.append(block, (entry,))
        except OSError as error:
            raise self._failure(error) from error

    def _prune(self, most: int) -> None:
        """Removes what is oldest until `most` bytes are left."""
        if self._size() <= most:
            return
        spared = self._spared()
        found = Recording(self._folder).find(spared)
        frames = {name for episode in found.values() for name in episode.frames}
        for number in self._frames.full_packs():
            if self._frames.drop(number, frames) and self._size() <= most:
                return
        for number in LEARNER.numbers(self._folder)[:-1]:
            LEARNER.drop(self._folder, number)
            if self._size() <= most:
                return
        for number in RECORDS.numbers(self._folder)[:-1]:
            if not any(entry.name in found for entry in RECORDS.entries(self._folder, number)):
                RECORDS.drop(self._folder, number)
                if self._size() <= most:
                    return
        if not self._too_large:
            self._too_large = True
            log.warning(
                "the recording %s has %d bytes, more than recording.maxGiB allows, and nothing more can be removed: "
                "checkpoints need it, or it is the newest",
                self._folder,
                self._size(),
            )

    def _size(self) -> int:
        segments = [(series, number) for series in (RECORDS, LEARNER) for number in series.numbers(self._folder)]
        return self._frames.size() + sum(series.size(self._folder, number) for series, number in segments)

    def _failure(self, error: OSError, path: Path | None = None) -> RecordingError:
        path = path or (self.path if hasattr(self, "_records") else self._folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self._folder).free >> 20
            return RecordingError(
                f"no space left for {path} ({free} MiB free): nothing recorded so far is lost; make room, or give "
                "another folder, and run again"
            )
        return RecordingError(f"{path} can't be written: {error}")
