"""Serves runs until it is asked to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tapforge_envs.serving.http import EVERYWHERE
from tapforge_envs.serving.page_site import CannotListen, page_served
from tapforge_envs.serving.same_site import LOOPBACK

from .library import Library
from .server import Server


@asynccontextmanager
async def serving(folders: Sequence[Path], host: str, port: int, token: str = "") -> AsyncIterator[str]:
    """The address of the page. `port` 0 takes a free one. Raises CannotListen, ConfigurationError."""
    if host not in LOOPBACK and not token:
        raise CannotListen(
            f"on {host!r} others reach the page, and recordings hold what was on screens: give a token "
            "(TAPFORGE_VIEW_TOKEN), or serve on 127.0.0.1 and forward the port with ssh -L"
        )
    library = await asyncio.to_thread(Library, folders)
    try:
        names = [] if host in EVERYWHERE else [host]
        app = Server(library, names, token).application()
        async with page_served(app, host, port, "--port") as address:
            yield address
    finally:
        await asyncio.to_thread(library.close)
