"""Access to the metrics, which name the pools and runs of all namespaces.

1. With `--metrics-token` a caller shows a bearer token that the API server knows (TokenReview), and RBAC lets its
   bearer `get` the path /metrics (SubjectAccessReview): the ClusterRole `tapforge-metrics-reader`, or the one that
   a Prometheus has already to scrape the API server and kubelets.
2. An answer is used for `_TRUST` seconds. While the API server can't be asked, the last one counts, however old: an
   outage is when metrics are needed.
3. At most `_AT_ONCE` questions are under way; wrong tokens keep neither claims nor renewals waiting, which have others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from aiohttp import web

from tapforge_operator.broker.auth import AnswerCache, token_key
from tapforge_operator.broker.writer import Api
from tapforge_operator.kube.client import ApiError, path

_TRUST: Final = 60.0
_AT_ONCE: Final = 4
_MAX_TOKEN: Final = 16_384


class MetricsAccess:
    def __init__(self, api: Api, monotonic: Callable[[], float] = time.monotonic):
        self._api = api
        self._gate = asyncio.Semaphore(_AT_ONCE)
        #: "" for a caller that may read them, else why not
        self._known: AnswerCache[bytes, tuple[int, str]] = AnswerCache(monotonic)

    async def refusal(self, request: web.Request) -> web.Response | None:
        """None: the caller may read them."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > _MAX_TOKEN:
            return _said(401, "metrics need the header `Authorization: Bearer <token>`")
        key = token_key(token)
        try:
            status, why = await self._known.get(key, lambda: self._ask(token), lambda found: found[0] == 200, _TRUST)
        except ApiError as error:
            status, why = self._known.last(key) or (503, f"the API server could not check the token: {error}")
        return None if status == 200 else _said(status, why)

    async def _ask(self, token: str) -> tuple[int, str]:
        async with self._gate:
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
            said = await self._api.create(path("tokenreviews", group="authentication.k8s.io/v1"), body)
            status = said.get("status") or {}
            user = status.get("user") or {}
            if not status.get("authenticated") or not user.get("username"):
                return 401, f"the token was not accepted: {status.get('error') or 'it is not valid'}"
            spec = {
                "user": user["username"],
                "uid": user.get("uid") or "",
                "groups": list(user.get("groups") or ()),
                "extra": user.get("extra") or {},
                "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
            }
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
            said = await self._api.create(path("subjectaccessreviews", group="authorization.k8s.io/v1"), body)
        status = said.get("status") or {}
        if status.get("allowed") and not status.get("denied"):
            return 200, ""
        return 403, (
            f"{user['username']} may not get /metrics: bind the ClusterRole tapforge-metrics-reader to it, or another "
            "one that has this nonResourceURL"
        )


def _said(status: int, why: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{why}\n", headers=headers)
