"""Phones of this process behind the page, and who plays on it without a browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from phones import PATIENT, Phones, phones

from tapforge_envs.bridge.page_phone import BridgedPhone
from tapforge_envs.bridge.slot import BridgeSlot
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.people.page import PAGE_HEADER, TIMEOUT, Page
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.protocol import Action, Task
from tapforge_envs.serving.page_site import page_served
from tapforge_trainer.run.people import PeopleFolder


@dataclass
class Pages:
    """`call` as a page of this name does."""

    address: str
    behind: Phones
    slots: list[BridgeSlot]
    tasks: Sequence[Task]
    session: aiohttp.ClientSession

    async def call(self, name: str, body: object = None, page: str = "one", **headers: str) -> tuple[int, dict]:
        url, sent = f"{self.address}api/phones/0{name}", {PAGE_HEADER: page, **headers}
        ask = self.session.get(url, headers=sent) if body is None else self.session.post(url, json=body, headers=sent)
        async with ask as answer:
            return answer.status, await answer.json()

    async def start(self, number: int = 0, page: str = "one", **more: Any) -> tuple[int, dict]:
        return await self.call("/task", {"key": self.tasks[number].key, **more}, page)

    async def act(self, action: Action, page: str = "one") -> tuple[int, dict]:
        return await self.call("/act", {"action": action.model_dump()}, page)


@asynccontextmanager
async def pages(
    folder: Path, tasks: Sequence[Task], *, own_goals: bool = False, token: str = "", silence: float = TIMEOUT
) -> AsyncIterator[Pages]:
    """One phone of 96x160 pixels. `silence`: seconds after which a page counts as closed."""
    clients, stopping = PhoneClients(), asyncio.Event()
    async with phones(1) as behind, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        phone = PhoneAddress("phone", behind.url(), PATIENT)
        slot = BridgeSlot("phone", lambda: clients.open(phone), lambda: clients.health(phone), PATIENT)

        async def listing() -> Sequence[Task]:
            return tasks

        writer = PeopleFolder(folder, "tapforge", [behind.url()])
        shown = BridgedPhone(slot, listing, own_goals=own_goals)
        page = Page([shown], ["127.0.0.1"], stopping, writer, token, silence)
        try:
            async with page_served(page.application(), "127.0.0.1", 0) as address:
                served = Pages(address, behind, [slot], tasks, session)
                if not token:
                    await served.call("/catalog")
                yield served
                stopping.set()
        finally:
            await slot.stop(1.0)
            await clients.close()
            writer.close()


def demonstrated(task: Task, width: int = 96, height: int = 160) -> list[Action]:
    phone = catalog.phone_for(task.suite, width, height)
    phone.begin(task.seed, catalog.rules_of(task))
    done = []
    for action in demonstration(phone, catalog.template_of(task), task.params):
        phone.act(action)
        done.append(action)
    return done
