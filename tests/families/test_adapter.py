"""The adapter that a family names is one that there is."""

from __future__ import annotations

from tapforge_trainer.agents.registry import agent_names
from tapforge_trainer.learner.families import families


def test_the_usual_adapter_of_each_family() -> None:
    assert {name: family.adapter for name, family in families().items()} == {
        "qwen2_vl": None,
        "qwen2_5_vl": "qwen2.5-vl",
        "qwen3_vl": "qwen3-vl",
        "qwen3_vl_moe": "qwen3-vl",
    }
    assert {family.adapter for family in families().values() if family.adapter} <= set(agent_names())
