"""A rank's way to the frames of an update: out of the object store by reference, else out of the recording.

- Ray brings an object to a node once, for all ranks of the node. What is taken from it is copied, so that nothing of
  the store stays pinned by it.
- An object that is lost, late or never came to be is replaced by the recording, where this node has that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from tapforge_trainer.frames.frame import FittedFrame, FrameError
from tapforge_trainer.recording.frames import FrameStore

log = logging.getLogger(__name__)

#: seconds that one episode's frames may take to come
_FETCH: Final = 120.0


class FrameSource(Protocol):
    """Frames of episodes, each of which has all that its own steps name. Used by one thread at a time."""

    def read(self, episode: str, names: Collection[str]) -> Mapping[str, FittedFrame]:
        """Raises FrameError for one that isn't there any more."""
        ...

    def lost(self, wanted: Mapping[str, Collection[str]]) -> list[str]:
        """Of frames by episode: the episodes of which not all can be read."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFrames:
    """A `FrameSource` on a rank's node."""

    #: by episode, to mappings from name to frame; held by the driver
    references: Mapping[str, Any]
    #: of which the driver did not make the objects itself: they are lost with the node that made them
    foreign: Collection[str]
    #: the recording, if this node has one
    recorded: FrameStore | None

    def read(self, episode: str, names: Collection[str]) -> Mapping[str, FittedFrame]:
        found = self._fetched(episode, names)
        if missing := [name for name in names if name not in found]:
            if self.recorded is None:
                raise FrameError(
                    f"frame {missing[0][:12]} of episode {episode} can't be fetched, and this node has no recording"
                )
            found |= {name: self.recorded.frame(name) for name in missing}
        return found

    def lost(self, wanted: Mapping[str, Collection[str]]) -> list[str]:
        import ray

        # An object may hold the frames of several episodes, and is waited for once.
        if coming := list({self.references[episode] for episode in wanted if episode in self.foreign}):
            ray.wait(coming, num_returns=len(coming), timeout=_FETCH)  # else they would come one after another
        return [episode for episode, names in wanted.items() if not self._has(episode, names)]

    def _has(self, episode: str, names: Collection[str]) -> bool:
        if episode in self.references and episode not in self.foreign:
            return True
        missing = set(names)
        if episode in self.foreign:
            missing -= self._fetched(episode, names).keys()
        return not missing or (self.recorded is not None and all(map(self.recorded.has, missing)))

    def _fetched(self, episode: str, names: Collection[str]) -> dict[str, FittedFrame]:
        """Those that the object store has."""
        import ray
        from ray.exceptions import RayError

        if (reference := self.references.get(episode)) is None:
            return {}
        try:
            frames = ray.get(reference, timeout=_FETCH)
        except RayError as error:
            log.warning("the frames of episode %s can't be fetched: %s", episode, error)
            return {}
        return {name: replace(frames[name], data=bytes(frames[name].data)) for name in names if name in frames}
