"""How much of what adapters change reaches the learner's own pass and the engines, in bf16, beside the same in fp32.

    python bench/lora.py [--rate 2e-5] [--rank 64] [--layers 4] [--updates 1 5 20 100]

A Qwen3-VL of width 256 with random weights, whose linear layers pass on as much as an 8B's: what
an update of this learning rate is, beside a weight and beside an output, then does not depend on the width. Adapters
learn one batch, by the learner's own update in fp32; after some updates their log-probabilities of the same texts are
read by each way that there is:

    learner         bf16, as it computes: adapters are added to base outputs that are rounded already, as vLLM does it
    fp32 sums       the same, but base and adapter are added in fp32 and rounded once
    merged          a vLLM engine that got merged weights in bf16
    adapter         a vLLM engine that got the adapter alone, beside the base's weights

`slope`: of a way's change since the beginning on that in fp32, with its standard error; 1 is all of it. `k3`: between a
way and another, over the texts' tokens. Writes bench-results/lora.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from load.machine import machine, show, write

#: linear layers are as large as makes them pass on as much as the 4096 inputs of an 8B do, whose weights are about 0.02
WIDTH = 256
#: of the tied embedding and head: logits differ by some 5
_EMBEDDING = 0.3
#: texts, how many of them are learned, and tokens of each before those that are scored
TEXTS, LEARNED, BEFORE, SCORED = 16, 3, 8, 64
_END = 600.0


def model_folder(folder: Path, layers: int) -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    from tapforge_trainer.tiny.folder import tiny_config, write_processor
    from tapforge_trainer.tiny.tokenizer import write_tokenizer

    folder.mkdir()
    write_tokenizer(folder)
    write_processor(folder)
    config, text = tiny_config(folder), {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "head_dim": 64}
    for name, value in (text | {"num_hidden_layers": layers}).items():
        setattr(config.text_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [12, 10, 10]
    config.vision_config.out_hidden_size = WIDTH
    generator = torch.Generator().manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                std = _EMBEDDING if "embed_tokens" in name else 0.02 * (4096 / WIDTH) ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.bfloat16().save_pretrained(folder)


def samples(folder: Path) -> list[Any]:
    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.records import ResponseSpan, Sample

    allowed, found = np.asarray(Tokens.load(folder).allowed_ids), []
    for k in range(TEXTS):
        ids = tuple(np.random.default_rng((7, k)).choice(allowed, BEFORE + SCORED).tolist())
        span = ResponseSpan(0, BEFORE, len(ids), (0.0,) * SCORED, (0,) * SCORED, 1.0)
        found.append(Sample(f"e{k}", "g", ids, len(ids), (), (span,)))
    return found


class NoFrames:
    """A `FrameSource` for texts."""

    def read(self, episode: str, names: Any) -> dict[str, Any]:
        return {}

    def lost(self, wanted: Any) -> list[str]:
        return []


# --- the learner's ways -----------------------------------------------------------------------------------------------


@contextmanager
def one_rank(folder: Path, dtype: Any, rank: int) -> Iterator[Any]:
    import torch

    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.learner.rank import Rank
    from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings

    allowed = Tokens.load(folder).allowed_ids
    settings = LearnerSettings(str(folder), allowed, dtype=dtype, threads=1, lora=LoraSettings(rank, 2.0 * rank))
    made = Rank(settings, 0, torch.distributed.HashStore())
    try:
        yield made
    finally:
        torch.distributed.destroy_process_group()


def learned(folder: Path, rank: int, rate: float, updates: Sequence[int]) -> dict[int, Any]:
    """Adapters by the number of updates that they have had."""
    from tapforge_trainer.algorithms.objective import Counts
    from tapforge_trainer.learner import lora
    from tapforge_trainer.learner.batches import plan_micro_batches, token_batch
    from tapforge_trainer.learner.rank import MiniBatch
    from tapforge_trainer.placement.settings import UpdateSettings

    found = {}
    with one_rank(folder, "float32", rank) as one:
        data = token_batch(samples(folder)[:LEARNED], one.vocabulary)
        batch = MiniBatch(
            tuple(plan_micro_batches(data.lengths, 1, 8192)[0]), Counts(float(LEARNED * SCORED), float(LEARNED))
        )
        for done in range(max(updates) + 1):
            if done in updates:
                found[done] = lora.values(one.policy.model)
            one.supervised(data, NoFrames(), [batch], UpdateSettings(learning_rate=rate))
    return found


def scored(folder: Path, dtype: str, rank: int, adapters: Mapping[int, Any], *, full: bool = False) -> Any:
    """Log-probabilities [tokens] by the number of updates, over the whole vocabulary; and what engines get of each:
    merged weights and adapters, packed."""
    from tapforge_trainer.learner import lora
    from tapforge_trainer.learner.batches import plan_micro_batches, token_batch
    from tapforge_trainer.learner.sharding import adapters as adapters_of
    from tapforge_trainer.learner.sharding import pack

    found, sent = {}, {}
    ours = lora.Adapted.forward
    try:
        if full:
            lora.Adapted.forward = full_sum  # type: ignore[method-assign]
        with one_rank(folder, dtype, rank) as one:
            data = token_batch(samples(folder), one.vocabulary)
            plans = plan_micro_batches(data.lengths, 1, 8192)[0]
            for done, values in adapters.items():
                with lora.exchanged(one.policy.model, values):
                    found[done] = one.logprobs(data, NoFrames(), plans, 1.0, masked=False)
                    if dtype == "bfloat16" and not full:
                        sent[done] = pack(one.weights()), pack(adapters_of(one))
    finally:
        lora.Adapted.forward = ours  # type: ignore[method-assign]
    return found, sent


def full_sum(layer: Any, x: Any) -> Any:
    """Of `lora.Adapted`, rounded once."""
    base = x.float() @ layer.weight.float().t()
    if layer.bias is not None:
        base = base + layer.bias.float()
    return (base + layer.scale * layer.lora_B(layer.lora_A(x)).float()).to(x.dtype)


# --- the engines' ways, each in a process of its own ------------------------------------------------------------------


def engine_scores(folder: Path, rank: int, payloads: Mapping[int, Path], adapter: bool) -> dict[int, np.ndarray]:
    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.engine.vllm import environment
    from tapforge_trainer.placement.settings import EngineSettings, LoraSettings

    tokens = Tokens.load(folder)
    settings = EngineSettings(
        str(folder),
        tokens.allowed_ids,
        tokens.stop_ids,
        dtype="bfloat16",
        context_tokens=512,
        max_sequences=4,
        prefix_caching=False,
        lora=LoraSettings(rank, 2.0 * rank) if adapter else None,
    )
    os.environ.update(environment(settings, tempfile.gettempdir()))
    from tapforge_trainer.engine.sampler import Sampler
    from tapforge_trainer.engine.vllm import ADAPTER_ID
    from tapforge_trainer.engine.wire import GenerateRequest

    done: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    sampler = Sampler(settings, done.put)
    sampler.ready.result(_END)
    found = {}
    for version, path in payloads.items():
        payload = path.read_bytes()

        def load(llm: Any, payload: bytes = payload) -> None:
            if adapter:
                llm.collective_rpc("load_adapter", kwargs={"adapter_id": ADAPTER_ID, "payload": payload})
                return
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("watch_arrivals")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"payload": payload}})
            llm.collective_rpc("finish_weight_update")

        sampler.renew("keep", load, version).result(_END)
        (report,) = sampler.collective("take_arrivals").result(_END)
        assert not report.wrong, report.wrong
        sampler.release().result(_END)
        rows: dict[str, Any] = {}
        asked = [
            GenerateRequest(f"a/{k}", one.ids, (), 1, 1.0, None, True, True) for k, one in enumerate(samples(folder))
        ]
        sampler.submit(asked, {})
        while len(rows) < len(asked):
            for result in done.get(timeout=_END):
                assert not result.error, result.error
                rows[result.key] = np.frombuffer(result.logprobs, np.float32)[-SCORED:].astype(np.float64)
        found[version] = np.concatenate([rows[one.key] for one in asked])
    sampler.stop()
    return found


def by_engine(folder: Path, rank: int, sent: Mapping[int, Any], adapter: bool) -> dict[int, np.ndarray]:
    with tempfile.TemporaryDirectory() as scratch:
        paths = {}
        for done, payloads in sent.items():
            paths[done] = Path(scratch) / str(done)
            paths[done].write_bytes(payloads[int(adapter)])
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(engine_scores, folder, rank, paths, adapter).result()


# --- figures ----------------------------------------------------------------------------------------------------------


def figures_of(ways: Mapping[str, Mapping[int, Any]], truth: Mapping[int, Any]) -> dict[str, Any]:
    from tapforge_trainer.sync.agreement import figures, slope_of

    found: dict[str, Any] = {}
    for name, scores in ways.items():
        for done in truth:
            slope = slope_of((scores[0], truth[0]), (scores[done], truth[done])) if done else None
            others = {f"k3 to {other}": ways[other][done] for other in ("learner", "fp32 sums")}
            found.setdefault(name, {})[done] = {
                **({"slope": round(slope.value, 3), "error": round(slope.error, 3)} if slope else {}),
                **{
                    key: round(figures([scores[done] - other])["gap_kl"], 5)
                    for key, other in (others | {"k3 to fp32": truth[done]}).items()
                },
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 5, 20, 100])
    parser.add_argument("--out", type=Path, default=Path("bench-results/lora.json"))
    args = parser.parse_args()
    facts, started = machine(), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model_folder(folder, args.layers)
        adapters = learned(folder, args.rank, args.rate, [0, *args.updates])
        truth, _ = scored(folder, "float32", args.rank, adapters)
        learner, sent = scored(folder, "bfloat16", args.rank, adapters)
        ways = {
            "learner": learner,
            "fp32 sums": scored(folder, "bfloat16", args.rank, adapters, full=True)[0],
            "merged": by_engine(folder, args.rank, sent, adapter=False),
            "adapter": by_engine(folder, args.rank, sent, adapter=True),
        }
    found = figures_of(ways, truth)
    moved = {done: float(np.abs(truth[done] - truth[0]).mean()) for done in truth}
    write(args.out, {"machine": facts, "rate": args.rate, "rank": args.rank, "change": moved, "ways": found})
    show(
        f"LoRA in bf16: slope of the change (k3 to the learner; to fp32 sums), {time.perf_counter() - started:.0f} s",
        ["updates", "change, nats", *ways],
        [
            [
                done,
                f"{moved[done]:.4f}",
                *(
                    f"{one.get('slope', 0):.2f} ({one['k3 to learner']:.4f}; {one['k3 to fp32 sums']:.4f})"
                    for one in (found[way][done] for way in ways)
                ),
            ]
            for done in (0, *args.updates)
        ],
    )


if __name__ == "__main__":
    main()
