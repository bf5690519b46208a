"""What a command computes on: decided by `placement/machine.py`, and in a cluster waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapforge_api import TrainingRun
from tapforge_api.gpus import gpus_needed
from tapforge_api.models import ServedModel

from ..placement.machine import Device, Machine, NoDevice, device_of
from ..placement.ray_start import gpus_in_ray, in_cluster, wait_for_gpus
from .assembly import ConfigurationError, SetupError
from .shutdown import StopSignal, unless_stopped


async def device_found(
    run: TrainingRun, stop: StopSignal, report: Callable[[str], None], models: Sequence[ServedModel] | None = None
) -> tuple[Machine, Device]:
    """This machine, and the device; in a cluster as soon as its GPUs are there. `models`: as of `device_of`. Raises
    SetupError, and Interrupted when a stop was requested."""
    machine = Machine.local()
    try:
        in_ray = await gpus_in_ray() if in_cluster() and run.spec.cluster is None else None
        device = device_of(run, machine, in_cluster=in_cluster(), in_ray=in_ray, models=models)
    except NoDevice as error:
        raise ConfigurationError(str(error)) from error
    if device == "cuda" and in_cluster():
        needed = gpus_needed(run.spec) if models is None else sum(model.gpus for model in models)
        try:
            await unless_stopped(stop, wait_for_gpus(needed, report, run.spec.deadlines.start_seconds))
        except TimeoutError as late:
            raise SetupError(str(late)) from late
    return machine, device
