"""Engine and learner speak of the same policy: before a sync, after it, and not while they differ."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
import torch
from both_ends import END, SHOTS, TOLERANCE, Hand, ask, client_of, gap, prompts_of, shake
from PIL import Image
from tiny_samples import Tiny, at_hand, frame

from tapforge_envs.protocol import Frame
from tapforge_trainer.agents.vision import VisionGrid, fit_frame
from tapforge_trainer.engine import client as engine_client
from tapforge_trainer.engine.client import EngineError, PromptMismatch
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.client import Learner, LearnerError
from tapforge_trainer.placement.settings import UpdateSettings
from tapforge_trainer.records import Generation, Prompt, Sampling
from tapforge_trainer.sync.history import ProofHistory
from tapforge_trainer.sync.proof import STATISTICS, Probe, make_probe
from tapforge_trainer.sync.sync import SyncMismatch, synchronize

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    import sys

    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


async def test_engine_and_learner_agree_before_and_after_a_sync_and_not_between(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, next_version: int
) -> None:
    engines, learner = both[0], fresh
    prompts = prompts_of(tiny)
    await synchronize(learner, engines, probe, next_version)
    before = await ask(engines, prompts)
    assert await gap(tiny, learner, prompts, before) < TOLERANCE
    await learner.run(shake, 0.02, "")
    assert await gap(tiny, learner, prompts, before) > 0.01
    worst = await synchronize(learner, engines, probe, next_version + 1)
    assert worst < TOLERANCE
    after = await ask(engines, prompts)
    assert await gap(tiny, learner, prompts, after) < TOLERANCE
    assert {v for g in after for v in g.versions} == {next_version + 1}
    assert [g.logprobs for g in after] != [g.logprobs for g in before]


async def test_a_phones_screen_is_the_same_to_the_adapter_the_engine_and_the_learner(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, next_version: int
) -> None:
    """1080x2400 pixels, fitted to about a million: 920 visual tokens."""
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 12, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((1080, 2400), Image.Resampling.NEAREST).save(out, "PNG")
    grid = VisionGrid(tiny.form.patch, tiny.form.merge, 4, 976)
    screen, _ = fit_frame(Frame.of(out.getvalue(), 1080, 2400), grid)
    prompt = tiny.prompt([screen])
    assert grid.visual_tokens(screen.width, screen.height) == 920
    (said,) = await ask(engines, [prompt])  # the client compares the engine's ids with the expansion
    assert said.prompt_length == len(tiny.expand(prompt.ids, [screen])) > 920
    assert await gap(tiny, fresh, [prompt], [said]) < TOLERANCE


async def test_the_vision_tower_and_its_cached_frames_are_renewed(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, next_version: int
) -> None:
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    prompts = [tiny.prompt([SHOTS[0]], k) for k in range(6)]
    old = await ask(engines, prompts)
    await fresh.run(shake, 0.1, "visual")
    assert await gap(tiny, fresh, prompts, old) > 0.001
    await synchronize(fresh, engines, probe, next_version + 1)
    assert await gap(tiny, fresh, prompts, await ask(engines, prompts)) < TOLERANCE


def _keep_the_tied_heads_old_pack(actor: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from tapforge_trainer.sync.transfer import CPUWeightTransfer

    actor.finish = CPUWeightTransfer.finish_weight_update
    CPUWeightTransfer.finish_weight_update = lambda self: finalize_layerwise_reload(self.model, self.model_config)


def _repack(actor: Any) -> None:
    from tapforge_trainer.sync.transfer import CPUWeightTransfer

    CPUWeightTransfer.finish_weight_update = actor.finish


def _break_reset(actor: Any, cache: str, looked_at: bool) -> None:
    setattr(actor._sampler._llm, cache, lambda **_: True)
    if not looked_at:
        actor._sampler._left_in_caches = dict


def _mend_reset(actor: Any, cache: str, looked_at: bool) -> None:
    delattr(actor._sampler._llm, cache)
    if not looked_at:
        del actor._sampler._left_in_caches


async def test_a_stale_tied_head_is_seen(
    both: tuple[Engines, Learner], fresh: Learner, probe: Probe, next_version: int
) -> None:
    engines = both[0]
    actor = engines._engines[0].actor
    await synchronize(fresh, engines, probe, next_version)
    await fresh.run(shake, 0.02, "embed_tokens")
    await actor.__ray_call__.remote(_keep_the_tied_heads_old_pack)
    with pytest.raises(SyncMismatch, match=f"version {next_version + 1}.*lm_head.weight .packed. has other bytes"):
        await synchronize(fresh, engines, probe, next_version + 1)
    await actor.__ray_call__.remote(_repack)
    assert await synchronize(fresh, engines, probe, next_version + 2) < TOLERANCE


@pytest.mark.parametrize(
    "cache, name, part",
    [("reset_prefix_cache", "prefix cache", "layers.0"), ("reset_encoder_cache", "encoder cache", "visual")],
)
@pytest.mark.parametrize("looked_at", [True, False])
async def test_a_stale_cache_is_seen_by_what_is_left_in_it_and_by_the_probe(
    both: tuple[Engines, Learner],
    fresh: Learner,
    probe: Probe,
    next_version: int,
    cache: str,
    name: str,
    part: str,
    looked_at: bool,
) -> None:
    """The same probe at each sync: what was computed with the weights before would be found again."""
    engines = both[0]
    actor = engines._engines[0].actor
    await synchronize(fresh, engines, probe, next_version)
    await fresh.run(shake, 0.1, part)
    await actor.__ray_call__.remote(_break_reset, cache, looked_at)
    said = f"the {name} of engine 0 has [1-9][0-9]* entries of the time before" if looked_at else "gap_mean "
    with pytest.raises(SyncMismatch, match=f"{said}.*after a full set was sent once more: .*{said}"):
        await synchronize(fresh, engines, probe, next_version + 1)
    await actor.__ray_call__.remote(_mend_reset, cache, looked_at)
    assert await synchronize(fresh, engines, probe, next_version + 2) < TOLERANCE


async def test_statistics_and_slopes_of_a_whole_proof(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, next_version: int
) -> None:
    """As in bf16, in a number format in which every token shows a mistake; with steps of a made-up episode."""
    engines, tokens, history = both[0], tiny.tokens, ProofHistory()
    episode = [tiny.prompt([SHOTS[0]]), tiny.prompt([SHOTS[1], SHOTS[2]])]
    marks = tokens.image_pad, tokens.vision_start, tokens.vision_end
    probe = make_probe(tiny.form, tokens.allowed_ids, *marks, 1024, (352, 320), statistical=True, episode=episode)
    await synchronize(fresh, engines, probe, next_version, history=history)
    figures = engines.metrics
    assert figures["gap_tokens"] >= STATISTICS + 2 * probe.answer and "gap_slope" not in figures
    assert history.first is not None and history.first["gap_mean"] < TOLERANCE
    first, scores = history.first, history.scores
    assert scores is not None and len(scores[0]) >= STATISTICS
    assert np.abs(scores[0] - scores[1]).max() < TOLERANCE, "over the whole vocabulary on both sides"
    await fresh.run(shake, 0.02, "")
    await synchronize(fresh, engines, probe, next_version + 1, history=history)
    assert engines.metrics["gap_slope"] == pytest.approx(1.0, abs=1e-3)
    assert history.first is first and history.scores is scores


async def test_nothing_but_allowed_tokens_is_sampled(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, hand: Hand, next_version: int
) -> None:
    """With weights that would say a vision placeholder about every second time."""

    def tempt(rank: Any, tokens: list[int]) -> None:
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            parameter = rank.policy.language.embed_tokens.weight
            whole = parameter.full_tensor()
            for token in tokens:
                whole[token] = 3.0 * torch.randn(whole.shape[1], generator=torch.Generator().manual_seed(token))
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))

    engines = both[0]
    await fresh.run(tempt, [tiny.tokens.image_pad, tiny.tokens.video_pad, tiny.tokens.vision_start])
    await synchronize(fresh, engines, probe, next_version)
    prompts = prompts_of(tiny, 20)
    await hand.endless()
    said = await ask(engines, prompts, max_tokens=40)
    everything = [token for g in said for token in g.ids]
    assert len(everything) == 800
    assert len(set(everything)) > 50
    assert not set(everything) & set(tiny.tokens.banned_ids)
    assert await gap(tiny, fresh, prompts, said) < TOLERANCE


async def test_temperature_seed_and_ends(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe
) -> None:
    engines = both[0]
    await synchronize(fresh, engines, probe, engines.version + 1)
    prompts = prompts_of(tiny, 6)
    cool = await ask(engines, prompts, temperature=0.5)
    assert await gap(tiny, fresh, prompts, cool, temperature=0.5) < TOLERANCE
    assert await gap(tiny, fresh, prompts, cool) > 0.05
    seeded = [await ask(engines, prompts, seed=11) for _ in range(2)]
    assert [g.ids for g in seeded[0]] == [g.ids for g in seeded[1]]
    greedy = [await ask(engines, prompts, temperature=0.0) for _ in range(2)]
    assert [g.ids for g in greedy[0]] == [g.ids for g in greedy[1]]
    for generation in cool:
        stopped = generation.ids[-1] == tiny.tokens.im_end
        assert generation.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(generation.ids) == 12


async def test_prompt_ids_are_the_agents_for_every_size(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    sizes = [(32, 32), (64, 64), (32, 128), (128, 32), (96, 160), (224, 96), (32, 480), (352, 320)]
    prompts = [tiny.prompt([frame(w, h, 3), frame(h, w, 4)], k) for k, (w, h) in enumerate(sizes)]
    for prompt, generation in zip(prompts, await ask(both[0], prompts, max_tokens=2), strict=True):
        assert tuple(generation.prompt_ids) == prompt.ids
        assert generation.prompt_length == len(tiny.expand(prompt.ids, prompt.frames))


async def test_the_engine_gets_what_vllms_own_processor_would_make(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    """Ids, places, patches and grids, for sizes that leave the processor nothing to resize."""

    def compare(self: Any, ids: tuple[int, ...], frames: list[FittedFrame]) -> list[tuple]:
        import io

        from PIL import Image
        from vllm import SamplingParams

        from tapforge_trainer.engine.wire import GenerateRequest

        sampler = self._sampler
        images = [Image.open(io.BytesIO(f.data)).convert("RGB") for f in frames]
        names = [f.name for f in frames]
        data = {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": names}} if frames else {}
        for f in frames:
            sampler._inputs._frames.put(f.name, f.data)
        mine = sampler._inputs.prompt(GenerateRequest("compare", ids, tuple(names), 1, 1.0))
        rows = []
        for prompt in (mine, {"prompt_token_ids": list(ids), **data}):
            request = sampler._llm.input_processor.process_inputs(
                "compare", prompt, SamplingParams(), supported_tasks=sampler._llm.get_supported_tasks()
            )
            features = request.mm_features or []
            places = [
                (feature.identifier, feature.mm_position.offset, feature.mm_position.length) for feature in features
            ]
            tensors = [{key: tensor.numpy() for key, tensor in feature.data.get_data().items()} for feature in features]
            rows.append((request.prompt_token_ids, places, tensors))
        return rows

    sizes = [(64, 64), (96, 160), (224, 96), (32, 480), (352, 320)]
    shots = [frame(width, height, 5) for width, height in sizes]
    for shown in ([shots[0]], shots[1:4], [shots[4], shots[4]], []):
        prompt = tiny.prompt(shown)
        actor = both[0]._engines[0].actor
        mine, theirs = await actor.__ray_call__.remote(compare, prompt.ids, list(prompt.frames))
        assert mine[:2] == theirs[:2]
        for a, b in zip(mine[2], theirs[2], strict=True):
            assert a.keys() == b.keys()
            assert np.array_equal(a["image_grid_thw"], b["image_grid_thw"])
            assert np.allclose(a["pixel_values"], b["pixel_values"], atol=1e-6)


async def test_a_prompt_that_is_not_the_agents_is_an_error(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    """Bytes that hold another size than the frame announces."""
    true = frame(96, 160, 0)
    lying = FittedFrame("c0ffee" * 8, true.data, 64, 64)
    with pytest.raises(PromptMismatch, match=r"prompt of \d+ tokens, expected were \d+.*c0ffeec0ffee 64x64"):
        await ask(both[0], [tiny.prompt([lying])])
    broken = FittedFrame("bad" * 16, true.data[:99], 96, 160)
    with pytest.raises(EngineError, match="frame badbadbadbad of 99 bytes can't be decoded"):
        await ask(both[0], [tiny.prompt([broken])])


async def test_a_refused_prompt_harms_no_other(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    good, long = tiny.prompt([SHOTS[0]]), tiny.prompt([], before=1100)
    results = await asyncio.gather(
        *(client_of(both[0]).generate(prompt, Sampling(4)) for prompt in (good, long, good)), return_exceptions=True
    )
    assert isinstance(results[1], EngineError)
    assert "1024" in str(results[1])
    assert isinstance(results[0], Generation)
    assert isinstance(results[2], Generation)


async def test_frames_that_the_engine_dropped_are_sent_again(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    engines = both[0]
    actor = engines._engines[0].actor

    def forget(self: Any, mib: int) -> int:
        sampler = self._sampler
        sampler._inputs._frames._max_bytes = mib * 1024 * 1024
        return len(sampler._inputs._frames._ready)

    await ask(engines, [tiny.prompt([shot]) for shot in SHOTS])
    await actor.__ray_call__.remote(forget, 0)
    await ask(engines, [tiny.prompt([shot]) for shot in SHOTS])
    assert await actor.__ray_call__.remote(forget, 256) <= 1
    again = await ask(engines, [tiny.prompt([shot]) for shot in SHOTS])
    assert all(g.ids for g in again)


async def test_frames_travel_once_and_calls_are_few(tiny: Tiny, both: tuple[Engines, Learner]) -> None:
    engines = both[0]
    client = client_of(engines)
    calls = client.calls
    await ask(engines, [tiny.prompt([SHOTS[k % 4]], k) for k in range(32)])
    assert client.calls - calls <= 2 + 12 + 2  # one submit, at most one result call per step
    assert all(shot.name in client._engines[0].known for shot in SHOTS)


async def test_what_differs_is_named() -> None:
    waiting = engine_client._Waiting(
        Prompt((1, 2), (), 2),
        Sampling(1),
        np.asarray([1, 2, 3], np.int32).tobytes(),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    text = engine_client._difference(1, waiting, np.asarray([1, 5, 3, 4], np.int32).tobytes())
    assert "prompt of 4 tokens, expected were 3; they differ from token 1 on" in text


async def test_a_dead_rank_ends_an_update_at_once(tiny: Tiny, expendable: Learner) -> None:
    """The other rank waits for the dead one and can't be used again."""
    import ray

    samples, frames = tiny.mixed()
    ray.kill(expendable._ranks[1])
    with pytest.raises(LearnerError, match="died during update"):
        await asyncio.wait_for(expendable.update(samples, at_hand(samples, frames), UpdateSettings(), 0), END)
