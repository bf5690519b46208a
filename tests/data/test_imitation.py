"""Samples of long and of unfit episodes: what they cost, and how they are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.data.test_bad_rows import long_episode

from tapforge_envs.protocol import Swipe
from tapforge_trainer.agents import make_agent, vision
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.tiny.folder import write_model


def test_of_a_long_history_only_the_screens_that_are_shown_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = long_episode(tmp_path / "set", 30)
    write_model(tmp_path / "model", 0)
    options: dict[str, Any] = {"prompt": "compact", "history_images": 3, "history_steps": 8, "response_tokens": 24}
    agent = make_agent("qwen3-vl", tmp_path / "model", context_tokens=1024, **options)
    decode, seen = vision.decode_screen, []
    monkeypatch.setattr(vision, "decode_screen", lambda frame: seen.append(frame.sha256) or decode(frame))
    found = ImitationData(agent, data, ("unknown",)).batch([29])
    [sample] = found.samples
    assert seen and set(seen) == {step.screen for step in data[0].steps[27:]}
    assert all(found.frames["one"][name].pixels().shape[2] == 3 for name in sample.frames) and len(sample.frames) == 3


def test_a_step_that_fails_is_counted_once(tmp_path: Path) -> None:
    data = long_episode(tmp_path / "set", 3)
    write_model(tmp_path / "model", 0)
    agent = make_agent(
        "qwen3-vl", tmp_path / "model", context_tokens=30, prompt="compact", history_images=1, history_steps=8,
        response_tokens=24,
    )  # fmt: skip
    found = ImitationData(agent, data, ("unknown",))
    for _ in range(2):
        assert not found.batch([0, 1, 2]).samples
    assert found.left_out.counts == {"context": 3}


def test_an_action_without_a_word_costs_its_own_step_alone(tmp_path: Path) -> None:
    # MAI-UI swipes in directions alone, by strokes of its own.
    data = long_episode(tmp_path / "set", 4, {1: Swipe(x=0.1, y=0.2, x2=0.7, y2=0.9)})
    write_model(tmp_path / "model", 0)
    agent = make_agent(
        "mai-ui", tmp_path / "model", context_tokens=1024, prompt="compact", history_images=1, history_steps=8,
        response_tokens=24,
    )  # fmt: skip
    found = ImitationData(agent, data, ("unknown",))
    samples = found.batch(range(4)).samples
    assert [sample.spans[0].step for sample in samples] == [0, 2, 3]
    assert found.left_out.counts == {"action": 1}
    weighed = ImitationData(agent, data, ("unknown",), {"success": 1.0, "unknown": 0.2}).batch([0])
    assert [sample.spans[0].weight for sample in (*samples[:1], *weighed.samples)] == [1.0, 0.2]
