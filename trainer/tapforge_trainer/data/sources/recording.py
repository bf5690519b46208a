"""What a run has recorded: its folder. Frames are those that the model saw, as large as it saw them.

Measurements have recordings in folders of their own: learning from those would spoil the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from tapforge_envs.protocol import ACTION, Outcome

from ...frames.frame import FrameError
from ...recording import PERSON, ROLLOUT
from ...recording.reader import Recording, RecordingError
from ...records import EpisodeRecord
from ..balance import Candidate, balanced
from ..convert import Bad, Row, RowStep
from ..episodes import DataError, wrong
from ..episodes import Outcome as Ended


def recording(
    path: Path, /, *, successes: bool = False, per_template: int = 0, longest: int = 0, balance: bool = False
) -> Iterator[Row | Bad]:
    """`successes`: nothing else; `per_template`: at most so many of each, the first; `longest`: steps of an episode at
    most. 0: no limit. `balance`: templates and lengths alike (`balance.py`), of what is left."""
    found = Recording(path / ROLLOUT)
    if not found.exists:
        raise DataError(f"{path} has no recording: it is not a folder of a run, or recorded nothing (spec.recording)")

    def wanted(episode: EpisodeRecord) -> bool:
        ended = episode.valid and (not successes or episode.outcome is Outcome.SUCCESS)
        return ended and not (longest and len(episode.steps) > longest)

    taken: dict[str, int] = {}
    trees = dict[str, str]()
    try:
        trees.update(found.ui_trees())
        kept = None
        if balance:
            candidates = (Candidate(e.id, template_of(e), len(e.steps)) for e in found.episodes() if wanted(e))
            kept = balanced(candidates)
        for episode in found.episodes():
            template = template_of(episode)
            full = per_template and taken.get(template, 0) >= per_template
            if not wanted(episode) or full or (kept is not None and episode.id not in kept):
                continue
            row = row_of(found, episode, trees, path.name)
            taken[template] = taken.get(template, 0) + isinstance(row, Row)
            yield row
    except RecordingError as error:
        raise DataError(str(error)) from error


def template_of(episode: EpisodeRecord) -> str:
    return f"{episode.task.suite}/{episode.task.template}"


def row_of(found: Recording, episode: EpisodeRecord, trees: Mapping[str, str], run: str) -> Row | Bad:
    """`trees`: UI trees by name; `run`: for messages and provenance."""
    name = f"{run}/{episode.id}"
    streams = {} if episode.rewards is None else episode.rewards.streams
    steps = []
    try:
        for place, step in enumerate(episode.steps):
            rewards = {stream: value for stream, values in streams.items() if (value := values[place]) is not None}
            steps.append(
                RowStep(
                    screen=found.frames.frame(step.frames[-1]).data,
                    action=None if step.action is None else ACTION.validate_python(step.action),
                    answer=step.text,
                    ids=tuple(step.generation.ids),
                    ui_tree=trees.get(step.ui_tree or "", ""),
                    app=step.app,
                    rewards={"environment": step.reward, **rewards} if step.reward else rewards,
                )
            )
        last = None if episode.last_frame is None else found.frames.frame(episode.last_frame).data
    except FrameError as error:
        return Bad(name, "image", str(error))
    except ValidationError as error:
        return Bad(name, "action", wrong(error))
    outcome: Ended = "success" if episode.outcome is Outcome.SUCCESS else "failure"
    model = "" if episode.group.startswith(PERSON) else run
    return Row(name, episode.task.goal, steps, outcome, (), last, episode.task, model=model)
