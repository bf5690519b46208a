"""Where the frames of a batch are, without their pixels: what the driver holds and passes on to the learner's ranks.

A `FrameHandle` is an episode's frames by name: a plain mapping (the player is in this process), or a Ray ObjectRef
of one, which the driver holds and never fetches. What is in no handle, or was lost, is read from the recording.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Mapping[str, FittedFrame], or a Ray ObjectRef of one
FrameHandle = Any


@dataclass(frozen=True, slots=True)
class BatchFrames:
    """`handles` by episode; `recorded` is the recording's folder of frames, on every node that has it."""

    handles: Mapping[str, FrameHandle] = field(default_factory=dict)
    recorded: Path | None = None


class FramesLost(RuntimeError):
    """Frames that are neither where their handles say nor in the recording: their `episodes` have to be played again.
    Nothing has been learned when this is raised."""

    def __init__(self, episodes: Collection[str]):
        self.episodes = tuple(sorted(episodes))
        shown = ", ".join(self.episodes[:5]) + (", ..." if len(self.episodes) > 5 else "")
        super().__init__(
            f"the frames of {len(self.episodes)} episodes are lost, and no recording on the learner's nodes has them: "
            f"{shown}; they have to be played again"
        )

    def __reduce__(self) -> tuple[type[FramesLost], tuple[tuple[str, ...]]]:
        return FramesLost, (self.episodes,)
