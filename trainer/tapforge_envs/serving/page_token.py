"""A page's token: a browser brings it as a cookie after it has opened `/?token=...`, a program as `Authorization:
Bearer`. Compared in constant time."""

from __future__ import annotations

import hmac

from aiohttp import web

from .claims import Refused


class PageToken:
    """`token` "": none is needed. `cookie`: its name."""

    def __init__(self, token: str, cookie: str):
        self._token, self._cookie = token, cookie

    def opened(self, request: web.Request) -> web.Response | None:
        """The answer to "/" where its address has the token: the same page without it, and the cookie."""
        if not (self._token and "token" in request.query):
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict", path="/")
        return answer

    def admit(self, request: web.Request) -> None:
        """Raises Refused."""
        if self._token and not self._knows(request):
            raise Refused(401, "this page needs its token: open /?token=TOKEN, or send Authorization: Bearer TOKEN")

    def _knows(self, request: web.Request) -> bool:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [request.cookies.get(self._cookie, ""), bearer if scheme.lower() == "bearer" else ""]
        given += [request.query.get("token", "")] if request.path == "/" else []
        due = self._token.encode()
        # A header may hold bytes that are not UTF-8.
        return any(hmac.compare_digest(one.encode(errors="surrogateescape"), due) for one in given)
