"""Where the operator's servers listen: `::` is every address of the machine, of IPv6 and of IPv4, whichever it has."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Final

from aiohttp import web

EVERYWHERE: Final = "::"
#: the machine knows no IPv6, or was told to forget it
_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


async def listen(runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
    """Raises OSError."""
    if host == EVERYWHERE:
        await web.SockSite(runner, _everywhere(port), ssl_context=context).start()
    else:
        await web.TCPSite(runner, host, port, ssl_context=context).start()


def _everywhere(port: int) -> socket.socket:
    """One socket for both: asyncio would take two, and two ports where any will do."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server((EVERYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return socket.create_server(("", port))
