"""Screens of the standard phone that were drawn once, served by phones that cost next to nothing.

    python -m load.canned SCREENS --slots N [--median S] [--sigma S]      one line of JSON on stdout: {"port": n}

Drawing and packing a screen of 1080x2400 costs more than all that a driver does with it. So each phone answers with one
of the canned PNGs, and no two answers are alike, as on a real phone, whose clock ticks: the first row of pixels is
written anew each time. It is a deflate block of its own, stored, so that the rest of the file stays as it was packed;
the row after it is filtered by itself. What the first row holds reaches the first rows of the resized frame.

Each phone draws its latencies (log-normal) from a seed of its own. `GET /steps` says how many steps were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from aiohttp import web
from PIL import Image

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.protocol import Frame, Observation, StepResult
from tapforge_envs.wire import CONTENT_TYPE, PROTOCOL, encode_step

WIDTH, HEIGHT, SUITE = 1080, 2400, "standard"
#: what zlib sums modulo
_ADLER = 65521


def draw(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[bytes]:
    """So many different screens, as a demonstrator of the standard phone meets them."""
    tasks, phone = catalog.tasks(SUITE, "train"), catalog.phone_for(SUITE, width, height)
    seen: dict[str, bytes] = {}
    number = 0
    while True:
        task = tasks.sample(0, number)
        template = catalog.template_of(task)
        frames = [phone.reset(task.seed, template.rules(task.params)).frame]
        frames += [phone.step(a).observation.frame for a in demonstration(phone, template, task.params, lambda: False)]
        for frame in frames:
            seen[frame.sha256] = frame.data
            if len(seen) == count:
                return list(seen.values())
        number += 1


class Screen:
    """A canned PNG whose first row is written anew by `with_row`."""

    def __init__(self, png: bytes):
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        self.height, self.width = pixels.shape[:2]
        rows = np.frombuffer(zlib.decompress(_image_data(png)), np.uint8).reshape(self.height, -1)[1:].copy()
        rows[0, 0] = 1  # the left neighbour, not the row above, which changes
        rows[0, 1:] = np.diff(pixels[1].astype(np.uint8), axis=0, prepend=np.zeros((1, 3), np.uint8)).reshape(-1)
        packer = zlib.compressobj(1, zlib.DEFLATED, -15)
        raw = rows.tobytes()
        rest = packer.compress(raw) + packer.flush()
        self._rest, self._rest_size, self._rest_adler = _chunk(b"IDAT", rest), len(raw), zlib.adler32(raw)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        self._head = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)

    def with_row(self, pixels: bytes) -> bytes:
        """`pixels`: RGB of the first row."""
        row = b"\0" + pixels
        size = len(row)
        first = b"\x78\x01\0" + struct.pack("<HH", size, size ^ 0xFFFF) + row
        one, two = zlib.adler32(row), self._rest_adler
        low = ((one & 0xFFFF) + (two & 0xFFFF) - 1) % _ADLER
        high = ((one >> 16) + (two >> 16) + self._rest_size * ((one & 0xFFFF) - 1)) % _ADLER
        checksum = struct.pack(">I", high << 16 | low)
        parts = (self._head, _chunk(b"IDAT", first), self._rest, _chunk(b"IDAT", checksum), _chunk(b"IEND", b""))
        return b"".join(parts)

    def frame(self, rng: random.Random) -> Frame:
        return Frame.of(self.with_row(rng.randbytes(3) * self.width), self.width, self.height)


def _image_data(png: bytes) -> bytes:
    at, found = 8, []
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            found.append(png[at + 8 : at + 8 + length])
        at += 12 + length
    return b"".join(found)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


# --- the server -------------------------------------------------------------------------------------------------------


class Phones:
    """As many phones as asked for, at /slot/N. An action that ends an episode is a step like any other, with `done`."""

    def __init__(self, screens: Sequence[Screen], slots: int, median: float, sigma: float):
        self._screens = screens
        self._median, self._sigma = median, sigma
        self._dice = [random.Random(slot) for slot in range(slots)]
        self.steps = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/steps", self._count)
        app.router.add_get("/slot/{slot}/health", self._health)
        app.router.add_post("/slot/{slot}/{call:reset|step|evaluate|close}", self._call)
        return app

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({"steps": self.steps})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "protocol": PROTOCOL, "instance": _instance(request)})

    async def _call(self, request: web.Request) -> web.Response:
        call, dice = request.match_info["call"], self._dice[int(request.match_info["slot"])]
        body = await request.json()
        if call == "close":
            return web.json_response({})
        if call == "evaluate":
            won = hashlib.sha256(body["episode"].encode()).digest()[0] % 2
            return web.json_response({"value": float(won), "reason": "canned", "side_effects": []})
        await asyncio.sleep(self._median * dice.lognormvariate(0.0, self._sigma))
        done = call == "step" and body["action"]["type"] in ("terminate", "answer")
        observation = Observation(dice.choice(self._screens).frame(dice), app="canned")
        self.steps += call == "step"
        answer = encode_step(StepResult(observation, done=done), _instance(request))
        return web.Response(body=answer, content_type=CONTENT_TYPE)


def _instance(request: web.Request) -> str:
    return f"{os.getpid()}-{request.match_info['slot']}"


async def _serve(phones: Phones) -> None:
    runner = web.AppRunner(phones.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()  # until the process is ended by its parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("screens", type=Path, help="folder of PNGs")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--median", type=float, default=1.0, help="seconds")
    parser.add_argument("--sigma", type=float, default=0.5)
    args = parser.parse_args()
    screens = [Screen(path.read_bytes()) for path in sorted(args.screens.glob("*.png"))]
    asyncio.run(_serve(Phones(screens, args.slots, args.median, args.sigma)))


if __name__ == "__main__":
    main()
