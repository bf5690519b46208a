"""Conformance of any server of tapforge's environment protocol (`wire.py`).

Rules that are checked: health, task list, what an observation is (hash, size, decodable picture), equal resets and
equal steps give equal bytes, a re-sent step is answered from the store and not executed again, steps from the future
and other episodes' calls are refused (409), malformed requests (400), unknown names (404), coordinates 0 and 1, a
verdict before the end, the end of an episode, close, claims (a fence older than the newest, another slot's claim), and
that the process stays the same one all the while. Beside the rules it reports what tells states apart.

Every call has a deadline. The check holds the slot while it runs and leaves it closed; a phone that was claimed before
is spoken to by the claim that it names, so its holder has to be out of the way. The check's own fences are smaller than
those of any claim. A server that doesn't answer at all ends the check with the violations seen so far.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
from PIL import Image, UnidentifiedImageError

from ..protocol import EnvironmentFault, StepResult, Task
from ..state_levels import StateLevels
from ..wire import (
    FENCE_HEADER,
    MAX_OBSERVATION,
    PROTOCOL,
    STALE_FENCE,
    TOKEN_VARIABLE,
    WRONG_SLOT,
    Fence,
    decode_step,
)
from .violations import Violation, curl, error_of, object_of

#: smaller than that of any claim, with room for an older one
_FENCE = 2
#: taps that a run consists of: far apart, so that on most screens some of them change something
_TAPS = ((0.0, 0.0), (0.5, 0.3), (0.17, 0.5), (0.83, 0.7), (0.5, 0.9), (1.0, 1.0), (0.5, 0.5), (0.17, 0.3))


class _Unreachable(Exception):
    """The server doesn't answer any more; nothing further can be checked. The violation is written already."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An observation as it came."""

    result: StepResult
    instance: str
    body: bytes
    #: what it answers
    request: str


class TapforgeCheck:
    def __init__(self, session: aiohttp.ClientSession, url: str, deadline: float, task: Task | None):
        self.session = session
        self.task = task
        self.url = url.rstrip("/")
        self.deadline = deadline
        self.violations: list[Violation] = []
        #: the last one that was made
        self.request = ""
        self.instance: str | None = None
        self.health_said_ok = False
        #: protocol of the server that it stands before, if it is a bridge
        self.behind = ""
        self.states = StateLevels()
        #: the slot that the phone says it is, and by which claim it is spoken to
        self.uid = ""
        self.claim: dict[str, str] = {}
        token = os.environ.get(TOKEN_VARIABLE, "")
        self.token = {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def before_another_protocol(self) -> bool:
        """Phones behind it promise neither equal screens nor to know their tasks by name."""
        return self.behind not in ("", "tapforge")

    def notes(self) -> list[str]:
        """Worth knowing, and no violations."""
        found = [str(self.states)]
        if self.before_another_protocol:
            found.append(f"a bridge before protocol {self.behind}: equal resets and unknown tasks are not checked")
            if not self.states.seen and not self.violations:
                found.append("no episode was played: it lists no tasks, name one (--task)")
        return found

    def say(self, rule: str, words: str, request: str = "") -> None:
        """`request`: what showed it; without it the last one."""
        self.violations.append(Violation(rule, words, request or self.request))

    def found(self) -> list[Violation]:
        return list(dict.fromkeys(self.violations))

    # --- one call ---

    async def call(
        self, rule: str, method: str, path: str, body: Any = None, claim: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        name = f"{method} {path}"
        headers = self.token | (self.claim if claim is None else claim)
        self.request = curl(method, self.url + path, headers, data)
        try:
            async with self.session.request(method, self.url + path, data=data, headers=headers) as answer:
                content = await answer.content.read(MAX_OBSERVATION + 1)
                while not answer.content.at_eof() and len(content) <= MAX_OBSERVATION:
                    content += await answer.content.read(MAX_OBSERVATION)
                if len(content) > MAX_OBSERVATION:
                    self.say(rule, f"{name} answers with more than {MAX_OBSERVATION} bytes")
                    raise _Unreachable
                return answer.status, content
        except TimeoutError as error:
            self.say(rule, f"{name} has no answer within {self.deadline:g} s{self._lie()}")
            raise _Unreachable from error
        except (aiohttp.ClientError, OSError) as error:
            self.say(rule, f"{name} failed, the server is gone or breaks the connection: {error}{self._lie()}")
            raise _Unreachable from error

    def _lie(self) -> str:
        return "; yet /health says ok" if self.health_said_ok else ""

    async def observation(self, rule: str, path: str, body: dict[str, Any]) -> _Seen | None:
        """A call that must answer with an observation."""
        status, content = await self.call(rule, "POST", path, body)
        if status != 200:
            self.say(rule, f"POST {path} answers {status} instead of 200{error_of(content)}{self._lie()}")
            return None
        try:
            result, instance = decode_step(content)
        except EnvironmentFault as error:
            self.say("frame", f"POST {path}: {error}")
            return None
        self.states.note(result.observation)
        seen = _Seen(result, instance, content, self.request)
        frame = result.observation.frame
        try:
            with Image.open(io.BytesIO(frame.data)) as image:
                image.load()
                if image.size != (frame.width, frame.height):
                    self.say(
                        "frame",
                        f"POST {path}: the picture is {image.width}x{image.height} pixels, announced was "
                        f"{frame.width}x{frame.height}",
                    )
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            self.say("frame", f"POST {path}: a frame of {len(frame.data)} bytes is not a whole picture: {error}")
        if self.instance is not None and instance != self.instance:
            self.say(
                "instance",
                f"POST {path} comes from instance {instance!r}, {self.instance!r} was running: the task is lost",
            )
            self.instance = instance
        return seen

    async def refused(
        self,
        rule: str,
        path: str,
        body: Any,
        want: int,
        what: str,
        claim: dict[str, str] | None = None,
        reason: str = "",
    ) -> None:
        """A call that must be refused with status `want` and words, and with `reason` where one is given."""
        status, content = await self.call(rule, "POST", path, body, claim)
        if status != want:
            self.say(rule, f"{what}: POST {path} answers {status} instead of {want}{error_of(content)}")
        elif not error_of(content):
            self.say(rule, f"{what}: POST {path} answers {want} without {{'error': words}}")
        elif reason and (object_of(content) or {}).get("reason") != reason:
            self.say(rule, f"{what}: POST {path} answers {want} without {{'reason': {reason!r}}}{error_of(content)}")

    # --- the rules ---

    async def health(self, again: bool = False) -> None:
        status, content = await self.call("health", "GET", "/health")
        fields = object_of(content)
        if status != 200:
            self.say("health", f"GET /health answers {status} instead of 200{error_of(content)}")
            return
        if fields is None:
            self.say("health", f"GET /health answers {content[:80]!r}, which is not a JSON object")
            return
        if fields.get("status") != "ok":
            self.say("health", f"status is {fields.get('status')!r} instead of 'ok', with HTTP status 200")
        if fields.get("protocol") != PROTOCOL:
            self.say("health", f"protocol is {fields.get('protocol')!r}, this client speaks {PROTOCOL!r}")
        instance = fields.get("instance")
        if not isinstance(instance, str) or not instance:
            self.say("health", f"instance is {instance!r}; it names the process and must not be empty")
        elif again and self.instance is not None and instance != self.instance:
            self.say("instance", f"/health names instance {instance!r}, before it was {self.instance!r}: it restarted")
        elif not again:
            self.instance = instance
            behind = fields.get("behind")
            self.behind = str(behind.get("protocol", "")) if isinstance(behind, dict) else ""
            self._introduce(fields.get("slot"), fields.get("fence"))
        self.health_said_ok = True

    def _introduce(self, slot: Any, fence: Any) -> None:
        if slot is not None and (not isinstance(slot, str) or not slot):
            self.say("health", f"slot is {slot!r}; it names the slot that the phone is, or is null")
        elif slot:
            self.uid = slot
            if isinstance(fence, int):
                self.claim = Fence(slot, fence).headers()

    async def tasks(self) -> Task | None:
        status, content = await self.call("tasks", "GET", "/tasks?limit=2")
        fields = object_of(content)
        listed = fields.get("tasks") if fields else None
        if status != 200 or not isinstance(listed, list):
            self.say("tasks", f"GET /tasks answers {status} without a list 'tasks'{error_of(content)}")
            return None
        if not 1 <= len(listed) <= 2 and not (self.before_another_protocol and not listed):
            self.say("tasks", f"GET /tasks?limit=2 lists {len(listed)} tasks")
        status, content = await self.call("tasks", "GET", "/tasks?suite=no-such-suite")
        if status != 404:
            self.say("unknown name", f"GET /tasks?suite=no-such-suite answers {status} instead of 404")
        found = self.task
        for item in listed:
            try:
                found = found or Task.model_validate(item)
            except ValueError as error:
                self.say("tasks", f"{item!r} is not a task: {error}")
        return found

    async def walk(self, rule: str, task: Task, resend: bool) -> list[_Seen]:
        """An episode of taps; every answer. With `resend`, every step is sent twice, the second time with another
        action: the index decides, not the content."""
        episode = _episode()
        seen = await self.observation(rule, "/reset", {"episode": episode, "task": task.model_dump()})
        if seen is None:
            return []
        answers = [seen]
        for index, (x, y) in enumerate(_TAPS):
            step = {"episode": episode, "index": index, "action": {"type": "tap", "x": x, "y": y}}
            seen = await self.observation("step", "/step", step)
            if seen is None:
                return answers
            answers.append(seen)
            if seen.result.done:
                self.say("step", f"the episode is done after a tap at ({x}, {y})")
            if resend:
                other = {**step, "action": {"type": "back"}}
                again = await self.observation("idempotent step", "/step", other if index % 2 else step)
                if again is not None and again.body != seen.body:
                    self.say("idempotent step", f"step {index} was sent twice and answered with different bytes")
        return answers

    async def determinism(self, task: Task) -> None:
        plain = await self.walk("reset", task, resend=False)
        doubled = await self.walk("reset", task, resend=True)
        if not plain or not doubled or self.before_another_protocol:
            return
        if plain[0].body != doubled[0].body:
            what = f"two resets with task {task.key!r} gave different bytes"
            self.say("determinism", what, doubled[0].request)
        else:
            for index, (one, two) in enumerate(zip(plain[1:], doubled[1:], strict=False)):
                if one.body != two.body:
                    self.say(
                        "idempotent step",
                        f"after the same actions step {index} looks different when every step is sent twice: "
                        "re-sent steps are executed again, or the phone isn't deterministic",
                        two.request,
                    )
                    return

    async def episodes(self, task: Task) -> None:
        """Fences, refusals, verdict, end and close of one episode."""
        old, episode = _episode(), _episode()
        for name in (old, episode):
            if await self.observation("reset", "/reset", {"episode": name, "task": task.model_dump()}) is None:
                return
        tap = {"type": "tap", "x": 0.5, "y": 0.5}
        step = {"episode": episode, "index": 0, "action": tap}
        await self.refused("fence", "/step", {**step, "episode": old}, 409, "a step of the episode before")
        await self.refused("fence", "/evaluate", {"episode": old}, 409, "a verdict for the episode before")
        await self.refused("fence", "/close", {"episode": old}, 409, "closing the episode before")
        await self.refused("future step", "/step", {**step, "index": 1}, 409, "step 1 before step 0")
        for what, path, body in _malformed(episode, task):
            await self.refused("malformed request", path, body, 400, what)
        wanted = task.model_dump()
        for field in () if self.before_another_protocol else ("suite", "template"):
            unknown = {"episode": _episode(), "task": {**wanted, field: "no-such-name"}}
            await self.refused("unknown name", "/reset", unknown, 404, f"{field} 'no-such-name'")
        # a refused reset may have ended the episode; nothing is promised about that
        episode = _episode()
        if await self.observation("reset", "/reset", {"episode": episode, "task": wanted}) is None:
            return
        await self.observation("step", "/step", {"episode": episode, "index": 0, "action": tap})
        await self.verdict(episode, "before the end")
        end = {"episode": episode, "index": 1, "action": {"type": "terminate", "status": "failure"}}
        seen = await self.observation("step", "/step", end)
        if seen is not None and not seen.result.done:
            self.say("end", "a terminate action didn't end the episode: done is false")
        await self.verdict(episode, "after the end")
        status, content = await self.call("close", "POST", "/close", {"episode": episode})
        if status != 200:
            self.say("close", f"POST /close answers {status} instead of 200{error_of(content)}")
        late = {"episode": episode, "index": 2, "action": tap}
        await self.refused("close", "/step", late, 409, "a step after close")

    async def claims(self, task: Task) -> None:
        """Requests with the newest claim of the phone are served, requests with an older one are refused."""
        slot = self.uid or _episode()
        newest = max(int(self.claim.get(FENCE_HEADER, 0)), _FENCE)
        self.claim = Fence(slot, newest).headers()
        episode = _episode()
        if await self.observation("claim", "/reset", {"episode": episode, "task": task.model_dump()}) is None:
            return
        step = {"episode": episode, "index": 0, "action": {"type": "tap", "x": 0.5, "y": 0.5}}
        older = Fence(slot, newest - 1).headers()
        for path, body in (
            ("/step", step),
            ("/evaluate", {"episode": episode}),
            ("/close", {"episode": episode}),
            ("/reset", {"episode": _episode(), "task": task.model_dump()}),
        ):
            await self.refused("claim", path, body, 409, "by an older claim", older, STALE_FENCE)
        if self.uid:
            other = Fence(_episode(), newest + 1).headers()
            await self.refused("claim", "/step", step, 409, "by another slot's claim", other, WRONG_SLOT)
        await self.refused("claim", "/step", step, 400, "with a fence of 'x'", {**self.claim, FENCE_HEADER: "x"})
        status, content = await self.call("claim", "GET", "/health", claim=older)
        if status != 200:
            self.say("claim", f"GET /health by an older claim answers {status} instead of 200{error_of(content)}")
        # none of these calls has changed anything: the episode goes on
        await self.observation("claim", "/step", step)
        await self.call("close", "POST", "/close", {"episode": episode})

    async def verdict(self, episode: str, when: str) -> None:
        status, content = await self.call("evaluate", "POST", "/evaluate", {"episode": episode})
        fields = object_of(content)
        if status != 200 or fields is None:
            words = f"POST /evaluate {when} answers {status} instead of 200 with JSON"
            self.say("evaluate", f"{words}{error_of(content)}{self._lie()}")
            return
        value, reason, effects = (fields.get("value"), fields.get("reason"), fields.get("side_effects"))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.say("evaluate", f"value {when} is {value!r}, must be a number from 0 to 1")
        if not isinstance(reason, str):
            self.say("evaluate", f"reason {when} is {reason!r}, must be a string")
        if not isinstance(effects, list) or not all(isinstance(effect, str) for effect in effects):
            self.say("evaluate", f"side_effects {when} is {effects!r}, must be a list of strings")

    async def everything(self) -> None:
        await self.health()
        task = await self.tasks()
        if task is None:
            return
        await self.determinism(task)
        await self.episodes(task)
        await self.claims(task)
        await self.health(again=True)


def _malformed(episode: str, task: Task) -> Iterator[tuple[str, str, Any]]:
    step = {"episode": episode, "index": 0, "action": {"type": "home"}}
    yield "a body that is not JSON", "/step", b"{"
    yield "a body that is not an object", "/step", []
    yield "a reset without a task", "/reset", {"episode": episode}
    yield "a reset without an episode", "/reset", {"task": task.model_dump()}
    yield "an unknown action", "/step", {**step, "action": {"type": "no-such-action"}}
    yield ("a coordinate of 1.5", "/step", {**step, "action": {"type": "tap", "x": 1.5, "y": 0.5}})
    yield ("a coordinate of -0.1", "/step", {**step, "action": {"type": "tap", "x": 0.5, "y": -0.1}})
    yield ("an action without its coordinates", "/step", {**step, "action": {"type": "tap"}})
    yield "an index of -1", "/step", {**step, "index": -1}
    yield "a verdict without an episode", "/evaluate", {}


def _episode() -> str:
    return f"check-{uuid4().hex[:12]}"


async def check_tapforge(
    session: aiohttp.ClientSession, url: str, deadline: float, task: Task | None = None
) -> TapforgeCheck:
    """`deadline`: seconds per call, which the session keeps. `task`: that is played instead of the first one listed."""
    running = TapforgeCheck(session, url, deadline, task)
    with contextlib.suppress(_Unreachable):  # written as a violation where it happened
        await running.everything()
    return running
