"""A run as all its attempts see it: fixed at its start, whatever release of the operator or edit of the spec comes.

Of the spec everything is in it that the driver reads. What is the operator's alone is not: the machines, `suspend`, and
an own pool's slots; the driver sees that pool by its name, as any other.
"""

from __future__ import annotations

from typing import Any

from tapforge_api.base import API_VERSION
from tapforge_api.document import to_yaml
from tapforge_api.environment import EnvironmentSource, PoolReference
from tapforge_api.loading import dump_set
from tapforge_api.training_run import RunMetadata, TrainingRun

from .records import Run


def pool_of(run: Run) -> str:
    """Name of the EmulatorPool that the run's phones come from; "" when they don't come from one."""
    source = run.spec.environment.source
    if source.pool is not None:
        return source.pool.name
    return run.name if source.own_pool is not None else ""


def slots_of(run: Run) -> int:
    """Phones that it claims at most; 0 without a pool."""
    source = run.spec.environment.source
    wants = source.pool or source.own_pool
    return wants.slots if wants is not None else 0


def resolve(run: Run) -> str:
    """YAML of the TrainingRun."""
    spec = run.spec
    source = spec.environment.source
    if source.own_pool is not None:
        reference = PoolReference(name=run.name, slots=source.own_pool.slots)
        environment = spec.environment.model_copy(update={"source": EnvironmentSource(pool=reference)})
        spec = spec.model_copy(update={"environment": environment})
    whole = TrainingRun(
        api_version=API_VERSION, metadata=RunMetadata(name=run.name, namespace=run.namespace), spec=spec
    )
    data: dict[str, Any] = dump_set(whole)
    for mine in ("cluster", "suspend"):
        data["spec"].pop(mine, None)
    return to_yaml(data)
