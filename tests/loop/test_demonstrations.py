"""Demonstrations: plans played on a phone, with an error rate, as samples that the learner takes."""

import pytest

from tapforge_envs.phone import catalog
from tapforge_trainer.agents import make_agent
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.tasks.demonstrations import demonstrate


@pytest.fixture(scope="module")
def agent():
    return make_agent(
        "qwen3-vl", SHIPPED, prompt="compact", history_images=1, history_steps=8, context_tokens=256, response_tokens=24
    )


def _play(agent, error_rate, episodes=64, suite="quickstart"):
    tasks = catalog.tasks(suite, "train")
    return demonstrate(agent, tasks, episodes=episodes, error_rate=error_rate, seed=7, width=96, height=160)


def test_who_never_errs_always_succeeds(agent):
    assert _play(agent, 0.0).success == 1.0


def test_who_always_errs_fails_wherever_there_is_a_decision(agent):
    found = _play(agent, 1.0)
    assert 0 < found.success <= 1 / 7  # only plain opening has none


def test_an_error_rate_of_a_half_is_in_between(agent):
    assert 0.35 < _play(agent, 0.5, episodes=160).success < 0.75


def test_samples_hold_the_agents_own_words(agent):
    found = _play(agent, 0.5, episodes=16)
    for sample in found.samples:
        (span,) = sample.spans
        assert (span.start, span.end) == (span.start, len(sample.ids))
        text = agent.decode(sample.ids[span.start : span.end])
        assert text.startswith("<tool_call>")
        assert text.endswith("</tool_call>")
        assert set(sample.frames) <= set(found.frames[sample.episode])
        assert sample.ids.count(agent_image(agent)) == 1
        assert sample.length == len(sample.ids) + 15 - 1  # 96x160 pixels are 3 x 5 visual tokens


def agent_image(agent) -> int:
    return agent._tokens.image_pad


def test_the_same_seed_gives_the_same_samples(agent):
    assert _play(agent, 0.5, 8).samples == _play(agent, 0.5, 8).samples
