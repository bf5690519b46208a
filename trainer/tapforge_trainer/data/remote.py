"""A data set in object storage or on Hugging Face: pinned for all sessions of a run, fetched once into a cache.

    s3://BUCKET/FOLDER, gs://BUCKET/FOLDER      a folder of `tapforge data`, in any store that checkpoints may be in
    hf://datasets/OWNER/NAME@REVISION/FOLDER    one in a repository; REVISION (main) and FOLDER may be left out

Of a branch the commit is pinned, of a bucket the files with their ETags. What was fetched is named by its content, so
that a run that is resumed elsewhere learns from the same rows (`identity`). Credentials are those of models.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tapforge_api.installing import install_package

from ..model_source import storage
from ..model_source.hub import hub_call
from ..model_source.ref import ModelError, ModelFile, ModelRef, ModelRefused
from ..model_source.tiny_base import cache_root
from ..storage.object_storage import is_uri, open_store
from .folder import ABOUT, EPISODES, SCREENS

_CACHE: Final = "data-sets"
_HUB: Final = re.compile(r"hf://datasets/([^/@\s]+/[^/@\s]+)(?:@([^/\s]+))?(?:/(\S+?))?/?")
_PARTS: Final = (ABOUT, EPISODES, f"{SCREENS}/")


def is_remote(place: str) -> bool:
    return is_uri(place)


def pinned(place: str, field: str, earlier: dict[str, Any] | None) -> ModelRef:
    """`field`: of the spec, that names it; `earlier`: `ModelRef.pinned` of an earlier session. Blocks. Raises
    ModelError."""
    ref = ModelRef("data", place.rstrip("/"), source=field)
    if find_spec(library := "huggingface_hub" if place.startswith("hf:") else "fsspec") is None:
        raise ModelRefused(f"{ref.shown} needs {library}, which is not installed: {install_package(library)}")
    if earlier is not None and earlier["place"] == ref.place:
        files = tuple(ModelFile(*file) for file in earlier["files"])
        return replace(ref, commit=earlier["commit"], files=files)
    if place.startswith("hf:"):
        return _pinned_on_the_hub(ref)
    with storage.storage_said(ref):
        found = open_store(ref.place).list()
    files = tuple(ModelFile(one.path, one.size, one.etag) for one in found if one.path.startswith(_PARTS))
    return _complete(replace(ref, files=files))


def fetched(ref: ModelRef, seconds: float) -> Path:
    """Its folder on this machine. `seconds`: for the wait for another process that fetches it. Blocks. Raises
    ModelError."""
    if not ref.commit:
        return storage.fetched(ref, cache_root() / _CACHE, True, seconds)
    from huggingface_hub import snapshot_download

    repo, _, folder = _named(ref)
    below = f"{folder}/" if folder else ""
    patterns = [f"{below}{ABOUT}", f"{below}{EPISODES}", f"{below}{SCREENS}/*"]
    call = partial(snapshot_download, repo, repo_type="dataset", revision=ref.commit, allow_patterns=patterns)
    found = Path(hub_call(ref, call)) / folder
    if not (found / ABOUT).is_file():
        raise ModelRefused(f"{ref.shown} has no {below}{ABOUT}: name a folder that `tapforge data` wrote")
    return found


def identity(path: str) -> str:
    """What says which rows a path has: of something that was fetched its name in the cache, wherever that is."""
    found = re.search(rf"(?:{_CACHE}/[^/]+-[0-9a-f]{{16}}|datasets--[^/]+/snapshots/.+)$", path)
    return path if found is None else found[0]


def _pinned_on_the_hub(ref: ModelRef) -> ModelRef:
    from huggingface_hub import HfApi, constants, get_token

    repo, revision, _ = _named(ref)
    ref = replace(ref, endpoint=os.environ.get("HF_ENDPOINT") or constants.ENDPOINT, token=get_token() or "")
    info = hub_call(ref, partial(HfApi().dataset_info, repo, revision=revision, timeout=30.0))
    if not info.sha:
        raise ModelError(f"{ref.shown}: the hub named no commit; name one after @")
    return replace(ref, commit=info.sha)


def _named(ref: ModelRef) -> tuple[str, str, str]:
    """(OWNER/NAME, revision, folder)."""
    found = _HUB.fullmatch(ref.place)
    if found is None:
        raise ModelRefused(
            f"{ref.shown} is not a data set of Hugging Face: write hf://datasets/OWNER/NAME@REVISION/FOLDER"
        )
    return found[1], found[2] or "main", found[3] or ""


def _complete(ref: ModelRef) -> ModelRef:
    names = {file.name for file in ref.files}
    if missing := sorted({ABOUT, EPISODES} - names):
        raise ModelRefused(
            f"{ref.shown} lacks {', '.join(missing)}: it is not a finished `tapforge data` folder, or nothing is there"
        )
    return ref
