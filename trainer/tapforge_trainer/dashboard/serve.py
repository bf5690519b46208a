"""Serves runs until it is asked to stop."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import web

from tapforge_envs.serving.http import EVERYWHERE, address_of, logger_without_addresses, site_at
from tapforge_envs.serving.same_site import LOOPBACK

from .library import Library
from .server import Server

#: seconds that calls in flight get at the end
_GRACE: Final = 0.5


class CannotServe(Exception):
    """The address can't be had, or needs a token. The message says what would help."""


@asynccontextmanager
async def serving(folders: Sequence[Path], host: str, port: int, token: str = "") -> AsyncIterator[str]:
    """The address of the page. `port` 0 takes a free one. Raises CannotServe, ConfigurationError."""
    if host not in LOOPBACK and not token:
        raise CannotServe(
            f"on {host!r} others reach the page, and recordings hold what was on screens: give a token "
            "(TAPFORGE_VIEW_TOKEN), or serve on 127.0.0.1 and forward the port with ssh -L"
        )
    library = await asyncio.to_thread(Library, folders)
    try:
        names = [] if host in EVERYWHERE else [host]
        app = Server(library, names, token).application()
        log = logger_without_addresses(__name__)
        runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=_GRACE)
        await runner.setup()
        try:
            try:
                await site_at(runner, host, port).start()
            except OSError as error:
                words = f"can't listen on {host}:{port}: {error.strerror or error}"
                if error.errno == errno.EADDRINUSE:
                    words = f"port {port} on {host} is in use; --port 0 takes a free one"
                raise CannotServe(words) from error
            yield address_of(runner, host)
        finally:
            await runner.cleanup()
    finally:
        await asyncio.to_thread(library.close)
