"""The prompts of a run by which its syncs are proved: chosen from the first batch, kept, and the same again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from counted import parts

from tapforge_trainer.loop import reinforce
from tapforge_trainer.placement.settings import EngineSettings
from tapforge_trainer.policy import PolicySettings
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.records import Prompt
from tapforge_trainer.run.folder import ROLLOUT
from tapforge_trainer.run.proof_prompts import PROMPTS, kept, name_of, steps_by_size
from tapforge_trainer.telemetry.progress import Progress


def proved(policy: Any, longest: int = 100_000) -> list[tuple[Prompt, ...]]:
    """What the policy's syncs are proved with, each time that it changes."""
    given: list[tuple[Prompt, ...]] = []
    policy.settings = PolicySettings(EngineSettings("nowhere", (1,), (1,)), None)
    policy.recorded_prompts, policy.longest_proof_prompt = (), longest

    def prove_with(prompts: tuple[Prompt, ...], name: str) -> None:
        policy.recorded_prompts, policy.proof_prompts = prompts, name
        given.append(prompts)

    policy.prove_with = prove_with
    return given


async def test_they_are_chosen_once_and_read_again_bit_for_bit(tmp_path: Path) -> None:
    async with parts(tmp_path, "stop.maxUpdates=3") as context:
        policy: Any = context.policy
        given = proved(policy)
        await reinforce(context, Progress())
        (prompts,) = given
        assert policy.saved[-1][1]["proof_prompts"] == name_of(prompts)
        assert policy.saved[-1][1]["first_proof"] is None, "what was proved by others is no measure"
    shutil.rmtree(tmp_path / ROLLOUT)  # what is kept is kept apart
    assert kept(tmp_path) == prompts and name_of(kept(tmp_path)) == name_of(prompts)
    assert len(prompts) == PROMPTS and all(prompt.frames for prompt in prompts)


async def test_what_is_largest_comes_first_and_each_episode_once(tmp_path: Path) -> None:
    async with parts(tmp_path, "stop.maxUpdates=1") as context:
        await reinforce(context, Progress())
    groups = list(Recording(tmp_path / ROLLOUT).groups())[:4]
    steps = steps_by_size(groups)
    episodes = [episode for group in groups for episode in group.episodes]
    assert len({step.episode for step in steps[: len(episodes)]}) == len(episodes)
    assert len(steps) == sum(len(episode.steps) for episode in episodes)
    visual = [s.generation.prompt_length - len(s.generation.prompt_ids) for s in steps[: len(episodes)]]
    assert visual == sorted(visual, reverse=True)
    assert steps == steps_by_size(groups[::-1]), "whatever the order"


@pytest.mark.parametrize(("longest", "overrides"), [(1, ()), (100_000, ("recording.encoding=jpeg",))])
async def test_prompts_that_leave_no_room_are_no_proof_and_screens_at_hand_need_no_recording(
    tmp_path: Path, longest: int, overrides: tuple[str, ...]
) -> None:
    async with parts(tmp_path, "stop.maxUpdates=2", *overrides) as context:
        given = proved(context.policy, longest)
        await reinforce(context, Progress())
    assert (given == [] and kept(tmp_path) == ()) if longest == 1 else kept(tmp_path) == given[0] != ()


def test_a_folder_that_can_not_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "prompts.json").write_text("[{")
    assert kept(tmp_path) == ()
