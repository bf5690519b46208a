"""Servers of other people: whether our client can train on one, by the calls that a run makes, and whether it refuses
what it can't do.

Rules that are checked: health (and that the process stays the same one), a reset that shows a whole picture, steps that
show one each of the size that the phone has, a verdict from 0 to 1, a second episode after the first, an end, and, by
raw requests, that a request which can't be served is not answered with 200 (`refusals.py`).

Nothing is checked twice on purpose: of these servers none promises that an answered step may be sent again. Each call
has a deadline. The check plays two short episodes: no other client may use the phone meanwhile.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import TypeVar

import aiohttp
from PIL import Image, UnidentifiedImageError

from ..clients.phones import PhoneAddress, PhoneClients
from ..protocol import (
    Action,
    Back,
    Environment,
    EnvironmentFault,
    Home,
    Observation,
    Tap,
    Task,
    Terminate,
    UnsupportedAction,
    Wait,
)
from ..state_levels import StateLevels
from .refusals import Refusal, as_words, refusals_of
from .violations import Violation, curl, error_of

#: what is done in an episode: harmless on a phone that shows anything
_ACTIONS: tuple[Action, ...] = (Tap(x=0.5, y=0.5), Back(), Home(), Wait(seconds=0.0))
#: bytes of an answer to a raw request
_LIMIT = 1024 * 1024

T = TypeVar("T")


class Requests:
    """The requests of a session as lines for a terminal, the newest last."""

    def __init__(self) -> None:
        self._made: deque[tuple[str, str, dict[str, str], bytearray]] = deque(maxlen=1)
        #: whether any of them was answered, whatever the answer
        self.answered = False

    @property
    def last(self) -> str:
        if not self._made:
            return ""
        method, url, headers, body = self._made[-1]
        return curl(method, url, headers, bytes(body) if body else None)

    def traces(self) -> list[aiohttp.TraceConfig]:
        async def begun(session: object, context: SimpleNamespace, p: aiohttp.TraceRequestStartParams) -> None:
            shown = {k: v for k, v in p.headers.items() if k != "Accept-Encoding"}
            context.body = bytearray()
            self._made.append((p.method, str(p.url), shown, context.body))

        async def sent(session: object, context: SimpleNamespace, p: aiohttp.TraceRequestChunkSentParams) -> None:
            context.body += p.chunk

        async def answered(session: object, context: SimpleNamespace, p: aiohttp.TraceRequestEndParams) -> None:
            self.answered = True

        config = aiohttp.TraceConfig()
        config.on_request_start.append(begun)
        config.on_request_end.append(answered)
        config.on_request_chunk_sent.append(sent)
        return [config]


class ClientCheck:
    def __init__(self, phone: PhoneAddress, task: Task | None):
        """`task`: that is played; without one the first of the server's list, if it has a list."""
        self._phone = phone
        self._task = task
        self._requests = Requests()
        self._clients = PhoneClients(self._requests.traces())
        self.violations: list[Violation] = []
        self.states = StateLevels()
        #: worth knowing, and no violation
        self.notes: list[str] = []
        self._size: tuple[int, int] | None = None

    @property
    def reached(self) -> bool:
        """Whether there is a phone at all: its server answered something, or its health was known without one."""
        return self._requests.answered or not any(found.rule == "health" for found in self.violations)

    def say(self, rule: str, words: str, request: str | None = None) -> None:
        self.violations.append(Violation(rule, words, self._requests.last if request is None else request))

    async def everything(self) -> None:
        try:
            before = await self._called("health", self._clients.health(self._phone))
            if before is None:
                return
            task = await self._some_task()
            if task is not None:
                _ = await self._episode(task) and await self._episode(task)
            await self._refusals()
            after = await self._called("health", self._clients.health(self._phone))
            if after is not None and after != before:
                self.say("instance", f"health names {after!r}, before it was {before!r}: it restarted")
        finally:
            await self._clients.close()

    async def _some_task(self) -> Task | None:
        if self._task is not None:
            return self._task
        try:
            return await self._clients.some_task(self._phone)
        except EnvironmentFault as fault:
            self.notes.append(f"no episode was played: {fault}")
            return None

    async def _episode(self, task: Task) -> bool:
        """Whether it went to its end."""
        environment = self._clients.open(self._phone)
        first = await self._called("reset", environment.reset(task))
        well = first is not None
        if first is not None:
            self._seen("reset", first)
            well = await self._played(environment)
        closed = await self._called("close", _ended(environment))
        return well and closed is not None

    async def _played(self, environment: Environment) -> bool:
        index = 0
        for action in _ACTIONS:
            try:
                result = await environment.step(action, index)
            except UnsupportedAction as error:
                self._noted(f"{action.type}: {error}")
                continue
            except EnvironmentFault as fault:
                self.say("step", str(fault))
                return False
            index += 1
            self._seen(f"step ({action.type})", result.observation)
            if result.done:
                self.say("step", f"the episode is done after {action.type}")
                return True
        try:
            ended = await environment.step(Terminate(status="failure"), index)
        except UnsupportedAction as error:
            self._noted(f"terminate: {error}")
        except EnvironmentFault as fault:
            self.say("end", str(fault))
            return False
        else:
            self._seen("step (terminate)", ended.observation)
            if not ended.done:
                self.say("end", "a terminate action didn't end the episode")
        score = await self._called("evaluate", environment.evaluate())
        return score is not None

    def _noted(self, words: str) -> None:
        note = f"an action that it doesn't have: {words}"
        if note not in self.notes:
            self.notes.append(note)

    def _seen(self, call: str, observation: Observation) -> None:
        self.states.note(observation)
        frame = observation.frame
        try:
            with Image.open(io.BytesIO(frame.data)) as image:
                image.load()
                size = image.size
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            self.say("frame", f"{call}: a frame of {len(frame.data)} bytes is not a whole picture: {error}")
            return
        if size != (frame.width, frame.height):
            self.say("frame", f"{call}: the picture is {size[0]}x{size[1]}, announced was {frame.width}x{frame.height}")
        if self._size is not None and size not in (self._size, self._size[::-1]):
            now, before = f"{size[0]}x{size[1]}", f"{self._size[0]}x{self._size[1]}"
            self.say("viewport", f"{call}: the screen is {now} pixels, before it was {before}")
        elif self._size is None:
            self.notes.append(f"its screen is {size[0]}x{size[1]} pixels")
        self._size = size

    async def _called(self, rule: str, work: Awaitable[T]) -> T | None:
        try:
            return await work
        except EnvironmentFault as fault:
            self.say(rule, str(fault))
            return None

    # --- raw requests ---

    async def _refusals(self) -> None:
        if not (wanted := refusals_of(self._phone.protocol)):
            return
        timeout = aiohttp.ClientTimeout(total=self._phone.deadlines.step)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for refusal in wanted:
                await self._refused(session, refusal)

    async def _refused(self, session: aiohttp.ClientSession, refusal: Refusal) -> None:
        url = self._phone.url.partition("?")[0].rstrip("/") + refusal.path
        headers = {"Content-Type": "application/json"} if refusal.body is not None else {}
        request = curl(refusal.method, url, headers, refusal.body)
        try:
            async with session.request(refusal.method, url, data=refusal.body, headers=headers) as answer:
                status, content = answer.status, await answer.content.read(_LIMIT)
        except TimeoutError:
            self.say("refusal", f"{refusal.what}: no answer within {self._phone.deadlines.step:g} s", request)
            return
        except (aiohttp.ClientError, OSError) as error:
            self.say("refusal", f"{refusal.what}: the connection broke: {error}", request)
            return
        if status not in refusal.wanted:
            words = f"{refusal.what}: answers {status} instead of {as_words(refusal.wanted)}"
            self.say("refusal", f"{words}{error_of(content)}", request)


async def _ended(environment: Environment) -> bool:
    await environment.close()
    return True


async def check_through_client(phone: PhoneAddress, task: Task | None) -> ClientCheck:
    running = ClientCheck(phone, task)
    await running.everything()
    return running
