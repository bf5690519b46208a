"""Browsers and pages that die, hang or are not there: named faults, and the next reset works."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from tests.web.conftest import tap, task

from tapforge_envs import protocol as p
from tapforge_envs.web.cdp import CdpError, Connection, Gone
from tapforge_envs.web.chromium import BrowserError, command
from tapforge_envs.web.environment import PageOptions, WebEnvironment
from tapforge_envs.web.pages import Pages


async def solved(page: WebEnvironment) -> bool:
    seen = await page.reset(task("click-test", 1))
    await page.step(tap(seen, id="subbtn"), 0)
    return (await page.evaluate()).value == 1


@pytest_asyncio.fixture
async def two() -> AsyncIterator[tuple[Pages, WebEnvironment, WebEnvironment]]:
    pages = Pages()
    options = PageOptions(call_seconds=10)
    yield pages, WebEnvironment("web-0", pages, options), WebEnvironment("web-1", pages, options)
    await pages.close()


async def test_a_page_that_crashes_is_a_fault_of_its_slot_alone(
    two: tuple[Pages, WebEnvironment, WebEnvironment],
) -> None:
    pages, page, other = two
    await page.reset(task("click-test", 1))
    there = await other.reset(task("click-test", 1))
    instance, browser = page.instance, pages.pid
    assert page._page is not None
    page._page.post("Page.crash", {})
    with pytest.raises(p.EnvironmentFault, match=r"web-0: step 0: the page crashed"):
        await page.step(p.Wait(seconds=0), 0)
    assert page.instance != instance
    with pytest.raises(p.EnvironmentFault, match=r"web-0: evaluate: no task"):
        await page.evaluate()
    await other.step(tap(there, id="subbtn"), 0)
    assert (await other.evaluate()).value == 1
    assert await solved(page)
    assert (pages.pid, pages.replaced) == (browser, 0)


async def test_a_browser_that_is_killed_is_replaced(two: tuple[Pages, WebEnvironment, WebEnvironment]) -> None:
    pages, page, other = two
    await page.reset(task("click-test", 1))
    await other.reset(task("click-test", 1))
    instances = {page.instance, other.instance}
    assert pages.pid is not None
    os.kill(pages.pid, signal.SIGKILL)
    for slot in (page, other):
        with pytest.raises(p.EnvironmentFault, match=rf"{slot.slot}: step 0: the browser closed the connection"):
            await slot.step(p.Wait(seconds=0), 0)
    assert await asyncio.gather(solved(page), solved(other)) == [True, True]
    assert not {page.instance, other.instance} & instances
    assert pages.replaced == 1


async def test_a_browser_that_died_between_episodes_costs_none(
    two: tuple[Pages, WebEnvironment, WebEnvironment],
) -> None:
    pages, page, _ = two
    assert await solved(page)
    assert pages.pid is not None
    os.kill(pages.pid, signal.SIGKILL)
    for _ in range(3000):
        if page.sick:
            break
        await asyncio.sleep(0.01)
    assert page.sick
    await page.restore()
    assert not page.sick
    assert await solved(page)


async def test_a_page_that_hangs_is_past_its_deadline_and_is_replaced() -> None:
    pages = Pages()
    page = WebEnvironment("web-0", pages, PageOptions(call_seconds=10))
    seen = await page.reset(task("click-test", 1))
    await page._evaluate("document.getElementById('subbtn').addEventListener('mousedown', () => { while (true); })")
    page._options = PageOptions(call_seconds=1)
    with pytest.raises(p.EnvironmentFault, match=r"web-0: step 0: .* no answer within 1 s") as fault:
        await page.step(tap(seen, id="subbtn"), 0)
    assert fault.value.reason is p.Reason.DEADLINE
    page._options = PageOptions(call_seconds=10)
    assert await solved(page)
    await pages.close()


async def test_a_script_that_fails_is_no_observation(two: tuple[Pages, WebEnvironment, WebEnvironment]) -> None:
    _, page, _ = two
    await page.reset(task("click-test", 1))
    await page._evaluate("void (document.body.getBoundingClientRect = () => { throw new Error('broken page'); })")
    with pytest.raises(p.EnvironmentFault, match=r"web-0: step 0: the page's script failed: Error: broken page"):
        await page.step(p.Wait(seconds=0), 0)
    assert await solved(page)


async def test_a_machine_without_a_browser_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserError, match="apt install chromium"):
        command()
    page = WebEnvironment("web-0", Pages())
    with pytest.raises(p.EnvironmentFault, match=r"web-0: reset: no Chromium on PATH"):
        await page.reset(task("click-test", 1))


async def test_a_browser_that_does_not_start_is_named_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "chromium"
    fake.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    page = WebEnvironment("web-0", Pages())
    with pytest.raises(p.EnvironmentFault, match=r"web-0: reset: Chromium was not ready .* no display here"):
        await page.reset(task("click-test", 1))


async def test_a_browser_ends_with_the_process_that_started_it() -> None:
    script = (
        "import asyncio, os\nfrom tapforge_envs.web.chromium import Browser\n"
        "async def main():\n    print((await Browser.start()).pid, flush=True)\n    os._exit(1)\nasyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    command_line = Path(f"/proc/{int(out)}/cmdline")
    for _ in range(600):  # a zombie has none
        if not command_line.exists() or not command_line.read_bytes():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"the browser {int(out)} still runs")


# --- the client of the DevTools protocol, against a browser that lies ---


@pytest.mark.parametrize(
    "answer,error,words",
    [
        (None, TimeoutError, "Page.enable has no answer within 0.2 s"),
        ("{", Gone, "what is not JSON"),
        ("[]", Gone, "not a message"),
        ('{"id": 1, "error": {"message": "no such page"}}', CdpError, "no such page"),
        ('{"id": 1, "error": 7}', CdpError, "7"),
        ('{"id": 1, "result": []}', CdpError, "not an object"),
        ('{"id": [], "result": {}}', TimeoutError, "no answer"),
        ('{"id": 99, "result": {}}', TimeoutError, "no answer"),
        ('{"method": 7, "sessionId": "s"}', Gone, "not a message"),
        (b"\x00" * 100, TimeoutError, "no answer"),
        ("x" * 5000, Gone, "connection"),
        ("close", Gone, "closed the connection"),
    ],
)
async def test_what_a_browser_sends_is_a_bounded_named_error(
    answer: str | bytes | None, error: type[Exception], words: str
) -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        if answer == "close":
            await socket.close()
        elif isinstance(answer, bytes):
            await socket.send_bytes(answer)
        elif answer is not None:
            await socket.send_str(answer)
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as http:
        connection = await Connection.open(http, f"http://127.0.0.1:{runner.addresses[0][1]}/", 5, max_message=4096)
        page = connection.attach("s")
        with pytest.raises(error, match=words):
            await page.call("Page.enable", seconds=0.2 if error is TimeoutError else 5)
        if error is Gone:
            with pytest.raises(Gone):
                await page.call("Page.enable", seconds=5)
        await connection.close()
    await runner.cleanup()
