"""Adapters that travel alone: a real engine of width 256 answers with the learner's own, and which one answered is
known: before and after a sync, in flight, after a restart; an engine that holds another one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
from both_ends import TOLERANCE, Hand, ask, client_of, gap, prompts_of, shake
from tiny_samples import Tiny, at_hand, of_generation

from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.placement.settings import LoraSettings, engine_rank
from tapforge_trainer.records import Sampling
from tapforge_trainer.sync.proof import Probe, make_probe
from tapforge_trainer.sync.sync import SyncMismatch, synchronize
from tapforge_trainer.tiny.folder import tiny_config, write_processor
from tapforge_trainer.tiny.tokenizer import write_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: of a rank that vLLM has no room of its own for, and a scale that is no power of two
LORA = LoraSettings(6, 18.0)
WIDTH = 256


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    import sys

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    from transformers import Qwen3VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("wide")
    write_tokenizer(folder)
    write_processor(folder)
    config = tiny_config(folder)
    for name, value in {"hidden_size": WIDTH, "head_dim": 64, "num_hidden_layers": 2}.items():
        setattr(config.text_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [12, 10, 10]
    config.vision_config.out_hidden_size = WIDTH
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.06)
    model.save_pretrained(folder)
    return Tiny.of(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(wide: Tiny, ray_cluster: None) -> AsyncIterator[tuple[Engines, Learner]]:
    engines = Engines(wide.engine_settings(lora=LORA), wide.form, wide.tokens.image_pad)
    learner = Learner(wide.learner_settings(ranks=2, lora=LORA))
    await asyncio.gather(engines.ready(), learner.ready())
    yield engines, learner
    await engines.close()
    await learner.close()


@pytest.fixture(scope="module")
def wide_probe(wide: Tiny) -> Probe:
    tokens = wide.tokens
    return make_probe(wide.form, tokens.allowed_ids, tokens.image_pad, tokens.vision_start, tokens.vision_end, 1024)


@pytest_asyncio.fixture(loop_scope="session")
async def held(pair: tuple[Engines, Learner]) -> AsyncIterator[Hand]:
    yield Hand(pair[0])
    await Hand(pair[0]).let_go()


async def test_before_the_first_sync_the_folders_model_answers(wide: Tiny, pair: tuple[Engines, Learner]) -> None:
    engines, learner = pair
    prompts = prompts_of(wide)
    assert await gap(wide, learner, prompts, await ask(engines, prompts)) < TOLERANCE


async def test_an_engine_answers_with_the_adapter_of_the_last_sync(
    wide: Tiny, pair: tuple[Engines, Learner], wide_probe: Probe
) -> None:
    """The same prompts each time: no cached prefix of another adapter is used."""
    engines, learner = pair
    prompts = prompts_of(wide)
    for size in (0.03, 0.05):
        before = await ask(engines, prompts)
        await learner.run(shake, size, "lora_")
        assert await gap(wide, learner, prompts, before) > 0.01
        version = engines.version + 1
        assert await synchronize(learner, engines, wide_probe, version) < TOLERANCE
        after = await ask(engines, prompts)
        assert await gap(wide, learner, prompts, after) < TOLERANCE
        assert {v for g in after for v in g.versions} == {version}
    whole = len(ray.get(await learner.weights()))
    assert 0 < engines.metrics["sync_bytes"] < whole / 10
    assert engines.metrics["sync_unread_tensors"] == 0


async def test_in_flight_each_token_is_of_the_adapter_that_its_version_names(
    wide: Tiny, pair: tuple[Engines, Learner], wide_probe: Probe, held: Hand
) -> None:
    engines, learner = pair
    await synchronize(learner, engines, wide_probe, first := engines.version + 1)
    await held.hold()
    prompts = prompts_of(wide, 4)
    running = asyncio.gather(*(client_of(engines).generate(prompt, Sampling(40)) for prompt in prompts))
    await held.until(lambda seen: len(seen.in_flight) == len(prompts))
    await held.step(20)
    await learner.run(shake, 0.05, "lora_")
    await synchronize(learner, engines, wide_probe, first + 1, mode="keep")
    said = await running
    assert all(set(g.versions) == {first, first + 1} for g in said)
    samples = [of_generation(prompt, g) for prompt, g in zip(prompts, said, strict=True)]
    mine = await learner.logprobs(samples, at_hand(samples, {f.name: f for p in prompts for f in p.frames}))
    for g, logprobs in zip(said, mine, strict=True):
        gaps, new = np.abs(np.subtract(logprobs, g.logprobs)), np.asarray(g.versions) == first + 1
        assert gaps[new].max() < TOLERANCE
        assert gaps[~new].max() > 1e-3


# --- in the engine's process ------------------------------------------------------------------------------------------


def _names(actor: Any) -> list[str]:
    from tapforge_trainer.engine.vllm import adapter_request

    sampler = actor._sampler
    return [
        adapter_request(sampler.settings, version).lora_name for version in (sampler._version, sampler._version + 1)
    ]


def _a_layer_stays(actor: Any) -> None:
    """It keeps the matrices that it has."""
    manager = actor._sampler._llm.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    layer = next(layer for name, layer in manager.modules.items() if name.endswith("1.mlp.down_proj"))
    actor.kept = layer
    layer.set_lora = lambda *_: None
    layer.reset_lora = lambda *_: None


def _an_adapter_turns_on_the_way(actor: Any) -> None:
    from tapforge_trainer.sync import transfer

    replace_adapter = actor.replace = transfer.replace_adapter

    def faulty(runner: Any, adapter_id: int, tensors: Any) -> Any:
        name = next(name for name in tensors if name.endswith("k_proj.lora_B.weight"))
        tensors[name][0, 0] += 1e-3
        return replace_adapter(runner, adapter_id, tensors)

    transfer.replace_adapter = faulty


def _mended(actor: Any) -> None:
    from tapforge_trainer.sync import transfer

    if layer := vars(actor).pop("kept", None):
        del layer.set_lora, layer.reset_lora
    transfer.replace_adapter = vars(actor).pop("replace", transfer.replace_adapter)


# --- here -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_a_layer_stays, r"got model\.language_model\.layers\.1\.mlp\.down_proj\.lora_A\.weight and 1 more and does"),
        (_an_adapter_turns_on_the_way, r"got other bytes of .*k_proj\.lora_B\.weight than the learner sent"),
    ],
)
async def test_another_adapter_than_the_learners_is_named(
    pair: tuple[Engines, Learner], wide_probe: Probe, fault: Any, words: str
) -> None:
    engines, learner = pair
    actor, version = engines._engines[0].actor, engines.version + 1
    await actor.__ray_call__.remote(fault)
    await learner.run(shake, 1e-4, "lora_", version)
    with pytest.raises(SyncMismatch, match=words):
        await synchronize(learner, engines, wide_probe, version)
    await actor.__ray_call__.remote(_mended)
    assert await synchronize(learner, engines, wide_probe, version) < TOLERANCE


async def test_a_prefix_is_another_ones_with_each_version(pair: tuple[Engines, Learner]) -> None:
    now, next_ = await pair[0]._engines[0].actor.__ray_call__.remote(_names)
    assert now != next_


async def test_an_engine_that_was_started_again_has_the_current_adapter(
    wide: Tiny, pair: tuple[Engines, Learner], wide_probe: Probe
) -> None:
    engines, learner = pair
    await learner.run(shake, 0.05, "lora_")
    await synchronize(learner, engines, wide_probe, version := engines.version + 1)
    ray.kill(engines._engines[0].actor)
    async with asyncio.timeout(120):
        await engines.starved.wait()
    assert not engines.replicas.live, "what it has is the folder's model"
    await synchronize(learner, engines, wide_probe, version)
    prompts = prompts_of(wide, 4)
    said = await ask(engines, prompts)
    assert await gap(wide, learner, prompts, said) < TOLERANCE
    assert {v for g in said for v in g.versions} == {version}


async def test_a_rank_is_rounded_up_to_one_that_the_engine_has() -> None:
    assert [engine_rank(rank) for rank in (1, 6, 32, 33, 300, 512)] == [1, 8, 32, 64, 320, 512]
    with pytest.raises(ValueError, match="up to 512, not of 513"):
        engine_rank(513)


async def test_the_engines_ranks_are_vllms() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    from tapforge_trainer.placement.settings import ENGINE_RANKS

    assert get_args(MaxLoRARanks) == ENGINE_RANKS
