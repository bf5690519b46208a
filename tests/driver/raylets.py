"""Several raylets with made-up GPUs on this machine, and the placements of a run on them: prints what was seen as JSON.
A process of its own: one process can use one Ray cluster only."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ |= {
    "RAY_prestart_worker_first_driver": "0",  # else each raylet begins with a process for each core
    "RAY_worker_niceness": "0",  # as policy.py has it: behind everything else workers get next to nothing
}

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.model_source.fake_hub import FakeHub, Repository
from tests.model_source.small_model import FIRST, REPO, files

from tapforge_trainer.model_source.ref import ModelRef
from tapforge_trainer.placement import placement
from tapforge_trainer.placement.placement import ActorPlacement, PlacementError, bundles_of
from tapforge_trainer.placement.settings import LearnerSettings, on_this_node

#: GPUs of each of the nodes, and cores, which nothing uses
GPUS, CPUS = 4, 16


class Who:
    def seen(self) -> dict[str, Any]:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {"node": ray.get_runtime_context().get_node_id(), "devices": devices.split(",")}


def started(place: ActorPlacement) -> Any:
    return ray.remote(Who).options(runtime_env={"env_vars": dict(place.environment)}, **place.options).remote()


def seen(actors: list[Any]) -> list[dict[str, Any]]:
    return ray.get([actor.seen.remote() for actor in actors], timeout=120)


async def case(ranks: int, engines: int, parallel: int, *, colocated: bool) -> dict[str, Any]:
    placed = await placement.place(bundles_of(ranks, engines, parallel, colocated=colocated), 60.0, print_error)
    actors = [[started(place) for place in places] for places in (placed.engines, placed.ranks)]
    found = {"engines": seen(actors[0]), "ranks": seen(actors[1])}
    # An engine that dies is started again in its own place.
    if actors[0]:
        ray.kill(actors[0][0])
        actors[0][0] = started(placed.engines[0])
        found["again"] = seen(actors[0][:1])[0]
    for actor in (*actors[0], *actors[1]):
        ray.kill(actor)
    placed.close()
    found["free"] = free()
    return found


def free(gpus: float = 2 * GPUS) -> float:
    """GPUs that are free, as soon as all are."""
    end = time.monotonic() + 60
    while (now := ray.available_resources().get("GPU", 0.0)) < gpus and time.monotonic() < end:
        time.sleep(0.2)
    return now


async def too_few() -> dict[str, Any]:
    told: list[str] = []
    found: dict[str, Any] = {}
    for name, bundles in {
        "in all": bundles_of(8, 1, 1, colocated=False),
        "by node": bundles_of(1, 1, 5, colocated=False),
    }.items():
        try:
            await placement.place(bundles, 0.0, told.append)
        except PlacementError as error:
            found[name] = str(error)
    held = await placement.place(bundles_of(5, 0, 1, colocated=False), 60.0, print_error)
    try:
        await placement.place(bundles_of(2, 1, 2, colocated=False), 0.0, told.append)
    except PlacementError as error:
        found["held"] = str(error)
    held.close()
    return found | {"told": told, "free": free()}


async def lost(cluster: Cluster, nodes: dict[str, Any]) -> dict[str, Any]:
    """An engine's node goes, and another one comes."""
    placed = await placement.place(bundles_of(4, 1, 4, colocated=False), 60.0, print_error)
    engine = started(placed.engines[0])
    before = seen([engine])[0]
    cluster.remove_node(nodes.pop(before["node"]))
    try:
        ray.get(engine.seen.remote(), timeout=120)
    except ray.exceptions.RayActorError:
        died = True
    again = started(placed.engines[0])
    fresh = add(cluster)
    after = seen([again])[0]
    ray.kill(again)
    placed.close()
    state = placement_group_table(placed.group)["state"]
    return {"before": before, "after": after, "died": died, "fresh": fresh.node_id, "state": state, "free": free()}


class Rank:
    """As much of one as fetches the model."""

    def folder(self, settings: LearnerSettings) -> tuple[str, str]:
        return on_this_node(settings).model, os.environ["HF_HUB_OFFLINE"]


async def models(nodes: dict[str, Any]) -> dict[str, Any]:
    """Three processes on each node want the same model of a hub."""
    hub = FakeHub({REPO: Repository(files(), {"main": FIRST})})
    endpoint = hub.start()
    settings = LearnerSettings("/of/the/driver", (1,), source=ModelRef("hub", REPO, FIRST, endpoint=endpoint))
    calls = {}
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        actors = [ray.remote(Rank).options(num_cpus=0, scheduling_strategy=where).remote() for _ in range(3)]
        calls[node] = [actor.folder.remote(settings) for actor in actors]
    found = [sorted(set(ray.get(asked, timeout=200))) for asked in calls.values()]
    hub.stop()
    return {"folders": found, "sent": dict(hub.sent), "free": free()}


#: of the head, at most
STARTS = 3


def add(cluster: Cluster, home: str = "") -> Any:
    """`home`: where processes of the node keep what they fetch."""
    own = {"env_vars": {"HF_HOME": home}} if home else {}
    return cluster.add_node(num_cpus=CPUS, num_gpus=GPUS, object_store_memory=80 << 20, **own)


def print_error(words: str) -> None:
    print(words, file=sys.stderr)


def begun() -> Cluster:
    """A cluster of a head. Ray gives its node 30 s to come up, which can't be set, and a busy machine takes longer."""
    quiet = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    for tries_left in reversed(range(STARTS)):
        try:
            return Cluster(initialize_head=True, head_node_args=quiet)
        except Exception as error:  # Ray raises nothing narrower
            if not tries_left or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


async def main() -> None:
    start = time.monotonic()
    cluster = begun()
    try:
        nodes = {node.node_id: node for node in (add(cluster, f"{sys.argv[1]}/{name}") for name in "ab")}
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        parts: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "apart": lambda: case(4, 2, 2, colocated=False),
            "spread": lambda: case(6, 1, 2, colocated=False),
            "colocated": lambda: case(4, 4, 1, colocated=True),
            "colocated in twos": lambda: case(8, 4, 2, colocated=True),
            "learner alone": lambda: case(3, 0, 1, colocated=True),
            "too few": too_few,
            "models": lambda: models(nodes),
            "lost": lambda: lost(cluster, nodes),
        }
        found = {}
        for name, part in parts.items():
            print_error(f"{name}, after {time.monotonic() - start:.0f} s")
            found[name] = await part()
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
