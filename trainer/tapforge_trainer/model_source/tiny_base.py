"""Where the tiny base is, which `tiny/build.py` makes, and the tiny judge, which `tiny/judge.py` trains."""

from __future__ import annotations

import os
from pathlib import Path

#: raised when sentences, screens or tokenizer change, so that a base of an older version is not taken for a new one
FORMAT = 3
#: comes with the package
SHIPPED = Path(__file__).parent.parent / "tiny" / "base"
JUDGE_FORMAT = 1
SHIPPED_JUDGE = Path(__file__).parent.parent / "tiny" / "judge_model"


def cache_root() -> Path:
    """$TAPFORGE_CACHE, or a folder in the user's cache."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tapforge")
    return Path(os.environ.get("TAPFORGE_CACHE") or default).expanduser()


def cache_folder() -> Path:
    """Where a base that is built on this machine lives."""
    return cache_root() / f"tiny-base-{FORMAT}"


def base_folder() -> Path:
    """The tiny base to start from: one that was built here, else the one that comes with the package. Raises
    FileNotFoundError that names the command when there is neither."""
    for folder in (cache_folder(), SHIPPED):
        if (folder / "model.safetensors").is_file():
            return folder
    raise FileNotFoundError(f"there is no tiny base in {cache_folder()} or {SHIPPED}; run: tapforge tiny build")


def judge_cache() -> Path:
    """Where a judge that is trained on this machine lives."""
    return cache_root() / f"tiny-judge-{JUDGE_FORMAT}"


def judge_folder() -> Path:
    """The tiny judge: one that was trained here, else the one that comes with the package. Raises FileNotFoundError
    that names the command when there is neither."""
    for folder in (judge_cache(), SHIPPED_JUDGE):
        if (folder / "model.safetensors").is_file():
            return folder
    missing = f"there is no tiny judge in {judge_cache()} or {SHIPPED_JUDGE}"
    raise FileNotFoundError(f"{missing}; run: tapforge judge train-tiny")


def tiny_folder(weights: str) -> Path:
    """`weights`: as in `spec.model.source.tiny`. Raises FileNotFoundError."""
    return judge_folder() if weights == "judge" else base_folder()
