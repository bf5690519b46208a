"""How many GPUs a run needs, and whether its machines have room for them.

- Apart, each learner rank has a GPU of its own, and each engine `tensorParallel` of one node.
- Colocated, every rank shares its GPU with an engine's: as many as there are ranks.
- Each replica of one of `spec.models` that a judge asks has `tensorParallel` GPUs of one node for itself. A run starts
  no others; `tapforge collect` counts those that it serves (`models_gpus_error`).
- A node is a Pod of `spec.cluster`, or the machine itself where there is no cluster.
- A Pod has the whole GPUs that the limits of Ray's container name (`nvidia.com/gpu`, `amd.com/gpu`), or `num-gpus` of
  its rayStartParams. Those of other containers are not Ray's.
- Slices and shares of GPUs, and devices by resource claims (DRA), whose number is in another object, are not counted: a
  run whose Pods ask for some has to say `num-gpus`.
- The operator counts once, for all attempts (`counted`): a driver finds the numbers in its file, and no Pod templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .cluster import RAY, ClusterSpec, Head, RayContainer, Workers
from .models import ServedModel, models_asked
from .template import Resources
from .training_run import TrainingRunSpec

#: the parameter of `ray start` by which a Pod says how many GPUs it has
_GIVEN: Final = "num-gpus"


def gpus_needed(spec: TrainingRunSpec) -> int:
    engines = spec.engine.replicas * spec.engine.tensor_parallel
    policy = engines if spec.placement.mode == "colocated" else spec.learner.ranks + engines
    return policy + sum(model.gpus for model in _beside(spec))


def _beside(spec: TrainingRunSpec) -> tuple[ServedModel, ...]:
    return models_asked(spec.models, spec.rewards, spec.stages)


def gpus_offered(cluster: ClusterSpec) -> tuple[int, ...]:
    """Of each Pod that Ray computes on, the head's first."""
    workers = (_gpus_of(group) for group in cluster.workers for _ in range(group.replicas))
    return (_gpus_of(cluster.head), *workers)


def counted(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster as a driver needs it: the GPUs of each Pod as numbers, which any release reads alike.
    Nothing of the Pod templates, whose environment may hold secrets."""
    workers = (Workers(name=g.name, replicas=g.replicas, ray_start_params=_num_gpus(g)) for g in cluster.workers)
    head = Head(ray_start_params=_num_gpus(cluster.head))
    return ClusterSpec(image=cluster.image, head=head, workers=tuple(workers))


def gpus_error(spec: TrainingRunSpec, nodes: Sequence[int], where: str) -> str | None:
    """Why the run doesn't fit nodes with so many GPUs; None: it does. `where`: whose they are, with its verb."""
    ranks, replicas, parallel = spec.learner.ranks, spec.engine.replicas, spec.engine.tensor_parallel
    needed, there = gpus_needed(spec), sum(nodes)
    engines = f"engine.replicas ({replicas})" + (f" x engine.tensorParallel ({parallel})" if parallel > 1 else "")
    models = _beside(spec)
    beside = "".join(f" and {_named(model)}" for model in models)
    if there < needed:
        if spec.placement.mode == "colocated":
            return f"{engines}{beside} need {needed} GPUs, but {where} {there}"
        remedy = (
            "; with placement.mode colocated, ranks and engines share theirs" if replicas * parallel == ranks else ""
        )
        return f"learner.ranks ({ranks}) and {engines}{beside} need {needed} GPUs, but {where} {there}{remedy}"
    each = ", ".join(str(gpus) for gpus in nodes if gpus)
    if (room := sum(gpus // parallel for gpus in nodes)) < replicas:
        return (
            f"{engines} need {parallel} GPUs of one node each, but {where} {each} by node: there is room for {room} of "
            f"{replicas} engines; lower engine.tensorParallel, or take nodes with more GPUs"
        )
    pieces = [(parallel, "an engine")] * replicas
    pieces += _pieces(models)
    if models and (lacks := _lacking(pieces, nodes)):
        return (
            f"{engines}{beside} need their GPUs by node, but {where} {each} by node: {lacks} finds no room; lower a "
            "tensorParallel, or take nodes with more GPUs"
        )
    return None


def models_gpus_error(models: Sequence[ServedModel], nodes: Sequence[int], where: str) -> str | None:
    """The same for models that are served without the run's policy."""
    if not (lacks := _lacking(_pieces(models), nodes)):
        return None
    served, each = " and ".join(map(_named, models)), ", ".join(str(gpus) for gpus in nodes if gpus) or "none"
    needed = sum(model.gpus for model in models)
    return (
        f"{served} need {needed} GPUs, but {where} {each} by node: {lacks} finds no room; lower a tensorParallel or "
        "replicas, or take a machine with more GPUs"
    )


def _named(model: ServedModel) -> str:
    return f"model {model.name} ({model.replicas} x {model.tensor_parallel})"


def _pieces(models: Sequence[ServedModel]) -> list[tuple[int, str]]:
    return [(model.tensor_parallel, f"model {model.name}") for model in models for _ in range(model.replicas)]


def _lacking(pieces: Sequence[tuple[int, str]], nodes: Sequence[int]) -> str:
    """Which of the pieces finds no node with so many GPUs left, the largest first and each on the fullest node that has
    room; "": none."""
    left = list(nodes)
    for gpus, name in sorted(pieces, key=lambda piece: -piece[0]):
        fitting = [k for k, free in enumerate(left) if free >= gpus]
        if not fitting:
            return name
        left[min(fitting, key=lambda k: left[k])] -= gpus
    return ""


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


def _num_gpus(pod: Head | Workers) -> dict[str, str]:
    """As a parameter of `ray start`; none where the number is unknown, which only a run on CPUs can do without."""
    return {} if _unclear(pod) else {_GIVEN: str(_gpus_of(pod))}


def _gpus_of(pod: Head | Workers) -> int:
    """As Ray will count them: by `num-gpus`, where that is set, else by limits, which are equal to requests for such
    resources."""
    if (given := pod.ray_start_params.get(_GIVEN, "")).isdecimal():
        return int(given)
    return sum(int(amount) for name, amount in _limits(pod) if name.endswith("/gpu") and amount.isdecimal())


def _unclear(pod: Head | Workers) -> str:
    """What may give the Pod GPUs, of an unknown number; "": there is nothing, or the number is known."""
    if _gpus_of(pod) or pod.ray_start_params.get(_GIVEN, "").isdecimal():
        return ""
    asked = [(name, amount) for name, amount in _limits(pod) if amount != "0" and ("gpu" in name or "/mig-" in name)]
    # A number of GPUs that is written as 4e0 or 4000m is none of the forms that are counted here.
    names = [f"{name}: {amount}" if name.endswith("/gpu") else name for name, amount in asked]
    return next(iter([*names, *(f"resource claim {name}" for name in _claims(pod))]), "")


def _limits(pod: Head | Workers) -> list[tuple[str, str]]:
    resources = _ray_resources(pod)
    limits = dict(resources.limits or {}) if resources is not None else {}
    return [(name, str(amount)) for name, amount in limits.items()]


def _claims(pod: Head | Workers) -> list[str]:
    """Resource claims of the Pod that Ray's container uses; one entry may stand for several devices."""
    resources = _ray_resources(pod)
    claims = (resources.model_extra or {}).get("claims") if resources is not None else None
    # Passed through as it stands: the API server has not looked at it yet.
    return [str(c.get("name")) for c in claims if isinstance(c, dict)] if isinstance(claims, list) else []


def _ray_resources(pod: Head | Workers) -> Resources | None:
    containers: Sequence[RayContainer] = pod.template.spec.containers or ()
    return next((container.resources for container in containers if container.name == RAY), None)
