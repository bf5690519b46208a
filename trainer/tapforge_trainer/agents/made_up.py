"""Steps of an episode that was never played, as an adapter prompts for them: with them a run's first weights are proved
before there is an episode."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import numpy as np

from tapforge_envs.protocol import Action, Back, Frame, Home, Observation, Tap, Wait

from ..frames.frame import encode
from ..records import Prompt
from .agent import Agent, ContextLimit, Turn

_GOAL: Final = "Open the settings, set the brightness to 40 % and send Ada a note of it."
#: what may have been done; an adapter has a word for one of them at least
_DONE: Final[tuple[Action, ...]] = (Tap(x=0.3, y=0.6), Back(), Home(), Wait())
#: numbers of the steps: the first, one with a short history, and one whose history is as long as the adapter keeps it
_STEPS: Final = (0, 1, 5)


def made_up_episode(agent: Agent, width: int, height: int) -> tuple[Prompt, ...]:
    """The same every time. `width`, `height`: of its screens, pixels. Prompts that the context has no room for are left
    out."""
    history: list[Turn] = []
    prompts: list[Prompt] = []
    for step in range(_STEPS[-1] + 1):
        seen, _ = agent.prepare(Observation(Frame.of(encode(_screen(width, height, step)), width, height)))
        if step in _STEPS and not isinstance(prompt := agent.prompt(_GOAL, history, seen), ContextLimit):
            prompts.append(prompt)
        for done in _DONE:
            with suppress(ValueError):  # this adapter has no word for it
                answer = agent.decode(agent.answer_ids(done, seen.frame))
                history.append(Turn(seen, answer, done))
                break
    return tuple(prompts)


def _screen(width: int, height: int, step: int) -> np.ndarray:
    """Rows of a list, in colours of their own, and fine stripes."""
    y, x = np.mgrid[0:height, 0:width]
    row = y // 48
    planes = [(row * 53 + 31 * step) % 256, (row * 97 + x // 64 * 29) % 256, (x + y) % 2 * 90 + 60]
    return np.stack(planes, -1).astype(np.uint8)
