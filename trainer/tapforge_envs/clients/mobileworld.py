"""A phone behind a MobileWorld or ClawGUI-Server, seen as an `Environment`.

The server repeats what it is sent twice, knows no episodes and no process of its own, and answers calls side by side.
So, in order of weight:
1. Nothing is sent twice. What changes the phone (`/task/init`, `/step`, `/task/eval`, `/task/tear_down`) and has no
   answer in time, or was cut off in the middle, goes on in the background, and until it ended the phone is sick: the
   server may still be carrying it out, in the middle of the next episode.
2. A reading call that was cut off leaves the slot dirty: `close` is then a fault.
3. What the server refuses (`terminate`, app switch, most keys, empty text) is `UnsupportedAction` before anything is
   sent (`mobileworld_actions.py`). Coordinates are pixels of the last frame.
4. `terminate` is sent as `status` and `answer` as it is; both end the episode here, and the judge is asked by
   `evaluate`. `wait` waits one second, whatever it is asked. What a user says to `ask_user` is in the note.
5. Health: 200 and 503 are answers, and `ok` without our device is not proof: `/init` is asked, which asks the phone.
   With a device that is sick beside ours, ours may be well.
6. An answer of another type, an error inside a 200, a score that is none from 0 to 1, half a PNG, or a frame of another
   size than the phone's is a fault that names it. A screen that was turned has both sides swapped.
7. A task is torn down by `close`, and else before the next reset of that phone.

An app whose name the server doesn't know is 500 there, before adb is asked: that is `UnsupportedAction` too. An adb
command that failed is 200 with an empty result there: that of `open_app` and `input_text` is in the note,
that of a touch looks like success. The judge sees one task phone per server; `?device=SERIAL` in the URL names another
one, for tasks that it doesn't judge by adb.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

import aiohttp
from yarl import URL

from tapforge_api.environment import Settle

from .. import protocol as p
from ..protocol import EnvironmentFault, Frame, Observation, Reason, Score, StepResult, Task, UnknownTask
from .http import Deadlines, HttpServer, short
from .mobileworld_actions import device_actions
from .mobileworld_memory import MobileWorldPhones
from .pictures import MAX_SIDE, frame_of
from .settling import settle

T = TypeVar("T")

SUITE: Final = "mobileworld"
#: bytes of an answer that is neither a screenshot nor a list
_SMALL: Final = 1024 * 1024
#: tasks of a server
MAX_TASKS: Final = 20_000
#: seconds after which a call counts as one that never ends
_HELD: Final = 3600.0
#: seconds that a `/task/tear_down` may take at least: it stops containers
_TEAR_DOWN: Final = 60.0
#: what adb says when it has no phone, where a server hands it on as a result
_ADB_FAILED = re.compile(
    r"^(adb: |error: )|device .{0,60}(offline|not found|unauthorized)|no devices/emulators", re.IGNORECASE
)
#: how `open_app` with a name that the server doesn't know ends there, before adb is asked
_UNKNOWN_APP: Final = "validation error for AdbResponse"
_WORDS: Final = 300
_PICTURE: Final = re.compile(rb'"b64_png"\s*:\s*"(?:data:[a-z/]+;base64,)?([A-Za-z0-9+/=\\]+)"')


class _Time:
    """What is left of a deadline, for the calls that share it."""

    def __init__(self, seconds: float):
        self._ends = asyncio.get_running_loop().time() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - asyncio.get_running_loop().time())


class MobileWorldClient:
    """One phone. Lives as long as a lease; session and memory belong to the process."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        phones: MobileWorldPhones,
        deadlines: Deadlines | None = None,
        slot: str = "",
        settings: Settle | None = None,
    ):
        """`url`: of the server; its query may name the device, `?device=SERIAL`."""
        full = URL(url)
        self.slot = slot or url
        base = str(full.with_query(None))
        self._small = HttpServer(base, session, self.slot, limit=_SMALL)
        self._large = HttpServer(base, session, self.slot)
        self._deadlines = deadlines or Deadlines()
        self._settings = settings or Settle()
        self._memory = phones.of(url)
        self._wanted = full.query.get("device", "")
        self._device = self._wanted
        self._task = ""
        self._frame: Frame | None = None
        #: a reading call that was cut off before its answer came
        self._cut_off = ""

    # --- an environment ---

    async def health(self) -> str:
        time = _Time(self._deadlines.health)
        status, body = await self._small.exchange("health", "GET", "/health", seconds=time.left())
        if status not in (200, 503):
            raise self._fault("health", f"answered {status}: {short(body)}")
        answer = self._small.parsed("health", body)
        devices = answer.get("device_status") if isinstance(answer, dict) else None
        if not isinstance(devices, dict) or not isinstance(answer.get("ok"), bool):
            raise self._fault("health", f"answered {short(body)}, expected 'ok' and 'device_status'")
        if not devices:  # every call of a phone registers it: this process of the server was never asked
            self._memory.restarted()
        self._refuse_unfinished("health")
        device = self._wanted or (next(iter(devices)) if len(devices) == 1 else "")
        if device not in devices:
            await self._init(time)
        elif devices[device] is not True:
            raise self._fault("health", f"answered {status}: {short(body)}: device {device!r} is sick")
        return ""

    async def reset(self, task: Task) -> Observation:
        if task.suite != SUITE or task.params:
            what = f"{task.key} is not a MobileWorld task: those have suite {SUITE!r} and a name as template"
            raise UnknownTask(f"{self.slot}: reset: {what}, no parameters")
        time = _Time(self._deadlines.reset)
        self._refuse_unfinished("reset")
        if self._memory.task:
            await self._tear_down()
        viewport = await self._init(time)
        goal = "" if task.goal else await self.goal(task.template, time.left())
        self._task, self._frame = task.template, None
        await self._task_init(task.template, time)
        frame = (await settle(lambda: self._screenshot(time), self._settings)).frame
        if viewport and sorted(viewport) != sorted((frame.width, frame.height)):
            size, said = f"{frame.width}x{frame.height}", f"{viewport[0]}x{viewport[1]}"
            raise self._fault("reset", f"screen is {size} pixels, /init said {said}: touches would land elsewhere")
        self._frame = frame
        return Observation(frame, goal=goal)

    async def step(self, action: p.Action, index: int) -> StepResult:
        call = f"step {index} ({action.type})"
        before = self._frame
        if before is None:
            raise self._fault(call, "there was no reset")
        parts = device_actions(action, before.width, before.height)
        time = _Time(self._deadlines.step)
        silent = ""
        for sent in parts:
            result = await self._result(call, action, sent, time)
            if isinstance(action, p.FINAL_ACTIONS):  # they don't touch the screen
                return StepResult(Observation(before), done=True)
            if isinstance(action, p.AskUser):
                return StepResult(Observation(before), note=result[:_WORDS])
            if _ADB_FAILED.search(result[:_WORDS]):
                raise self._fault(call, f"adb failed: {result[:_WORDS]}")
            if result == "" and sent["action_type"] in ("open_app", "input_text"):
                silent = f"{sent['action_type']} had no effect, as far as adb says"
        waits = isinstance(action, p.Wait)
        capture = lambda: self._screenshot(time)  # noqa: E731
        settled = await settle(capture, self._settings, before=before, expects_change=not waits)
        self._frame = settled.frame
        return StepResult(Observation(settled.frame), note=silent)

    async def _result(self, call: str, action: p.Action, sent: dict[str, Any], time: _Time) -> str:
        """What the server says to one request of a step."""
        body = {"device": self._device, "action": sent}
        try:
            answer = self._object_of(call, await self._act(call, "POST", "/step", body, time.left()))
        except EnvironmentFault as fault:
            if isinstance(action, p.OpenApp) and _UNKNOWN_APP in str(fault):
                raise p.UnsupportedAction(f"the server knows no app {action.name!r}") from fault
            raise
        if "result" not in answer:
            raise self._fault(call, f"answered {_brief(answer)}, expected 'result'")
        return answer["result"] if isinstance(answer["result"], str) else _brief(answer["result"])

    async def evaluate(self) -> Score:
        time = _Time(self._deadlines.evaluate)
        body = {"task_name": self._task, "req_device": self._device}
        answer = self._object_of("evaluate", await self._act("evaluate", "GET", "/task/eval", body, time.left()))
        value = answer.get("score")
        # True and False are scores: some graders return them.
        if not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN is in no range
            raise self._fault("evaluate", f"answered {_brief(answer)}: 'score' must be a number from 0 to 1")
        return Score(float(value), str(answer.get("reason", ""))[:_WORDS])

    async def close(self) -> None:
        if self._cut_off:
            what = f"{self._cut_off} was cut off before its answer came: it may still be carried out"
            raise self._fault("close", what)
        self._refuse_unfinished("close")
        if self._memory.task:
            await self._tear_down()

    # --- what else a server tells ---

    async def tasks(self, seconds: float) -> list[str]:
        """The names of its tasks. Raises EnvironmentFault when it has none, or more than `MAX_TASKS`."""
        listed = await self._large.json("task/list", "GET", "/task/list", seconds=seconds)
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TASKS:
            count = f"{len(listed)} tasks" if isinstance(listed, list) else _brief(listed)
            raise self._fault("task/list", f"answered {count}, expected a list of 1 to {MAX_TASKS}")
        names = [card.get("name") if isinstance(card, dict) else None for card in listed]
        if wrong := [card for card, name in zip(listed, names, strict=True) if not _is_name(name)]:
            raise self._fault("task/list", f"{_brief(wrong[0])} has no name")
        return [str(name) for name in names]

    async def goal(self, task: str, seconds: float) -> str:
        goal = await self._small.json("task/goal", "GET", "/task/goal", query={"task_name": task}, seconds=seconds)
        if not isinstance(goal, str) or not goal.strip():
            raise self._fault("task/goal", f"answered {_brief(goal)} for {task!r}, expected the goal's words")
        return goal

    # --- calls ---

    async def _init(self, time: _Time) -> tuple[int, int] | None:
        """Asks the phone itself whether it is well. Its size, or None where the server doesn't know it."""
        query = {"device": self._wanted} if self._wanted else None
        answer = await self._object("init", "GET", "/init", time, query=query)
        device, size = answer.get("device"), answer.get("viewport_size")
        if not _is_name(device) or (self._wanted and device != self._wanted):
            wanted = f"device {self._wanted!r}" if self._wanted else "the serial of a device"
            raise self._fault("init", f"answered {_brief(answer)}, expected {wanted}")
        self._device = str(device)
        if size is None or size == [None, None]:
            return None
        sides = size if isinstance(size, list) else []
        if len(sides) != 2 or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
            raise self._fault("init", f"answered {_brief(answer)}: 'viewport_size' must be [width, height] in pixels")
        return sides[0], sides[1]

    async def _task_init(self, name: str, time: _Time) -> None:
        memory = self._memory
        memory.inits += 1
        memory.task = name
        body = {"task_name": name, "req_device": self._device}
        call = f"/task/init of {name!r}"
        try:
            status, answer = await self._act(call, "POST", "/task/init", body, time.left())
        except EnvironmentFault as fault:
            raise EnvironmentFault(f"{fault}{memory.snapshots()}", fault.reason) from fault
        if status != 200:
            memory.task = ""  # there is nothing to tear down, and the server may not even know the name
            raise self._fault("task/init", f"{name!r} answered {status}: {short(answer)}{memory.snapshots()}")
        said = self._small.parsed("task/init", answer)
        if said is not True and not (isinstance(said, str) and said.lower() == "ok"):
            raise self._fault("task/init", f"{name!r} answered {_brief(said)}, expected 'OK'{memory.snapshots()}")

    async def _tear_down(self) -> None:
        # Forgotten first: a server that can't tear it down is asked once.
        name, self._memory.task = self._memory.task, ""
        if not self._device:
            await self._init(_Time(self._deadlines.health))
        body = {"task_name": name, "req_device": self._device}
        seconds = max(self._deadlines.close, _TEAR_DOWN)
        status, answer = await self._act("/task/tear_down", "POST", "/task/tear_down", body, seconds)
        if status != 200:
            raise self._fault("task/tear_down", f"{name!r} answered {status}: {short(answer)}")

    async def _screenshot(self, time: _Time) -> Frame:
        # With one name for all of them the server's disk doesn't fill.
        query = {"device": self._device, "return_b64": "true", "prefix": "tapforge"}
        answer = self._large.exchange("screenshot", "GET", "/screenshot", query=query, seconds=time.left())
        status, body = await self._cuttable("screenshot", answer)
        if status != 200:
            raise self._fault("screenshot", f"answered {status}: {short(body)}")
        try:
            frame = await asyncio.to_thread(_picture, body)  # megabytes
        except ValueError as error:  # binascii.Error is one
            raise self._fault("screenshot", str(error)) from error
        if (known := self._frame) and sorted((known.width, known.height)) != sorted((frame.width, frame.height)):
            now, before = f"{frame.width}x{frame.height}", f"{known.width}x{known.height}"
            raise self._fault("screenshot", f"screen is {now} pixels, before it was {before}")
        return frame

    async def _object(
        self, call: str, method: str, path: str, time: _Time, *, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The object that a reading call answers."""
        exchange = self._small.exchange(call, method, path, query=query, seconds=time.left())
        return self._object_of(call, await self._cuttable(call, exchange))

    def _object_of(self, call: str, answered: tuple[int, bytes]) -> dict[str, Any]:
        """The object of a 200 answer that holds no error."""
        status, body = answered
        if status != 200:
            raise self._fault(call, f"answered {status}: {short(body)}")
        answer = self._small.parsed(call, body)
        if not isinstance(answer, dict) or "detail" in answer or answer.get("error"):
            raise self._fault(call, f"answered {_brief(answer)}")
        return answer

    async def _act(self, call: str, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        """(status, body) of what changes the phone. It goes on when no caller waits for it any more."""
        memory = self._memory
        memory.call = call
        exchange = self._small.exchange(call, method, path, body=body, seconds=_HELD)
        memory.unfinished = asyncio.create_task(exchange, name=f"{self.slot}: {call}")
        done, _ = await asyncio.wait({memory.unfinished}, timeout=seconds)
        if not done:
            what = f"no answer within {seconds:g} s: it may still be carried out"
            raise self._fault(call, what, Reason.DEADLINE)
        finished, memory.unfinished = memory.unfinished, None
        return finished.result()

    async def _cuttable(self, call: str, answer: Coroutine[Any, Any, T]) -> T:
        try:
            return await answer
        except asyncio.CancelledError:
            self._cut_off = call
            raise

    def _refuse_unfinished(self, call: str) -> None:
        """Raises EnvironmentFault while the server may still be carrying out a call that no caller waits for."""
        if (unfinished := self._memory.unfinished) is None:
            return
        given_up = self._memory.call
        if not unfinished.done():
            raise self._fault(call, f"{given_up}, which was given up, still runs there")
        fault = unfinished.exception()
        if isinstance(fault, EnvironmentFault) and fault.reason is Reason.DEADLINE:
            raise self._fault(call, f"{given_up} didn't end within {_HELD:g} s: restart its container")
        self._memory.unfinished = None

    def _fault(self, call: str, what: str, reason: Reason = Reason.ENV_ERROR) -> EnvironmentFault:
        return self._small.fault(call, what, reason)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _picture(body: bytes) -> Frame:
    """The frame of a screenshot's answer. Of megabytes only the one field is read. Raises ValueError."""
    found = _PICTURE.search(body)
    if found is None:
        raise ValueError(f"answered {short(body)}, expected the picture in 'b64_png'")
    return frame_of(base64.b64decode(found[1].replace(b"\\/", b"/"), validate=True))


def _brief(value: Any) -> str:
    return short(repr(value)[: 2 * _WORDS].encode(errors="replace"))
