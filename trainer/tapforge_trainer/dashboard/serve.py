"""Serves runs until it is asked to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tapforge_envs.serving.same_site import LOOPBACK

from .library import Library
from .server import Server

_EVERYWHERE: Final = ("", "0.0.0.0", "::", "*")
#: seconds that calls in flight get at the end
_GRACE: Final = 0.5


class CannotServe(Exception):
    """The address can't be had, or needs a token. The message says what would help."""


def _log() -> logging.Logger:
    """Without requests that are none: their words name the address, in which a token may stand."""
    found = logging.getLogger(__name__)
    found.addFilter(_of_ours)
    return found


def _of_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


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
        names = [] if host in _EVERYWHERE else [host]
        app = Server(library, names, token).application()
        runner = web.AppRunner(app, access_log=None, logger=_log(), shutdown_timeout=_GRACE)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, None if host == "*" else host, port).start()
            except OSError as error:
                words = f"can't listen on {host}:{port}: {error.strerror or error}"
                if error.errno == errno.EADDRINUSE:
                    words = f"port {port} on {host} is in use; --port 0 takes a free one"
                raise CannotServe(words) from error
            listening = runner.addresses[0][1]
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening}/"
        finally:
            await runner.cleanup()
    finally:
        await asyncio.to_thread(library.close)
