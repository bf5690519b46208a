"""Where the page listens, and by which names it may be called."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from ..serving.http import EVERYWHERE, address_of, logger_without_addresses, site_at
from ..serving.same_site import LOOPBACK

#: seconds that calls in flight get at the end
_GRACE: Final = 0.5


class CannotListen(Exception):
    """A port or an address can't be had; says which and what would help."""


def names_of(host: str) -> list[str] | None:
    """Hosts by which a page at `host` may be called; None: any, which needs a token."""
    return None if host in EVERYWHERE else [host]


def refusal_to_show(host: str, token: str) -> str:
    """Why the page may not be served there; "" when it is fine."""
    if host in LOOPBACK or token:
        return ""
    return (
        f"on {host!r} others reach the page, which acts on phones: give it a token (TAPFORGE_TOKEN), serve no page "
        "(--page off), or serve on 127.0.0.1 and forward the port with ssh -L"
    )


@asynccontextmanager
async def page_served(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Its address. `port` 0 takes a free one. Raises CannotListen."""
    log = logger_without_addresses(__name__)
    runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=_GRACE)
    await runner.setup()
    try:
        try:
            await site_at(runner, host, port).start()
        except OSError as error:
            words = f"page: can't listen on {host}:{port}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                words = f"page: port {port} on {host} is in use; --page 0 takes a free one"
            raise CannotListen(words) from error
        yield address_of(runner, host)
    finally:
        await runner.cleanup()
