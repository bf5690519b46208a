"""Data sets of a run that lie elsewhere, as folders of this machine: pinned in the run's `data-sets.json`.

What comes after takes the run with folders in place of URIs. Only the driver reads data sets; screens reach ranks as
those of every episode do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun

from ..data import remote
from ..model_source.ref import ModelError, ModelRefused
from .assembly import ConfigurationError, SetupError
from .folder import write_atomically
from .local_files import folder_of

PINNED: Final = "data-sets.json"


def with_data(run: TrainingRun, runs: Path) -> TrainingRun:
    """The run, with a folder in place of each data set that a URI names. Blocks. Raises SetupError."""
    spec, folder = run.spec, folder_of(run, runs)
    recorded = spec.environment.source.dataset
    imitated = None if spec.warm_start is None else spec.warm_start.data
    named = [("spec.environment.source.dataset", recorded), ("spec.warmStart.data", imitated)]
    asked = [
        (f"{field}.{alias}", place)
        for field, data in named
        if data is not None
        for alias, place in (("path", data.path), ("heldOut", data.held_out))
        if place is not None and remote.is_remote(place)
    ]
    if not asked:
        return run
    found = _fetched(folder, {place: field for field, place in reversed(asked)}, spec.deadlines.start_seconds)

    def here(data: Any) -> Any:
        places = {"path": data.path, "held_out": data.held_out}
        return data.model_copy(update={name: found.get(place, place) for name, place in places.items()})

    changed: dict[str, Any] = {}
    if recorded is not None:
        source = spec.environment.source.model_copy(update={"dataset": here(recorded)})
        changed["environment"] = spec.environment.model_copy(update={"source": source})
    if spec.warm_start is not None and imitated is not None:
        changed["warm_start"] = spec.warm_start.model_copy(update={"data": here(imitated)})
    return run.model_copy(update={"spec": spec.model_copy(update=changed)})


def _fetched(folder: Path, asked: dict[str, str], seconds: float) -> dict[str, str]:
    """By URI, its folder here. `asked`: URIs with the field that names each."""
    kept = folder / PINNED
    try:
        earlier = json.loads(kept.read_text()) if kept.exists() else {}
        refs = {place: remote.pinned(place, field, earlier.get(place)) for place, field in asked.items()}
        found = {place: str(remote.fetched(ref, seconds)) for place, ref in refs.items()}
    except ModelRefused as error:
        raise ConfigurationError(str(error)) from error
    except ModelError as error:
        raise SetupError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"{kept}, what data sets were pinned to, can't be read ({error})"
        raise SetupError(f"{what}: restore it, or delete it to begin with them as they are now") from error
    now = json.dumps(earlier | {place: ref.pinned for place, ref in refs.items()}, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, now)
    return found
