"""The page and its API over HTTP. Read only: there is nothing but GET.

- It answers on 127.0.0.1; on other addresses only with a token, which a browser brings as a cookie after it has opened
  `/?token=...`, and a program as `Authorization: Bearer`.
- A Host that isn't this server's own name (a name that was rebound to this address) gets 403, and so does what the
  browser marks as another site's.
- What models and phones wrote is JSON or an image, never HTML, and the page makes text nodes of it. The policy of the
  page allows its own files alone: no inline script, no inline style, nothing from elsewhere.
- Whatever can't be answered is {"error": words}.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from tapforge_envs.serving.claims import Refused
from tapforge_envs.serving.http import Handler
from tapforge_envs.serving.page_token import PageToken
from tapforge_envs.serving.same_site import LOOPBACK, check_same_site, seal

from ..recording.reader import RecordingError
from . import comparison
from .export import exported
from .library import Library
from .opened import OpenRun
from .query import BadQuery
from .stored import NotThere

_COOKIE: Final = "tapforge_view"
_KINDS: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
#: figures of one question
_MOST_FIGURES: Final = 64


class Server:
    """`names`: hosts by which it may be called; empty: any, which needs a token."""

    def __init__(self, library: Library, names: Sequence[str], token: str = ""):
        if not names and not token:
            raise ValueError("a server that may be called by any name needs a token")
        self._library, self._token = library, PageToken(token, _COOKIE)
        self._names = {name.strip("[]").lower() for name in (*LOOPBACK, *names)} if names else None
        page = files("tapforge_trainer.dashboard") / "page"
        self._files = {one.name: one.read_bytes() for one in page.iterdir() if one.name.endswith(tuple(_KINDS))}

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get("/", self.page)
        app.router.add_get("/page/{file}", self.file)
        app.router.add_get("/api/runs", self.runs)
        app.router.add_get("/api/compare", self.compare)
        self._add(app, "", lambda run, _: run.overview())
        self._add(app, "/figures", lambda run, r: run.figures(_figures(r)))
        self._add(app, "/episodes", lambda run, r: run.episodes(r.query.items()))
        self._add(app, "/facets", lambda run, _: run.facets())
        self._add(app, "/episode", lambda run, r: run.episode(*_named(r)))
        self._add(app, "/group", lambda run, r: run.group(*_named(r)))
        self._add(app, "/step", lambda run, r: run.step(*_named(r), _number(r, "step")))
        app.router.add_get("/api/runs/{run}/frame", self.frame)
        app.router.add_get("/api/runs/{run}/export", self.export)
        return app

    # --- what is answered ---

    async def page(self, request: web.Request) -> web.Response:
        if (opened := self._token.opened(request)) is not None:
            return opened
        headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
        return web.Response(body=self._files["index.html"], content_type="text/html", charset="utf-8", headers=headers)

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._files or name == "index.html":
            raise Refused(404, f"the page has no file {name[:100]!r}")
        kind = next(kind for ending, kind in _KINDS.items() if name.endswith(ending))
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8")

    async def runs(self, request: web.Request) -> web.Response:
        def found() -> list[dict[str, Any]]:
            return [{"name": name, **self._library.get(name).brief()} for name in self._library.names()]

        return _json({"runs": await asyncio.to_thread(found)})

    async def compare(self, request: web.Request) -> web.Response:
        a, recording_a, b, recording_b = _asked(request, "a", "recording_a", "b", "recording_b")

        def found() -> dict[str, Any]:
            sides = (self._library.get(a).results(recording_a), self._library.get(b).results(recording_b))
            return comparison.compared(*sides)

        return _json(await asyncio.to_thread(found))

    async def frame(self, request: web.Request) -> web.Response:
        run = self._library.get(request.match_info["run"])
        data, kind = await asyncio.to_thread(run.frame, *_named(request))
        # Named by its content: it never changes.
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return web.Response(body=data, content_type=kind, headers=headers)

    async def export(self, request: web.Request) -> web.Response:
        """A file that is kept, never a page of this server."""
        run = self._library.get(request.match_info["run"])
        found = await asyncio.to_thread(exported, run, list(request.query.items()))
        name = re.sub(r"[^\w.-]", "-", request.match_info["run"], flags=re.ASCII)
        headers = {
            "Content-Disposition": f'attachment; filename="{name}-episodes.html"',
            "Content-Security-Policy": "sandbox",
        }
        return web.Response(body=found.data, content_type="text/html", charset="utf-8", headers=headers)

    def _add(self, app: web.Application, path: str, answer: Callable[[OpenRun, web.Request], Any]) -> None:
        async def handler(request: web.Request) -> web.Response:
            run = self._library.get(request.match_info["run"])
            return _json(await asyncio.to_thread(answer, run, request))

        app.router.add_get(f"/api/runs/{{run}}{path}", handler)

    # --- who may ask ---

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            answer = await handler(request)
        except Refused as error:
            answer = web.json_response({"error": str(error)}, status=error.status)
        except NotThere as error:
            answer = web.json_response({"error": str(error)}, status=404)
        except BadQuery as error:
            answer = web.json_response({"error": str(error)}, status=400)
        except (RecordingError, OSError) as error:
            answer = web.json_response({"error": str(error)}, status=500)
        except web.HTTPException as error:
            words = f"{request.method} {request.path}: {error.reason}"
            answer = web.json_response({"error": words}, status=error.status)
        answer.headers.setdefault("Cache-Control", "no-store")
        seal(answer)
        return answer

    def _admit(self, request: web.Request) -> None:
        """Raises Refused."""
        check_same_site(request, self._names)
        self._token.admit(request)


def _json(found: Any) -> web.Response:
    try:
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(found), separators=(",", ":"))
    return web.Response(text=text, content_type="application/json")


def _finite(found: Any) -> Any:
    """With null for numbers that JSON has no form of: a run that went wrong is the one that is looked at."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    return [_finite(value) for value in found] if isinstance(found, list | tuple) else found


def _asked(request: web.Request, *names: str) -> tuple[str, ...]:
    if missing := [name for name in names if not request.query.get(name)]:
        raise BadQuery(f"{request.path} needs {', '.join(f'{name}=' for name in missing)}")
    return tuple(request.query[name] for name in names)


def _named(request: web.Request) -> tuple[str, str]:
    recording, name = _asked(request, "recording", "name")
    return recording, name


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 7):
        raise BadQuery(f"{name}={text[:40]!r} isn't the number of a step")
    return int(text)


def _figures(request: web.Request) -> list[str]:
    names = request.query.getall("name", [])
    if len(names) > _MOST_FIGURES:
        raise BadQuery(f"{len(names)} figures are asked for; ask for {_MOST_FIGURES} at most")
    return names
