"""A worker of ZeroGUI's manager (`env_api_wrapper.py`): one process with one virtual machine, seen as an `Environment`.

OSWorld and AndroidLab speak it in two dialects. Promises, whatever the dialect:

1. Every call ends within its deadline (the requests of a reset together) or raises `EnvironmentFault`. Nothing is sent
   twice: ZeroGUI's own client repeats a step that timed out, and the machine carries it out again.
2. The worker answers 200 to everything; `success: false` in it is a fault in its own words.
3. The last step before `/evaluate` is the dialect's word for the end. At the step limit neither of them is sent.
4. Whether the task can be done and what it asks for comes from the worker's task; nothing is judged by default.
5. A machine is started once: only when the worker itself says that it has none. A second `/start` would leave the first
   machine running and unreachable.
6. An answer is parsed in a thread: its screen is 1 to 4 MB of base64.

The worker keeps its machine when an episode ends; its maker ends it (`slots/managed.py`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from ..protocol import (
    FINAL_ACTIONS,
    Action,
    EnvironmentFault,
    Frame,
    Observation,
    Score,
    StepResult,
    Task,
    UnknownTask,
    Wait,
)
from .http import Deadlines, HttpServer, short
from .pictures import frame_of

#: a worker without a machine says this when it is to reset one: its global is None
_NO_MACHINE: Final = "'NoneType' object has no attribute 'reset'"
#: of a file of examples that isn't there
_NO_TASK: Final = "No such file or directory"
#: characters of an accessibility tree that are kept
_TREE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What the worker's configuration of a task says."""

    #: "" and None where it doesn't say
    goal: str
    feasible: bool | None


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs. Functions raise ValueError for what they can't read, `command` UnsupportedAction."""

    #: body of `/start`
    start: Mapping[str, Any]
    #: body of `/get_task_config`
    lookup: Callable[[Task], dict[str, Any]]
    #: task, its configuration -> body of `/reset`
    reset: Callable[[Task, dict[str, Any]], dict[str, Any]]
    facts: Callable[[dict[str, Any]], TaskFacts]
    #: action, width, height, the usual pause -> (what `/step` is sent, its pause in seconds)
    command: Callable[[Action, int, int, float], tuple[str, float]]
    #: sent before `/evaluate` when the agent didn't end the episode itself; None: nothing
    end: str | None


class WorkerClient:
    """One worker. Lives as long as a lease."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        deadlines: Deadlines,
        slot: str,
        dialect: Dialect,
        pause: float,
    ):
        """`pause`: seconds that the worker waits from an action to its frame."""
        if "#" in url or "?" in url:
            raise EnvironmentFault(f"{slot}: a manager's workers are made by a run; name the URL of a worker here")
        self._server = HttpServer(url, session, slot)
        self._deadlines = deadlines
        self._dialect = dialect
        self._pause = pause
        self._size: tuple[int, int] | None = None
        self._ended = False
        #: a call that has no answer yet
        self._under_way = ""

    async def health(self) -> str:
        """Always "": the worker says nothing by which its process could be known. Raises EnvironmentFault for one that
        is a manager."""
        answer = await self._server.json("health", "GET", "/", seconds=self._deadlines.health)
        info = answer.get("info") if isinstance(answer, dict) else None
        if not isinstance(info, str):
            raise self._server.fault("health", f"answered {answer!r:.300}; a worker answers with its 'info'")
        if "manager" in info:
            raise self._server.fault("health", f"is {info!r:.100}, not a worker: a run names it with ?workers=NUMBER")
        return ""

    async def reset(self, task: Task) -> Observation:
        ends = _now() + self._deadlines.reset
        self._size, self._ended = None, False
        try:
            lookup = self._dialect.lookup(task)
        except ValueError as error:
            raise UnknownTask(f"{self._server.slot}: reset: {task.key}: {error}") from error
        found = await self._read("reset: task", "POST", "/get_task_config", _left(ends), lookup)
        if found.get("success") is False and _NO_TASK in (why := str(found.get("message"))):
            raise UnknownTask(f"{self._server.slot}: reset: {task.key}: the worker has no such task: {why:.300}")
        self._checked("reset: task", found)
        config = found.get("task_config")
        if not isinstance(config, dict):
            raise self._server.fault("reset: task", f"'task_config' is {config!r:.200}, no object")
        try:
            facts = self._dialect.facts(config)
            body = self._dialect.reset(task, config)
        except ValueError as error:
            raise self._server.fault("reset: task", f"{task.key}: {error}") from error
        if task.goal and facts.goal and task.goal != facts.goal:
            raise self._server.fault(
                "reset: task",
                f"the worker's goal is {facts.goal!r:.200}, the task's is {task.goal!r:.200}: they differ; "
                "leave the goal out of the task file",
            )
        answer = await self._read("reset", "POST", "/reset", _left(ends), body)
        if answer.get("success") is False and _NO_MACHINE in str(answer.get("message")):
            await self.start(_left(ends))
            answer = await self._read("reset", "POST", "/reset", _left(ends), body)
        seen = await self._seen("reset", self._checked("reset", answer))
        return Observation(seen.frame, ui_tree=seen.ui_tree, goal=facts.goal, feasible=facts.feasible)

    async def start(self, seconds: float) -> None:
        """Starts the machine of a worker that has none."""
        await self._ask("start", "POST", "/start", seconds, dict(self._dialect.start))

    async def stop(self, seconds: float) -> None:
        """Stops the machine, and whatever a step still does in it; a reset starts it again."""
        await self._ask("stop", "POST", "/close", seconds)

    async def step(self, action: Action, index: int) -> StepResult:
        call = f"step {index} ({action.type})"
        if self._size is None:
            raise self._server.fault(call, "there is no episode: reset first")
        text, pause = self._dialect.command(action, *self._size, self._pause)
        final = isinstance(action, FINAL_ACTIONS)
        if isinstance(action, Wait):  # here: the worker's own sleep would count against the step's deadline
            await asyncio.sleep(action.seconds)
        result = await self._step(call, text, pause)
        self._ended = final
        return StepResult(result.observation, done=final or result.done, reward=result.reward)

    async def evaluate(self) -> Score:
        if self._size is None:
            raise self._server.fault("evaluate", "there is no episode: reset first")
        if not self._ended and self._dialect.end is not None:
            await self._step("evaluate: end", self._dialect.end, 0.0)
            self._ended = True
        answer = await self._ask("evaluate", "GET", "/evaluate", self._deadlines.evaluate)
        value = answer.get("metric")
        # Some of OSWorld's metrics are truth values.
        if not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN is in no range
            raise self._server.fault("evaluate", f"'metric' is {value!r:.100}, must be a number from 0 to 1")
        return Score(float(value))

    async def close(self) -> None:
        """Nothing: the next reset takes the machine back to its snapshot. After a call that was cut off it is a fault:
        the worker does several things at once, and the old step would act in the next episode."""
        if self._under_way:
            raise self._server.fault("close", f"{self._under_way} was cut off: it may still be carried out")
        self._size = None

    async def _step(self, call: str, text: str, pause: float) -> StepResult:
        body = {"action": text, "pause": pause}
        answer = await self._ask(call, "POST", "/step", self._deadlines.step, body)
        reward, done = answer.get("reward", 0), answer.get("done")
        if not isinstance(done, bool) or isinstance(reward, bool) or not isinstance(reward, int | float):
            raise self._server.fault(call, f"'done' is {done!r:.50} and 'reward' {reward!r:.50}, no truth and number")
        if not abs(reward) <= 1e6:  # NaN, infinite, or an integer that is not a float
            raise self._server.fault(call, f"'reward' is {reward!r:.50}")
        return StepResult(await self._seen(call, answer), done=done, reward=float(reward))

    async def _ask(
        self, call: str, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._checked(call, await self._read(call, method, path, seconds, body))

    async def _read(
        self, call: str, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self._under_way = call
        status, raw = await self._server.exchange(call, method, path, body=body, seconds=seconds)
        self._under_way = ""
        if status != 200:
            raise self._server.fault(call, f"answered {status}: {short(raw)}")
        try:
            answer = await asyncio.to_thread(json.loads, raw)
        except (ValueError, RecursionError) as error:
            raise self._server.fault(call, f"answer is not JSON: {short(raw)}") from error
        if not isinstance(answer, dict):
            raise self._server.fault(call, f"answer is not an object: {short(raw)}")
        return answer

    def _checked(self, call: str, answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("success") is not True:
            why = answer.get("message", answer.get("success"))
            raise self._server.fault(call, f"the worker failed: {str(why)[:300]}")
        return answer

    async def _seen(self, call: str, answer: dict[str, Any]) -> Observation:
        obs = answer.get("obs")
        if not isinstance(obs, dict):
            raise self._server.fault(call, f"'obs' is {type(obs).__name__}, no object")
        try:
            frame = await asyncio.to_thread(_screenshot, obs.get("screenshot"))
        except ValueError as error:
            raise self._server.fault(call, f"the screenshot is none: {error}") from error
        self._size = (frame.width, frame.height)
        tree = obs.get("accessibility_tree")
        return Observation(frame, ui_tree=tree if isinstance(tree, str) and 0 < len(tree) <= _TREE else None)


def _screenshot(text: object) -> Frame:
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} instead of base64")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{len(text)} characters are not base64: {error}") from error
    return frame_of(data)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(ends: float) -> float:
    """Seconds; a request that would have none is still made, and times out at once."""
    return max(0.001, ends - _now())
