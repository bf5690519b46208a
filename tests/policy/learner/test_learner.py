"""What ranks make of samples: gradients, updates, checkpoints, exports."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from both_ends import END, Elsewhere, Player
from safetensors.torch import load
from tiny_samples import PlainFrames, Tiny, at_hand, plain_logprobs, plain_model

from tapforge_trainer.algorithms.losses import policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.frames.handles import BatchFrames, FramesLost
from tapforge_trainer.learner import checkpoint_storage, checkpoints, rank_state
from tapforge_trainer.learner.batches import MicroBatchPlan, SampleError, TokenBatch, plan_micro_batches
from tapforge_trainer.learner.client import Learner, LearnerError
from tapforge_trainer.learner.export import export
from tapforge_trainer.learner.frame_store import FrameStore
from tapforge_trainer.placement.settings import UpdateSettings
from tapforge_trainer.recording.frames import FrameWriter
from tapforge_trainer.recording.retention import Retention

pytestmark = pytest.mark.asyncio(loop_scope="session")

OBJECTIVE = Objective(importance_cap=None)


def gradients(
    rank: Any, data: TokenBatch, frames: dict, plans: list[list[MicroBatchPlan]], counts: Counts, objective: Objective
) -> dict[str, np.ndarray]:
    """Runs on a rank: whole gradients by name."""
    from functools import partial

    from tapforge_trainer.learner.batch_loss import DeviceFigures, batch_loss
    from tapforge_trainer.learner.metrics import UpdateMetrics
    from tapforge_trainer.learner.rank import MiniBatch

    metrics = UpdateMetrics()
    figures = DeviceFigures(metrics)
    loss = partial(batch_loss, data, data.behavior, None, None, objective, counts, figures, 1, False)
    batch = MiniBatch(tuple(plans[rank.rank]), counts)
    rank.accumulate(data, PlainFrames(frames), batch, UpdateSettings(), loss, metrics, figures)
    found = {}
    for name, parameter in rank.policy.model.named_parameters():
        full = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[name] = full.numpy().copy()
    rank.optimizer.zero_grad()
    return found


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    """Functions of this module run on ranks, whose processes can't import it."""
    import sys

    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def expected_gradients(
    tiny: Tiny, data: TokenBatch, frames: dict, counts: Counts, objective: Objective
) -> dict[str, Any]:
    policy = tiny.policy(plain_model(tiny))
    micro = tiny.micro_batch(data, MicroBatchPlan(tuple(range(len(data)))), frames)
    logp, _ = policy(micro, FrameStore(tiny.form).get(micro.frames, frames))
    at = micro.response
    result = policy_loss(
        logp,
        torch.from_numpy(data.behavior[at]),
        torch.from_numpy(data.advantage[at]),
        torch.from_numpy(data.span[at]),
        objective=objective,
        counts=counts,
    )
    result.loss.backward()
    return {name: parameter.grad.numpy() for name, parameter in policy.model.named_parameters()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(np.linalg.norm(value)) for value in expected.values())
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= tolerance * max(float(np.linalg.norm(value)), 1e-2 * scale), name


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("budget", [100_000, 150, 1])
async def test_gradients_do_not_depend_on_ranks_and_micro_batches(
    tiny: Tiny, fresh: Learner, budget: int, aggregation: Any
) -> None:
    """Two ranks, unequal micro-batches (with one sample each: 9 for 2 ranks), against one plain pass over all."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    objective = replace(OBJECTIVE, aggregation=aggregation)
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    expected = expected_gradients(tiny, data, frames, counts, objective)
    plans = plan_micro_batches(data.lengths, 2, budget)
    found = await fresh.run(gradients, data, frames, plans, counts, objective)
    assert_close(found[0], expected)
    assert_close(found[1], found[0], 0.0)


async def test_a_rank_without_images_keeps_in_step(tiny: Tiny, fresh: Learner) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    texts = [k for k, sample in enumerate(samples) if not sample.frames]
    others = [k for k, sample in enumerate(samples) if sample.frames]
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    plans = [[MicroBatchPlan(tuple(texts))], [MicroBatchPlan(tuple(others))]]
    found = await asyncio.wait_for(fresh.run(gradients, data, frames, plans, counts, OBJECTIVE), END)
    assert_close(found[0], expected_gradients(tiny, data, frames, counts, OBJECTIVE))


@pytest.mark.parametrize("known_at_once", [True, False])
async def test_a_death_has_precedence_over_what_it_did_to_other_ranks(fresh: Learner, known_at_once: bool) -> None:
    """The other rank's connection to the dead one breaks, and that may be known first."""
    from ray.exceptions import RayActorError, RayTaskError

    loop = asyncio.get_running_loop()
    broken, dead = loop.create_future(), loop.create_future()
    calling = asyncio.create_task(fresh._call([broken, dead], "update", END))
    first, second = (dead, broken) if known_at_once else (broken, dead)
    errors = {
        broken: RayTaskError("update", "Traceback", RuntimeError("Connection closed by peer")),
        dead: RayActorError(),
    }
    first.set_exception(errors[first])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.set_exception(errors[second])
    with pytest.raises(LearnerError, match="a rank died during update"):
        await calling


async def test_a_rank_that_fails_alone_is_named_though_the_other_one_waits_for_it(
    fresh: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayTaskError

    from tapforge_trainer.learner import client as learner

    monkeypatch.setattr(learner, "_DEATH_IS_KNOWN", 0.01)
    loop = asyncio.get_running_loop()
    failed, waiting = loop.create_future(), loop.create_future()
    failed.set_exception(RayTaskError("update", "ValueError: no such frame", ValueError("no such frame")))
    with pytest.raises(LearnerError, match="update failed on a rank: .*no such frame"):
        await fresh._call([failed, waiting], "update", END)


async def weights(learner: Learner) -> bytes:
    return bytes(await (await learner.weights()))


async def test_updates_are_reproducible_to_the_bit(tiny: Tiny, fresh: Learner, first_weights: Path) -> None:
    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=OBJECTIVE, learning_rate=1e-3, mini_batches=2)
    results = []
    for _ in range(2):
        await checkpoints.load(fresh, first_weights)
        figures = [await fresh.update(samples, at_hand(samples, frames), settings, version) for version in range(2)]
        results.append((await weights(fresh), [f["loss"] for f in figures]))
    assert results[0] == results[1]


async def test_going_on_from_a_checkpoint_equals_going_on(tiny: Tiny, fresh: Learner, tmp_path: Path) -> None:
    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=OBJECTIVE, learning_rate=1e-3, warmup_steps=5)
    await fresh.update(samples, at_hand(samples, frames), settings, 0)
    await fresh.logprobs(samples, at_hand(samples, frames))  # as a sync does
    await checkpoints.save(fresh, tmp_path, 1, {"order": [3, 1], "version": 1})
    for version in (1, 2):
        await fresh.update(samples, at_hand(samples, frames), settings, version)
    uninterrupted = await weights(fresh)
    await fresh.logprobs(samples, at_hand(samples, frames))
    assert await checkpoints.load(fresh, tmp_path) == {"order": [3, 1], "version": 1}
    figures = {}
    for version in (1, 2):
        figures = await fresh.update(samples, at_hand(samples, frames), settings, version)
    assert figures["learning_rate"] == pytest.approx(1e-3 * 3 / 5)
    assert await weights(fresh) == uninterrupted


async def test_an_optimizer_that_made_no_step_is_saved_as_one(tiny: Tiny, fresh: Learner, tmp_path: Path) -> None:
    """Saving gives it no state, and after loading its next step is its first."""
    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=OBJECTIVE, learning_rate=1e-3)
    await checkpoints.save(fresh, tmp_path, 1, {})
    await fresh.update(samples, at_hand(samples, frames), settings, 0)
    first = await weights(fresh)
    await checkpoints.load(fresh, tmp_path)
    await fresh.update(samples, at_hand(samples, frames), settings, 0)
    assert await weights(fresh) == first


async def test_another_number_of_ranks_goes_on(tiny: Tiny, fresh: Learner, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one, and the next update is the same up to rounding."""
    from tapforge_trainer.learner.rank import MiniBatch, Rank

    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=OBJECTIVE, learning_rate=1e-3)
    await fresh.update(samples, at_hand(samples, frames), settings, 0)
    folder = (await checkpoints.save(fresh, tmp_path, 1, {})).path
    await fresh.update(samples, at_hand(samples, frames), settings, 1)
    expected = load(await weights(fresh))
    one = Rank(tiny.learner_settings(ranks=1), 0, torch.distributed.HashStore())
    try:
        rank_state.load(one, folder, checkpoints.read_state(folder), moments=True)
        data = tiny.token_batch(samples)
        counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
        one.update(
            data,
            PlainFrames(frames),
            [MiniBatch(tuple(plan_micro_batches(data.lengths, 1, 8192)[0]), counts)],
            settings,
            1,
        )
        for name, tensor in one.weights().items():
            assert torch.allclose(tensor, expected[name], atol=2e-5), name
    finally:
        torch.distributed.destroy_process_group()


async def test_a_full_disk_leaves_the_checkpoint_before(
    tiny: Tiny, fresh: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checkpoints.save(fresh, tmp_path, 1, {"n": 1})

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_storage, "flush", full)
        with pytest.raises(
            checkpoints.CheckpointError, match=r"update-00000002.*disk is full.*update-00000001 is still"
        ):
            await checkpoints.save(fresh, tmp_path, 2, {"n": 2})
    assert checkpoints.latest(tmp_path) == str(tmp_path / "update-00000001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "update-00000001"]
    assert await checkpoints.load(fresh, tmp_path) == {"n": 1}


async def test_ranks_that_do_not_see_the_drivers_folder_say_so(fresh: Learner, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"nowhere is the driver's.*a file system that all have"):
        await fresh.run(rank_state.stage, str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
    await checkpoints.save(fresh, tmp_path, 1, {})


def _mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    _mount(folder, "size=2m")
    yield folder
    # at once, also while somebody is still looking at a file there
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_disk_that_fills_while_ranks_write(fresh: Learner, small_disk: Path, tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match=r"disk is full.*no earlier one"):
        await checkpoints.save(fresh, small_disk, 1, {})
    assert list(small_disk.iterdir()) == []
    await checkpoints.save(fresh, tmp_path / "large", 1, {})


async def test_a_volume_that_becomes_read_only(fresh: Learner, small_disk: Path) -> None:
    _mount(small_disk, "remount,size=64m")
    await checkpoints.save(fresh, small_disk, 1, {"n": 1})
    _mount(small_disk, "remount,ro")
    with pytest.raises(
        checkpoints.CheckpointError, match=r"update-00000002.*file system is read-only.*update-00000001 is still"
    ):
        await checkpoints.save(fresh, small_disk, 2, {"n": 2})
    assert await checkpoints.load(fresh, small_disk) == {"n": 1}


async def test_the_newest_checkpoints_are_kept(fresh: Learner, tmp_path: Path) -> None:
    for update in (1, 2, 3, 3):
        await checkpoints.save(fresh, tmp_path, update, {"update": update}, keep=2)
    assert sorted(path.name for path in tmp_path.glob("update-*")) == ["update-00000002", "update-00000003"]
    assert await checkpoints.load(fresh, tmp_path, tmp_path / "update-00000002") == {"update": 2}
    assert await checkpoints.load(fresh, tmp_path / "elsewhere") is None


async def test_a_damaged_checkpoint_is_named(fresh: Learner, tmp_path: Path) -> None:
    folder = Path((await checkpoints.save(fresh, tmp_path, 1, {})).path)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(checkpoints.CheckpointError, match="format 99"):
        await checkpoints.load(fresh, tmp_path)
    (folder / "state.json").write_text(json.dumps(state))
    for part in folder.glob("*.distcp"):
        part.unlink()
    with pytest.raises(checkpoints.CheckpointError, match="update-00000001"):
        await checkpoints.load(fresh, tmp_path)
    (tmp_path / "latest").write_text("update-00000009\n")
    with pytest.raises(checkpoints.CheckpointError, match="update-00000009"):
        await checkpoints.load(fresh, tmp_path)


async def test_an_export_is_a_model_folder(tiny: Tiny, fresh: Learner, tmp_path: Path) -> None:
    samples, frames = tiny.mixed()
    await fresh.update(samples, at_hand(samples, frames), UpdateSettings(objective=OBJECTIVE, learning_rate=1e-2), 0)
    folder = await export(fresh, tmp_path / "out")
    exported = replace(tiny, folder=folder)
    mine = await fresh.logprobs(samples, at_hand(samples, frames))
    model = plain_model(exported)
    for sample, logprobs in zip(samples, mine, strict=True):
        with torch.no_grad():
            assert torch.allclose(plain_logprobs(model, exported, sample, frames), torch.tensor(logprobs), atol=1e-5)
    assert Tiny.of(folder).tokens.allowed_ids == tiny.tokens.allowed_ids
    assert not list(tmp_path.glob(".partial*"))
    await export(fresh, folder)  # replaces


async def test_learning_moves_towards_advantage_and_imitation(tiny: Tiny, fresh: Learner) -> None:
    samples, frames = tiny.mixed()
    before = await fresh.logprobs(samples, at_hand(samples, frames))
    on_policy = [
        replace(s, spans=(replace(s.spans[0], logprobs=logprobs),)) for s, logprobs in zip(samples, before, strict=True)
    ]
    figures = await fresh.update(
        on_policy, at_hand(on_policy, frames), UpdateSettings(objective=OBJECTIVE, learning_rate=1e-3), 0
    )
    assert figures["kl_age_0"] < 1e-8 and figures["tokens_age_0"] == sum(len(logprobs) for logprobs in before)
    assert figures["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    after = await fresh.logprobs(samples, at_hand(samples, frames))
    gain = [sum(b) - sum(a) for a, b in zip(before, after, strict=True)]
    advantages = [s.spans[0].advantage * len(s.spans[0].logprobs) for s in samples]
    assert np.corrcoef(gain, advantages)[0, 1] > 0.5

    first = await fresh.supervised(samples, at_hand(samples, frames), UpdateSettings(learning_rate=3e-3))
    for _ in range(5):
        last = await fresh.supervised(samples, at_hand(samples, frames), UpdateSettings(learning_rate=3e-3))
    assert last["loss"] < first["loss"] - 0.3


async def test_old_samples_get_importance_weights(tiny: Tiny, fresh: Learner) -> None:
    """The engine's log-probabilities are from other weights: they are the weight, and the cap works."""
    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=replace(OBJECTIVE, importance_cap=1.5), learning_rate=0.0, off_policy=True)
    figures = await fresh.update(samples, at_hand(samples, frames), settings, version=3)
    assert "ratio_mean" not in figures
    assert figures["importance_mean"] <= 1.5
    mine = await fresh.logprobs(samples, at_hand(samples, frames))
    gaps = np.concatenate([np.subtract(a, s.spans[0].logprobs) for a, s in zip(mine, samples, strict=True)])
    assert figures["importance_mean"] == pytest.approx(float(np.minimum(np.exp(gaps), 1.5).mean()), rel=1e-4)
    assert {name for name in figures if "_age_" in name} == {"tokens_age_3", "kl_age_3"}
    assert figures["kl_age_3"] == pytest.approx(float((np.exp(gaps) - 1 - gaps).mean()), rel=1e-3)


async def test_a_sample_that_must_not_be_learned_changes_nothing(tiny: Tiny, fresh: Learner) -> None:
    samples, frames = tiny.mixed(4)
    before = await weights(fresh)
    ids = list(samples[1].ids)
    ids[samples[1].spans[0].start] = tiny.tokens.image_pad
    with pytest.raises(SampleError, match="episode-1"):
        await fresh.update([samples[0], replace(samples[1], ids=tuple(ids))], BatchFrames(), UpdateSettings(), 0)
    broken = replace(samples[0], spans=(replace(samples[0].spans[0], advantage=float("nan")),))
    with pytest.raises(LearnerError, match="gradient's norm is nan"):
        await fresh.update([broken], at_hand([broken], frames), UpdateSettings(), 0)
    assert await weights(fresh) == before


async def test_frames_come_by_reference_and_the_driver_never_fetches_them(tiny: Tiny, fresh: Learner) -> None:
    samples, frames = tiny.mixed()
    expected = await fresh.logprobs(samples, at_hand(samples, frames))
    player = ray.remote(Player).options(num_cpus=0).remote(frames)
    handles = {s.episode: player.frames.remote(s.frames, Elsewhere()) for s in samples}
    assert await fresh.logprobs(samples, BatchFrames(handles)) == expected
    figures = await fresh.update(samples, BatchFrames(handles), UpdateSettings(objective=OBJECTIVE), 0)
    assert figures["tokens"] == sum(s.length for s in samples)
    ray.kill(player)  # what it returned is the driver's
    await fresh.update(samples, BatchFrames(handles), UpdateSettings(objective=OBJECTIVE), 1)
    with pytest.raises(ray.exceptions.RaySystemError, match="the driver fetched"):
        ray.get(handles[samples[0].episode])


async def test_lost_frames_are_read_from_the_recording_or_named_and_the_learner_goes_on(
    tiny: Tiny, fresh: Learner, tmp_path: Path
) -> None:
    samples, frames = tiny.mixed()
    settings = UpdateSettings(objective=OBJECTIVE)
    player = ray.remote(Player).options(num_cpus=0).remote(frames)
    episode, shown = samples[3].episode, samples[3].frames
    handles: dict[str, Any] = {s.episode: frames for s in samples}
    ray.kill(player)
    handles[episode] = player.frames.remote(shown, None)
    with pytest.raises(FramesLost) as caught:
        await asyncio.wait_for(fresh.update(samples, BatchFrames(handles), settings, 0), END)
    assert caught.value.episodes == (episode,)
    writer = FrameWriter(tmp_path, Retention())
    for name in shown:
        writer.put(frames[name])
    writer.close()
    figures = await fresh.update(samples, BatchFrames(handles, tmp_path), settings, 0)
    assert figures["tokens"] == sum(s.length for s in samples)
