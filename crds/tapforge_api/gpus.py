"""How many GPUs a run needs, and whether its machines have room for them.

- Apart, each learner rank has a GPU of its own, and each engine `tensorParallel` of one node.
- Colocated, every rank shares its GPU with an engine's: as many as there are ranks.
- A node is a Pod of `spec.cluster`, or the machine itself where there is no cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cluster import ClusterSpec, RayTemplate
from .training_run import TrainingRunSpec


def gpus_needed(spec: TrainingRunSpec) -> int:
    engines = spec.engine.replicas * spec.engine.tensor_parallel
    return engines if spec.placement.mode == "colocated" else spec.learner.ranks + engines


def gpus_offered(cluster: ClusterSpec) -> tuple[int, ...]:
    """Of each Pod that Ray computes on, the head's first."""
    workers = (_gpus_of(group.template) for group in cluster.workers for _ in range(group.replicas))
    return (_gpus_of(cluster.head.template), *workers)


def gpus_error(spec: TrainingRunSpec, nodes: Sequence[int], where: str) -> str | None:
    """Why the run doesn't fit nodes with so many GPUs; None: it does. `where`: whose they are, with its verb."""
    ranks, replicas, parallel = spec.learner.ranks, spec.engine.replicas, spec.engine.tensor_parallel
    needed, there = gpus_needed(spec), sum(nodes)
    engines = f"engine.replicas ({replicas})" + (f" x engine.tensorParallel ({parallel})" if parallel > 1 else "")
    if there < needed:
        if spec.placement.mode == "colocated":
            return f"{engines} need {needed} GPUs, but {where} {there}"
        remedy = (
            "; with placement.mode colocated, ranks and engines share theirs" if replicas * parallel == ranks else ""
        )
        return f"learner.ranks ({ranks}) and {engines} need {needed} GPUs, but {where} {there}{remedy}"
    if (room := sum(gpus // parallel for gpus in nodes)) < replicas:
        each = ", ".join(str(gpus) for gpus in nodes if gpus)
        return (
            f"{engines} need {parallel} GPUs of one node each, but {where} {each} by node: there is room for {room} of "
            f"{replicas} engines; lower engine.tensorParallel, or take nodes with more GPUs"
        )
    return None


def cluster_gpus_error(spec: TrainingRunSpec) -> str | None:
    """The same for the Pods of `spec.cluster`. A run that computes on CPUs has no such error."""
    if spec.cluster is None or spec.device == "cpu":
        return None
    nodes = gpus_offered(spec.cluster)
    if not any(nodes) and spec.device is None:
        return None
    return gpus_error(spec, nodes, "Pods of spec.cluster ask for")


def _gpus_of(template: RayTemplate) -> int:
    """By its limits: for such resources Kubernetes wants requests to be equal."""
    found = 0
    for container in template.spec.containers or ():
        limits = container.resources.limits if container.resources is not None else None
        for name, amount in dict(limits or {}).items():
            if (name.endswith("/gpu") or "/mig-" in name) and str(amount).isdecimal():
                found += int(str(amount))
    return found
