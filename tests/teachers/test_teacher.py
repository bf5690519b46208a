"""A teacher's endpoint that fails now and then: what is asked again, counted and given up."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.teachers.test_collect import run_of, served, teacher_of

from tapforge_api.judge import JudgeModel
from tapforge_envs.protocol import Frame, Observation
from tapforge_trainer.agents.coordinates import Grid, ImagePixels
from tapforge_trainer.agents.parsing import ParseFailure
from tapforge_trainer.agents.registry import conversation_agent
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.records import Generation, Prompt, Sampling
from tapforge_trainer.teachers.agent import TeacherAgent, ids_of, text_of
from tapforge_trainer.teachers.answers import AnswerStatistics
from tapforge_trainer.teachers.ledger import Ledger
from tapforge_trainer.teachers.teacher import Teacher, TeacherError
from tapforge_trainer.tiny.folder import write_model

GOAL = json.dumps([{"role": "user", "content": [{"type": "text", "text": "Task: nothing"}, {"type": "image"}]}])
SCREEN = FittedFrame.of(np.zeros((160, 96, 3), np.uint8))


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> TeacherAgent:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0)
    return TeacherAgent(conversation_agent("qwen3-vl", folder, history_images=1, history_steps=2, response_tokens=64))


class Says:
    """Answers every question with this message."""

    model = "teacher"

    def __init__(self, message: dict[str, Any], finish: str = "stop", usage: bool = True):
        self._message, self._finish, self._usage = message, finish, usage

    def application(self) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            choice = {"message": self._message, "finish_reason": self._finish}
            used = {"usage": {"prompt_tokens": 7, "completion_tokens": 3}} if self._usage else {}
            return web.json_response({"model": "teacher", "choices": [choice], **used})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        return app


async def answer_of(agent: TeacherAgent, tmp_path: Path, server: Any, **given: Any) -> tuple[Generation, Ledger]:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    async with served(server) as url:
        model = JudgeModel(url=url, model="teacher", request_seconds=given.pop("request_seconds", 5))
        teacher = Teacher(agent, model, ledger, environ={}, **given)
        try:
            return await teacher.generate(Prompt(ids_of(GOAL), (SCREEN,), 1), Sampling(64)), ledger
        finally:
            await teacher.close()
            ledger.close()


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"status": 429, "retry_after": 0.2}, "status 429"),
        ({"huge": True}, "long"),
        ({"html": True}, "no json"),
        ({"slow": 30.0}, "slow"),
    ],
    ids=str,
)
async def test_what_fails_once_is_asked_again_and_counted(
    agent: TeacherAgent, tmp_path: Path, faults: dict[str, Any], kind: str
) -> None:
    # The demonstrator doesn't know this goal: that it says so shows that it was asked again.
    found, ledger = await answer_of(agent, tmp_path, teacher_of(run_of(), first=1, **faults), request_seconds=1)
    assert found.finish_reason == "abort" and "the goal of no task" in ledger.failed.first["status 400"]
    assert ledger.failed.counts == {kind: 1, "status 400": 1} and ledger.failed.first[kind]


async def test_an_answer_that_never_comes_ends_its_episode_and_nothing_else(
    agent: TeacherAgent, tmp_path: Path
) -> None:
    found, ledger = await answer_of(agent, tmp_path, teacher_of(run_of(), huge=True))
    assert found.finish_reason == "abort" and ledger.failed.counts == {"long": 3}


CALL = '{"action": "click", "coordinate": [500, 500]}'


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"content": "Tap.", "tool_calls": [{"function": {"name": "mobile_use", "arguments": CALL}}]}, "tap"),
        ({"content": None, "tool_calls": [{"function": {"name": "mobile_use", "arguments": json.loads(CALL)}}]}, "tap"),
        ({"content": [{"type": "text", "text": "no"}]}, "no_tool_call"),
        ({"content": None, "refusal": "I can't"}, "no_tool_call"),
        ({"content": None, "tool_calls": "nonsense"}, "no_tool_call"),
        ({"content": "half a character: \ud800"}, "no_tool_call"),
        ({"content": "x" * 300_000}, "cut_off"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
async def test_words_and_calls(agent: TeacherAgent, tmp_path: Path, message: Any, read: str) -> None:
    given, ledger = await answer_of(agent, tmp_path, Says(message))
    found = agent.read(text_of(given.ids), given.finish_reason, SCREEN)
    assert (found.kind if isinstance(found, ParseFailure) else found.type) == read
    assert ledger.tokens == 10


async def test_a_budget_needs_an_endpoint_that_counts(agent: TeacherAgent, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="--max-tokens could not hold"):
        await answer_of(agent, tmp_path, Says({"content": "hi"}, usage=False), max_tokens=100)


def test_the_prompt_says_the_tool_in_words_whatever_the_student_is_asked(agent: TeacherAgent) -> None:
    [system, *_] = agent.chat.conversation("Open Notes", [], agent.prepare(_observation())[0])[0]
    words = "".join(getattr(part, "text", part) or "" for part in system.parts)
    assert "mobile_use" in words and "<tool_call>" in words and "999" in words


def _observation() -> Any:
    return Observation(
        Frame(SCREEN.data, hashlib.sha256(SCREEN.data).hexdigest(), SCREEN.width, SCREEN.height, "image/png")
    )


def test_a_ledger_that_was_cut_off(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    assert ledger.begin([4, 5]) == 0
    ledger.answered(10, 2)
    ledger.close()
    with (tmp_path / "l").open("ab") as file:
        file.write(b'{"ended": 0')
    again = Ledger(tmp_path / "l")
    assert (again.tokens, again.parts, again.ended) == (12, {0: [4, 5]}, set())
    again.end(0)
    again.close()
    last = Ledger(tmp_path / "l")
    assert last.ended == {0} and last.answers == 1
    last.close()


@pytest.mark.parametrize(
    ("places", "asked", "looks"),
    [
        ([(0.25, 0.5)] * 9, Grid(999), "fraction"),
        ([(540, 1900)] * 9, Grid(999), "pixels"),
        ([(540, 1000)] * 9, Grid(999), "grid1000"),
        ([(540, 900)] * 9, Grid(999), ""),
        ([(540, 1900)] * 3, Grid(999), ""),
        ([(0.25, 0.5)] * 9, ImagePixels(), "fraction"),
        ([(0, 0), (1, 1)] * 9, Grid(999), ""),
    ],
    ids=str,
)
def test_what_coordinates_look_like(places: Any, asked: Any, looks: str) -> None:
    found = AnswerStatistics()
    for x, y in places:
        found.places += 1
        found.shares += max(x, y) <= 1 and isinstance(x, float)
        found.most = max(found.most, x, y)
    assert found.convention(asked) == looks
