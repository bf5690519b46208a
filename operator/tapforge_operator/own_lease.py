"""Hears the leader's Lease where nothing else does: an operator whose pools are in other namespaces than its own.

The leader renews its Lease every few seconds. Hearing of it shows that watches live, also while the pools are so quiet
that nothing else happens; otherwise a list of everything would have to answer their silence, every half a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from . import names
from .kube.client import ApiError, Client, path
from .world import LEASES

log = logging.getLogger(__name__)

#: between two watches
_AGAIN: Final = 0.5
_PAUSE: Final = 5.0
#: a watch that says nothing for so long, while a leader renews every few seconds, is dead
_SILENCE: Final = 25.0


class OwnLease:
    def __init__(self, client: Client, namespace: str, heard: Callable[[], None]):
        """`namespace`: of the Lease. `heard` is called whenever it was renewed."""
        self._client = client
        self._where = path("leases", namespace, group=LEASES)
        self._heard = heard

    async def run(self) -> None:
        """Until cancelled."""
        selector = f"{names.MANAGED_BY}={names.OPERATOR}"
        while True:
            try:
                # From any version on: what is there now is told first.
                async for event in self._client.watch(self._where, selector, since="0", silence=_SILENCE):
                    if event["type"] != "BOOKMARK":
                        self._heard()
                await asyncio.sleep(_AGAIN)
            except ApiError as error:
                log.info("the leader's Lease is not heard for now: %s", error)
                await asyncio.sleep(_PAUSE)
