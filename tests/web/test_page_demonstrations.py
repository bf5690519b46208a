"""The demonstrator of pages: what it taps wins, what it taps when it errs doesn't, and a run's learner can take it."""

from __future__ import annotations

import pytest
from tests.web.conftest import task

from tapforge_envs.protocol import Frame, Observation
from tapforge_envs.web import catalog
from tapforge_envs.web.demonstrator import DEMONSTRATED, GRID, demonstration
from tapforge_envs.web.environment import WebEnvironment
from tapforge_trainer.agents import make_agent
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.tasks.demonstrations import Demonstrations, demonstrate
from tapforge_trainer.tasks.source import TaskError


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", DEMONSTRATED)
async def test_who_never_errs_wins_and_who_errs_does_not(page: WebEnvironment, name: str) -> None:
    template = catalog.TEMPLATES[name]
    for seed in range(2):
        for err in (False, True):
            asked = template.task(template.splits()[0], seed)
            action = demonstration(asked, await page.reset(asked), err)
            assert abs(action.x * 999 / GRID - round(action.x * 999 / GRID)) < 1e-6
            await page.step(action, 0)
            assert ((await page.evaluate()).value == 1) is not err


def test_what_nobody_demonstrates_is_named() -> None:
    seen = Observation(Frame.of(b"", 160, 210), ui_tree='{"tag": "body"}', goal="Click the button.")
    with pytest.raises(LookupError, match="page 'tic-tac-toe' has no demonstration"):
        demonstration(task("tic-tac-toe"), seen, False)
    with pytest.raises(LookupError, match="nothing on the page"):
        demonstration(task("click-test"), seen, False)


def _play(
    error_rate: float, episodes: int, templates: tuple[str, ...] = ("click-test", "click-dialog")
) -> Demonstrations:
    agent = make_agent(
        "qwen3-vl", SHIPPED, prompt="compact", history_images=1, history_steps=8, context_tokens=256, response_tokens=24
    )
    tasks = catalog.tasks("train", templates)
    return demonstrate(agent, tasks, episodes=episodes, error_rate=error_rate, seed=7, width=160, height=210)


@pytest.mark.long
def test_samples_are_the_same_whichever_page_played_them() -> None:
    one, other = _play(0.5, 6), _play(0.5, 6)
    assert one.samples == other.samples
    assert len(one.samples) == one.episodes == 6
    assert [sample.episode for sample in one.samples] == [f"demonstration-{n}" for n in range(6)]
    assert 0 < one.success < 1
    for sample in one.samples:
        assert set(sample.frames) <= set(one.frames[sample.episode])


def test_who_never_errs_always_succeeds() -> None:
    assert _play(0.0, 4).success == 1


def test_a_run_on_pages_without_demonstrations_says_so() -> None:
    with pytest.raises(TaskError, match=r"spec.warmStart: page 'tic-tac-toe' has no demonstration"):
        _play(0.0, 4, ("tic-tac-toe",))
