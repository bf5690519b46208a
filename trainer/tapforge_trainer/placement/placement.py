"""Which GPUs of which nodes learner ranks and engines get.

- One placement group holds all of a run's GPUs: it comes as a whole or not at all, so that no process of a run waits
  for a GPU that another one of it holds.
- A bundle is of one node. Apart, each engine has one with `tensor_parallel` GPUs, and each rank one with its GPU.
  Colocated, an engine's bundle is that of its ranks, too.
- Engines and ranks are numbered by node and GPU: neighbours among the ranks are of one node, and colocated, rank k has
  the k-th GPU of the engines.
- An engine that is started again gets its bundle again, on whichever node that is by then.
- Apart, Ray says to each process which GPUs it sees. Colocated, two processes see the same GPU, of which Ray's own
  counting knows nothing: the group's probes say which it is, and the processes get it in their environment.
- Every wait says for what, and has an end. The group goes when the run closes it, or with the driver.

On CPUs there is no group: Ray places actors as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .settings import EngineSettings, LearnerSettings

#: between two looks at whether the group is there, seconds
_LOOK: Final = 1.0
#: for a probe of a bundle that is there: a process of Ray's has to start, seconds
_PROBE: Final = 300.0


class PlacementError(RuntimeError):
    """The GPUs are not there in time."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one node has to offer for an engine, for ranks, or for both."""

    gpus: int
    engine: bool
    ranks: int

    @property
    def cpus(self) -> int:
        """One for each process."""
        return self.engine + self.ranks


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What a bundle turned out to be."""

    node: str
    #: as CUDA_VISIBLE_DEVICES has them
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """A bundle by its index, and the devices in it that a process sees."""

    bundle: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """Where an actor starts: Ray's options for it, and what it finds in its environment."""

    options: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    environment: Mapping[str, str] = field(default_factory=dict)


#: without GPUs
ANYWHERE: Final = ActorPlacement()


# --- decisions --------------------------------------------------------------------------------------------------------


def bundles_of(ranks: int, engines: int, parallel: int, *, colocated: bool) -> tuple[Bundle, ...]:
    """`engines` of `parallel` GPUs each; 0 `ranks` or 0 `engines`: nothing is learned, or nothing sampled."""
    if colocated and ranks and engines:
        if ranks != engines * parallel:
            raise ValueError(f"{ranks} ranks can't share the GPUs of {engines} engines of {parallel} GPUs each")
        return (Bundle(parallel, True, parallel),) * engines
    return (Bundle(parallel, True, 0),) * engines + (Bundle(1, False, 1),) * ranks


def assign_devices(
    bundles: Sequence[Bundle], bundle_devices: Sequence[NodeDevices]
) -> tuple[list[DeviceAssignment], list[DeviceAssignment]]:
    """Of the engines and of the ranks, in the order of their numbers."""
    order = sorted(
        range(len(bundles)), key=lambda k: (bundle_devices[k].node, [_number(d) for d in bundle_devices[k].devices])
    )
    engines, ranks = [], []
    for k in order:
        devices = tuple(sorted(bundle_devices[k].devices, key=_number))
        if bundles[k].engine:
            engines.append(DeviceAssignment(k, devices))
        ranks += [DeviceAssignment(k, (device,)) for device in devices[: bundles[k].ranks]]
    return engines, ranks


def _number(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (-1, device)


def waits_for(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    """Why the group is not there yet. `nodes`: what each living one has; `free`: what they have left together."""
    needed = sum(bundle.gpus for bundle in bundles)
    there = int(sum(node.get("GPU", 0) for node in nodes))
    if there < needed:
        return f"waiting for GPUs: {there} of {needed} are in the Ray cluster"
    largest = max(bundles, key=lambda bundle: (bundle.gpus, bundle.cpus))
    if not any(node.get("GPU", 0) >= largest.gpus and node.get("CPU", 0) >= largest.cpus for node in nodes):
        offered = ", ".join(f"{node.get('GPU', 0):g} and {node.get('CPU', 0):g}" for node in nodes if node.get("GPU"))
        return (
            f"waiting for a node with {largest.gpus} GPUs and {largest.cpus} CPUs, which "
            f"{'an engine needs' if largest.engine else 'a rank needs'}: the nodes have {offered}"
        )
    cpus = sum(bundle.cpus for bundle in bundles)
    return (
        f"waiting for {needed} GPUs and {cpus} CPUs by nodes as engines and ranks need them: {free.get('GPU', 0):g} "
        f"GPUs and {free.get('CPU', 0):g} CPUs are free"
    )


# --- with Ray ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    engines: Sequence[ActorPlacement] = ()
    ranks: Sequence[ActorPlacement] = ()
    group: Any = None

    def close(self) -> None:
        """Gives the GPUs back."""
        if self.group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self.group)


def ray_logs() -> Path | None:
    """Where the Ray of this process keeps its own logs on this node; None: it was not started."""
    import ray
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_logs_dir_path()) if ray.is_initialized() and global_worker.node else None


@asynccontextmanager
async def ray_kept() -> AsyncIterator[None]:
    """Policies with `keep_ray`, one after another, have one Ray, which ends with the block."""
    import ray

    try:
        yield
    finally:
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)


async def placed(
    engine: EngineSettings | None, replicas: int, learner: LearnerSettings | None, report: Callable[[str], None]
) -> Placement:
    """Of a run. Raises PlacementError."""
    either = engine or learner
    if either is None or either.device == "cpu":
        return Placement()
    bundles = bundles_of(
        learner.ranks if learner else 0,
        replicas if engine else 0,
        engine.tensor_parallel if engine else 1,
        colocated=either.colocated,
    )
    return await place(bundles, either.start_seconds, report)


async def place(bundles: Sequence[Bundle], seconds: float, report: Callable[[str], None]) -> Placement:
    """Returns when the GPUs are there. `report` gets what is waited for, each time that it changes. Raises
    PlacementError after `seconds`."""
    from ray.util import placement_group, remove_placement_group

    wanted = [{"GPU": bundle.gpus, "CPU": bundle.cpus} for bundle in bundles]
    group = await asyncio.to_thread(placement_group, wanted, strategy="PACK")
    try:
        await _there(group, bundles, seconds, report)
        bundle_devices = await _bundle_devices(group, bundles)
    except BaseException:
        remove_placement_group(group)
        raise
    engines, ranks = assign_devices(bundles, bundle_devices)
    shared = any(bundle.engine and bundle.ranks for bundle in bundles)
    return Placement(
        [_place(group, assigned, shared) for assigned in engines],
        [_place(group, assigned, shared) for assigned in ranks],
        group,
    )


async def _there(group: Any, bundles: Sequence[Bundle], seconds: float, report: Callable[[str], None]) -> None:
    import ray

    reported, end = "", asyncio.get_running_loop().time() + seconds
    while not await asyncio.to_thread(group.wait, _LOOK):
        living = [node["Resources"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        words = waits_for(bundles, living, await asyncio.to_thread(ray.available_resources))
        if words != reported:
            report(words)
            reported = words
        if asyncio.get_running_loop().time() >= end:
            raise PlacementError(f"{words}, after {seconds:g} s: look at the Pods of the run's workers")


async def _bundle_devices(group: Any, bundles: Sequence[Bundle]) -> list[NodeDevices]:
    import ray

    probe = ray.remote(_own_devices)
    asked = [
        probe.options(num_cpus=0, num_gpus=bundle.gpus, scheduling_strategy=_in(group, k)).remote()
        for k, bundle in enumerate(bundles)
    ]
    try:
        async with asyncio.timeout(_PROBE):
            return [NodeDevices(node, devices) for node, devices in await asyncio.gather(*asked)]
    except TimeoutError as error:
        raise PlacementError(f"the nodes did not say within {_PROBE:g} s which GPUs they have set aside") from error


def _own_devices() -> tuple[str, tuple[str, ...]]:
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), tuple(context.get_accelerator_ids()["GPU"])


def _in(group: Any, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _place(group: Any, assigned: DeviceAssignment, shared: bool) -> ActorPlacement:
    options = {"num_cpus": 1, "num_gpus": len(assigned.devices), "scheduling_strategy": _in(group, assigned.bundle)}
    if not shared:
        return ActorPlacement(options)
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(assigned.devices),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    return ActorPlacement(options | {"num_gpus": 0}, environment)
