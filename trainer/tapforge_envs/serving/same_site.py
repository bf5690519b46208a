"""What servers of pages check before they answer: a browser asks for them by their own name, from their own pages.

A Host that isn't the server's own is a name that was rebound to its address; what the browser marks as another site's
comes from a page that has no business here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from .claims import Refused

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def check_same_site(request: web.Request, names: Collection[str] | None) -> None:
    """`names`: hosts by which the server may be called, in lower case; None: any. "/" may be opened from anywhere: that
    is how a link gets here. Raises Refused."""
    host = request.headers.get("Host", "")
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        name = ""
    if names is not None and name not in names:
        raise Refused(403, f"this page isn't called {host[:200]!r}; open it by the address that it printed")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and request.path != "/":
        raise Refused(403, "a page of another site asks; only this server's own page may")


def seal(answer: web.StreamResponse) -> None:
    """No other site may embed it, and no browser guesses what it is."""
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
