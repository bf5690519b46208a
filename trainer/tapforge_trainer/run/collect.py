"""`tapforge collect`: a model behind an endpoint plays a run's tasks on the run's phones, and what went well is data.

    FOLDER/collect.json          what is asked of whom: the same command goes on where it was, another one is refused
    FOLDER/collect.jsonl         tokens used, requests that failed, tasks that were begun (`teachers/ledger.py`)
    FOLDER/played/000000/        recordings: a part of the tasks each, all episodes with every screen; `view` shows them
    FOLDER/data.json, ...        the data set (`data/folder.py`), written when the command ends

Tasks are those of the run, in the order of its seed. Of a part that was cut off, tasks without a valid episode are
played again in the next one. Episodes are kept in the order of their tasks, not in that in which phones finish, so that
long ones are in it as often as short ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun, dump_set
from tapforge_api.judge import JudgeModel
from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import Outcome

from ..agents.chat_agent import ChatAgent
from ..agents.registry import conversation_agent
from ..data.convert import Bad, Converted, Row, convert
from ..data.folder import ABOUT, UNFINISHED
from ..data.rows import convention
from ..data.sources.recording import row_of
from ..judges.endpoint import public
from ..recording.reader import Recording
from ..recording.retention import Retention
from ..records import EpisodeRecord
from ..rollout.worker import RolloutWorker
from ..tasks.selection import training_tasks
from ..teachers.agent import TeacherAgent
from ..teachers.answers import AnswerStatistics
from ..teachers.ledger import Ledger
from ..teachers.teacher import BudgetUsed, Teacher, TeacherError
from . import assembly
from .adapters import adapter_options
from .assembly import ConfigurationError, SetupError
from .collect_options import CollectOptions, endpoint_of
from .evaluation import play
from .folder import LOCK, locked, write_atomically, write_spec
from .learning_errors import rewarder_of
from .local_files import folder_of
from .model_pin import model_of
from .served_models import without_own_models
from .shutdown import StopSignal, together, unless_stopped

log = logging.getLogger(__name__)

_ASKED: Final = "collect.json"
_LEDGER: Final = "collect.jsonl"
_PLAYED: Final = "played"
#: of the recording of a part, which says its prefix in names of episodes
_RECORDING: Final = "rollout"
#: tasks of a part at most
_PART: Final = 256
#: of episodes that are kept, the share that is expected at least when the next part is cut
_SHARE: Final = 0.1


async def collect_session(
    run: TrainingRun, runs: Path, stop: StopSignal, options: CollectOptions, say: Callable[[str], None]
) -> int:
    """The exit code: 1 where it ended with fewer episodes than were asked for, which are a data set all the same.
    Raises SetupError for what can't work, Interrupted when a stop was requested."""
    folder, why = options.into, ""
    if run.spec.environment.source.dataset is not None:
        raise ConfigurationError("spec.environment.source.dataset has no phone that a teacher could play on")
    model = endpoint_of(options)
    others = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if others and _ASKED not in others:
        raise ConfigurationError(f"--into {folder} holds other files; name a new folder")
    with locked(folder):
        asked = _asked(run, options)
        with closing(Ledger(folder / _LEDGER)) as ledger:
            _the_same(folder, asked, ledger.answers)
            found = await asyncio.to_thread(_found, folder, ledger, options.keep)
            if len(found.kept) < options.episodes:
                chat = await asyncio.to_thread(_chat, run, runs, options)
                teacher, agent = _teacher(chat, options, model, ledger, say)
                try:
                    why = await _collect(run, stop, options, ledger, teacher, agent, say)
                finally:
                    await teacher.close()
                found = await asyncio.to_thread(_found, folder, ledger, options.keep)
                said = list(_lines(chat, ledger, found))
                if not found.kept:
                    raise SetupError("\n".join([f"no episode is kept: {why or 'none went well'}", *said]))
                for line in said:
                    say(line)
                if why:
                    say(f"{len(found.kept):,} of {options.episodes:,} episodes: {why}; the same command goes on")
        made = await asyncio.to_thread(_written, folder, found.kept[: options.episodes], options, asked)
        say(f"{folder}: {made.episodes:,} episodes, {made.steps:,} steps of {options.model}")
        for line in made.rejected.lines():
            say(f"left out {line}")
    return 0 if made.episodes >= options.episodes else 1


# --- what is asked ----------------------------------------------------------------------------------------------------


def _asked(run: TrainingRun, options: CollectOptions) -> dict[str, Any]:
    """What decides which episodes there will be."""
    spec = dump_set(run)["spec"]
    told = {"environment": spec.get("environment"), "tasks": spec.get("tasks"), "seed": spec.get("seed")}
    prompt = options.prompt_file.read_bytes() if options.prompt_file is not None else b""
    return {
        "run": run.metadata.name,
        "environment": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16],
        "teacher": public(options.teacher),
        "model": options.model,
        "adapter": options.adapter or run.spec.model.adapter.name,
        "coordinates": options.coordinates,
        "prompt": hashlib.sha256(prompt).hexdigest()[:16] if prompt else None,
        "tool_calls": options.tool_calls,
        "temperature": options.temperature,
    }


def _the_same(folder: Path, asked: Mapping[str, Any], answers: int) -> None:
    """The address may change: it is the same model elsewhere. Before the first answer all may, such as a wrong name."""
    path = folder / _ASKED
    if not (path.exists() and answers):
        write_atomically(path, json.dumps(asked, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    changed = [name for name in asked if name != "teacher" and asked[name] != before.get(name)]
    if changed:
        what = "; ".join(f"{name} was {before.get(name)!r} and is {asked[name]!r}" for name in changed)
        raise ConfigurationError(f"{folder} was begun otherwise ({what}); name another folder, and merge them later")


def _chat(run: TrainingRun, runs: Path, options: CollectOptions) -> ChatAgent:
    name, adapter = options.adapter or run.spec.model.adapter.name, run.spec.model.adapter
    folder = assembly.described(model_of(run, folder_of(run, runs)))
    own = adapter_options(run)
    file = options.prompt_file or (own["prompt_file"] if name == adapter.name else None)
    kept = ("history_images", "history_steps", "keep", "min_pixels", "max_pixels", "context")
    shared = {key: own[key] for key in kept}
    try:
        coordinates = None if options.coordinates is None else convention(options.coordinates)
        return conversation_agent(
            name, folder, **shared, response_tokens=options.answer_tokens, prompt_file=file, coordinates=coordinates
        )
    except (ValueError, KeyError, OSError) as error:
        raise ConfigurationError(f"the teacher's adapter {name}: {error}") from error


def _teacher(
    chat: ChatAgent, options: CollectOptions, model: JudgeModel, ledger: Ledger, say: Callable[[str], None]
) -> tuple[Teacher, TeacherAgent]:
    agent = TeacherAgent(chat)
    if options.tool_calls and chat.dialect.schema is None:
        raise ConfigurationError(
            f"--tool-calls: answers of {chat.dialect.name} are no tool calls; name another adapter, or leave it out"
        )
    try:
        teacher = Teacher(
            agent,
            model,
            ledger,
            tool_calls=options.tool_calls,
            max_tokens=options.max_tokens,
            answer_seconds=options.answer_seconds,
            environ=os.environ,
            say=say,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return teacher, agent


# --- playing ----------------------------------------------------------------------------------------------------------


async def _collect(
    run: TrainingRun,
    stop: StopSignal,
    options: CollectOptions,
    ledger: Ledger,
    teacher: Teacher,
    agent: TeacherAgent,
    say: Callable[[str], None],
) -> str:
    """Plays until enough episodes are kept. Returns why it ended before, "" where it didn't."""
    tasks, judged = training_tasks(run), run.spec.rewards.verifier == "ignored"
    if judged:
        without_own_models([run.spec.rewards], "collect")
    player = RolloutWorker(agent, {"": teacher}, rewarder=rewarder_of(run) if judged else None)

    async def health(phone: PhoneAddress) -> str:
        return await player.health(phone)

    slots = assembly.slots_of(run, health)
    setup = replace(
        assembly.rollout_setup_of(run, slots, agent, player, tuple),
        retention=Retention(),
        response_tokens=options.answer_tokens,
    )
    try:
        if spent := teacher.spent:
            return spent
        await unless_stopped(stop, together(slots.start()))
        while True:
            found = await asyncio.to_thread(_found, options.into, ledger, options.keep)
            left = options.most - len(found.done | _ended(ledger))
            wanted = min(left, _PART, math.ceil((options.episodes - len(found.kept)) / found.share))
            if len(found.kept) >= options.episodes:
                return ""
            if wanted <= 0:
                return f"--max-episodes {options.most:,} are played"
            if spent := teacher.spent:
                return spent
            numbers = _next_numbers(ledger, found, wanted)
            part = ledger.begin(numbers)
            recorded = _recording_of(options.into, part, make=True)
            write_spec(recorded.parent, run)  # what `tapforge view` reads
            say(f"{len(found.kept):,} of {options.episodes:,} episodes are kept; playing {len(numbers):,} tasks")
            playing = play(
                setup,
                [tasks.sample(run.spec.seed, number) for number in numbers],
                repeats=1,
                temperature=options.temperature,
                seed=run.spec.seed,
                folder=recorded,
                judged=judged,
            )
            episodes = await unless_stopped(stop, playing)
            ledger.end(part)
            if not any(episode.valid for episode in episodes):
                reasons = ", ".join(sorted({episode.reason.value for episode in episodes}))
                return f"none of {len(numbers):,} tasks had a valid episode ({reasons}); look at the phones"
    except BudgetUsed as spent:
        return str(spent)
    except TeacherError as error:
        raise SetupError(str(error)) from error
    finally:
        for result in await asyncio.gather(slots.close(), player.close(), return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("closing failed: %s", result)


def _ended(ledger: Ledger) -> set[int]:
    """Numbers of tasks that were played to their end, whatever came of them."""
    return {number for part in ledger.ended for number in ledger.parts[part]}


def _next_numbers(ledger: Ledger, found: _Found, count: int) -> list[int]:
    """First those of parts that were cut off, without a valid episode."""
    begun = [number for part, numbers in ledger.parts.items() if part not in ledger.ended for number in numbers]
    ended = _ended(ledger)
    again = [number for number in dict.fromkeys(begun) if number not in found.done and number not in ended]
    fresh = max((number for numbers in ledger.parts.values() for number in numbers), default=-1) + 1
    return [*again, *range(fresh, fresh + count)][:count]


def _recording_of(folder: Path, part: int, *, make: bool = False) -> Path:
    place = folder / _PLAYED / f"{part:06d}"
    if make:
        place.mkdir(parents=True, exist_ok=True)
    return place / _RECORDING


# --- what was played --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    part: int
    episode: str


@dataclass
class _Found:
    #: in the order of their tasks
    kept: list[_Kept] = field(default_factory=list)
    #: numbers of tasks with a valid episode
    done: set[int] = field(default_factory=set)
    valid: int = 0
    #: what those that are kept say
    contents: set[str] = field(default_factory=set)
    #: of all that were not kept
    reasons: Counter[str] = field(default_factory=Counter)
    answers: AnswerStatistics = field(default_factory=AnswerStatistics)

    @property
    def share(self) -> float:
        """That is expected to be kept."""
        return max(_SHARE, len(self.kept) / self.valid) if self.valid else 1.0


def _found(folder: Path, ledger: Ledger, keep: str) -> _Found:
    found = _Found()
    for part, numbers in ledger.parts.items():
        recording = Recording(_recording_of(folder, part))
        for episode in recording.episodes() if recording.exists else ():
            found.answers.take(episode)
            if not episode.valid:
                found.reasons[episode.reason.value] += 1
                continue
            number = numbers[int(episode.group.rpartition("-")[2])]
            found.valid += 1
            if not (keep == "all" or episode.outcome is Outcome.SUCCESS) or number in found.done:
                found.reasons[f"failure ({episode.reason.value})"] += 1
            elif (says := _says(episode)) in found.contents:
                found.reasons["says what another one says"] += 1
            else:
                found.contents.add(says)
                found.kept.append(_Kept(number, part, episode.id))
            found.done.add(number)
    found.kept.sort(key=lambda one: one.number)
    return found


def _says(episode: EpisodeRecord) -> str:
    """Equal for episodes of which a data set takes one (`data/episodes.py:Episode.content`)."""
    steps = [(step.frames[-1], step.action) for step in episode.steps]
    return hashlib.sha256(json.dumps([episode.task.goal, steps], sort_keys=True).encode()).hexdigest()


def _lines(chat: ChatAgent, ledger: Ledger, found: _Found) -> Iterator[str]:
    """What became of it, for people."""
    answers = found.answers
    yield (
        f"{ledger.answers:,} answers, {ledger.prompt_tokens:,} + {ledger.answer_tokens:,} tokens, "
        f"{len(found.kept):,} of {found.valid:,} episodes are kept"
    )
    for reason, count in found.reasons.most_common():
        yield f"not kept: {count:,} x {reason}"
    yield from (f"no action: {line}" for line in answers.unread.lines())
    yield from (f"request failed: {line}" for line in ledger.failed.lines())
    if looks := answers.convention(chat.dialect.coordinates):
        yield (
            f"{answers.places:,} places go up to {answers.most:g} and look like --coordinates {looks}; asked for were "
            f"numbers {chat.dialect.coordinates.range(2)}"
        )


# --- the data set -----------------------------------------------------------------------------------------------------


def _written(folder: Path, kept: list[_Kept], options: CollectOptions, asked: Mapping[str, Any]) -> Converted:
    """Written anew each time: what an earlier command wrote of fewer episodes is replaced."""
    (folder / UNFINISHED).touch()
    (folder / ABOUT).unlink(missing_ok=True)
    return convert(_rows(folder, kept, options.model), "teacher", folder, {**asked, "keep": options.keep}, max_bad=0.1)


def _rows(folder: Path, kept: list[_Kept], model: str) -> Iterator[Row | Bad]:
    """Without the ids of answers, which are no tokens of any model."""
    by_part: dict[int, set[str]] = {}
    for one in kept:
        by_part.setdefault(one.part, set()).add(one.episode)
    for part, names in by_part.items():
        recording = Recording(_recording_of(folder, part))
        trees = dict(recording.ui_trees())
        for episode in recording.episodes():
            if episode.id in names:
                row = row_of(recording, episode, trees, f"{folder.name}/{part:06d}")
                if isinstance(row, Row):
                    row = replace(row, model=model, steps=[replace(step, ids=()) for step in row.steps])
                yield row
