"""All watches but those of runs: they tell the world what happens, and write nothing into the cluster.

Most are kopf's. Slots are by far the most numerous objects and change the most often, so they don't take kopf's way, on
which an event costs five times as much and every object keeps a task: a thousand Pods that change at once are digested
in a tenth of a second, and claims are answered in between. The leader's Lease has a watch where no other hears it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, cast

import kopf

from . import names
from .kube.client import Client
from .kube.connection import connection
from .kube.reflector import Kind, Reflector
from .spectator import look_on
from .world import LEASES, MEMBERS, World, within

_SLOTS: Final = Kind("slots", "pods", MEMBERS)
_LEASE: Final = Kind("the leader's Lease", "leases", f"{names.MANAGED_BY}={names.OPERATOR}", LEASES)
#: a watch that says nothing for so long, while a leader renews every few seconds, is dead
_SILENCE: Final = 25.0


def slot_reflector(world: World, client: Client, spaces: tuple[str, ...], heard: Callable[[], None]) -> Reflector:
    """`spaces`: namespaces, "" for all of them. `heard` is called whenever a list or a watch said anything."""
    return Reflector(
        client,
        _SLOTS,
        spaces,
        world.saw_pod,
        lambda space, listed, as_of: world.slots.replace(listed, as_of, within(space)),
        heard=heard,
    )


def lease_reflector(client: Client, namespace: str, renewed: Callable[[], None]) -> Reflector:
    """For an operator whose pools are in other namespaces than its own: `renewed` is called whenever the leader renewed
    its Lease, which it does every few seconds. That shows that watches live, also while the pools are so quiet that
    nothing else happens; otherwise a list of everything would have to answer their silence, every half a minute."""
    return Reflector(client, _LEASE, (namespace,), lambda _, __: renewed(), silence=_SILENCE)


async def watch(
    world: World,
    reflectors: Sequence[Reflector],
    namespaces: Collection[str],
    begun: asyncio.Event,
    end: asyncio.Event,
) -> None:
    """Watches the namespaces, all of them when none is named, and what the reflectors follow; sets `begun`, and returns
    when `end` is set."""
    # Begun before kopf, which ends every task that it finds afterwards; with the tasks that these begin.
    hearing = {asyncio.create_task(one.run(), name="a reflector") for one in reflectors}
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
