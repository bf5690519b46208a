"""A broker behind its port, with the API server that it asks in memory."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from dataclasses import replace

import aiohttp
from aiohttp import web
from callers import Callers
from claim_cluster import KEYS, TIMEOUTS, Broker, Cluster, Lab

from tapforge_api.claims import Refusal
from tapforge_operator.broker import http, tls
from tapforge_operator.broker.auth import Auth
from tapforge_operator.broker.http import Forward
from tapforge_operator.broker.waiting import WaitingRoom, limits_of
from tapforge_operator.server import Connections, listen

#: a broker behind a socket lives by the machine's time: it never gives up what it has begun
LONG_TIMEOUTS = replace(TIMEOUTS, settle=300.0, siblings=60.0, release=300.0, refresh=300.0)
#: what the certificate is for, wherever the broker is reached
NAME = "tapforge-broker.tapforge-system.svc"
CLAIMS = "/v1/namespaces/lab/pools/phones/claims"


class Api:
    """Who may call, and the phones, in one API server."""

    def __init__(self, callers: Callers, door):
        self._callers = callers
        self._door = door

    async def get(self, path: str):
        return await (self._callers if path in self._callers.objects else self._door).get(path)

    async def create(self, path: str, body):
        return await (self._callers if "review" in path else self._door).create(path, body)

    async def patch(self, path: str, body):
        return await self._door.patch(path, body)

    async def delete(self, path: str, body=None):
        return await self._door.delete(path, body)


class House:
    """A broker behind its port."""

    def __init__(self, lab: Lab, leading: bool = True):
        self.lab = lab
        self.broker = Broker(lab, timeouts=LONG_TIMEOUTS)
        self.broker.leading = leading
        self.callers = Callers()
        self.callers.pools = {}
        self.callers.add_run()
        self.token = self.callers.token_of("train-head")
        self.auth = Auth(Api(self.callers, self.broker.door), self.broker.claims.find_pool)
        self.url = self.address = ""
        self.room = WaitingRoom(limits_of(4096))
        #: whether the leader answered, of what was passed on
        self.passed_on: list[bool] = []
        self.session: aiohttp.ClientSession
        self.trust: ssl.SSLContext

    async def open(
        self,
        material: tls.Material | None = None,
        leader: Callable[[], str] | None = None,
        connections: int = 4096,
    ) -> tls.Material:
        """`leader`: where this one passes its callers on to."""
        self.material = material = material or await own_material(["localhost", "127.0.0.1", NAME])
        self.trust = ssl.create_default_context(cadata=material.ca.decode())
        self.forward = Forward(leader, "standby", NAME, self.trust, self.passed_on.append) if leader else None
        app = http.application(self.broker.claims, self.auth, KEYS.proved, self.room, self.forward)
        self.add_to(app)
        self.runner = http.runner(app)
        await self.runner.setup()
        self.context = tls.context(material)
        self.connections = Connections(connections)
        await listen(self.runner, "127.0.0.1", 0, self.context, connections=self.connections)
        self.address = f"127.0.0.1:{self.runner.addresses[0][1]}"
        self.url = f"https://{self.address}"
        self.session = self.caller()
        return material

    def add_to(self, app: web.Application) -> None:
        """What a test has at the same port."""

    def caller(self, address: str = "127.0.0.1") -> aiohttp.ClientSession:
        """Somebody at that address of this machine."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.trust, limit=0, local_addr=(address, 0)))

    async def close(self) -> None:
        await self.session.close()
        if self.forward is not None:
            await self.forward.close()
        await self.broker.end()
        await self.runner.cleanup()

    async def post(
        self, path: str, body, token: str | None = None, session: aiohttp.ClientSession | None = None, **more
    ):
        headers = {"Authorization": f"Bearer {self.token if token is None else token}", **more.pop("headers", {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (session or self.session).post(self.url + path, data=data, headers=headers, **more) as response:
            return response.status, await response.json(), response.headers

    async def refused(self, path: str, body, status: int, reason: str, token: str | None = None) -> str:
        got, answer, _ = await self.post(path, body, token)
        refusal = Refusal.model_validate(answer)
        assert (got, refusal.reason) == (status, reason), refusal
        return refusal.message


async def own_material(certified: list[str]) -> tls.Material:
    """Of an authority of its own."""
    return await tls.ensure(_Direct(Cluster()), "tapforge-system", certified)


class _Direct:
    def __init__(self, cluster: Cluster):
        self.cluster = cluster

    async def get(self, path):
        return self.cluster.get(path)

    async def create(self, path, body):
        return self.cluster.create(path, body)

    async def patch(self, path, body):
        return self.cluster.patch(path, body)

    async def delete(self, path, body=None):
        return self.cluster.delete(path, body)
