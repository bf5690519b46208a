"""All watches: they tell the world what happens, and write nothing into the cluster. Slots have one of their own
(slot_watch.py), the leader's Lease where no other hears it (own_lease.py), everything else is kopf's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterator
from typing import Any, cast

import kopf

from .kube.connection import connection
from .own_lease import OwnLease
from .slot_watch import SlotWatch
from .spectator import look_on
from .world import World


async def watch(
    world: World,
    slots: SlotWatch,
    namespaces: Collection[str],
    begun: asyncio.Event,
    end: asyncio.Event,
    own: OwnLease | None = None,
) -> None:
    """Watches the namespaces, all of them when none is named; sets `begun`, and returns when `end` is set."""
    # Begun before kopf, which ends every task that it finds afterwards; with the tasks that this one begins.
    hearing = {asyncio.create_task(slots.run(), name="slots")}
    if own is not None:
        hearing.add(asyncio.create_task(own.run(), name="the leader's Lease"))
    await asyncio.sleep(0)
    for task in hearing:
        task.add_done_callback(lambda _: end.set())
    try:
        await _watch_others(world, namespaces, begun, end)
    finally:
        for task in hearing:
            task.cancel()
        done, _ = await asyncio.wait(hearing)
    for task in done:
        if not task.cancelled():
            task.result()


async def _watch_others(world: World, namespaces: Collection[str], begun: asyncio.Event, end: asyncio.Event) -> None:
    settings = kopf.OperatorSettings()
    look_on(settings)
    settings.scanning.disabled = True  # needs no right to list namespaces and definitions
    # Below the API server's own limit, so that both sides agree that a watch is over.
    settings.watching.server_timeout = 270
    settings.watching.client_timeout = 300
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Patience()
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: object) -> kopf.ConnectionInfo:
        return connection(settings)

    world.watch(registry, settings)
    await kopf.operator(
        registry=registry,
        settings=settings,
        # Nobody sees it, but without one kopf asks for the name of its user, and a container's may have none.
        identity=cast(Any, "tapforge-operator"),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        ready_flag=begun,
        stop_flag=end,
    )


class _Patience:
    """Pauses between attempts, seconds. They have no end: a namespace that may not be read (any more), or an API server
    that fails for an hour, is no reason for all other watches to end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(15))
