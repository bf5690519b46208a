"""The command that installs what is missing: the one place that error messages take it from.

- A command works as it is written, in the environment that reported the error: it names that environment's Python, and
  pip only where that environment has pip. An environment of uv's (`make setup`) has none, and uv installs there: the
  one on PATH, or the one that `make setup` has put into its cache.
- An extra is named by its requirements rather than as `tapforge[extra]`: a wheel may come from a folder or a release's
  page, and no package index has to know tapforge.
- What training needs comes from a lock (`shipped.py`): of vLLM's builds for CPUs no resolver accepts the index's torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from .shipped import files

#: the packages that training needs are locked and tested for this Python
TRAINER_PYTHON: Final = (3, 11)
#: modules that only training imports; those of its packages that other commands use by themselves, which run on any
#: Python (`plan` counts tokens); those of other extras
_OF_THE_TRAINER: Final = ("ray", "torch", "torchvision", "transformers", "vllm")
_LIGHT: Final = ("huggingface_hub", "matplotlib", "safetensors", "tokenizers")
_EXTRA_OF: Final = {"fsspec": "storage", "kubernetes": "cluster", "miniwob": "web", "pyarrow": "data"}
#: what NVIDIA's driver makes
_NVIDIA: Final = Path("/dev/nvidiactl")


def install_extra(extra: str) -> str:
    """The command for an extra of `pyproject.toml`. Raises KeyError for one that it doesn't have."""
    return f"{_installer()} {' '.join(shlex.quote(one) for one in _requirements(extra))}"


def install_package(name: str) -> str:
    """The command for one package, in the version that the project's extras allow where one of them names it."""
    found = [one for one in _requirements() if re.split(r"[^\w.-]", one, maxsplit=1)[0] == name]
    return f"{_installer()} {shlex.quote(found[0] if found else name)}"


def install_trainer(device: Literal["cpu", "gpu"]) -> str:
    """The command for torch, Ray, vLLM and the rest, in the versions of the lock."""
    if sys.version_info[:2] != TRAINER_PYTHON:
        wanted, found = (".".join(map(str, one)) for one in (TRAINER_PYTHON, sys.version_info[:2]))
        return f"install tapforge in an environment of Python {wanted}: training is not tested on {found}"
    return f"{_installer()} --no-deps -r {shlex.quote(str(files('locks')[f'trainer-{device}.txt']))}"


def how_to_install(module: str) -> str | None:
    """The command for a module that an import didn't find; None: no extra of ours brings it."""
    top = module.partition(".")[0]
    if extra := _EXTRA_OF.get(top):
        return install_extra(extra)
    if top in _OF_THE_TRAINER or (top in _LIGHT and sys.version_info[:2] == TRAINER_PYTHON):
        return install_trainer("gpu" if _NVIDIA.exists() else "cpu")
    return install_package(top.replace("_", "-")) if top in _LIGHT else None


def _installer() -> str:
    python = shlex.quote(sys.executable or "python3")
    return f"{python} -m pip install" if find_spec("pip") else f"{_uv()} pip install --python {python}"


def _uv() -> str:
    """As the Makefile names its own; "uv" where there is none at all."""
    if shutil.which("uv"):
        return "uv"
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tapforge")
    found = sorted(Path(os.environ.get("TAPFORGE_CACHE") or default).glob("uv-*/bin/uv"), key=os.path.getmtime)
    return shlex.quote(str(found[-1])) if found else "uv"


def _requirements(extra: str = "") -> list[str]:
    """Of an extra; without one: of all together, the package's own included."""
    try:
        lines = requires("tapforge") or []
    except PackageNotFoundError:  # imported from files that were never installed
        return [f"tapforge[{extra}]"] if extra else []
    parted = [(line.partition(";")[0].strip(), re.search(r"extra == ['\"]([\w-]+)['\"]", line)) for line in lines]
    if not extra:
        return [text for text, _ in parted]
    found = [text for text, of in parted if of is not None and of[1] == extra]
    if not found:
        raise KeyError(f"pyproject.toml has no extra {extra}")
    return found
