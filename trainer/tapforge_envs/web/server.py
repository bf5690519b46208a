"""MiniWoB++'s pages behind tapforge's own protocol: K slots, each a page, in one browser.

    python -m tapforge_envs.web.server --port 0 --slots 4

- Slot i answers under /slot/i; / is slot 0. One line of JSON, {"port": N, "slots": K}, says that every page is open.
- What idempotence, claims and refusals mean is the bridge's to say (`tapforge_envs/bridge/slot.py`).
- A page that crashed, and every page of a browser that died, has another instance; a slot that can't have a page is
  sick (503) and says why.
- With TAPFORGE_SLOT in its environment slot 0 serves that slot's claims only (`wire.py`).
- Exit codes: 0 after SIGTERM or SIGINT, 2 when it can't start (the message says why).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from tapforge_api.claims import SLOT_VARIABLE

from ..bridge.server import GRACE, Served, served_application
from ..bridge.slot import BridgeSlot
from ..clients.http import Deadlines
from ..protocol import EnvironmentFault, Task
from ..serving.http import listen, stop_signal
from . import catalog
from .environment import PageOptions, WebEnvironment
from .pages import Pages

#: pages on which no tap alone ends an episode
_CALM = ("chase-circle", "terminal")
#: pages that are opened at the same time
_AT_ONCE = 4
#: seconds of one call; a browser that died is started again within a health check
_DEADLINES = Deadlines(health=60.0, reset=60.0, step=60.0, evaluate=10.0, close=10.0)


async def serve(slots: int, host: str, port: int, options: PageOptions, uid: str = "") -> int:
    """Until it is stopped. Returns 0, or 2 when it can't start."""
    stopping = stop_signal()
    pages = Pages()
    environments = [WebEnvironment(f"page {i}", pages, options) for i in range(slots)]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def open_page(environment: WebEnvironment) -> None:
        async with turns:
            await environment.restore()

    try:
        try:
            catalog.url("click-test")
            await asyncio.gather(*map(open_page, environments))
        except EnvironmentFault as fault:
            print(fault, file=sys.stderr)
            return 2
        held = [_slot(environment, uid if i == 0 else "") for i, environment in enumerate(environments)]
        app = served_application([Served(slot, "devtools", _listed) for slot in held])
        try:
            return await listen(app, host, port, slots, stopping, GRACE)
        finally:
            await asyncio.gather(*(slot.stop(GRACE) for slot in held))
    finally:
        await pages.close()


def _slot(environment: WebEnvironment, uid: str) -> BridgeSlot:
    async def probe() -> str:
        await environment.restore()
        return environment.instance

    return BridgeSlot(environment.slot, lambda: environment, probe, _DEADLINES, uid)


async def _listed() -> Sequence[Task]:
    """A task of every page, of the first split that has it. First come those that no tap ends: a client that tries the
    server with taps anywhere, as `env check` does, sees more than one step."""
    templates = sorted(catalog.TEMPLATES.values(), key=lambda template: template.name not in _CALM)
    return [template.task(template.splits()[0], 0) for template in templates]


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 256:
        raise argparse.ArgumentTypeError(f"{value} slots; must be 1 to 256")
    return value


def _scale(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 8:
        raise argparse.ArgumentTypeError(f"{value} pixels of a frame per pixel of a page; must be 1 to 8")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tapforge_envs.web.server", description="MiniWoB++ in a headless Chromium, over HTTP."
    )
    parser.add_argument("--host", default="127.0.0.1", help=":: is every address, of IPv6 and of IPv4")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--slots", type=_count, default=1, help="independent pages, under /slot/0 and on")
    parser.add_argument("--scale", type=_scale, default=1, help="pixels of a frame per pixel of a page (160x210)")
    args = parser.parse_args(argv)
    options = PageOptions(scale=args.scale)
    return asyncio.run(serve(args.slots, args.host, args.port, options, os.environ.get(SLOT_VARIABLE, "")))


if __name__ == "__main__":
    sys.exit(main())
