"""Where a phone is, as plain data, and the connections of one process to phones.

Whoever plays may be another process than the one that leases phones: it is sent a `PhoneAddress` and opens it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from ..protocol import Environment
from ..wire import Fence
from .tapforge_http import Deadlines, TapforgeClient, new_session


@dataclass(frozen=True, slots=True)
class PhoneAddress:
    #: its slot, by which errors name it
    slot: str
    url: str
    deadlines: Deadlines = field(default_factory=Deadlines)
    #: of the claim by which it is used
    fence: Fence | None = None


class PhoneClients:
    """Belongs to one event loop; connects when it is first asked. `close` it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def open(self, phone: PhoneAddress) -> Environment:
        """For one lease."""
        return self._client(phone)

    async def health(self, phone: PhoneAddress) -> str:
        """The instance of its server. Raises EnvironmentFault when it is sick or doesn't answer within its deadline."""
        return await self._client(phone).health()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self, phone: PhoneAddress) -> TapforgeClient:
        if self._session is None:
            self._session = new_session()
        return TapforgeClient(phone.url, self._session, phone.deadlines, phone.slot, phone.fence)
