"""A caller of the broker: the three calls, nothing else. Every call has a deadline."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Claim:
    id: str
    secret: str
    slot: str
    fence: int


class Refused(RuntimeError):
    def __init__(self, status: int, text: str, retry_after: float = 0.0):
        super().__init__(f"{status} {text[:300]}")
        self.status = status
        #: seconds; 0 where the broker named none
        self.retry_after = retry_after
        said = json.loads(text) if text.startswith("{") else {}
        self.reason = str(said.get("reason", ""))


class Broker:
    """`async with Broker(url, ca) as broker`."""

    def __init__(self, url: str, authority: str, deadline: float = _DEADLINE):
        self._url = url
        self._tls = ssl.create_default_context(cadata=authority)
        self._deadline = deadline

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._deadline),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def acquire(self, path: str, token: str, request: str, slots: int = 1, wait: float = 10.0) -> list[Claim]:
        """Raises Refused; aiohttp.ClientError and TimeoutError where there is no answer."""
        ask = {"request": request, "slots": slots, "waitSeconds": wait, "ttlSeconds": 300}
        said = await self._post(path, ask, {"Authorization": f"Bearer {token}"})
        return [Claim(c["id"], c["secret"], c["slot"], c["fence"]) for c in said["claims"]]

    async def renew(self, claims: list[Claim]) -> list[str]:
        """Their states."""
        said = await self._post("/v1/claims/renew", {"claims": [{"id": c.id, "secret": c.secret} for c in claims]})
        return [claim["state"] for claim in said["claims"]]

    async def release(self, claims: list[Claim]) -> None:
        given = [{"id": c.id, "secret": c.secret, "episodes": 1, "verdict": "clean"} for c in claims]
        await self._post("/v1/claims/release", {"claims": given})

    async def _post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        async with self._session.post(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        ) as answer:
            text = await answer.text()
            if answer.status != 200:
                after = answer.headers.get("Retry-After", "")
                raise Refused(answer.status, text, float(after) if after.isdigit() else 0.0)
            return json.loads(text)
