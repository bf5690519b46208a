"""`tapforge collect` on phones of this machine, with the demonstrator behind an endpoint of this process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tapforge_api import TrainingRun, load
from tapforge_trainer.agents import make_agent
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.judges.server import Faults, JudgeServer, ModelServer
from tapforge_trainer.judges.simulated import Errors
from tapforge_trainer.run.assembly import ConfigurationError, SetupError
from tapforge_trainer.run.collect import _chat, collect_session
from tapforge_trainer.run.collect_options import CollectOptions
from tapforge_trainer.run.folder import read_spec
from tapforge_trainer.run.shutdown import StopSignal
from tapforge_trainer.tasks.selection import training_tasks
from tapforge_trainer.teachers.ledger import Ledger
from tapforge_trainer.teachers.simulated import Demonstrator, TeacherFaults, TeacherServer, dialect_named
from tapforge_trainer.tiny.folder import write_model

SAMPLE = Path("manifests/samples/quickstart.yaml").absolute()
#: two phones of one process, and tasks of few steps
PHONES = ("spec.environment.source.processes.count=2", "spec.tasks.templates=[open, switch]")


def run_of(*overrides: str) -> TrainingRun:
    return load(SAMPLE, [*PHONES, *overrides])


def teacher_of(run: TrainingRun, *, error_rate: float = 0.0, **faults: Any) -> TeacherServer:
    own = TeacherFaults(**{name: faults.pop(name) for name in ("two_calls", "pixels") if name in faults})
    tasks, screen = training_tasks(run), run.spec.environment.screen
    known = (tasks.sample(run.spec.seed, number) for number in range(60))
    demonstrator = Demonstrator(known, screen.width, screen.height, error_rate=error_rate)
    return TeacherServer("teacher", demonstrator, dialect_named("qwen3-vl"), Faults(**faults), own)


@asynccontextmanager
async def served(server: ModelServer) -> AsyncIterator[str]:
    runner = web.AppRunner(server.application(), shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def collected(tmp_path: Path, server: TeacherServer, run: TrainingRun | None = None, **given: Any) -> list[str]:
    said: list[str] = []
    async with served(server) as url:
        options = CollectOptions(
            **{"teacher": url, "model": "teacher", "into": tmp_path / "set", "episodes": 6} | given
        )
        code = await collect_session(run or run_of(), tmp_path / "runs", StopSignal(10), options, said.append)
    assert code == (len(DataFolder(tmp_path / "set")) < options.episodes), "fewer than were asked for are a failure"
    return said


async def test_what_a_teacher_did_well_is_data_that_a_model_imitates(tmp_path: Path) -> None:
    run = run_of()
    await collected(tmp_path, teacher_of(run, error_rate=0.5))
    data = DataFolder(tmp_path / "set")
    assert len(data) == 6 and data.about["made_of"]["model"] == "teacher"
    played = read_spec(tmp_path / "set" / "played" / "000000")  # `tapforge view` shows it
    assert played.spec.tasks == run.spec.tasks and (tmp_path / "set" / "played" / "000000" / "rollout").is_dir()
    for episode in data:
        assert episode.outcome == "success" and episode.provenance.model == "teacher"
        assert all(step.action is not None and step.answer and not step.ids for step in episode.steps)

    write_model(tmp_path / "model", 0)
    agent = make_agent(
        "qwen3-vl", tmp_path / "model", context_tokens=256, prompt="compact", history_images=1, history_steps=8,
        response_tokens=24,
    )  # fmt: skip
    imitated = ImitationData(agent, data, ("success",))
    samples = imitated.batch(range(len(imitated))).samples
    assert len(samples) == len(imitated) and not imitated.left_out.total
    assert "<tool_call>" in agent.decode(samples[0].ids[samples[0].spans[0].start :])

    # asked for no more, nothing is played; asked for more, it goes on
    silent = teacher_of(run)
    await collected(tmp_path, silent, episodes=5)
    assert silent.requests == 0 and len(DataFolder(tmp_path / "set")) == 5
    said = await collected(tmp_path, silent, episodes=8, keep="all", tool_calls=False)
    assert len(DataFolder(tmp_path / "set")) == 8 and said
    with pytest.raises(ConfigurationError, match="temperature was 0.7 and is 0.1"):
        await collected(tmp_path, silent, episodes=9, temperature=0.1)


def test_a_teacher_sees_the_history_that_the_run_shows(tmp_path: Path) -> None:
    run = run_of("spec.model.adapter={prompt: full, history: {blocks: {keep: 1, upTo: 3}}}")
    chat = _chat(run, tmp_path, CollectOptions("http://127.0.0.1:1/v1", "teacher", tmp_path / "set", 1))
    assert (chat.window.history_images, chat.window.keep) == (3, 1)


async def test_calls_as_tool_calls(tmp_path: Path) -> None:
    await collected(tmp_path, teacher_of(run_of()), episodes=2, tool_calls=True)
    assert len(DataFolder(tmp_path / "set")) == 2


async def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    server = teacher_of(run_of(), slow=0.05)
    async with served(server) as url:
        command = [
            sys.executable, "-m", "tapforge_trainer.cli.main", "collect", "-f", str(SAMPLE), "--teacher", url,
            "--model", "teacher", "--episodes", "30", "--into", str(tmp_path / "set"), "--runs", str(tmp_path / "runs"),
            *(word for one in PHONES for word in ("--set", one)),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        try:
            async with asyncio.timeout(120):
                while not _recorded(tmp_path / "set"):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    before = _recorded(tmp_path / "set")
    ledger = Ledger(tmp_path / "set" / "collect.jsonl")
    used, begun = ledger.tokens, ledger.parts[0]
    ledger.close()
    assert 0 < before < 30 and used and len(begun) == 30

    await collected(tmp_path, teacher_of(run_of()), episodes=30)
    assert len(DataFolder(tmp_path / "set")) == 30
    ledger = Ledger(tmp_path / "set" / "collect.jsonl")
    assert ledger.tokens > used and set(ledger.parts[1]) < set(begun), "what was cut off is played, and nothing twice"
    assert len(ledger.parts[1]) <= 30 - before
    ledger.close()


def _recorded(folder: Path) -> int:
    lines = (line for path in folder.glob("played/*/rollout/*.jsonl") for line in path.read_bytes().splitlines())
    return sum(line.startswith(b'{"kind":"episode"') for line in lines)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"prose": True}, "no action: .* x no_tool_call, first .* I would tap the button"),
        ({"two_calls": True}, "no action: .* x several_tool_calls"),
        ({"html": True}, "8 answers in a row didn't come"),
    ],
    ids=str,
)
async def test_a_teacher_of_another_kind_is_counted_and_shown(tmp_path: Path, faults: dict, words: str) -> None:
    with pytest.raises(SetupError) as told:
        await collected(tmp_path, teacher_of(run_of(), **faults), max_episodes=2)
    assert re.search(words, str(told.value)), str(told.value)


async def test_an_endpoint_that_is_down_is_said_and_ends_it(tmp_path: Path) -> None:
    """Two phones: their questions are given up one after another, long before eight in a row are."""
    said: list[str] = []
    options = CollectOptions("http://127.0.0.1:9/v1", "teacher", tmp_path / "set", 6, answer_seconds=3)
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:9.* no answer came for \d+ s"):
        await collect_session(run_of(), tmp_path / "runs", StopSignal(10), options, said.append)
    assert any(re.match(r"waiting for teacher: \d+ requests failed in .* it ends after 6 s", line) for line in said), (
        said
    )


async def test_an_endpoint_that_takes_questions_and_never_answers_ends_it_as_soon(tmp_path: Path) -> None:
    """Each question has time for one request, which its own end cuts off."""
    with pytest.raises(SetupError, match=r"no answer (came|within 6 s);.* no answer came for \d+ s"):
        await collected(tmp_path, teacher_of(run_of(), slow=600), answer_seconds=6)
    failed = [line for line in (tmp_path / "set" / "collect.jsonl").read_text().splitlines() if '"slow"' in line]
    assert 2 <= len(failed) < 8, "one for each question that was given up"


async def test_a_wrong_name_is_put_right_in_the_same_folder(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="'teachr' does not exist"):
        await collected(tmp_path, teacher_of(run_of()), model="teachr", episodes=2)
    said = await collected(tmp_path, teacher_of(run_of()), episodes=2)
    assert len(DataFolder(tmp_path / "set")) == 2
    assert DataFolder(tmp_path / "set").about["made_of"]["model"] == "teacher"
    counted = next(line for line in said if " answers, " in line)
    assert not counted.startswith("0 answers"), counted


async def test_a_question_that_is_refused_costs_its_own_episode(tmp_path: Path) -> None:
    run = run_of()
    tasks, screen = training_tasks(run), run.spec.environment.screen
    refused = tasks.sample(run.spec.seed, 4).goal
    known = (tasks.sample(run.spec.seed, number) for number in range(60))
    demonstrator = Demonstrator((one for one in known if one.goal != refused), screen.width, screen.height)
    server = TeacherServer("teacher", demonstrator, dialect_named("qwen3-vl"))
    said = await collected(tmp_path, server, run, episodes=6)
    data = DataFolder(tmp_path / "set")
    assert len(data) == 6 and refused not in {episode.task.goal for episode in data}
    assert any(line.startswith("request failed: ") and "status 400" in line for line in said), said


async def test_another_convention_of_coordinates_is_named(tmp_path: Path) -> None:
    run = run_of("spec.environment.screen.width=96")
    said = await collected(tmp_path, teacher_of(run, pixels=True), coordinates="fraction", keep="all", episodes=3)
    assert any("look like --coordinates grid" in line for line in said), said


async def test_a_budget_of_tokens_ends_it_with_what_there_is(tmp_path: Path) -> None:
    said = await collected(tmp_path, teacher_of(run_of()), episodes=50, max_tokens=4000)
    assert 0 < len(DataFolder(tmp_path / "set")) < 50
    assert any("--max-tokens 4,000 are used" in line for line in said)
    # again, nothing is begun, and what there is stays
    ledger = (tmp_path / "set" / "collect.jsonl").read_bytes()
    again = await collected(tmp_path, silent := teacher_of(run_of()), episodes=50, max_tokens=4000)
    assert any("--max-tokens 4,000 are used" in line for line in again) and silent.requests == 0
    assert (tmp_path / "set" / "collect.jsonl").read_bytes() == ledger


async def test_what_an_earlier_episode_says_is_replaced_by_another(tmp_path: Path) -> None:
    """There are five tasks: from the sixth on what is played says nothing new, and is not counted as kept."""
    named = run_of("spec.tasks.maxTasks=5")
    said = await collected(tmp_path, teacher_of(run_of()), named, episodes=4)
    assert len(DataFolder(tmp_path / "set")) == 4
    said = await collected(tmp_path, teacher_of(run_of()), named, episodes=8, max_episodes=12)
    found = list(DataFolder(tmp_path / "set"))
    assert len({episode.content for episode in found}) == len(found) == 5, said
    assert any("x says what another one says" in line for line in said), said


async def test_a_judge_says_what_went_well_where_no_verifier_is_asked(tmp_path: Path) -> None:
    judge = JudgeServer("simulated-phone", Errors(1.0))
    async with served(judge) as url:
        model = f"{{url: '{url}', model: simulated-phone}}"
        streams = f"[{{name: judge, judge: {{prompt: simulated-phone, models: [{model}]}}}}]"
        run = run_of(f"spec.rewards={{verifier: ignored, success: judge, streams: {streams}}}")
        with pytest.raises(SetupError, match="no episode is kept"):
            await collected(tmp_path, teacher_of(run), run, episodes=2, max_episodes=2)
    assert judge.requests >= 2, "this judge is always wrong, and the teacher never"


async def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="holds other files"):
        await collected(tmp_path, teacher_of(run_of()))


@pytest.mark.parametrize("url", ["127.0.0.1:9000/v1", "ftp://127.0.0.1/v1", "http://127.0.0.1:9000/v1?key=secret"])
async def test_an_address_that_is_none_is_refused_before_a_folder_is_made(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match="--teacher: url"):
        await collected(tmp_path, teacher_of(run_of()), teacher=url)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"teacher": "larg"}, r"larg is not one of spec.models \(it has large\), nor an endpoint"),
        ({"teacher": "large", "model": None, "tool_calls": True}, "leave out --tool-calls, for endpoints alone"),
        ({"teacher": "large", "api_key_env": "KEY"}, "leave out --model, --api-key-env, for endpoints alone"),
        ({"teacher": "http://127.0.0.1:9/v1", "model": None}, "is an endpoint: name its model with --model"),
    ],
)
async def test_what_can_t_be_a_teacher_is_refused_before_anything_starts(
    tmp_path: Path, given: dict, words: str
) -> None:
    run = run_of("spec.models=[{name: large, source: {tiny: {}}}]")
    with pytest.raises(ConfigurationError, match=words):
        await collected(tmp_path, teacher_of(run), run, **given)
    assert not (tmp_path / "set").exists()


async def test_a_served_teacher_that_can_t_read_its_prompts_is_refused_before_a_phone_starts(tmp_path: Path) -> None:
    (tmp_path / "blind").mkdir()
    for config, words in ((None, "blind holds no config.json"), ('{"model_type": "qwen2"}', "takes no images")):
        if config is not None:
            (tmp_path / "blind" / "config.json").write_text(config)
        run = run_of(f"spec.models=[{{name: large, source: {{path: {{folder: {tmp_path / 'blind'}}}}}}}]")
        with pytest.raises(ConfigurationError, match=rf"spec.models\[large\].*{words}"):
            await collected(tmp_path, teacher_of(run), run, teacher="large", model=None)
        assert not (tmp_path / "set" / "played").exists()


async def test_a_folder_that_only_a_lock_was_left_in_is_taken(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".lock").write_text("123")
    await collected(tmp_path, teacher_of(run_of()), episodes=1)
    assert len(DataFolder(tmp_path / "set")) == 1
