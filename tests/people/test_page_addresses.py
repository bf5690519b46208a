"""Where the page listens, and how its token reaches it: links of other sites, pages side by side, every address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from chromium import tab

from tapforge_envs.people.page import Page
from tapforge_envs.people.serve import names_of
from tapforge_envs.serving.page_site import page_served

TOKEN = "0123456789abcdef"


@asynccontextmanager
async def served(token: str = TOKEN, host: str = "127.0.0.1") -> AsyncIterator[str]:
    page = Page([], names_of(host), asyncio.Event(), token=token)
    async with page_served(page.application(), host, 0) as address:
        yield address


async def test_a_link_of_another_site_opens_the_page_and_two_pages_keep_their_tokens(tmp_path: Path) -> None:
    other = "fedcba9876543210"
    async with served() as one, served(other) as two:
        links = f'<a id="one" href="{one}?token={TOKEN}">1</a> <a id="two" href="{two}?token={other}">2</a>'

        async def html(request: web.Request) -> web.Response:
            return web.Response(text=links, content_type="text/html")

        site = web.Application()
        site.router.add_get("/", html)
        async with page_served(site, "127.0.0.1", 0) as address:
            elsewhere = address.replace("127.0.0.1", "localhost")
            async with tab(elsewhere, tmp_path / "profile") as page:
                for name, opened in (("#one", one), ("#two", two)):
                    await page.call("Page.navigate", url=elsewhere)
                    await page.until(f"document.querySelector({name!r})")
                    await page.click(name)
                    await page.until(f"location.href === {opened!r} && document.title === 'tapforge phones'")
                for opened in (one, two):
                    await page.call("Page.navigate", url=opened)
                    await page.until(f"location.href === {opened!r} && document.title === 'tapforge phones'")


async def test_a_plus_in_a_token_may_stand_in_the_address() -> None:
    async with served("abc+def/0123456=") as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        answer = await _raw(port, "/?token=abc+def/0123456=")
        assert b" 303 " in answer.partition(b"\r\n")[0], answer


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "*"])
async def test_every_address_of_the_machine_has_the_one_port_that_is_printed(host: str) -> None:
    async with served(host=host) as address, aiohttp.ClientSession() as session:
        port = int(address.rstrip("/").rpartition(":")[2])
        names = ["127.0.0.1"] if host == "0.0.0.0" or not socket.has_dualstack_ipv6() else ["127.0.0.1", "[::1]"]
        for url in (address, *(f"http://{name}:{port}/" for name in names)):
            async with session.get(f"{url}api/catalog", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 200, url


async def test_no_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        assert b" 400 " in (await _raw(port, f"/?token={TOKEN}\0")).partition(b"\r\n")[0]
    assert TOKEN not in caplog.text


async def _raw(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer
