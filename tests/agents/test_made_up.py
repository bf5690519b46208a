"""The made-up episode by which a run's first weights are proved: prompts of every adapter, with its history."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from drawn import draw_frame

from tapforge_envs.protocol import Observation
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.made_up import made_up_episode
from tapforge_trainer.agents.registry import agent_names

OPTIONS = {"prompt": "full", "history_images": 2, "history_steps": 8, "response_tokens": 64}


@pytest.mark.parametrize("name", agent_names())
def test_its_prompts_are_the_adapter_s_with_all_of_its_history(model_folder: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    kind = "qwen2_5_vl" if name.startswith("ui-tars") else "qwen3_vl"  # some adapters ask what a model was built on
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    agent = make_agent(name, folder, context_tokens=8192, **OPTIONS)
    prompts = made_up_episode(agent, 128, 256)
    assert len(prompts) == 3 and prompts == made_up_episode(agent, 128, 256)
    assert [len(prompt.frames) for prompt in prompts] == [1, 2, 2]
    assert len({frame.name for prompt in prompts for frame in prompt.frames}) >= 4, "screens of its own for each step"
    seen, _ = agent.prepare(Observation(draw_frame()))
    real = agent.prompt("Go", [], seen)
    assert list(prompts[0].ids[:1]) == list(real.ids[:1]), "the same marks as in a run"
    assert prompts[2].expanded_length > prompts[0].expanded_length


def test_what_has_no_room_is_left_out(model_folder: Path) -> None:
    agent = make_agent("qwen3-vl", model_folder, context_tokens=100, **OPTIONS)
    assert made_up_episode(agent, 128, 256) == ()
