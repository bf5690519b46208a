"""Pages for a browser: they listen, and don't write addresses into logs, since tokens are in those."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from .http import address_of, logger_without_addresses, site_at

#: seconds that calls in flight get at the end
_GRACE: Final = 0.5


class CannotListen(Exception):
    """An address can't be had, or needs a token; says which and what would help."""


@asynccontextmanager
async def page_served(app: web.Application, host: str, port: int, option: str = "--page") -> AsyncIterator[str]:
    """Its address. `port` 0 takes a free one. `option`: of the command, that names the port. Raises CannotListen."""
    log = logger_without_addresses(__name__)
    runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=_GRACE)
    await runner.setup()
    try:
        try:
            await site_at(runner, host, port).start()
        except OSError as error:
            words = f"page: can't listen on {host}:{port}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                words = f"page: port {port} on {host} is in use; {option} 0 takes a free one"
            raise CannotListen(words) from error
        yield address_of(runner, host)
    finally:
        await runner.cleanup()
