"""The folder of what people played: a recording as a run has it, and a data set, of the same episodes.

    FOLDER/spec.yaml, rollout/                     what `tapforge view` and `data convert recording` read
    FOLDER/data.json, episodes.jsonl, screens/     what `warmStart.data` and `tapforge data` read

It is made when the first episode is kept, and belongs to one process then. An episode that can't be written is in
neither, and can be kept again once there is room.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from tapforge_api import SpecError, TrainingRun, load, to_yaml
from tapforge_api.pool import Protocol
from tapforge_envs.people.episode import CannotKeep, HumanEpisode, HumanStep
from tapforge_envs.protocol import Outcome

from ..data.appending import DataAppender
from ..data.episodes import DataError, Episode, Provenance, Step
from ..data.folder import ABOUT, DataFolder
from ..frames.frame import FittedFrame, FrameError, decode
from ..recording import PERSON
from ..recording.reader import Recording, RecordingError
from ..recording.recorder import Recorder
from ..records import EpisodeRecord, EpisodeRewards, Generation, GroupRecord, StepRecord
from ..states.reading import read_state
from .assembly import ConfigurationError, SetupError
from .folder import LOCK, ROLLOUT, locked, write_spec

_SOURCE: Final = "person"
_NOT_SAID: Final = Generation((), (), (), (), "stop", 0)


class PeopleFolder:
    """A `people.episode.EpisodeWriter`. `close` it."""

    def __init__(self, folder: Path, protocol: Protocol, phones: Sequence[str]):
        """`phones`: their addresses. Raises ConfigurationError for a folder that holds something else."""
        _check(folder)
        self._folder = folder
        self._run = _run_of(protocol, phones)
        self._open = ExitStack()
        self._recorder: Recorder | None = None
        self._data: DataAppender | None = None
        self._order = 0
        self._number = 0

    async def keep(self, played: HumanEpisode) -> str:
        try:
            return await asyncio.to_thread(self._keep, played)
        except (ConfigurationError, SetupError, RecordingError, DataError, FrameError, OSError) as error:
            raise CannotKeep(str(error)) from error

    def close(self) -> None:
        self._recorder = self._data = None
        self._open.close()

    def _keep(self, played: HumanEpisode) -> str:
        try:
            return self._write(played)
        except BaseException:
            # Half an episode may lie there: the next writers cut it off.
            with suppress(OSError, RecordingError):
                self.close()
            raise

    def _write(self, played: HumanEpisode) -> str:
        recorder, data = self._writers()
        # Unique in the folder, whatever was deleted from it and whatever the clock says.
        self._number = max(self._number + 1, int(1000 * played.ended))
        name = f"{PERSON}{self._number}"
        record, frames, trees = _record(name, played)
        data.episode(_episode(name, played, data, self._folder.name))
        recorder.episode(record, frames, trees)
        recorder.group(GroupRecord(record.group, self._order, record.task, 0, (record,)))
        recorder.sync()
        data.commit()
        self._order += 1
        return f"{name} in {self._folder}"

    def _writers(self) -> tuple[Recorder, DataAppender]:
        if self._recorder is None or self._data is None:
            _check(self._folder)
            with ExitStack() as opening:
                opening.enter_context(locked(self._folder))
                data = DataAppender(self._folder, {"source": _SOURCE})
                opening.callback(data.close)
                recorder = Recorder(self._folder / ROLLOUT)
                opening.callback(recorder.close)
                write_spec(self._folder, self._run)
                recorded = [group.id for group in Recording(self._folder / ROLLOUT).groups()]
                names = [*recorded, *(episode.id for episode in DataFolder(self._folder))]
                self._order, self._number = len(recorded), max(map(_number_of, names), default=0)
                self._open = opening.pop_all()
            self._recorder, self._data = recorder, data
        return self._recorder, self._data


def _number_of(name: str) -> int:
    number = name.removeprefix(PERSON)
    return int(number) if number.isascii() and number.isdecimal() else 0


def _check(folder: Path) -> None:
    """Raises ConfigurationError for a folder of something else."""
    if not folder.exists() or not {path.name for path in folder.iterdir()} - {LOCK}:
        return
    try:
        made_of = json.loads((folder / ABOUT).read_text())["made_of"]
        if made_of.get("source") == _SOURCE:
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # whatever it is, it isn't ours
    raise ConfigurationError(f"{folder} holds other files than what people played: name another folder (--record)")


def _run_of(protocol: Protocol, phones: Sequence[str]) -> TrainingRun:
    """What spec.yaml says: on which phones it was played. Nothing is trained by it."""
    spec: dict[str, Any] = {"environment": {"protocol": protocol, "source": {"urls": {"list": list(phones)}}}}
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": _SOURCE}}
    try:
        return load(to_yaml({**head, "spec": spec}))
    except SpecError as error:
        raise ConfigurationError(str(error)) from error


# --- as a recording ---------------------------------------------------------------------------------------------------


def _record(name: str, played: HumanEpisode) -> tuple[EpisodeRecord, dict[str, FittedFrame], dict[str, str]]:
    """With its frames and UI trees, by name."""
    frames, trees, steps = dict[str, FittedFrame](), dict[str, str](), list[StepRecord]()
    episode = f"{name}.0.0"
    for index, step in enumerate(played.steps):
        steps.append(_step(episode, index, step, frames, trees))
    last = FittedFrame.of(decode(played.last.frame.data, played.last.frame.sha256))
    frames[last.name] = last
    reward = None
    if played.decided:
        reward = EpisodeRewards({}, played.outcome, played.reason, message="the person said so: nothing judged it")
    record = EpisodeRecord(
        id=episode,
        group=name,
        task=played.task,
        attempt=0,
        slot=played.phone,
        seed=0,
        reason=played.reason,
        outcome=played.outcome,
        score=None if played.score is None else played.score.value,
        message=reward.message if reward is not None else played.score.reason if played.score is not None else "",
        steps=tuple(steps),
        started=played.started,
        ended=played.ended,
        last_frame=last.name,
        rewards=reward,
    )
    return record, frames, trees


def _step(
    episode: str, index: int, step: HumanStep, frames: dict[str, FittedFrame], trees: dict[str, str]
) -> StepRecord:
    seen, action = step.seen, step.action.model_dump(exclude_none=True)
    pixels = decode(seen.frame.data, seen.frame.sha256)
    frame, state = FittedFrame.of(pixels), read_state(seen, lambda: pixels)
    frames[frame.name] = frame
    if seen.ui_tree is not None:
        trees[hashlib.sha256(seen.ui_tree.encode()).hexdigest()] = seen.ui_tree
    return StepRecord(
        episode=episode,
        index=index,
        frames=(frame.name,),
        state_key=seen.state_key,
        app=seen.app,
        generation=_NOT_SAID,
        text=json.dumps(action),
        action=action,
        parse_error=None,
        reward=step.reward,
        note=step.note,
        seconds_model=0.0,
        seconds_environment=0.0,
        window=seen.window,
        ui_tree=state.ui_tree,
        ui_key=state.ui_key,
        frame_key=state.frame_key,
    )


# --- as data ----------------------------------------------------------------------------------------------------------


def _episode(name: str, played: HumanEpisode, data: DataAppender, folder: str) -> Episode:
    steps = tuple(
        Step(
            screen=data.screen(step.seen.frame.data),
            action=step.action,
            ui_tree=step.seen.ui_tree or "",
            app=step.seen.app,
            rewards={"environment": step.reward} if step.reward else {},
        )
        for step in played.steps
    )
    return Episode(
        id=name,
        task=played.task,
        steps=steps,
        outcome="success" if played.outcome is Outcome.SUCCESS else "failure",
        last_screen=data.screen(played.last.frame.data),
        provenance=Provenance(source=_SOURCE, row=f"{folder}/{name}"),
    )
