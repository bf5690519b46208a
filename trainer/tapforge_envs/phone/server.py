"""The phone server: K independent phones behind tapforge's own protocol (`tapforge_envs/wire.py`).

    python -m tapforge_envs.phone.server --host 127.0.0.1 --port 0 --slots 4 --width 96 --height 160
    python -m tapforge_envs.phone.server --protocol mobileworld --slots 4 --devices emulator-5554

- With --protocol mobileworld each slot is a MobileWorld server (`mobileworld/server.py`), with a phone per device.
- Slot i answers under /slot/i; / is slot 0. One line of JSON, {"port": N, "slots": K}, says that it is ready.
- With TAPFORGE_SLOT in its environment it serves that slot's claims only (`wire.py`).
- Faults (`faults.py`) come from --faults (a JSON list, for every slot) or POST /slot/i/faults, GET shows them.
- Exit codes: 0 after SIGTERM or SIGINT, 2 when it can't start (the message says why).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, get_args

from aiohttp import web
from pydantic import ValidationError

from tapforge_api.claims import SLOT_VARIABLE
from tapforge_envs.protocol import StepResult
from tapforge_envs.serving.claims import Refused
from tapforge_envs.serving.http import (
    EpisodeRequest,
    ResetRequest,
    StepRequest,
    listen,
    read,
    slot_application,
    stop_signal,
    words,
)
from tapforge_envs.wire import CONTENT_TYPE, PROTOCOL, answers

from . import catalog, faults
from .device import Offers
from .faults import FAULTS, Fault
from .injection import Injector
from .mobileworld import server as mobileworld
from .mobileworld.devices import TaskNames
from .mobileworld.messages import DEVICE
from .mobileworld.server import MobileWorld, Variant
from .motion import Motion
from .slot import Slot
from .tasks import SPLITS

#: pixels per side
_SMALLEST, _LARGEST = 32, 4096
_TASK_LIMIT = 1000
#: seconds that calls in flight get at shutdown
_GRACE = 0.2

_Kind = Literal["observation", "score"]


@dataclass(frozen=True, slots=True)
class _Answer:
    body: bytes
    headers: dict[str, str]


class SlotServer:
    """One slot on the wire: reads requests, spoils answers as its faults say."""

    def __init__(self, slot: Slot, faults: Injector):
        self.slot = slot
        self.faults = faults
        #: phones of the same server, whose answers are given by mistake
        self.neighbours: Sequence[SlotServer] = ()
        #: the last answer of each kind
        self._last: dict[_Kind, _Answer] = {}

    async def health(self, request: web.Request) -> web.Response:
        well = self.faults.lying or not self.faults.hung
        body = {
            "status": "ok" if well else "hung: give the slot other faults or start the server anew",
            "protocol": PROTOCOL,
            "instance": self.slot.instance,
            "width": self.slot.width,
            "height": self.slot.height,
            "suites": list(self.slot.suites),
            "episode": self.slot.episode.id if self.slot.episode else None,
            "slot": self.slot.claims.uid or None,
            "fence": self.slot.claims.fence,
        }
        return web.json_response(body, status=200 if well else 503)

    async def tasks(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            limit = int(query.get("limit", "100"))
            seed = int(query.get("seed", "0"))
        except ValueError as error:
            raise Refused(400, f"limit and seed are whole numbers: {error}") from error
        if not 1 <= limit <= _TASK_LIMIT:
            raise Refused(400, f"limit is {limit}, must be 1 to {_TASK_LIMIT}")
        names = [query["suite"]] if query.get("suite") else list(self.slot.suites)
        splits = [query["split"]] if query.get("split") else list(SPLITS)
        if names[0] not in self.slot.suites:
            raise Refused(404, catalog.unknown("suite", names[0], list(self.slot.suites)))
        try:
            sets = [catalog.tasks(name, split) for name in names for split in splits]
        except catalog.UnknownTask as error:
            raise Refused(404, str(error)) from error
        endless = (tasks.sample(seed, index) for index in range(limit) for tasks in sets)
        return web.json_response({"tasks": [task.model_dump() for task in islice(endless, limit)]})

    async def reset(self, request: web.Request) -> web.Response:
        body = await read(request, self.slot.claims, ResetRequest)
        fault = await self.faults.strike("reset", body.episode, -1)
        result = self.slot.reset(body.episode, body.task)
        self.faults.new_episode()
        await self.faults.delay("reset", body.episode, -1)
        return self._observation(result, fault, answers("reset", body.episode))

    async def step(self, request: web.Request) -> web.Response:
        body = await read(request, self.slot.claims, StepRequest)
        fault = await self.faults.strike("step", body.episode, body.index)
        result = self.slot.step(body.episode, body.index, body.action)
        await self.faults.delay("step", body.episode, body.index)
        return self._observation(result, fault, answers("step", body.episode, body.index))

    async def evaluate(self, request: web.Request) -> web.Response:
        body = await read(request, self.slot.claims, EpisodeRequest)
        fault = await self.faults.strike("evaluate", body.episode, -1)
        score = self.slot.evaluate(body.episode)
        await self.faults.delay("evaluate", body.episode, -1)
        verdict = {"value": score.value, "reason": score.reason, "side_effects": list(score.side_effects)}
        answer = _Answer(json.dumps(verdict).encode(), answers("evaluate", body.episode))
        answer = self._given("score", answer, fault)
        if fault is not None and fault.kind == "bad_score":
            answer = replace(answer, body=fault.no_score(body.episode))
        return web.Response(body=answer.body, content_type="application/json", headers=answer.headers)

    async def close(self, request: web.Request) -> web.Response:
        body = await read(request, self.slot.claims, EpisodeRequest)
        if self.faults.hung:
            await self.faults.never()
        self.slot.close(body.episode)
        return web.json_response({})

    async def get_faults(self, request: web.Request) -> web.Response:
        return await self.faults.show(request)

    async def post_faults(self, request: web.Request) -> web.Response:
        return await self.faults.set(request)

    def _observation(self, result: StepResult, fault: Fault | None, headers: dict[str, str]) -> web.Response:
        kind = fault.kind if fault else None
        if kind == "lost_task":
            self.slot.restart()
            result = self.slot.stranger()
        elif kind == "half":
            result = faults.halved(result)
        elif kind == "wrong_size":
            result = faults.resized(result)
        answer = self._given("observation", _Answer(self.slot.encode(result), headers), fault)
        if kind == "corrupt":
            answer = replace(answer, body=faults.corrupt(answer.body))
        return web.Response(body=answer.body, content_type=CONTENT_TYPE, headers=answer.headers)

    def _given(self, kind: _Kind, answer: _Answer, fault: Fault | None) -> _Answer:
        """This answer, or another one where the fault is that they are mixed up."""
        before, self._last[kind] = self._last.get(kind), answer
        match fault.kind if fault else None:
            case "stale":
                other = before
            case "foreign":
                other = next((n._last[kind] for n in self.neighbours if n is not self and kind in n._last), None)
            case _:
                return answer
        if other is None:
            raise Refused(503, f"fault on demand: there is no other {kind} to answer with")
        return other


def application(slots: Sequence[Slot], initial_faults: list[Fault], stopping: asyncio.Event) -> web.Application:
    """The server as an aiohttp application. Setting `stopping` lets hung calls go."""
    servers = [SlotServer(slot, Injector(list(initial_faults), stopping)) for slot in slots]
    for server in servers:
        server.neighbours = servers
    return serving(servers)


def serving(servers: Sequence[SlotServer]) -> web.Application:
    """The slots of one address."""
    return slot_application(
        servers,
        get={"/health": SlotServer.health, "/tasks": SlotServer.tasks, "/faults": SlotServer.get_faults},
        post={
            "/reset": SlotServer.reset,
            "/step": SlotServer.step,
            "/evaluate": SlotServer.evaluate,
            "/close": SlotServer.close,
            "/faults": SlotServer.post_faults,
        },
    )


async def serve(args: argparse.Namespace, initial_faults: list[Fault]) -> int:
    stopping = stop_signal()
    if args.protocol == "mobileworld":
        names = TaskNames(args.suites, args.tasks)
        servers = [
            MobileWorld(
                args.width,
                args.height,
                tuple(args.suites),
                names,
                Injector(list(initial_faults), stopping),
                tuple(args.devices),
                args.variant,
                motion=args.motion and args.motion.model_copy(update={"seed": args.motion.seed + slot}),
            )
            for slot in range(args.slots)
        ]
        return await listen(mobileworld.application(servers), args.host, args.port, args.slots, stopping, _GRACE)
    uid = os.environ.get(SLOT_VARIABLE, "")
    slots = [Slot(args.width, args.height, args.suites, uid, args.states) for _ in range(args.slots)]
    app = application(slots, initial_faults, stopping)
    return await listen(app, args.host, args.port, args.slots, stopping, _GRACE)


def _side(text: str) -> int:
    value = int(text)
    if not _SMALLEST <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{value} pixels; must be {_SMALLEST} to {_LARGEST}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{value}; must be 1 to 4096")
    return value


def _motion(text: str) -> Motion:
    try:
        return Motion.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(words(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tapforge_envs.phone.server", description="Simulated phones over HTTP."
    )
    parser.add_argument("--host", default="127.0.0.1", help=":: is every address, of IPv6 and of IPv4")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--slots", type=_count, default=1, help="independent phones, under /slot/0 and on")
    parser.add_argument("--width", type=_side, default=96, help="pixels")
    parser.add_argument("--height", type=_side, default=160, help="pixels")
    parser.add_argument("--suites", nargs="+", default=list(catalog.SUITES), help="suites that are served")
    parser.add_argument(
        "--states", choices=get_args(Offers), default="exact", help="what tells the state: a key, a UI tree, the frame"
    )
    parser.add_argument("--protocol", choices=("tapforge", "mobileworld"), default="tapforge", help="what is spoken")
    parser.add_argument("--devices", nargs="+", default=[DEVICE], help="mobileworld: serials of each server's phones")
    parser.add_argument("--tasks", type=_count, default=100, help="mobileworld: tasks of each suite and split")
    parser.add_argument(
        "--variant", choices=get_args(Variant), default="mobileworld", help="mobileworld: whose server it is like"
    )
    parser.add_argument("--motion", type=_motion, help="mobileworld: JSON of how screens move; {} is the default way")
    parser.add_argument("--faults", default="[]", help="JSON list of faults for every slot")
    args = parser.parse_args(argv)
    try:
        for name in args.suites:
            catalog.suite(name)
        initial_faults = FAULTS.validate_json(args.faults)
    except catalog.UnknownTask as error:
        print(error, file=sys.stderr)
        return 2
    except ValidationError as error:
        print(f"--faults is not a list of faults: {words(error)}", file=sys.stderr)
        return 2
    return asyncio.run(serve(args, initial_faults))


if __name__ == "__main__":
    sys.exit(main())
