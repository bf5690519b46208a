"""A phone behind tapforge's own HTTP protocol (`wire.py`), seen as an `Environment`.

Promises:
1. Every call ends within its deadline (`Deadlines`, seconds) or raises `EnvironmentFault`.
2. A step that timed out is sent once more with the same index: the server answers a known index again and executes
   nothing twice. After that it is a fault with reason `deadline`. A call whose connection broke is sent once more too
   (each call of the protocol may be repeated); nothing else is ever repeated.
3. Bytes that are not the announced frame (wrong hash, cut-off PNG, another size than announced) never become an
   observation.
4. A phone that was claimed is told by which claim, with every request; that it is another slot, or has a newer holder,
   is a fault with reason `lease_lost`.
5. A server process that was replaced has lost the episode: another `instance` is a fault, never a silent new start.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from ..protocol import Action, EnvironmentFault, Frame, Observation, Reason, Score, StepResult, Task
from ..wire import MAX_OBSERVATION, NO_FENCE, PROTOCOL, STALE_FENCE, WRONG_SLOT, Fence, decode_step

_JSON = {"Content-Type": "application/json"}
_PNG_HEAD = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_TAIL = b"\x00\x00\x00\x00IEND\xaeB`\x82"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that one call may take. Health is short: it only asks whether somebody is there."""

    health: float = 5.0
    reset: float = 60.0
    step: float = 30.0
    evaluate: float = 30.0
    close: float = 5.0


def new_session() -> aiohttp.ClientSession:
    """One session per slot source: connections are reused, and the number of phones is the only limit."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    # Deadlines are set per call below; the session's own would only hide which call ran out of time.
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


def check_frame(frame: Frame) -> None:
    """Raises EnvironmentFault when a PNG is incomplete or of another size than announced. Other media types are
    checked where they are decoded."""
    if frame.media_type != "image/png":
        return
    data = frame.data
    if not data.startswith(_PNG_HEAD) or len(data) < 24:
        raise EnvironmentFault(f"frame of {len(data)} bytes is announced as image/png but does not begin like one")
    width, height = struct.unpack(">II", data[16:24])
    if (width, height) != (frame.width, frame.height):
        raise EnvironmentFault(
            f"frame is {width}x{height} pixels, announced was {frame.width}x{frame.height}: taps would land elsewhere"
        )
    if not data.endswith(_PNG_TAIL):
        raise EnvironmentFault(f"frame of {len(data)} bytes has no end (IEND): half a PNG")


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
    ):
        """`fence`: of the claim by which the phone is used. `episode_ids` names episodes on the wire. Ids must never
        repeat on a phone; faults on demand are drawn from them, so a benchmark that wants the same faults again gives
        its own."""
        if not url.startswith(("http://", "https://")):
            raise EnvironmentFault(f"{slot or url}: {url} is no URL: what answers there doesn't speak {PROTOCOL}")
        base = URL(url)
        path = base.path.rstrip("/")
        self._urls = {c: base.with_path(f"{path}/{c}") for c in ("health", "reset", "step", "evaluate", "close")}
        self._session = session
        self._deadlines = deadlines or Deadlines()
        self._fence = fence
        self._claim = fence.headers() if fence else {}
        self.slot = slot or url
        self._episode_ids = episode_ids
        self._episode = ""
        self._instance = ""
        self._size: tuple[int, int] | None = None

    async def health(self) -> str:
        """The instance of the server. Raises EnvironmentFault when the phone says it is sick, or says nothing."""
        body = await self._call("health", None, self._deadlines.health)
        answer = self._json("health", body)
        if answer.get("protocol") != PROTOCOL or answer.get("status") != "ok":
            raise self._fault("health", f"answered {_short(body)}, expected status 'ok' and protocol '{PROTOCOL}'")
        there = answer.get("slot")
        if self._fence and there and there != self._fence.slot:
            what = f"slot {there!r} answers at the address of {self._fence.slot!r}"
            raise self._fault("health", what, Reason.LEASE_LOST)
        return str(answer.get("instance", ""))

    async def reset(self, task: Task) -> Observation:
        self._episode = self._episode_ids(task)
        self._instance = ""
        self._size = None
        request = {"episode": self._episode, "task": task.model_dump()}
        body = await self._call("reset", request, self._deadlines.reset)
        return self._observation("reset", body).observation

    async def step(self, action: Action, index: int) -> StepResult:
        request = {"episode": self._episode, "index": index, "action": action.model_dump()}
        name = f"step {index} ({action.type})"
        body = await self._call("step", request, self._deadlines.step, name=name, repeat_when_late=True)
        return self._observation(name, body)

    async def evaluate(self) -> Score:
        body = await self._call("evaluate", {"episode": self._episode}, self._deadlines.evaluate)
        answer = self._json("evaluate", body)
        value = answer.get("value")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1 or math.isnan(value):
            raise self._fault("evaluate", f"answered {_short(body)}: 'value' must be a number from 0 to 1")
        effects = answer.get("side_effects") or ()
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
        if self._size and self._size != (frame.width, frame.height):
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
        repeat_when_late: bool = False,
    ) -> bytes:
        name = name or call
        data = None if request is None else json.dumps(request).encode()
        for last_try in (False, True):
            try:
                async with asyncio.timeout(seconds):
                    status, body = await self._exchange(call, data)
            except TimeoutError as error:
                if repeat_when_late and not last_try:
                    continue
                twice = "twice within" if repeat_when_late else "within"
                raise self._fault(name, f"no answer {twice} {seconds:g} s", Reason.DEADLINE) from error
            except aiohttp.ClientConnectorError as error:
                raise self._fault(name, f"nobody answers: {error}") from error
            except (aiohttp.ClientError, OSError) as error:
                if not last_try:
                    continue
                raise self._fault(name, f"connection broke: {type(error).__name__}: {error}") from error
            if status == 200:
                return body
            if status == 409:
                raise await self._fenced(name, body)
            raise self._fault(name, f"answered {status}: {_short(body)}")
        raise AssertionError("the last try either returns or raises")

    async def _exchange(self, call: str, data: bytes | None) -> tuple[int, bytes]:
        url = self._urls[call]
        if data is None:
            context = self._session.get(url, headers=self._claim)
        else:
            context = self._session.post(url, data=data, headers={**_JSON, **self._claim})
        async with context as response:
            length = response.content_length
            if length is not None and length <= MAX_OBSERVATION:
                return response.status, await response.read()
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_OBSERVATION:
                    raise self._fault(call, f"answer is longer than {MAX_OBSERVATION} bytes")
            return response.status, bytes(body)

    async def _fenced(self, call: str, body: bytes) -> EnvironmentFault:
        """409: the phone is somebody else's, or runs another episode. Its instance tells whether it restarted or
        somebody else took it."""
        if _reason(body) in (STALE_FENCE, WRONG_SLOT, NO_FENCE):
            return self._fault(call, f"refused: {_short(body)}", Reason.LEASE_LOST)
        try:
            instance = await self.health()
        except EnvironmentFault as fault:
            return self._fault(call, f"refused ({_short(body)}) and sick: {fault}")
        if instance and self._instance and instance != self._instance:
            return self._fault(call, f"server was replaced ({self._instance!r} -> {instance!r}): the task is lost")
        return self._fault(call, f"refused: {_short(body)}; somebody else uses this phone", Reason.LEASE_LOST)

    def _json(self, call: str, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._fault(call, f"answer is not JSON: {_short(body)}") from error
        if not isinstance(answer, dict):
            raise self._fault(call, f"answer is not an object: {_short(body)}")
        return answer

    def _fault(self, call: str, what: str, reason: Reason = Reason.ENV_ERROR) -> EnvironmentFault:
        return EnvironmentFault(f"{self.slot}: {call}: {what}", reason)


def _reason(body: bytes) -> str:
    """The one word of a refusal; "" where it has none."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    return str(answer.get("reason", "")) if isinstance(answer, dict) else ""


def _short(body: bytes) -> str:
    text = body[:300].decode("utf-8", "replace")
    return text if len(body) <= 300 else text + "..."
