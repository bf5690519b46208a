"""A policy without a network: an agent whose tokens are bytes of JSON, and generators that answer from a script.

The demonstrator knows the way through a task because it walked it on a phone of its own; it recognises where it is by
goal, step and screen, as a model would. Anything it doesn't recognise it declares failed.
"""

import asyncio
import json
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import ACTION, Action, Observation, Task, Terminate
from tapforge_trainer.agents.agent import ContextLimit, Prepared, Turn
from tapforge_trainer.agents.parsing import ParseFailure
from tapforge_trainer.frames.frame import FittedFrame, Pixels
from tapforge_trainer.records import FinishReason, Generation, Prompt, Sampling

IMAGE, END = 256, 257
GIVE_UP = Terminate(status="failure")
DONE = Terminate(status="success")
INFEASIBLE = Terminate(status="infeasible")
TASKS = catalog.tasks("quickstart", "train")


class BytesAgent:
    """A prompt is the frame, the goal and the number of the step; an answer is an action as JSON."""

    allowed_ids = (*range(256), END)
    stop_ids = (END,)

    def __init__(self, context: int = 10_000, visual_tokens: int = 15):
        self.context = context
        self.visual_tokens = visual_tokens

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt | ContextLimit:
        ids = (IMAGE, *f"{len(history)} {goal}".encode())
        ids += tuple(b for turn in history for b in turn.text.encode("utf-8", "replace"))
        length = len(ids) - 1 + self.visual_tokens
        if length > self.context:
            return ContextLimit(length, 0, self.context)
        return Prompt(ids, (seen.frame,), length)

    def read(self, text: str, finish_reason: FinishReason, screen: FittedFrame | None = None) -> Action | ParseFailure:
        if finish_reason == "length":
            return ParseFailure("cut_off", "too long")
        try:
            return ACTION.validate_json(text)
        except ValidationError:
            return ParseFailure("json", f"{text[:40]!r} is no action")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        return (IMAGE,) * self.visual_tokens + prompt.ids[1:]

    def answer_ids(self, action: Action, screen: FittedFrame | None = None) -> tuple[int, ...]:
        return (*json.dumps(action.model_dump()).encode(), END)

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        """The frame as it came, named by its bytes as in recordings of earlier versions."""
        o, came = observation, observation.frame
        frame = FittedFrame(came.sha256, came.data, came.width, came.height)
        return Prepared(frame, self.visual_tokens, o.app, o.state_key, o.ui_tree, o.window), frame.pixels


AGENT = BytesAgent()


def say(answer: Action | str, prompt: Prompt, version: int = 0, finish_reason: FinishReason = "stop") -> Generation:
    """The generation of an engine that says exactly this."""
    ids = (*answer.encode(), END) if isinstance(answer, str) else AGENT.answer_ids(answer)
    return Generation(prompt.ids, ids, (-0.1,) * len(ids), (version,) * len(ids), finish_reason, prompt.expanded_length)


def heard(prompt: Prompt) -> tuple[int, str]:
    """(number of the step, goal and earlier answers) of a prompt."""
    number, _, goal = bytes(prompt.ids[1:]).decode().partition(" ")
    return int(number), goal


def way(task: Task) -> list[tuple[str, Action]]:
    """The demonstrator's way through a task: the screen at each step, and the action there."""
    phone = catalog.phone_for(task.suite, 96, 160)
    template = catalog.template_of(task)
    seen = phone.reset(task.seed, template.rules(task.params))
    steps = []
    for do in template.plan(task.params, lambda: False):
        action = do.resolve(phone)
        steps.append((seen.frame.sha256, action))
        seen = phone.step(action).observation
    return steps


class Script:
    """Answers by a function of (step, prompt, sampling); counts, and can be slow or hold the policy's version."""

    def __init__(self, answer: Callable[[int, Prompt, Sampling], Action | str | Generation], seconds: float = 0.0):
        self.answer = answer
        self.seconds = seconds
        self.version = 0
        self.calls = 0
        self.inside = 0
        self.most_inside = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.calls += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        version = self.version
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.inside -= 1
        answer = self.answer(heard(prompt)[0], prompt, sampling)
        return answer if isinstance(answer, Generation) else say(answer, prompt, version)


class Held(Script):
    """Answers when it is let go; until then those who ask wait inside. `steps` come before that."""

    def __init__(self, answer: Callable[[int, Prompt, Sampling], Action | str | Generation], steps: int = 0):
        super().__init__(answer)
        self.steps = steps
        self.let_go = asyncio.Event()
        #: calls that wait, or have waited
        self.held = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        if heard(prompt)[0] < self.steps:
            return await super().generate(prompt, sampling)
        self.held += 1
        self.inside += 1
        try:
            await self.let_go.wait()
        finally:
            self.inside -= 1
        return await super().generate(prompt, sampling)


def always(*answers: Action | str) -> Script:
    """Says these one after the other in every episode, and the last one for ever."""
    return Script(lambda step, prompt, sampling: answers[min(step, len(answers) - 1)])


class Demonstrator(Script):
    """Solves the tasks that it was shown; `careless(sampling)` gives an episode up at that answer."""

    def __init__(self, tasks: Sequence[Task], careless: Callable[[Sampling], bool] = lambda s: False, seconds=0.0):
        super().__init__(self._answer, seconds)
        self.careless = careless
        self.known = {
            (task.goal, step, screen): action for task in tasks for step, (screen, action) in enumerate(way(task))
        }
        self.goals = {task.goal for task in tasks}

    def _answer(self, step: int, prompt: Prompt, sampling: Sampling) -> Action | str:
        text = heard(prompt)[1]
        goal = next((g for g in self.goals if text == g or text.startswith(g + "{")), "")
        if self.careless(sampling):
            return GIVE_UP
        return self.known.get((goal, step, prompt.frames[-1].name), GIVE_UP)
