"""Simulated phones, a part of which is sick on a seeded schedule, and their own log of requests.

    python -m load.faulty --phones 16 --first 0 --sick 3 7 --seed 0 --log FILE

One line of JSON, {"ports": [...]}, says that they listen: each phone at an address of its own. Their schedule begins
with a line on stdin; they end with stdin.

- The phones are `tapforge_envs.phone`'s, and so are their faults (`faults.py`), but for two things. Each picture is
  unique: the first pixels are drawn anew from phone, episode and step, as a clock would be; so are verdicts, which are
  numbers from 0 to 1 with all their digits. And a crash takes one phone: its connections are reset, nothing listens at
  its address for a while, and then another instance does.
- A sick phone goes from one spell to the next without a pause; each is of one kind and lasts a random time. In a spell
  each call of that kind's calls goes wrong with the kind's probability.
- The log has a line for each request when it arrives, one when a fault strikes it, and one when it is answered. What it
  says of a picture is the hash that a recording names it by.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

from tapforge_envs.phone.faults import Fault
from tapforge_envs.phone.injection import Injector
from tapforge_envs.phone.server import SlotServer, serving
from tapforge_envs.phone.slot import Slot
from tapforge_envs.protocol import Action, Frame, Score, StepResult, Task
from tapforge_trainer.frames.frame import name_of

WIDTH, HEIGHT = 96, 160
#: of the logarithm of a call's latency
SIGMA = 0.5
#: mean length of a spell, and how long a crashed phone is away, in calls of a healthy phone
SPELL, RESTART = 25.0, 8.0
EVERY = ("reset", "step", "evaluate")
#: kind -> (calls it applies to, probability of each call)
SPELLS: dict[str, tuple[tuple[str, ...], float]] = {
    "hung": (("reset", "step", "evaluate"), 0.3),
    "crashed": (("reset", "step", "evaluate"), 0.3),
    "lying_health": (EVERY, 1.0),
    "error": (EVERY, 0.3),
    "slow": (EVERY, 1.0),
    "corrupt": (("reset", "step"), 0.3),
    "half": (("reset", "step"), 0.3),
    "wrong_size": (("reset", "step"), 0.3),
    "stale": (("reset", "step", "evaluate"), 0.3),
    "foreign": (("reset", "step", "evaluate"), 0.3),
    "lost_task": (("step",), 0.3),
    "bad_score": (("evaluate",), 1.0),
}
#: times the usual latency, in a spell of slowness
SLOWER = 10.0


@dataclass(frozen=True, slots=True)
class Spell:
    kind: str
    #: seconds since the beginning of the schedule
    ends: float


def spells(seed: int, phone: int, seconds: float, median: float) -> list[Spell]:
    """What a sick phone has, one after the other: every kind comes before any comes again. `median`: of a healthy
    phone's calls, seconds."""
    dice, ends, found = Random(f"{seed}:{phone}"), 0.0, list[Spell]()
    while ends < seconds:
        for kind in dice.sample(list(SPELLS), len(SPELLS)):
            ends += SPELL * median * dice.expovariate(1.0)
            found.append(Spell(kind, ends))
    return found


def faults_of(spell: str | None, median: float, seed: int) -> list[Fault]:
    """`median`: of a healthy phone's calls, seconds."""
    usual = Fault(kind="slow", median_seconds=median, sigma=SIGMA, seed=seed)
    if spell is None:
        return [usual]
    calls, probability = SPELLS[spell]
    return [
        usual,
        Fault(kind=spell, calls=calls, probability=probability, seed=seed, median_seconds=SLOWER * median, sigma=SIGMA),
    ]


def sick_phones(phones: int, share: float, seed: int) -> list[int]:
    return sorted(Random(f"{seed}:sick").sample(range(phones), round(share * phones)))


class UniqueSlot(Slot):
    """A slot no two answers of which are alike, also not those of another phone in the same situation."""

    def __init__(self, number: int):
        super().__init__(WIDTH, HEIGHT, ["quickstart"])
        self.number = number

    def reset(self, episode: str, task: Task) -> StepResult:
        return self._unique(super().reset(episode, task), episode, -1)

    def step(self, episode: str, index: int, action: Action) -> StepResult:
        return self._unique(super().step(episode, index, action), episode, index)

    def evaluate(self, episode: str) -> Score:
        super().evaluate(episode)
        return Score(Random(f"{self.number}:{episode}").random())

    def _unique(self, result: StepResult, episode: str, index: int) -> StepResult:
        frame, digest = result.observation.frame, hashlib.sha256(f"{self.number}:{episode}:{index}".encode()).digest()
        with Image.open(io.BytesIO(frame.data)) as image:
            pixels = np.array(image.convert("RGB"))
        pixels[0, :8] = np.frombuffer(digest[:24], np.uint8).reshape(8, 3)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG", compress_level=1)
        return replace(
            result, observation=replace(result.observation, frame=Frame.of(out.getvalue(), frame.width, frame.height))
        )


class FaultyPhone:
    """A phone at an address of its own."""

    def __init__(self, number: int, median: float, seed: int, log: Log, stopping: asyncio.Event):
        self.number = number
        self.median = median
        self._seed = seed
        faults = Injector(faults_of(None, median, seed), stopping, self._crash, self._struck)
        self.server = SlotServer(UniqueSlot(number), faults)
        #: call -> its number in the log
        self._numbers: dict[tuple[str, str, int], int] = {}
        app = serving([self.server])
        app.middlewares.insert(0, self._logged)
        self._log = log
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None
        self._connections: set[asyncio.Transport] = set()
        self._restart: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        await self._runner.setup()
        await self._listen()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    def fall_sick(self, spell: str) -> None:
        self.server.faults.faults = faults_of(spell, self.median, self._seed)
        self.server.faults.hung = False

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()

    def _crash(self) -> None:
        if self._restart is None:
            self._restart = asyncio.get_running_loop().create_task(self._away())

    async def _away(self) -> None:
        """As if the process were killed: the kernel resets its connections and refuses new ones."""
        assert self._site is not None
        listening, self._site = self._site, None
        for transport in list(self._connections):
            transport.abort()
        await listening.stop()
        await asyncio.sleep(RESTART * self.median)
        self.server.slot.restart()
        await self._listen()
        self._restart = None

    def _struck(self, call: str, episode: str, index: int, kind: str) -> None:
        self._log.struck(self._numbers[call, episode, index], kind)

    @web.middleware
    async def _logged(self, request: web.Request, handler: Any) -> web.StreamResponse:
        call = request.path.strip("/")
        if (transport := request.transport) is not None and transport not in self._connections:
            self._connections = {one for one in self._connections if not one.is_closing()} | {transport}
        if call == "health":
            return await handler(request)
        asked = json.loads(await request.read())
        number = self._log.arrived(self.number, call, asked)
        self._numbers[call, asked.get("episode", ""), asked.get("index", -1)] = number
        status, body = 0, b""
        try:
            response = await handler(request)
            status, body = response.status, response.body
            return response
        finally:
            self._log.answered(number, status, call, body)


class Log:
    """Lines of JSON. An unanswered request has no second line, or one with status 0."""

    def __init__(self, path: Path):
        self._file = path.open("w", buffering=1 << 16)
        self._number = 0

    def arrived(self, phone: int, call: str, asked: dict[str, Any]) -> int:
        self._number += 1
        line = {"n": self._number, "phone": phone, "at": time.time(), "call": call, "episode": asked.get("episode")}
        self._write({**line, "index": asked.get("index", -1), "action": asked.get("action")})
        return self._number

    def struck(self, number: int, fault: str) -> None:
        self._write({"n": number, "fault": fault})

    def answered(self, number: int, status: int, call: str, body: bytes) -> None:
        line: dict[str, Any] = {"n": number, "done": time.time(), "status": status}
        if status == 200 and call in ("reset", "step"):
            line["picture"] = _picture(body)
        if status == 200 and call == "evaluate":
            line["score"] = _score(body)
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if not self._file.closed:  # what hung to the end has no second line
            self._file.write(json.dumps(line) + "\n")


def _score(body: bytes) -> float | None:
    verdict = json.loads(body)
    value = verdict.get("value") if isinstance(verdict, dict) else None
    return value if isinstance(value, float) else None


def _picture(body: bytes) -> str | None:
    """What a recording calls the picture of this answer; None: it holds none."""
    try:
        with Image.open(io.BytesIO(body.partition(b"\n")[2])) as image:
            return name_of(np.asarray(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError):
        return None


async def _plague(phones: Sequence[FaultyPhone], seed: int, seconds: float) -> None:
    """Makes sick phones go through their spells, for so many seconds."""

    async def one(phone: FaultyPhone) -> None:
        begun = asyncio.get_running_loop().time()
        for spell in spells(seed, phone.number, seconds, phone.median):
            phone.fall_sick(spell.kind)
            await asyncio.sleep(max(0.0, begun + spell.ends - asyncio.get_running_loop().time()))

    await asyncio.gather(*map(one, phones))


async def _serve(args: argparse.Namespace) -> None:
    log = Log(args.log)
    numbers = range(args.first, args.first + args.phones)
    phones = [FaultyPhone(number, args.median, args.seed, log, asyncio.Event()) for number in numbers]
    for phone in phones:
        phone.server.neighbours = [other.server for other in phones]
        await phone.start()
    print(json.dumps({"ports": [phone.port for phone in phones]}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await lines.readline()
    sick = [phone for phone in phones if phone.number in set(args.sick)]
    plague = asyncio.create_task(_plague(sick, args.seed, args.seconds))
    await lines.read()
    plague.cancel()
    for phone in phones:
        await phone.close()
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phones", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first phone")
    parser.add_argument("--sick", type=int, nargs="*", default=[], help="numbers of sick phones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--median", type=float, default=0.6, help="of a healthy phone's calls, seconds")
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the schedule")
    parser.add_argument("--log", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
