"""A phone behind tapforge's own HTTP protocol (`wire.py`), seen as an `Environment`.

Promises:
1. Every call ends within its deadline (`Deadlines`, seconds) or raises `EnvironmentFault`.
2. A step that timed out is sent once more with the same index: the server answers a known index again and executes
   nothing twice. After that it is a fault with reason `deadline`. A call whose connection broke is sent once more too
   (each call of the protocol may be repeated); nothing else is ever repeated.
3. Bytes that are not the announced frame (wrong hash, cut-off PNG, another size than announced) never become an
   observation.
4. A phone that was claimed gets the claim with every request; that it is another slot, or has a newer holder,
   is a fault with reason `lease_lost`.
5. A server process that was replaced has lost the episode: another `instance` is a fault, never a silent new start.
6. An answer that says that it is to another call (`Tapforge-Answers`) is a fault: a screen or a verdict of another
   episode or step never enters this one.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from ..protocol import (
    Action,
    EnvironmentFault,
    Observation,
    Reason,
    Score,
    StepResult,
    Task,
    UnknownTask,
    UnsupportedAction,
)
from ..wire import (
    MAX_OBSERVATION,
    NO_FENCE,
    PROTOCOL,
    STALE_FENCE,
    TOKEN_VARIABLE,
    UNSUPPORTED_ACTION,
    WRONG_SLOT,
    Fence,
    answers,
    decode_step,
)
from .http import ConnectionBroke, Deadlines, HttpServer, short
from .pictures import check_frame

_TASKS = TypeAdapter(list[Task])
#: what a bridge says about the phone behind it, in the body of a 5xx
_BEHIND = {reason.value: reason for reason in (Reason.DEADLINE, Reason.LEASE_LOST, Reason.JUDGE_ERROR)}


class TapforgeClient:
    """One phone. Lives as long as a lease; the session belongs to the slot source."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        deadlines: Deadlines | None = None,
        slot: str = "",
        fence: Fence | None = None,
        episode_ids: Callable[[Task], str] = lambda task: uuid.uuid4().hex,
        token: str = "",
    ):
        """`fence`: of the claim by which the phone is used. `token`: of the server, if it has one. `episode_ids` names
        episodes on the wire. Ids must never repeat on a phone; faults on demand are drawn from them, so a benchmark
        that wants the same faults again gives its own."""
        if not url.startswith(("http://", "https://")):
            raise EnvironmentFault(f"{slot or url}: {url} is not a URL: what answers there doesn't speak {PROTOCOL}")
        self.slot = slot or url
        self._server = HttpServer(url, session, self.slot, limit=MAX_OBSERVATION)
        self._deadlines = deadlines or Deadlines()
        self._fence = fence
        self._headers = fence.headers() if fence else {}
        if token and URL(url).user is not None:
            what = f"{self.slot}: its URL has a user and {TOKEN_VARIABLE} is set: a request has room for one of them"
            raise EnvironmentFault(what)
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._episode_ids = episode_ids
        self._episode = ""
        self._instance = ""
        self._size: tuple[int, int] | None = None

    async def health(self) -> str:
        """The instance of the server. Raises EnvironmentFault when the phone says it is sick, or says nothing."""
        body = await self._call("health", None, self._deadlines.health)
        answer = self._json("health", body)
        if answer.get("protocol") != PROTOCOL or answer.get("status") != "ok":
            raise self._fault("health", f"answered {short(body)}, expected status 'ok' and protocol '{PROTOCOL}'")
        there = answer.get("slot")
        if self._fence and there and there != self._fence.slot:
            what = f"slot {there!r} answers at the address of {self._fence.slot!r}"
            raise self._fault("health", what, Reason.LEASE_LOST)
        return str(answer.get("instance", ""))

    async def tasks(self, limit: int = 100) -> list[Task]:
        """Some tasks that the server lists."""
        body = await self._call("tasks", None, self._deadlines.reset, query={"limit": str(limit)})
        answer = self._json("tasks", body)
        try:
            # What a later server says of a task means nothing here, as in its other answers.
            return _TASKS.validate_python(answer.get("tasks"), extra="ignore")
        except ValidationError as error:
            raise self._fault("tasks", f"lists what is not a task: {error.errors(include_url=False)[0]}") from error

    async def reset(self, task: Task) -> Observation:
        self._episode = self._episode_ids(task)
        self._instance = ""
        self._size = None
        request = {"episode": self._episode, "task": task.model_dump()}
        body = await self._call("reset", request, self._deadlines.reset, expected=answers("reset", self._episode))
        return self._observation("reset", body).observation

    async def step(self, action: Action, index: int) -> StepResult:
        request = {"episode": self._episode, "index": index, "action": action.model_dump()}
        name = f"step {index} ({action.type})"
        body = await self._call(
            "step",
            request,
            self._deadlines.step,
            name=name,
            repeat_when_late=True,
            expected=answers("step", self._episode, index),
        )
        return self._observation(name, body)

    async def evaluate(self) -> Score:
        expected = answers("evaluate", self._episode)
        body = await self._call("evaluate", {"episode": self._episode}, self._deadlines.evaluate, expected=expected)
        answer = self._json("evaluate", body)
        value = answer.get("value")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1 or math.isnan(value):
            raise self._fault("evaluate", f"answered {short(body)}: 'value' must be a number from 0 to 1")
        effects = answer.get("side_effects") or []
        if not isinstance(effects, list):
            raise self._fault("evaluate", f"answered {short(body)}: 'side_effects' must be a list")
        return Score(float(value), str(answer.get("reason", "")), tuple(str(e) for e in effects))

    async def close(self) -> None:
        """Ends the episode on the phone. Without an episode there is nothing to end."""
        if self._episode:
            await self._call("close", {"episode": self._episode}, self._deadlines.close)
            self._episode = ""

    def _observation(self, call: str, body: bytes) -> StepResult:
        try:
            result, instance = decode_step(body)
            check_frame(result.observation.frame)
        except EnvironmentFault as fault:
            raise self._fault(call, str(fault), fault.reason) from fault
        if self._instance and instance != self._instance:
            raise self._fault(call, f"server is now instance {instance!r}, was {self._instance!r}: the task is lost")
        self._instance = instance
        frame = result.observation.frame
        # A phone behind a bridge may be turned.
        if self._size and (frame.width, frame.height) not in (self._size, self._size[::-1]):
            now, before = f"{frame.width}x{frame.height}", f"{self._size[0]}x{self._size[1]}"
            raise self._fault(call, f"screen is {now} pixels, at the start of the episode it was {before}")
        self._size = (frame.width, frame.height)
        return result

    async def _call(
        self,
        call: str,
        request: dict[str, Any] | None,
        seconds: float,
        *,
        name: str = "",
        query: Mapping[str, str] | None = None,
        repeat_when_late: bool = False,
        expected: dict[str, str] | None = None,
    ) -> bytes:
        name = name or call
        method = "GET" if request is None else "POST"
        for last_try in (False, True):
            try:
                status, body = await self._server.exchange(
                    name,
                    method,
                    call,
                    query=query,
                    body=request,
                    seconds=seconds,
                    headers=self._headers,
                    expected=expected,
                )
            except ConnectionBroke:
                if last_try:
                    raise
                continue
            except EnvironmentFault as fault:
                if not repeat_when_late or fault.reason is not Reason.DEADLINE:
                    raise
                if last_try:
                    raise self._fault(name, f"no answer twice within {seconds:g} s", Reason.DEADLINE) from fault
                continue
            if status == 200:
                return body
            if status == 409:
                raise await self._fenced(name, body)
            if status == 422 and _reason(body) == UNSUPPORTED_ACTION:
                raise UnsupportedAction(f"{self.slot}: {name}: {short(body)}")
            if status == 404 and call == "reset":
                self._episode = ""
                raise UnknownTask(f"{self.slot}: {name}: answered 404: {short(body)}")
            behind = _BEHIND.get(_reason(body), Reason.ENV_ERROR) if status >= 500 else Reason.ENV_ERROR
            raise self._fault(name, f"answered {status}: {short(body)}", behind)
        raise AssertionError("the last try either returns or raises")

    async def _fenced(self, call: str, body: bytes) -> EnvironmentFault:
        """409: the phone has another holder, or runs another episode. Its instance tells whether it restarted or
        another client took it."""
        if _reason(body) in (STALE_FENCE, WRONG_SLOT, NO_FENCE):
            return self._fault(call, f"refused: {short(body)}", Reason.LEASE_LOST)
        try:
            instance = await self.health()
        except EnvironmentFault as fault:
            return self._fault(call, f"refused ({short(body)}) and sick: {fault}")
        if instance and self._instance and instance != self._instance:
            return self._fault(call, f"server was replaced ({self._instance!r} -> {instance!r}): the task is lost")
        return self._fault(call, f"refused: {short(body)}; another client uses this phone", Reason.LEASE_LOST)

    def _json(self, call: str, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._fault(call, f"answer is not JSON: {short(body)}") from error
        if not isinstance(answer, dict):
            raise self._fault(call, f"answer is not an object: {short(body)}")
        return answer

    def _fault(self, call: str, what: str, reason: Reason = Reason.ENV_ERROR) -> EnvironmentFault:
        return self._server.fault(call, what, reason)


def _reason(body: bytes) -> str:
    """The one word of a refusal; "" where it has none."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    return str(answer.get("reason", "")) if isinstance(answer, dict) else ""
