"""The page in Chromium, on simulated phones: several phones, tabs, and lists that come late."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from chromium import Tab, tab

from tapforge_envs.people.page import PAGE_HEADER, Page
from tapforge_envs.phone.page_phone import SharedPhone
from tapforge_envs.phone.serve import Ports, serving
from tapforge_envs.phone.slot import Slot
from tapforge_envs.serving.page_site import page_served

STEPS = "(async () => (await ask(at('', {}))).steps)()"
PORTS = Ports(page=0, tapforge=None, mobileworld=None, adb=None)


async def choose(page: Tab, number: int) -> None:
    await page.value(f"$('number').value = '{number}'; $('number').dispatchEvent(new Event('change'))")


async def test_what_was_done_on_a_phone_reaches_that_phone_and_tabs_have_names_of_their_own(tmp_path: Path) -> None:
    async with (
        serving(2, 96, 160, ("quickstart",), PORTS) as served,
        tab(served.page, tmp_path / "profile") as page,
    ):
        await page.until("tasks && state && !$('start').disabled")
        await page.click("#start")
        await page.until("state.task && state.steps === 0")
        # Another phone is chosen before the actions on this one were sent.
        await page.value("act({type: 'home'}); act({type: 'home'}); $('number').value = '1';"
                         "$('number').dispatchEvent(new Event('change')); queue")  # fmt: skip
        await page.until("phone === 1 && state && state.task === null")
        assert [await page.value(STEPS.format(number)) for number in (0, 1)] == [2, 0]
        await choose(page, 0)
        await page.until("state && state.task && state.steps === 2")
        # A copy of the tab copies what is stored.
        assert await page.value("sessionStorage.getItem('page')") is None
        name = await page.value("pageName")
        await page.call("Page.reload")
        await page.until("typeof state === 'object' && state && state.task && !state.held")
        assert await page.value("pageName") == name
        assert page.complaints == []


async def test_a_list_that_can_not_be_had_is_asked_for_again(tmp_path: Path) -> None:
    async with serving(1, 96, 160, ("quickstart",), PORTS) as served, tab(served.page, tmp_path / "profile") as page:
        await page.call("Network.enable")
        for blocked in ("*/api/catalog", "*/phones/0/catalog"):
            await page.call("Network.setBlockedURLs", urls=[blocked])
            await page.call("Page.reload")
            await asyncio.sleep(0.5)
            await page.until("document.readyState === 'complete' && typeof tasks === 'object' && tasks === null")
            await page.call("Network.setBlockedURLs", urls=[])
            await page.until("tasks && state && !$('start').disabled")


async def test_a_page_that_shows_another_phone_keeps_the_one_that_it_plays_on() -> None:
    phones = [SharedPhone(Slot(96, 160, ("quickstart",)), {}, number) for number in range(2)]
    page = Page(phones, ["127.0.0.1"], asyncio.Event(), timeout=0.5)
    async with page_served(page.application(), "127.0.0.1", 0) as address, aiohttp.ClientSession() as session:
        at, mine = f"{address}api/phones", {PAGE_HEADER: "one"}
        body = {"suite": "quickstart", "template": "open"}
        async with session.post(f"{at}/0/task", json=body, headers=mine) as answer:
            assert answer.status == 200
        for _ in range(20):
            async with session.get(f"{at}/1", headers=mine) as answer:
                assert answer.status == 200
            await asyncio.sleep(0.1)
        async with session.get(f"{at}/0", headers={PAGE_HEADER: "two"}) as answer:
            assert (await answer.json())["held"]
