"""The run's own prompts by which its syncs are proved, from its first batch on: chosen once, and kept in its folder.

- Chosen are the steps with the most visual tokens, one of each episode before a second one of any: what the largest
  frames and the longest prompts of the run do to engine and learner shows there.
- They are written to `proof/` of the run's folder, frames included, so that the proofs of a resumed run have the same
  ones, whatever of the recording was removed. Its progress names them: a first proof is compared with later ones of the
  same prompts alone.
- Frames that were recorded lossily, or not at all, can't be shown again as they were; a run without any that can be
  keeps its made-up episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Final

from ..frames.frame import FittedFrame, FrameError
from ..frames.handles import FrameHandle
from ..recording.frames import FrameStore, FrameWriter
from ..recording.retention import Retention
from ..records import GroupRecord, Prompt, StepRecord
from .context import RunContext

log = logging.getLogger(__name__)

#: prompts that are kept: with answers of 64 tokens enough for a proof by statistics
PROMPTS: Final = 16
#: steps of a batch whose frames are looked for
_LOOKED_AT: Final = 4 * PROMPTS
_FOLDER, _PROMPTS, _FRAMES = "proof", "prompts.json", "frames"


async def adopt(context: RunContext, groups: Sequence[GroupRecord], held: Mapping[str, FrameHandle], rec: Path) -> None:
    """Once in a run: from here on its syncs are proved by prompts of these groups. `held`: frames at hand, by episode;
    `rec`: the recording's folder of frames."""
    policy = context.policy
    if policy.settings.engine is None or policy.recorded_prompts:
        return
    longest = policy.longest_proof_prompt
    prompts = await asyncio.to_thread(_chosen, groups, held, FrameStore(rec), longest)
    if prompts:
        await asyncio.to_thread(_write, context.folder / _FOLDER, prompts)
        policy.prove_with(prompts, name_of(prompts))
        policy.proofs.first = None


def kept(folder: Path) -> tuple[Prompt, ...]:
    """Those of a run's folder; () where it has none."""
    place = folder / _FOLDER
    try:
        document = json.loads((place / _PROMPTS).read_text(encoding="utf-8"))
        frames = FrameStore(place / _FRAMES)
        return tuple(
            Prompt(tuple(one["ids"]), tuple(frames.frame(name) for name in one["frames"]), one["length"])
            for one in document
        )
    except FileNotFoundError:
        return ()
    except (FrameError, ValueError, KeyError) as error:
        log.warning("%s can't be read (%s); other prompts of the run are chosen", place, error)
        return ()


def name_of(prompts: Sequence[Prompt]) -> str:
    """The same for the same prompts."""
    return hashlib.sha256(json.dumps(_document(prompts)).encode()).hexdigest()[:16]


def steps_by_size(groups: Sequence[GroupRecord]) -> list[StepRecord]:
    """Of these groups' episodes: by visual tokens, then by length; one of each episode first. Pure."""

    def size(step: StepRecord) -> tuple[int, int, str, int]:
        said = step.generation
        return len(said.prompt_ids) - said.prompt_length, -said.prompt_length, step.episode, step.index

    ranked = [sorted(episode.steps, key=size) for group in groups for episode in group.episodes]
    rounds = (sorted((steps[k] for steps in ranked if k < len(steps)), key=size) for k in count())
    found: list[StepRecord] = []
    for steps in rounds:
        if not steps:
            return found
        found += steps
    return found


def _chosen(
    groups: Sequence[GroupRecord], held: Mapping[str, FrameHandle], recorded: FrameStore, longest: int
) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    for step in islice(steps_by_size(groups), _LOOKED_AT):
        said = step.generation
        if len(prompts) == PROMPTS:
            break
        if said.prompt_length > longest or not step.frames:
            continue
        frame = _reader(held.get(step.episode), recorded)
        try:
            prompts.append(Prompt(tuple(said.prompt_ids), tuple(map(frame, step.frames)), said.prompt_length))
        except FrameError as error:
            log.info("step %d of %s proves no sync: %s", step.index, step.episode, error)
    return tuple(prompts)


def _reader(handle: FrameHandle | None, recorded: FrameStore) -> Callable[[str], FittedFrame]:
    """Raises FrameError for a frame that isn't there as the model saw it."""
    return lambda name: handle[name] if isinstance(handle, Mapping) and name in handle else recorded.frame(name)


def _document(prompts: Sequence[Prompt]) -> list[dict[str, object]]:
    return [
        {"ids": list(one.ids), "frames": [frame.name for frame in one.frames], "length": one.expanded_length}
        for one in prompts
    ]


def _write(place: Path, prompts: Sequence[Prompt]) -> None:
    """As a whole: prompts.json is the last file, and the folder is new."""
    shutil.rmtree(place, ignore_errors=True)
    writer = FrameWriter(place / _FRAMES, Retention())
    try:
        for frame in (frame for prompt in prompts for frame in prompt.frames):
            writer.put(frame)
        writer.sync()
    finally:
        writer.close()
    (place / f".{_PROMPTS}").write_text(json.dumps(_document(prompts)), encoding="utf-8")
    (place / f".{_PROMPTS}").rename(place / _PROMPTS)
