"""`tapforge env play`: one episode by a random or written policy, with a line per step, and what a run's recording has.

    FOLDER/rollout/       records and frames, as a run writes them (`recording/recorder.py`)
    FOLDER/replay.html    the episode to look at (`viewer/replay.py`)

The episode is played by the same code as a run's (`rollout/episode.py`): its limits, its outcomes. There is no model:
frames are kept in their own size, and the "answer" of a step is the action as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from pydantic import ValidationError

from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.protocol import (
    ACTION,
    Action,
    Environment,
    EnvironmentFault,
    Observation,
    Score,
    StepResult,
    Task,
    Terminate,
    UnsupportedAction,
)

from ..agents.agent import Prepared, Turn
from ..agents.parsing import ParseFailure
from ..attempt import Attempt, AttemptRequest, EpisodeLimits, EpisodeResult
from ..frames.frame import FittedFrame, FrameError, Pixels, decode
from ..recording import ROLLOUT
from ..recording.reader import Recording
from ..recording.recorder import Recorder
from ..records import EpisodeRecord, FinishReason, Generation, GroupRecord, Prompt, Sampling
from ..rollout.baselines import random_action
from ..rollout.episode import Episode
from ..viewer.replay import Replay, write_replay

#: bytes of a file of actions
_MAX_SCRIPT = 1024 * 1024
#: actions in a row that the phone doesn't have, after which it ends
_MAX_REFUSED = 8
#: for all calls together; each call has its own deadline
_EPISODE_SECONDS = 24 * 3600.0
#: chooses the action of a step by its number
Policy = Callable[[int], Action]


class PlayError(Exception):
    """There is nothing to play, or nothing to play by."""


def random_policy(seed: int) -> Policy:
    return lambda step: random_action(Random(f"{seed}/{step}"))


def read_actions(path: Path) -> Policy:
    """One action as JSON per line; empty lines and those that begin with # are skipped. After the last one the episode
    is ended as a success. Raises PlayError."""
    try:
        if path.stat().st_size > _MAX_SCRIPT:
            raise PlayError(f"{path} is larger than {_MAX_SCRIPT} bytes: it holds one action per line")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PlayError(f"the file of actions {path} can't be read: {error}") from error
    actions: list[Action] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                actions.append(ACTION.validate_json(line))
            except ValidationError as error:
                what = error.errors(include_url=False)[0]["msg"]
                example = '{"type": "tap", "x": 0.5, "y": 0.5}'
                raise PlayError(f"{path}:{number}: {what}; a line looks like {example}") from error
    end = Terminate(status="success")
    return lambda step: actions[step] if step < len(actions) else end


@dataclass
class _Player:
    """An agent and its engine in one: what a model would say is the policy's action as JSON, one id per byte."""

    policy: Policy
    allowed_ids: tuple[int, ...] = tuple(range(256))
    banned_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    answers: int = field(default=0, init=False)

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        seen, frame = observation, observation.frame
        try:
            pixels = decode(frame.data, frame.sha256)
        except FrameError as error:
            raise EnvironmentFault(str(error)) from error
        if pixels.shape[:2] != (frame.height, frame.width):
            raise EnvironmentFault(
                f"the frame is {pixels.shape[1]}x{pixels.shape[0]} pixels, announced was {frame.width}x{frame.height}"
            )
        prepared = Prepared(FittedFrame.of(pixels), 1, seen.app, seen.state_key, seen.ui_tree, seen.window)
        return prepared, lambda: pixels

    def outline(self, observation: Observation) -> Prepared:
        return self.prepare(observation)[0]

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt:
        return Prompt((0,), (seen.frame,), 1)

    def read(self, text: str, finish_reason: FinishReason, screen: FittedFrame) -> Action | ParseFailure:
        return ACTION.validate_json(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(iter(ids)).decode()  # of an array, bytes() would take the memory

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(prompt.ids)

    def answer_ids(self, action: Action, screen: FittedFrame) -> tuple[int, ...]:
        return tuple(json.dumps(action.model_dump(exclude_none=True)).encode())

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        ids = self.answer_ids(self.policy(self.answers), prompt.frames[-1])
        self.answers += 1
        zeros = (0,) * len(ids)
        return Generation(prompt.ids, ids, zeros, zeros, "stop", 1)


@dataclass
class _Told:
    """A phone that says what happens on it, a line per call."""

    phone: Environment
    say: Callable[[str], None]

    async def reset(self, task: Task) -> Observation:
        begun = time.perf_counter()
        seen = await self.phone.reset(task)
        goal = task.goal or seen.goal
        self.say(f"reset   {_ms(begun)}  {_screen(seen)}" + (f"  goal: {goal}" if goal else ""))
        return seen

    async def step(self, action: Action, index: int) -> StepResult:
        begun = time.perf_counter()
        try:
            result = await self.phone.step(action, index)
        except UnsupportedAction as error:
            self.say(f"step {index:<2} refused, nothing was done: {error}")
            raise
        fields = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v!r}" for k, v in _fields(action).items())
        note = [f"({result.note})"] if result.note else []
        words = " ".join((action.type, *fields, *note))
        self.say(f"step {index:<2} {_ms(begun)}  {_screen(result.observation)}  {words}")
        return result

    async def evaluate(self) -> Score:
        begun = time.perf_counter()
        score = await self.phone.evaluate()
        self.say(f"verdict {_ms(begun)}  {score.value:g}" + (f"  {score.reason}" if score.reason else ""))
        return score

    async def close(self) -> None:
        await self.phone.close()


def _ms(begun: float) -> str:
    return f"{1000 * (time.perf_counter() - begun):7.0f} ms"


def _screen(seen: Observation) -> str:
    return f"{seen.frame.width}x{seen.frame.height}" + (f" {seen.app}" if seen.app else "")


def _fields(action: Action) -> dict[str, object]:
    return {name: value for name, value in action.model_dump(exclude_none=True).items() if name != "type"}


async def play(
    phone: PhoneAddress,
    task: Task | None,
    policy: Policy,
    folder: Path,
    say: Callable[[str], None],
    *,
    seed: int = 0,
    max_steps: int | None = None,
) -> EpisodeRecord:
    """Plays, records and draws. Raises PlayError and EnvironmentFault when there is nothing to play, and
    RecordingError."""
    if (folder / ROLLOUT).exists():
        raise PlayError(f"{folder} has an episode already: name another folder (--output)")
    clients = PhoneClients()
    try:
        attempt = Attempt("play", 0, 0, 0, 0, await _task(clients, phone, task, max_steps), seed)
        limits = EpisodeLimits(max_parse_failures=_MAX_REFUSED, episode_seconds=_EPISODE_SECONDS)
        player = _Player(policy)
        environment = clients.open(phone)
        try:
            episode = Episode(AttemptRequest(attempt, Sampling(1), limits), player, player)
            result = await episode.play(_Told(environment, say), phone.slot)
        finally:
            await _closed(environment, say)
    finally:
        await clients.close()
    _write(folder, result)
    return result.record


async def _task(clients: PhoneClients, phone: PhoneAddress, task: Task | None, max_steps: int | None) -> Task:
    task = task or await clients.some_task(phone)
    return task if max_steps is None else task.model_copy(update={"max_steps": max_steps})


async def _closed(environment: Environment, say: Callable[[str], None]) -> None:
    try:
        await environment.close()
    except EnvironmentFault as fault:
        say(f"the episode's end: {fault}")


def _write(folder: Path, result: EpisodeResult) -> None:
    record = result.record
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder / ROLLOUT)
    try:
        recorder.episode(record, result.frames, result.ui_trees)
        recorder.group(GroupRecord(record.group, 0, record.task, 0, (record,)))
    finally:
        recorder.close()
    recording = Recording(folder / ROLLOUT)
    facts = {"phone": record.slot, "reason": record.reason.value}
    title = record.task.goal or record.task.template
    replay = Replay(title, recording.frames.get, facts=facts, groups=list(recording.groups()), played=True)
    write_replay(folder / "replay.html", replay)
