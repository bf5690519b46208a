"""A page in the browser that shows phones live and takes clicks, drags, keys and typing: a person tries a task by hand.

- The page acts on phones, so it answers its own pages alone: a Host that isn't its own name (a name that was rebound
  to this address), an Origin of another site, or a request that the browser marks as another site's gets 403. It may
  not be framed, and it loads nothing from elsewhere.
- What changes a phone is a POST of JSON. An action is one of `protocol.Action`, in relative coordinates.
- The state is asked for with the key of what was seen last, and answered when it is another one, or after `_WAIT`.
- Phones are shared with the protocols that serve them: what another client does is shown, and the other way round.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Final, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapforge_envs import protocol as p
from tapforge_envs.serving.claims import Refused
from tapforge_envs.serving.http import Handler, words
from tapforge_envs.serving.same_site import LOOPBACK, check_same_site, seal

from . import catalog
from .slot import Slot
from .tasks import SPLITS, Split

#: seconds after which a state that has not changed is answered
_WAIT: Final = 10.0
#: seconds between two looks at a phone
_LOOK: Final = 0.08
#: requests that may wait at a time; more are answered at once
_MAX_WAITING: Final = 64
#: bytes of a request's body
_MAX_REQUEST: Final = 128 * 1024
_MAX_NUMBER: Final = 1_000_000


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActRequest(_Body):
    action: Annotated[p.Action, Field(discriminator="type")]


class TaskRequest(_Body):
    suite: str = Field(max_length=200)
    template: str = Field(max_length=200)
    split: Split = "train"
    number: int = Field(0, ge=0, lt=_MAX_NUMBER, description="the n-th task of this template and split")


class FinishRequest(_Body):
    status: Literal["success", "failure", "infeasible"] | None = None
    answer: str | None = Field(None, max_length=10_000)


_Model = TypeVar("_Model", bound=_Body)


@dataclass
class Shown:
    """A phone on the page."""

    slot: Slot
    #: protocol -> what a client of it is given
    addresses: Mapping[str, str]
    #: actions of the page since the task was started, and what the last one came to
    steps: int = 0
    note: str = ""
    #: the task that they belong to
    task: p.Task | None = None

    def state(self) -> dict[str, Any]:
        """What the page shows. `seen` is its key."""
        slot, phone = self.slot, self.slot.phone
        if slot.task is not self.task:
            self.steps, self.note, self.task = 0, "", slot.task
        shown = {
            "width": phone.width,
            "height": phone.height,
            "app": phone.state["nav"]["app"],
            "frame": phone.observe().frame.sha256,
            "task": _told(slot.task) if slot.task is not None else None,
            "steps": self.steps,
            "note": self.note,
            "ended": phone.state["ended"],
            "verdict": _verdict(slot) if phone.state["ended"] is not None and slot.task is not None else None,
            "addresses": dict(self.addresses),
        }
        seen = hashlib.blake2b(json.dumps(shown, sort_keys=True).encode(), digest_size=12).hexdigest()
        return {**shown, "seen": seen}


def _told(task: p.Task) -> dict[str, Any]:
    """What a person is told about a task; whether it can be done is theirs to find out."""
    return {"suite": task.suite, "template": task.template, "goal": task.goal, "max_steps": task.max_steps}


def _verdict(slot: Slot) -> dict[str, Any]:
    """As an episode of a run would end."""
    phone, task = slot.phone, slot.task
    assert task is not None
    score = phone.evaluate()
    infeasible = phone.state["ended"] == "infeasible"
    reason = p.Reason.DECLARED_INFEASIBLE if infeasible else p.Reason.DONE
    outcome = p.outcome_of(reason, feasible=task.feasible, threshold=task.threshold, score=score.value)
    return {
        "score": score.value,
        "reason": score.reason,
        "side_effects": list(score.side_effects),
        "outcome": outcome,
        "feasible": task.feasible,
    }


class Page:
    """`names`: hosts by which the page may be called, beside this machine's own."""

    def __init__(self, phones: Sequence[Shown], names: Sequence[str], stopping: asyncio.Event):
        self._phones = list(phones)
        self._names = {name.strip("[]").lower() for name in (*LOOPBACK, *names)}
        self._stopping = stopping
        self._waiting = 0
        self._html = (files("tapforge_envs.phone") / "page.html").read_text(encoding="utf-8")

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_REQUEST)
        app.router.add_get("/", self.html)
        app.router.add_get("/api/catalog", self.catalog)
        app.router.add_get("/api/phones/{phone}", self.state)
        app.router.add_get("/api/phones/{phone}/frame", self.frame)
        app.router.add_post("/api/phones/{phone}/act", self.act)
        app.router.add_post("/api/phones/{phone}/task", self.task)
        app.router.add_post("/api/phones/{phone}/finish", self.finish)
        return app

    # --- what is shown ---

    async def html(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
            "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        return web.Response(
            text=self._html.replace("{{nonce}}", nonce),
            content_type="text/html",
            headers={"Content-Security-Policy": policy},
        )

    async def catalog(self, request: web.Request) -> web.Response:
        suites = {
            name: {split: [t.name for t in catalog.suite(name).templates if t.split(split)] for split in SPLITS}
            for name in self._phones[0].slot.suites
        }
        return web.json_response({"suites": suites, "phones": len(self._phones)})

    async def state(self, request: web.Request) -> web.Response:
        shown, seen = self._phone(request), request.query.get("seen", "")
        state = shown.state()
        if state["seen"] == seen and self._waiting < _MAX_WAITING:
            self._waiting += 1
            try:
                end = asyncio.get_running_loop().time() + _WAIT
                while state["seen"] == seen and asyncio.get_running_loop().time() < end and not self._stopping.is_set():
                    await asyncio.sleep(_LOOK)
                    state = shown.state()
            finally:
                self._waiting -= 1
        return web.json_response(state)

    async def frame(self, request: web.Request) -> web.Response:
        frame = self._phone(request).slot.phone.observe().frame
        return web.Response(body=frame.data, content_type=frame.media_type)

    # --- what is done ---

    async def act(self, request: web.Request) -> web.Response:
        shown, body = self._phone(request), await _read(request, ActRequest)
        state = shown.state()
        if state["ended"] is not None:
            raise Refused(409, "the task has ended; start one")
        shown.note = shown.slot.phone.act(body.action)
        shown.steps += 1
        return web.json_response(shown.state())

    async def task(self, request: web.Request) -> web.Response:
        shown, body = self._phone(request), await _read(request, TaskRequest)
        if body.suite not in shown.slot.suites:
            raise Refused(404, catalog.unknown("suite", body.suite, list(shown.slot.suites)))
        try:
            tasks = catalog.tasks(body.suite, body.split, [body.template])
        except catalog.UnknownTask as error:
            raise Refused(404, str(error)) from error
        shown.slot.begin(tasks.sample(0, body.number))
        shown.task = None
        return web.json_response(shown.state())

    async def finish(self, request: web.Request) -> web.Response:
        shown, body = self._phone(request), await _read(request, FinishRequest)
        if shown.slot.task is None or shown.slot.phone.state["ended"] is not None:
            raise Refused(409, "no task is running; start one")
        if body.answer is not None:
            shown.slot.phone.act(p.Answer(text=body.answer))
        elif body.status is not None:
            shown.slot.phone.act(p.Terminate(status=body.status))
        else:
            raise Refused(400, "give a status or an answer")
        return web.json_response(shown.state())

    # --- who may ask ---

    def _phone(self, request: web.Request) -> Shown:
        number = request.match_info["phone"]
        if not (number.isascii() and number.isdecimal() and len(number) < 6 and int(number) < len(self._phones)):
            raise Refused(404, f"no phone {number[:40]!r}; there are 0 to {len(self._phones) - 1}")
        return self._phones[int(number)]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            answer = await handler(request)
        except Refused as error:
            answer = web.json_response({"error": str(error)}, status=error.status)
        except web.HTTPException as error:
            answer = web.json_response(
                {"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status
            )
        answer.headers["Cache-Control"] = "no-store"
        seal(answer)
        return answer

    def _admit(self, request: web.Request) -> None:
        """Raises Refused for what another site's page asks."""
        check_same_site(request, self._names)
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            raise Refused(403, f"a page of {origin[:200]!r} asks; only the phones' own page may")


async def _read(request: web.Request, model: type[_Model]) -> _Model:
    if request.content_type != "application/json":
        raise Refused(
            415, f"{request.path}: the body has to be application/json, and is {request.content_type[:100]!r}"
        )
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise Refused(400, f"{request.path} can't read its body: {words(error)}") from error
