"""What an observation tells about its state, as far as a step's record keeps it.

The environment's exact key needs nothing else. Without one, the hash of the UI tree; without a tree that tells
anything, the key of the frame as the model sees it, so that a recording gives the same keys again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from tapforge_envs.protocol import Observation
from tapforge_envs.ui_tree import ui_key

from ..frames.frame import Pixels
from .frame import frame_key


@dataclass(frozen=True, slots=True)
class StateReading:
    #: sha256 of the UI tree, its name in the recording
    ui_tree: str | None = None
    ui_key: str | None = None
    frame_key: str | None = None


def is_free(observation: Observation) -> bool:
    """Whether `read_state` costs nothing; else it takes milliseconds, off the event loop."""
    return observation.state_key is not None and observation.ui_tree is None


def read_state(observation: Observation, pixels: Callable[[], Pixels]) -> StateReading:
    """`pixels`: of the observation's frame as the model sees it. They are asked for only where they tell the state."""
    tree = observation.ui_tree
    name = hashlib.sha256(tree.encode()).hexdigest() if tree is not None else None
    if observation.state_key is not None:
        return StateReading(name)
    key = ui_key(tree) if tree is not None else None
    if key is not None:
        return StateReading(name, key)
    return StateReading(name, None, frame_key(pixels()).text())
