"""Where a phone is and what it speaks, as plain data, and the connections of one process to phones.

The process that plays may be another than the one that leases phones: it is sent a `PhoneAddress` and opens it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from typing import Protocol as Interface

import aiohttp

from tapforge_api.environment import Adb, Settle
from tapforge_api.pool import Protocol

from ..protocol import Environment, EnvironmentFault, Task
from ..wire import TOKEN_VARIABLE, Fence
from .http import Deadlines, new_session
from .mobileworld_memory import MobileWorldPhones
from .tapforge_http import TapforgeClient

if TYPE_CHECKING:
    from .adb.client import AdbPhones


@dataclass(frozen=True, slots=True)
class PhoneOptions:
    """How phones of a run are used, whatever their address is."""

    #: when their screens count as settled after an action; phones of protocol tapforge know that by themselves
    settle: Settle = field(default_factory=Settle)
    #: for phones of protocol adb
    adb: Adb = field(default_factory=Adb)


@dataclass(frozen=True, slots=True)
class PhoneAddress:
    #: its slot, by which errors name it
    slot: str
    url: str
    deadlines: Deadlines = field(default_factory=Deadlines)
    #: of the claim by which it is used
    fence: Fence | None = None
    protocol: Protocol = "tapforge"
    options: PhoneOptions = PhoneOptions()


class Client(Environment, Interface):
    """A phone through its server. Lives as long as a lease."""

    async def health(self) -> str:
        """Which process of the server answers; "" where it doesn't say. Raises EnvironmentFault when it is sick or
        doesn't answer within its deadline."""
        ...


class PhoneClients:
    """Belongs to one event loop; connects when it is first asked. `close` it."""

    def __init__(self, traces: Sequence[aiohttp.TraceConfig] = ()) -> None:
        """`traces`: observers of the requests over HTTP."""
        self._traces = list(traces)
        self._session: aiohttp.ClientSession | None = None
        self._adb: AdbPhones | None = None
        self._mobileworld = MobileWorldPhones()

    def open(self, phone: PhoneAddress) -> Environment:
        """For one lease."""
        return self._client(phone)

    async def health(self, phone: PhoneAddress) -> str:
        """The instance of its server. Raises EnvironmentFault when it is sick or doesn't answer within its deadline."""
        return await self._client(phone).health()

    async def tasks(self, phone: PhoneAddress, limit: int) -> list[Task]:
        """Tasks that its server lists, `limit` at most; none where it has no list that may be asked for at any time."""
        client = self._client(phone)
        if isinstance(client, TapforgeClient):
            return (await client.tasks(limit))[:limit]
        if phone.protocol == "mobileworld":
            from .mobileworld import SUITE, MobileWorldClient

            assert isinstance(client, MobileWorldClient)
            names = await client.tasks(phone.deadlines.reset)
            # Its judges' 0.99 is a success.
            return [Task(suite=SUITE, template=name, threshold=0.99) for name in names[:limit]]
        if phone.protocol == "androidworld":
            from .androidworld import AndroidWorldClient

            assert isinstance(client, AndroidWorldClient)
            types = await client.tasks(phone.deadlines.reset)
            return [Task(suite="androidworld", template=name, params={"task_idx": "0"}) for name in types[:limit]]
        return []

    async def some_task(self, phone: PhoneAddress) -> Task:
        """The first that its server lists; over adb one that does nothing. Raises EnvironmentFault where there is none,
        because it has to be named."""
        if phone.protocol == "adb":
            return Task(suite="adb", template="nothing", params={"check": "echo well", "expect": "well"})
        if not (listed := await self.tasks(phone, 1)):
            raise EnvironmentFault(f"{phone.slot}: the server lists no tasks: name one (--task)")
        return listed[0]

    async def close(self) -> None:
        await self._mobileworld.close()
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._adb is not None:
            await self._adb.close()
            self._adb = None

    def _client(self, phone: PhoneAddress) -> Client:
        if self._session is None:
            self._session = new_session(self._traces)
        match phone.protocol:
            case "tapforge":
                token = os.environ.get(TOKEN_VARIABLE, "")
                return TapforgeClient(phone.url, self._session, phone.deadlines, phone.slot, phone.fence, token=token)
            case "androidworld":
                from .androidworld import AndroidWorldClient

                return AndroidWorldClient(phone.url, self._session, phone.deadlines, phone.slot)
            case "adb":
                from .adb.client import AdbClient, AdbPhones

                if self._adb is None:
                    self._adb = AdbPhones.of_environment(phone.slot)
                options = phone.options
                return AdbClient(phone.url, self._adb, phone.deadlines, phone.slot, options.adb, options.settle)
            case "mobileworld":
                from .mobileworld import MobileWorldClient

                return MobileWorldClient(
                    phone.url, self._session, self._mobileworld, phone.deadlines, phone.slot, phone.options.settle
                )
            case "osworld":
                from .osworld import osworld

                return osworld(phone.url, self._session, phone.deadlines, phone.slot, phone.options.settle)
            case "androidlab":
                from .androidlab import androidlab

                return androidlab(phone.url, self._session, phone.deadlines, phone.slot, phone.options.settle)
            case other:
                raise ValueError(f"{phone.slot}: there is no client for protocol {other!r} yet")
