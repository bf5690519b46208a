"""`tapforge collect`: a teacher plays a run's tasks on the run's phones, and what went well is data. It is a model
behind an endpoint, or one of `spec.models`, which is served as a run serves its judges' (`run/served_models.py`).

    FOLDER/collect.json          what is asked of whom: the same command goes on where it was, another one is refused
    FOLDER/collect.jsonl         tokens used, requests that failed, tasks that were begun (`teachers/ledger.py`)
    FOLDER/logs/model-0.log      what a server of the teacher writes where it uses GPUs
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
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun, dump_set
from tapforge_api.judge import JudgeModel
from tapforge_envs.clients.phones import PhoneAddress

from ..agents.chat_agent import ChatAgent
from ..agents.registry import conversation_agent
from ..data.rows import convention
from ..judges.endpoint import public
from ..recording.retention import Retention
from ..rollout.worker import RolloutWorker
from ..serving.servers import ModelServers
from ..tasks.selection import training_tasks
from ..teachers.agent import TeacherAgent
from ..teachers.ledger import Ledger
from ..teachers.teacher import BudgetUsed, Teacher, TeacherError
from . import assembly
from .adapters import adapter_options
from .assembly import ConfigurationError, SetupError
from .collect_options import CollectOptions, teacher_of
from .collected import Found, found_in, lines_of, recording_of, written
from .evaluation import play
from .folder import LOCK, locked, write_atomically, write_spec
from .learning_errors import rewarder_of
from .local_files import folder_of
from .model_pin import model_of
from .served_model_errors import images_sent, served_model_errors
from .served_models import models_alone
from .shutdown import StopSignal, together, unless_stopped

log = logging.getLogger(__name__)

_ASKED: Final = "collect.json"
_LEDGER: Final = "collect.jsonl"
#: tasks of a part at most
_PART: Final = 256


async def collect_session(
    run: TrainingRun, runs: Path, stop: StopSignal, options: CollectOptions, say: Callable[[str], None]
) -> int:
    """The exit code: 1 where it ended with fewer episodes than were asked for, which are a data set all the same.
    Raises SetupError for what can't work, Interrupted when a stop was requested."""
    folder, why = options.into, ""
    if run.spec.environment.source.dataset is not None:
        raise ConfigurationError("spec.environment.source.dataset has no phone that a teacher could play on")
    model = teacher_of(options, run.spec.models)
    others = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if others and _ASKED not in others:
        raise ConfigurationError(f"--into {folder} holds other files; name a new folder")
    with locked(folder):
        asked = _asked(run, options, model)
        with closing(Ledger(folder / _LEDGER)) as ledger:
            _the_same(folder, asked, ledger.answers)
            found = await asyncio.to_thread(found_in, folder, ledger, options.keep)
            if len(found.kept) < options.episodes:
                chat = await asyncio.to_thread(_chat, run, runs, options)
                teacher, agent = _teacher(chat, options, model, ledger, say)
                try:
                    serve = _serving(run, runs, options, model, agent, stop, say)
                    why = await _collect(run, stop, options, ledger, teacher, agent, serve, say)
                finally:
                    await teacher.close()
                found = await asyncio.to_thread(found_in, folder, ledger, options.keep)
                said = list(lines_of(chat, ledger, found))
                if not found.kept:
                    raise SetupError("\n".join([f"no episode is kept: {why or 'none went well'}", *said]))
                for line in said:
                    say(line)
                if why:
                    say(f"{len(found.kept):,} of {options.episodes:,} episodes: {why}; the same command goes on")
        made = await asyncio.to_thread(written, folder, found.kept[: options.episodes], options.keep, asked)
        say(f"{folder}: {made.episodes:,} episodes, {made.steps:,} steps of {model.model}")
        for line in made.rejected.lines():
            say(f"left out {line}")
    return 0 if made.episodes >= options.episodes else 1


# --- what is asked ----------------------------------------------------------------------------------------------------


def _asked(run: TrainingRun, options: CollectOptions, model: JudgeModel) -> dict[str, Any]:
    """What decides which episodes there will be."""
    spec = dump_set(run)["spec"]
    told = {"environment": spec.get("environment"), "tasks": spec.get("tasks"), "seed": spec.get("seed")}
    served = next((one for one in run.spec.models if model.url is None and one.name == model.model), None)
    prompt = options.prompt_file.read_bytes() if options.prompt_file is not None else b""
    return {
        "run": run.metadata.name,
        "environment": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16],
        "teacher": f"spec.models[{model.model}]" if model.url is None else public(model.url),
        "model": model.model,
        "source": None if served is None else served.source.model_dump(mode="json", by_alias=True, exclude_none=True),
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


def _serving(
    run: TrainingRun,
    runs: Path,
    options: CollectOptions,
    model: JudgeModel,
    agent: TeacherAgent,
    stop: StopSignal,
    say: Callable[[str], None],
) -> Callable[[], AbstractAsyncContextManager[ModelServers | None]]:
    """Starts what is asked here: the teacher, where it is one of `spec.models`, and the models of judges that say what
    went well. Raises ConfigurationError."""
    sent = images_sent([run.spec.rewards]) if run.spec.rewards.verifier == "ignored" else {}
    if model.url is None:
        sent[model.model] = max(sent.get(model.model, 0), agent.chat.window.history_images)
    if wrong := served_model_errors(run, sent):
        raise ConfigurationError("\n".join(wrong))
    return partial(models_alone, run, folder_of(run, runs), sent, stop, (options.into / "logs").absolute(), say)


# --- playing ----------------------------------------------------------------------------------------------------------


async def _collect(
    run: TrainingRun,
    stop: StopSignal,
    options: CollectOptions,
    ledger: Ledger,
    teacher: Teacher,
    agent: TeacherAgent,
    serve: Callable[[], AbstractAsyncContextManager[ModelServers | None]],
    say: Callable[[str], None],
) -> str:
    """Plays until enough episodes are kept. Returns why it ended before, "" where it didn't."""
    tasks, judged = training_tasks(run), run.spec.rewards.verifier == "ignored"
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
        found, numbers, why = await _next(options, ledger, teacher)
        if not numbers:
            return why
        # Phones that don't answer are known before anything heavy is started.
        await unless_stopped(stop, together(slots.start()))
        async with serve() as servers:
            if servers is not None:
                servers.follow(teacher.use_models)
                servers.follow(player.use_models)
            while numbers:
                part = ledger.begin(numbers)
                recorded = recording_of(options.into, part, make=True)
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
                found, numbers, why = await _next(options, ledger, teacher)
            return why
    except BudgetUsed as spent:
        return str(spent)
    except TeacherError as error:
        raise SetupError(str(error)) from error
    finally:
        for result in await asyncio.gather(slots.close(), player.close(), return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("closing failed: %s", result)


async def _next(options: CollectOptions, ledger: Ledger, teacher: Teacher) -> tuple[Found, list[int], str]:
    """What is kept, the tasks to play next, by number, and why there are none; "": enough is kept."""
    found = await asyncio.to_thread(found_in, options.into, ledger, options.keep)
    if len(found.kept) >= options.episodes:
        return found, [], ""
    left = options.most - len(found.done | _ended(ledger))
    wanted = min(left, _PART, math.ceil((options.episodes - len(found.kept)) / found.share))
    if wanted <= 0:
        return found, [], f"--max-episodes {options.most:,} are played"
    if spent := teacher.spent:
        return found, [], spent
    return found, _next_numbers(ledger, found, wanted), ""


def _ended(ledger: Ledger) -> set[int]:
    """Numbers of tasks that were played to their end, whatever came of them."""
    return {number for part in ledger.ended for number in ledger.parts[part]}


def _next_numbers(ledger: Ledger, found: Found, count: int) -> list[int]:
    """First those of parts that were cut off, without a valid episode."""
    begun = [number for part, numbers in ledger.parts.items() if part not in ledger.ended for number in numbers]
    ended = _ended(ledger)
    again = [number for number in dict.fromkeys(begun) if number not in found.done and number not in ended]
    fresh = max((number for numbers in ledger.parts.values() for number in numbers), default=-1) + 1
    return [*again, *range(fresh, fresh + count)][:count]
