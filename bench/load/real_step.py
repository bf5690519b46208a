"""One contender's training step on a published model's width, in a process of its own: prints a line of JSON.

    python -m load.real_step CONTENDER LENGTHS [--threads 2] [--model NAME]

Qwen3-VL-2B at 2 language layers and 2 vision blocks, random weights, fp32, LoRA of rank 16 on the language model, a
frozen tower. The batch is the same for all: rows of text with one screen of 20 visual tokens each and an answer. A step
is forward, backward and AdamW over the whole batch. Contenders:

- `packed`: the learner's rank
- `trl`: the loss of TRL's GRPOTrainer with peft, in micro-batches of `ROWS`
- `transformers`: the model's own forward pass with labels, with peft, in micro-batches of `ROWS`
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.families import real
from tests.families.samples import frame, sample, tokens

from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.families import ModelConfig
from tapforge_trainer.learner.frame_store import FrameStore, PixelFormat
from tapforge_trainer.records import Sample

MODEL, LAYERS, RANK = "qwen3-vl-2b", 2, 16
#: a micro-batch of those that pad; the packed one has as many tokens as these rows have at equal lengths
ROWS = 4
ANSWER = 32
#: tokens of a row, its screen and answer included
LENGTHS = {"equal": [192] * 8, "mixed": [64, 80, 96, 112, 128, 160, 224, 672]}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 3


def batch(lengths: list[int], form: PixelFormat) -> tuple[list[Sample], dict[str, FittedFrame]]:
    made, frames = [], {}
    # Neither sorted nor lucky: long and short ones share micro-batches, as they come from episodes.
    for k, length in enumerate(np.random.default_rng(0).permutation(lengths).tolist()):
        shown = frame(form, 5, 4, k)
        frames[shown.name] = shown
        around = length - 20 - 2 - ANSWER  # the screen, its two marks, the answer
        made.append(sample(form, [shown], k, around - 3, ANSWER))
        assert made[-1].length == length
    return made, frames


def ranked(
    folder: Path, samples: list[Sample], frames: dict[str, FittedFrame], budget: int
) -> Callable[[], dict[str, float]]:
    """A step of the learner's rank; it says what it counted."""
    from tapforge_trainer.algorithms.objective import Counts, Objective
    from tapforge_trainer.learner.batches import frames_of, plan_micro_batches, token_batch
    from tapforge_trainer.learner.rank import MiniBatch, Rank
    from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings, UpdateSettings

    settings = LearnerSettings(
        str(folder),
        tokens().allowed_ids,
        threads=torch.get_num_threads(),
        lora=LoraSettings(RANK, 2.0 * RANK),
        tokens_per_micro_batch=budget,
    )
    rank = Rank(settings, 0, torch.distributed.HashStore())
    data = token_batch(samples, rank.vocabulary)
    plans = plan_micro_batches(data.lengths, 1, settings.tokens_per_micro_batch)[0]
    counts = Counts.of((span.end - span.start, 1.0) for one in samples for span in one.spans)

    class Source:
        """The frames as another process would hand them on."""

        def lost(self, wanted: Any) -> list[str]:
            return []

        def read(self, episode: str, names: Any) -> dict[str, FittedFrame]:
            return {name: frames[name] for name in names}

    assert set().union(*frames_of(data, plans).values()) == set(frames)
    update = UpdateSettings(objective=Objective(), learning_rate=1e-5)

    def step() -> dict[str, float]:
        rank.policy.forget_features()  # an update's frames are new ones
        return dict(rank.update(data, Source(), [MiniBatch(tuple(plans), counts)], update, 0).sums)

    return step


def packed(folder: Path, lengths: list[int]) -> Callable[[], object]:
    samples, frames = batch(lengths, PixelFormat.of_folder(folder))
    return ranked(folder, samples, frames, ROWS * max(LENGTHS["equal"]))


def padded(
    folder: Path, samples: list[Sample], frames: dict[str, FittedFrame], rows_at_once: int
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model with peft's adapters, and micro-batches: prompts padded on the left, answers all of one length."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    form = PixelFormat.of_folder(folder)
    config = ModelConfig.of_folder(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    pattern = rf".*language_model\.layers\.\d+\.(self_attn|mlp)\.({'|'.join(TARGETS)})"
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=pattern)).train()
    store = FrameStore(form)
    mean, std = (torch.tensor(values).view(1, 3, 1) for values in (form.mean, form.std))
    answer = samples[0].spans[0].end - samples[0].spans[0].start
    made = []
    for at in range(0, len(samples), rows_at_once):
        rows = samples[at : at + rows_at_once]
        grids = [[form.grid(frames[name].width, frames[name].height) for name in one.frames] for one in rows]
        expanded = [
            tokens().expand(one.ids, [tall * wide for tall, wide in seen])
            for one, seen in zip(rows, grids, strict=True)
        ]
        width = max(map(len, expanded)) - answer
        prompts = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, ids in enumerate(expanded):
            prompts[row, width - len(ids) + answer :] = torch.tensor(ids[:-answer])
            mask[row, width - len(ids) + answer :] = 1
        shown = store.get([name for one in rows for name in one.frames], frames)
        patches = torch.from_numpy(np.concatenate([shown[name].values for one in rows for name in one.frames]))
        pixels = (patches.float().view(len(patches), 3, -1) / 255 - mean) / std
        pixels = pixels.unsqueeze(2).expand(-1, -1, 2, -1).reshape(len(patches), -1)  # two equal times
        completions = torch.tensor([ids[-answer:] for ids in expanded])
        everything = torch.cat([prompts, completions], 1)
        made.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": mask,
                "completion_ids": completions,
                "completion_mask": torch.ones_like(completions),
                "advantages": torch.tensor([one.spans[0].advantage for one in rows]),
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([[1, 2 * tall, 2 * wide] for seen in grids for tall, wide in seen]),
                "mm_token_type_ids": (everything == config.image_token).int(),
            }
        )
    return model, made


def _padded(folder: Path, lengths: list[int]) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    return padded(folder, *batch(lengths, PixelFormat.of_folder(folder)), ROWS)


def _stepping(model: Any, batches: list[Any], loss: Callable[[Any], torch.Tensor]) -> Callable[[], object]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> None:
        for one in batches:
            (loss(one) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers(folder: Path, lengths: list[int]) -> Callable[[], object]:
    return by_transformers(*_padded(folder, lengths))


def by_transformers(model: Any, batches: list[dict[str, torch.Tensor]]) -> Callable[[], object]:
    def loss(one: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([one["prompt_ids"], one["completion_ids"]], 1)
        mask = torch.cat([one["prompt_mask"], one["completion_mask"]], 1)
        labels = torch.where(torch.arange(ids.shape[1]) >= one["prompt_ids"].shape[1], ids, -100)
        shown = {name: one[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
        return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **shown).loss

    return _stepping(model, batches, loss)


def trl(folder: Path, lengths: list[int]) -> Callable[[], object]:
    return by_trl(folder, *_padded(folder, lengths), [[1] * ROWS] * (len(lengths) // ROWS))


def by_trl(
    folder: Path, model: Any, batches: list[dict[str, torch.Tensor]], images: list[list[int]]
) -> Callable[[], object]:
    """`images`: per micro-batch and row."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    answer = batches[0]["completion_ids"].shape[1]
    scratch = tempfile.mkdtemp()
    arguments = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, report_to=[], beta=0.0, num_generations=ROWS,
        per_device_train_batch_size=ROWS, gradient_checkpointing=False, max_completion_length=answer,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    for one, counts in zip(batches, images, strict=True):
        one["num_images"] = counts  # type: ignore[assignment]
        one["num_items_in_batch"] = one["completion_mask"].sum()
    return _stepping(trainer.model, batches, lambda one: trainer._compute_loss(trainer.model, one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=["packed", "trl", "transformers"])
    parser.add_argument("lengths", choices=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    folder = real.folder(args.model, LAYERS, LAYERS)
    lengths = LENGTHS[args.lengths]
    made = {
        "packed": lambda: packed(folder, lengths),
        "trl": lambda: trl(folder, lengths),
        "transformers": lambda: transformers(folder, lengths),
    }
    step = made[args.contender]()
    step()  # warms up
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    best = min(seconds)  # others may use the machine meanwhile
    figures = {
        "tokens_per_second": round(sum(lengths) / best, 1),
        "step_seconds": round(best, 3),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(figures), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
