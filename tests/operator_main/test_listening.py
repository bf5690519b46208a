"""The operator's servers are reached by IPv4 and by IPv6, on one port, with the certificate that callers verify."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web

from tapforge_operator.broker import tls
from tapforge_operator.broker.material import NOTHING, completed
from tapforge_operator.server import EVERYWHERE, Connections, listen


def _machine(host: str) -> bool:
    """The machine has such addresses."""
    if not host.startswith("["):
        return True
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("where", [EVERYWHERE, "127.0.0.1"])
async def test_who_reaches_it(host: str, where: str) -> None:
    material = completed(NOTHING, ["localhost", "127.0.0.1", "::1"], datetime.now(UTC))

    async def here(_: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", here)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await listen(runner, where, 0, tls.context(material), connections=Connections(8))
        assert len(runner.addresses) == 1
        trust = ssl.create_default_context(cadata=material.ca.decode())
        url = f"https://{host}:{runner.addresses[0][1]}/"
        if host == "[::1]" and (where != EVERYWHERE or not _machine(host)):
            with pytest.raises(aiohttp.ClientConnectorError):
                await _get(url, trust)
        else:
            assert await _get(url, trust) == "here"
    finally:
        await runner.cleanup()


async def _get(url: str, trust: ssl.SSLContext) -> str:
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trust) as answer:
        return await answer.text()


async def test_a_machine_without_ipv6_is_listened_to_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await listen(runner, EVERYWHERE, 0, connections=Connections(8))
        assert runner.addresses[0][0] == "0.0.0.0"
    finally:
        await runner.cleanup()
