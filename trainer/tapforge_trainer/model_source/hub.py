"""Models of Hugging Face's hub, by its own client: its cache, its token, its mirror."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tapforge_api.model import HuggingFaceModel

from .folder import complete, incomplete, lacking_of, names_of
from .ref import (
    POLICY,
    TEXTS,
    WEIGHTS,
    CredentialsRefused,
    ModelError,
    ModelFile,
    ModelRef,
    ModelRefused,
    enough_room,
    line_of,
    of_disk,
    one_process,
    wanted,
)

T = TypeVar("T")

_BY_HAND: Final = "download it there (hf download), unset HF_HUB_OFFLINE, or name a folder in path.folder instead"


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a commit that this machine's cache has, with its config.json at least. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(path).parent if isinstance(path, str) else None


def pinned(found: HuggingFaceModel, earlier: dict[str, Any] | None, field: str = POLICY) -> ModelRef:
    """The commit and the files. Where the hub does not answer, the commit is what this node's cache has, and which
    files there are is each node's own matter. Raises ModelError."""
    from huggingface_hub import HfApi, constants, get_token, snapshot_download

    revision = found.revision
    if earlier is not None and (earlier["kind"], earlier["place"]) == ("hub", found.repo):
        revision = earlier["commit"]
    ref = ModelRef("hub", found.repo, revision, endpoint=constants.ENDPOINT, token=get_token() or "", source=field)
    # By the revision's name, which the cache remembers for a time without a network.
    texts = partial(
        snapshot_download, found.repo, revision=revision, allow_patterns=list(TEXTS), ignore_patterns=["*/*"]
    )
    ref = replace(ref, commit=Path(hub_call(ref, texts)).name)
    try:
        ask = partial(HfApi().model_info, found.repo, revision=ref.commit, files_metadata=True, timeout=30.0)
        info = hub_call(ref, ask)
    except ModelError:
        return ref
    return complete(
        replace(
            ref,
            files=tuple(
                ModelFile(file.rfilename, file.size or 0) for file in info.siblings or () if wanted(file.rfilename)
            ),
        )
    )


def fetched(ref: ModelRef, weights: bool, seconds: float) -> Path:
    """The snapshot in this node's cache. Raises ModelError."""
    from huggingface_hub import constants, get_token, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch = partial(
        snapshot_download,
        ref.place,
        revision=ref.commit,
        allow_patterns=[*TEXTS, WEIGHTS] if weights else list(TEXTS),
        ignore_patterns=["*/*"],
        token=get_token() or ref.token or None,
        endpoint=os.environ.get("HF_ENDPOINT") or ref.endpoint or None,
    )

    def here() -> Path | None:
        try:
            folder = Path(fetch(local_files_only=True))
        except LocalEntryNotFoundError:
            return None
        faults = incomplete(folder) if weights else lacking_of(names_of(folder), weights=False)
        return None if faults else folder

    if (folder := here()) is not None:
        return folder
    cache = Path(constants.HF_HUB_CACHE)
    if constants.is_offline_mode():
        raise _offline(ref)
    name = ref.place.replace("/", "--")
    with one_process(cache / ".locks" / f"tapforge--{name}--{ref.commit}.lock", ref, seconds):
        if (folder := here()) is None:
            snapshot = cache / f"models--{name}" / "snapshots" / ref.commit
            files = [file for file in ref.files if wanted(file.name, weights)]
            missing = sum(file.size for file in files if not (snapshot / file.name).exists())
            enough_room(ref, missing, cache, "HF_HOME")
            folder = Path(hub_call(ref, fetch))
    return folder


def _offline(ref: ModelRef) -> ModelRefused:
    from huggingface_hub import constants

    where = f"{constants.HF_HUB_CACHE} on {socket.gethostname()}"
    return ModelRefused(f"{ref.shown}: HF_HUB_OFFLINE is set, and {where} does not hold all of it: {_BY_HAND}")


def hub_call(ref: ModelRef, call: Callable[[], T]) -> T:
    """What the hub answers, or a ModelError that says what to do about it."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return call()
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            raise _offline(ref) from error
        # The client hides a refusal behind the words that nothing is in its cache.
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        hub = f"{ref.shown}: {ref.endpoint}"
        if isinstance(cause, RevisionNotFoundError):
            raise ModelRefused(f"{hub} has no such revision: name a branch, a tag or a commit") from error
        if isinstance(cause, GatedRepoError) or status == 403:
            raise CredentialsRefused(
                f"{hub} refuses access ({status}): accept the model's terms there, and give HF_TOKEN of an account "
                "that did"
            ) from error
        if isinstance(cause, RepositoryNotFoundError) or status == 401:
            who = "HF_TOKEN is not accepted" if ref.token else "no HF_TOKEN is given, which a private one needs"
            raise CredentialsRefused(f"{hub} has no such repository for us ({status}): {who}") from error
        if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
            raise ModelRefused(f"{hub} has lost a file of it ({line_of(cause)}): pin another revision") from error
        raise ModelError(f"{hub} can't be asked ({line_of(cause)}): {_BY_HAND}") from error
    except OSError as error:
        raise of_disk(ref, error) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise ModelError(f"{ref.shown}: {ref.endpoint} can't be asked ({line_of(error)}): {_BY_HAND}") from error
