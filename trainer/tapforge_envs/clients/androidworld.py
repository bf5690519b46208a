"""AndroidWorld's own server (`server/android_server.py`, port 5000), seen as an `Environment`.

    template = AndroidWorld's task type     params.task_idx = which instance of it (0 when missing)
    seed     = of the server's task suite; 0 means 42, with which the server itself starts

Promises:
1. Every call ends within its deadline (a step and a reset are several requests with one deadline together) or raises
   `EnvironmentFault`. Nothing is sent twice: a step that timed out is a fault with reason `deadline`.
2. A reset makes the suite anew from (seed, task_idx): a server that restarts loses its suite, a client may have made
   another one, and an instance that a broken episode left initialized can't be initialized again. The server's goal is
   the goal; a task that names another one is a fault, because what is judged would not be what was asked.
3. What the server can't do is `UnsupportedAction` before anything is sent. It answers 200 to actions that it drops.
4. Screens are JSON numbers (33 MB for 1080 x 2400), read in a thread; what isn't a screen is a fault.

What the server does otherwise than the action says is in the step's note: it presses Enter after typed text; it strokes
across the middle of the screen whatever the points of a swipe. It types ASCII only: other text would lose characters;
and what the phone's shell would change is refused.

The server answers one request at a time, `/health` too: while it works, it looks sick. Its errors are a bare 500.
"""

from __future__ import annotations

import asyncio
import re
from fnmatch import fnmatchcase
from typing import Any

import aiohttp

from .. import protocol as p
from ..protocol import Observation, Score, StepResult, Task, UnknownTask, UnsupportedAction, pixel
from .http import Deadlines, HttpServer, short
from .pixels import frame_of_numbers

#: bytes of a screen: one of 1080 x 2400 white pixels has 33 million
SCREEN_LIMIT = 64 * 1024 * 1024
#: bytes of any other answer
LIMIT = 1024 * 1024
#: of the suite with which the server starts
SERVER_SEED = 42
#: instances of each task that the server makes at its start
SERVER_COMBINATIONS = 2
#: task types in a list; the benchmark has 116
MAX_TASKS = 10_000
#: a vertical swipe that begins this near to its edge pulls down the notifications or goes home
_EDGE = 0.03

#: what the shell reads as a home folder, and as several words
_TILDE = re.compile(r"~|[A-Za-z_]\w*=(?:.*:)?~")
_BRACES = re.compile(r"\{.*(?:,|\.\.).*\}")
#: the folder in which the phone's shell runs is /; what Android may have there
_ROOT = (
    "acct", "apex", "bin", "bugreports", "cache", "charger", "config", "d", "data", "data_mirror", "debug_ramdisk",
    "default.prop", "dev", "etc", "first_stage_ramdisk", "init", "linkerconfig", "lost+found", "metadata", "mnt",
    "odm", "odm_dlkm", "oem", "postinstall", "proc", "product", "root", "sbin", "sdcard", "second_stage_resources",
    "storage", "sys", "system", "system_dlkm", "system_ext", "tmp", "vendor", "vendor_dlkm",
)  # fmt: skip

_KEYS = {"ENTER": "keyboard_enter", "BACK": "navigate_back", "HOME": "navigate_home"}
_STATUS = {"success": "complete", "failure": "infeasible", "infeasible": "infeasible"}


class AndroidWorldClient:
    """One server, which is one emulator. Lives as long as a lease."""

    def __init__(self, url: str, session: aiohttp.ClientSession, deadlines: Deadlines, slot: str):
        self._server = HttpServer(url, session, slot, LIMIT)
        self._screens = HttpServer(url, session, slot, SCREEN_LIMIT)
        self._deadlines = deadlines
        self._task: dict[str, str] | None = None
        self._size: tuple[int, int] | None = None
        #: a call that has no answer yet
        self._under_way = ""

    async def health(self) -> str:
        """Always "": the server says nothing by which its process could be known."""
        answer = await self._server.json("health", "GET", "/health", seconds=self._deadlines.health)
        self._must_succeed("health", answer)
        return ""

    async def reset(self, task: Task) -> Observation:
        index = _task_index(task, self._server)
        self._task, self._size, self._under_way = None, None, "reset"
        ends = _now() + self._deadlines.reset
        combinations = max(SERVER_COMBINATIONS, index + 1)
        suite = {"n_task_combinations": str(combinations), "seed": str(task.seed or SERVER_SEED)}
        await self._ask("reset: suite", "GET", "/suite/reinitialize", ends, suite)
        query = {"task_type": task.template, "task_idx": str(index)}
        goal = await self._goal(task, query, ends)
        self._task = query
        await self._ask("reset: initialize", "POST", "/task/initialize", ends, query)
        await self._ask("reset: home", "POST", "/reset", ends, {"go_home": "true"})
        seen = await self._see("reset: screenshot", ends)
        self._under_way = ""
        return Observation(seen.frame, goal=goal)

    async def step(self, action: p.Action, index: int) -> StepResult:
        call = f"step {index} ({action.type})"
        if self._size is None:
            raise self._server.fault(call, "no task is initialized: reset first")
        request, note = request_of(action, *self._size)
        if request is None:
            assert isinstance(action, p.Wait)
            await asyncio.sleep(action.seconds)
        ends, self._under_way = _now() + self._deadlines.step, call
        if request is not None:
            answer = await self._server.json(call, "POST", "/execute_action", body=request, seconds=_left(ends))
            self._must_succeed(call, answer)
        seen = await self._see(call, ends)
        self._under_way = ""
        return StepResult(seen, done=isinstance(action, p.FINAL_ACTIONS), note=note)

    async def evaluate(self) -> Score:
        if self._task is None:
            raise self._server.fault("evaluate", "no task is initialized: reset first")
        answer = await self._server.json(
            "evaluate", "GET", "/task/score", query=self._task, seconds=self._deadlines.evaluate
        )
        value = answer.get("score") if isinstance(answer, dict) else None
        # Some of the benchmark's judges answer with a truth value.
        if not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN is in no range
            raise self._server.fault("evaluate", f"answered {answer!r:.300}: 'score' must be a number from 0 to 1")
        return Score(float(value))

    async def close(self) -> None:
        """Undoes what the task set up on the phone; that is the work of a reset and has its deadline. After a call that
        was cut off the server has to be left alone until it answers again: that is a fault."""
        if self._under_way:
            raise self._server.fault("close", f"{self._under_way} was cut off: it may still be carried out")
        if self._task is None:
            return
        task, self._task = self._task, None
        await self._ask("close", "POST", "/task/tear_down", _now() + self._deadlines.reset, task)

    async def tasks(self, seconds: float) -> list[str]:
        """The task types of the server."""
        answer = await self._server.json("tasks", "GET", "/suite/task_list", query={"max_index": "-1"}, seconds=seconds)
        names = answer.get("task_list") if isinstance(answer, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._server.fault("tasks", f"answered {answer!r:.300}: 'task_list' must be a list of names")
        if len(names) > MAX_TASKS:
            raise self._server.fault(
                "tasks", f"lists {len(names)} tasks; more than {MAX_TASKS} is not an AndroidWorld suite"
            )
        return names

    async def _goal(self, task: Task, query: dict[str, str], ends: float) -> str:
        call = f"goal of {query['task_type']} {query['task_idx']}"
        status, body = await self._server.exchange(call, "GET", "/task/goal", query=query, seconds=_left(ends))
        if status == 500 and task.template not in await self.tasks(_left(ends)):
            raise UnknownTask(f"{self._server.slot}: {call}: the server's suite has no task {task.template!r:.100}")
        if status != 200:
            raise self._server.fault(call, f"answered {status}: {short(body)}")
        answer = self._server.parsed(call, body)
        goal = answer.get("goal") if isinstance(answer, dict) else None
        if not isinstance(goal, str) or not goal.strip():
            raise self._server.fault(call, f"answered {answer!r:.300}: 'goal' must be text")
        if task.goal and task.goal != goal:
            raise self._server.fault(
                call,
                f"the server's goal is {goal!r:.200}, the task's is {task.goal!r:.200}: they are different tasks; "
                "leave the goal out of the task file, or write it with this seed",
            )
        return goal

    async def _ask(self, call: str, method: str, path: str, ends: float, query: dict[str, str]) -> None:
        self._must_succeed(call, await self._server.json(call, method, path, query=query, seconds=_left(ends)))

    def _must_succeed(self, call: str, answer: Any) -> None:
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise self._server.fault(call, f"answered {answer!r:.300}, expected status 'success'")

    async def _see(self, call: str, ends: float) -> Observation:
        # The server's own settling: up to 6 s until the UI elements stop changing. Frames are far too large to poll.
        body = bytearray()
        status, _ = await self._screens.exchange(
            call, "GET", "/screenshot", query={"wait_to_stabilize": "true"}, seconds=_left(ends), into=body
        )
        if status != 200:
            raise self._server.fault(call, f"screenshot answered {status}: {short(bytes(body[:400]))}")
        try:
            frame = await asyncio.to_thread(frame_of_numbers, body)
        except ValueError as error:
            raise self._server.fault(call, f"screenshot is not a screen: {error}") from error
        # A phone that is turned has another size: the next action is measured on what the agent sees.
        self._size = (frame.width, frame.height)
        return Observation(frame)


def request_of(action: p.Action, width: int, height: int) -> tuple[dict[str, Any] | None, str]:
    """What `/execute_action` is sent (None: nothing, the client waits itself), and a note on what the server does
    otherwise than the action says. Raises UnsupportedAction."""

    def at(kind: str, x: float, y: float) -> dict[str, Any]:
        return {"action_type": kind, "x": pixel(x, width), "y": pixel(y, height)}

    match action:
        case p.Tap():
            return at("click", action.x, action.y), ""
        case p.DoubleTap():
            return at("double_tap", action.x, action.y), ""
        case p.LongPress():
            note = "" if action.seconds == 1 else "the server holds for 1 s"
            return at("long_press", action.x, action.y), note
        case p.Swipe():
            return _stroke(action)
        case p.Scroll():
            note = "" if (action.x, action.y) == (0.5, 0.5) else "the server scrolls in the middle of the screen"
            return {"action_type": "scroll", "direction": action.direction}, note
        case p.Type():
            return _typed(action.text)
        case p.Key() if action.name.upper() in _KEYS:
            return {"action_type": _KEYS[action.name.upper()]}, ""
        case p.Enter():
            return {"action_type": "keyboard_enter"}, ""
        case p.Home():
            return {"action_type": "navigate_home"}, ""
        case p.Back():
            return {"action_type": "navigate_back"}, ""
        case p.OpenApp() if action.name.strip():
            return {"action_type": "open_app", "app_name": action.name.strip()}, ""
        case p.Wait():
            return None, ""
        case p.Answer():
            return {"action_type": "answer", "text": action.text}, ""
        case p.Terminate():
            return {"action_type": "status", "goal_status": _STATUS[action.status]}, ""
        case p.Key():
            raise UnsupportedAction(f"AndroidWorld's server has no key {action.name!r}; it has {', '.join(_KEYS)}")
    raise UnsupportedAction(f"AndroidWorld's server has no {action.type}")


def _stroke(action: p.Swipe) -> tuple[dict[str, Any], str]:
    """The server takes a direction only. Its `scroll` strokes from the middle, its `swipe` from edge to edge; both
    name vertical strokes by where the finger goes (swipe) or by what comes into view (scroll)."""
    across, down = action.x2 - action.x, action.y2 - action.y
    if abs(across) == abs(down):
        raise UnsupportedAction(f"AndroidWorld's server swipes up, down, left or right: ({across:g}, {down:g}) is none")
    note = "the server swipes across the middle of the screen, whatever the points"
    if abs(across) > abs(down):
        return {"action_type": "scroll", "direction": "right" if across < 0 else "left"}, note
    if down > 0 and action.y <= _EDGE:
        return {"action_type": "swipe", "direction": "down"}, note
    if down < 0 and action.y >= 1 - _EDGE:
        return {"action_type": "swipe", "direction": "up"}, note
    return {"action_type": "scroll", "direction": "down" if down < 0 else "up"}, note


def _typed(text: str) -> tuple[dict[str, Any], str]:
    """The server presses Enter for each line end and once more at the end: a last line end is left to it."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text == "\n":
        return {"action_type": "keyboard_enter"}, ""
    note = "" if text.endswith("\n") else "the server presses Enter after text"
    return {"action_type": "input_text", "text": _typable(text.removesuffix("\n"))}, note


def _typable(text: str) -> str:
    if not text:
        raise UnsupportedAction("AndroidWorld's server drops an empty text")
    if changed := next((word for word in text.split() if _changed_by_the_shell(word)), None):
        raise UnsupportedAction(f"AndroidWorld's server hands {changed!r:.60} to the phone's shell, which changes it")
    lost = list(dict.fromkeys(c for c in text if not (" " <= c <= "~" or c == "\n")))
    if "%s" in text:
        raise UnsupportedAction("AndroidWorld's server types '%s' as a space")
    if lost:
        raise UnsupportedAction(f"AndroidWorld's server types ASCII only; it would drop {''.join(lost[:10])!r}")
    return text


def _changed_by_the_shell(word: str) -> bool:
    """Whether the phone's shell makes another word of it: the server quotes no `~ * ? [ ] { }`. A pattern that no name
    in the phone's root folder fits stays as it is ("what?", "5*3")."""
    if _TILDE.match(word) or _BRACES.search(word):
        return True
    if not any(c in word for c in "*?["):
        return False
    return "/" in word or any(fnmatchcase(name, word) for name in _ROOT)


def _task_index(task: Task, server: HttpServer) -> int:
    text = task.params.get("task_idx", "0")
    others = sorted(set(task.params) - {"task_idx"})
    if others or not (text.isascii() and text.isdecimal() and len(text) <= 4):
        what = "an AndroidWorld task has the parameter task_idx, 0 to 9999, only"
        raise UnknownTask(f"{server.slot}: reset: {task.key}: {what}")
    return int(text)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(ends: float) -> float:
    """Seconds; a request that would have none is still made, and times out at once."""
    return max(0.001, ends - _now())
