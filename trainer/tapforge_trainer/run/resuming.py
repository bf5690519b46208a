"""How a session stands to the run's checkpoints: which one it resumes from, and that it leaves none half written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tapforge_api import TrainingRun

from ..learner.checkpoint_storage import CheckpointError, checkpoint_at, read_state
from ..policy import Policy
from ..storage.object_storage import is_uri
from ..telemetry.progress import Progress, belongs, normalized, saved_since_resuming
from .folder import check_same


async def resumed_from(run: TrainingRun, policy: Policy, uid: str) -> tuple[Progress | None, str]:
    """Loads the checkpoint to resume from, and returns its progress. One that resumeFrom names among the run's own
    counts until there is one that was made after it. One of another run only gives its weights, and only while this run
    has no checkpoint of its own: then it returns no progress, but what that checkpoint is."""
    given, place = run.spec.checkpoints.resume_from, policy.settings.place
    inside = given is not None and _inside(given, place.root)
    session = {"resumed_from": normalized(given) if given is not None and inside else ""}
    counts = given is not None and inside and not await asyncio.to_thread(saved_since_resuming, place, given)
    state = None if counts else await policy.resume()
    if state is not None:
        check_same(state.get("spec", {}), run, place.root)  # the run's folder may be another one by now
        return Progress.of(state, **session), ""
    if given is None:
        return None, ""
    found = await asyncio.to_thread(checkpoint_at, given)
    state = (await asyncio.to_thread(read_state, found))["driver"]
    own = inside or belongs(state, run.metadata.name, uid)
    # The memory of another run's optimizer is of what that one learned, and at whose rate.
    await policy.resume(found, moments=own)
    if own:
        return Progress.of(state, **session), ""
    return None, f"{given} (update {state['update']} of {state.get('run') or 'another run'})"


def _inside(given: str, root: str) -> bool:
    if is_uri(given) or is_uri(root):
        return given.startswith(f"{root}/")
    return Path(given).resolve().is_relative_to(Path(root).resolve())


@asynccontextmanager
async def checkpoint_written(policy: Policy) -> AsyncIterator[None]:
    """A checkpoint that is being written when the block ends is waited for; not when the work is aborted."""
    try:
        yield
    except Exception as error:
        try:
            await policy.settle()
        except CheckpointError as lost:
            error.add_note(str(lost))
        raise
    await policy.settle()
