"""What keeps prompts of a history in blocks from extending each other, as far as an adapter and its files show it.

- A chat template: seen on a made-up episode of two steps, whose second prompt has to begin with the first one and the
  answer as it was sampled. One that opens a thought itself can't: earlier turns are shown without their thoughts.
- A prompt file: its variables that change from step to step.
- A context is another package's code and isn't called: what it adds to the first message may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tapforge_envs.protocol import Back, Tap

from ..frames.frame import FittedFrame
from ..records import Prompt
from .agent import Prepared, Turn

if TYPE_CHECKING:
    from .chat_agent import ChatAgent
    from .prompt_file import PromptFile

#: variables of a prompt file that say something else at every step
_CHANGING = ("step", "history", "app")


def prompts_differ(prompt_file: PromptFile | None, context: str | None) -> Iterator[str]:
    """What changes the first message, whatever the model is."""
    if prompt_file is not None and (named := [name for name in _CHANGING if name in prompt_file.used]):
        yield (
            f"the prompt file {prompt_file.path} names {' and '.join(named)}, so that the first message is another one "
            "at each step; leave out what changes"
        )
    if context is not None:
        yield (
            f"what the context {context} adds is in the first message, and a prompt extends the last one only "
            "where it adds the same again"
        )


def template_breaks(agent: ChatAgent) -> Iterator[str]:
    """What the chat template does. `agent`: in blocks, with the prompt of its adapter and without a context."""
    template = agent.chat.template.origin
    if agent.chat.opened and agent.window.prompt == "full":  # others are written without the template
        yield (
            f"{template} opens a thought ({agent.chat.opened}) in each answer, and earlier turns are shown without "
            "their thoughts; use the model's Instruct edition, or a template that opens none"
        )
        return
    width, height = agent.grid.within(1).fit(1, 1)
    frame = FittedFrame("made up", b"", width, height)
    seen = Prepared(frame, agent.visual_tokens(frame))
    answer = _answer(agent, frame)
    first = agent.prompt("goal", [], seen)
    second = agent.prompt("goal", [Turn(seen, agent.decode(answer), Back(), answer)], seen)
    if not isinstance(first, Prompt) or not isinstance(second, Prompt) or len(second.frames) < 2:
        return  # a context that holds no two screens, whose note says it
    wanted = (*first.ids, *answer)
    if second.ids[: len(wanted)] == wanted:
        return
    end = next((at for at, (a, b) in enumerate(zip(wanted, second.ids, strict=False)) if a != b), len(second.ids))
    asked, later = (agent.chat.show(ids[max(0, end - 6) : end + 6]) for ids in (wanted, second.ids))
    yield (
        f"{template} writes a turn otherwise when it is an earlier one ({later!r} where the model was asked with "
        f"{asked!r}); use a template that writes it the same"
    )


def _answer(agent: ChatAgent, frame: FittedFrame) -> tuple[int, ...]:
    try:
        return agent.answer_ids(Back(), frame)
    except ValueError:  # desktops have no such key
        return agent.answer_ids(Tap(x=0.5, y=0.5), frame)
