"""How many GPUs a run needs, and whether its machines have room for them.

- Apart, each learner rank has a GPU of its own, and each engine `tensorParallel` of one node.
- Colocated, every rank shares its GPU with an engine's: as many as there are ranks.
- A node is a Pod of `spec.cluster`, or the machine itself where there is no cluster.
- A Pod has the whole GPUs that its limits name (`nvidia.com/gpu`, `amd.com/gpu`), or `num-gpus` of its rayStartParams.
  Slices and shares of GPUs are counted by nobody: a run whose Pods ask for some has to say `num-gpus`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cluster import ClusterSpec, Head, Workers
from .training_run import TrainingRunSpec


def gpus_needed(spec: TrainingRunSpec) -> int:
    engines = spec.engine.replicas * spec.engine.tensor_parallel
    return engines if spec.placement.mode == "colocated" else spec.learner.ranks + engines


def gpus_offered(cluster: ClusterSpec) -> tuple[int, ...]:
    """Of each Pod that Ray computes on, the head's first."""
    workers = (_gpus_of(group) for group in cluster.workers for _ in range(group.replicas))
    return (_gpus_of(cluster.head), *workers)


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
    if wrong := unclear_gpus_error(spec.cluster):
        return wrong
    nodes = gpus_offered(spec.cluster)
    if not any(nodes) and spec.device is None:
        return None
    return gpus_error(spec, nodes, "Pods of spec.cluster ask for")


def unclear_gpus_error(cluster: ClusterSpec) -> str | None:
    """Which resource of a Pod leaves open how many GPUs Ray will find; None: none does."""
    pods: dict[str, Head | Workers] = {"head": cluster.head}
    pods |= {f"workers[{k}]": group for k, group in enumerate(cluster.workers)}
    for where, pod in pods.items():
        if name := _unclear(pod):
            return (
                f"spec.cluster.{where} asks for {name}, which says nothing about how many GPUs Ray finds there: set "
                f"spec.cluster.{where}.rayStartParams.num-gpus, or spec.device to cpu"
            )
    return None


def _gpus_of(pod: Head | Workers) -> int:
    """As Ray will count them: by `num-gpus`, where that is set, else by limits, which are equal to requests for such
    resources."""
    if (given := pod.ray_start_params.get("num-gpus", "")).isdecimal():
        return int(given)
    return sum(int(amount) for name, amount in _limits(pod) if name.endswith("/gpu") and amount.isdecimal())


def _unclear(pod: Head | Workers) -> str:
    """A resource that gives the Pod GPUs, but who knows how many; "": there is none, or its number is known."""
    if _gpus_of(pod) or pod.ray_start_params.get("num-gpus", "").isdecimal():
        return ""
    names = (name for name, amount in _limits(pod) if amount != "0" and not name.endswith("/gpu"))
    return next((name for name in names if "gpu" in name or "/mig-" in name), "")


def _limits(pod: Head | Workers) -> list[tuple[str, str]]:
    return [
        (name, str(amount))
        for container in pod.template.spec.containers or ()
        if container.resources is not None
        for name, amount in dict(container.resources.limits or {}).items()
    ]
