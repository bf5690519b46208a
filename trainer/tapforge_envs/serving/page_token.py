"""A page's token: a browser brings it as a cookie after it has opened `/?token=...`, a program as `Authorization:
Bearer`. Compared in constant time.

- Browsers send a cookie to every port of a host, so its name holds the port by which the page was called: pages side by
  side, behind forwarded ports too, keep their own.
- The cookie comes along when a link of another site leads to the page (SameSite=Lax); what such a site asks otherwise
  is refused by `same_site.py`.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

from .claims import Refused


class PageToken:
    """`token` "": none is needed. `cookie`: what its name begins with."""

    def __init__(self, token: str, cookie: str):
        self._token, self._cookie = token, cookie

    def opened(self, request: web.Request) -> web.Response | None:
        """The answer to "/" where its address has the token: the same page without it, and the cookie."""
        if not (self._token and "token" in request.query):
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._name(request), self._token, httponly=True, samesite="Lax", path="/")
        return answer

    def admit(self, request: web.Request) -> None:
        """Raises Refused."""
        if self._token and not self._knows(request):
            raise Refused(401, "this page needs its token: open /?token=TOKEN, or send Authorization: Bearer TOKEN")

    def _knows(self, request: web.Request) -> bool:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [request.cookies.get(self._name(request), ""), bearer if scheme.lower() == "bearer" else ""]
        if request.path == "/":
            asked = request.query.get("token", "")
            given += [asked, asked.replace(" ", "+")]  # a + that was typed as it is
        due = self._token.encode()
        # A header may hold bytes that are not UTF-8.
        return any(hmac.compare_digest(one.encode(errors="surrogateescape"), due) for one in given)

    def _name(self, request: web.Request) -> str:
        try:
            port = urlsplit(f"//{request.headers.get('Host', '')}").port
        except ValueError:  # no number, or none of a port
            port = None
        return self._cookie if port is None else f"{self._cookie}_{port}"
