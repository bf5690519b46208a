"""Samples, prompts and frames for a published family at few layers, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.families import real

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.agents.vision import VisionGrid
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.batches import MicroBatchPlan, TokenBatch, Vocabulary, micro_batch, token_batch
from tapforge_trainer.learner.families import ModelConfig, family_of
from tapforge_trainer.learner.frame_store import FrameStore, PixelFormat
from tapforge_trainer.learner.packed import PackedPolicy
from tapforge_trainer.records import ResponseSpan, Sample

IMAGE, START, END = 151655, 151652, 151653


@cache
def tokens() -> Tokens:
    return Tokens.load(real.tokenizer_folder())


def vocabulary(config: ModelConfig) -> Vocabulary:
    return Vocabulary.of(config.vocabulary, config.image_token, tokens().allowed_ids)


def frame(form: PixelFormat, rows: int, columns: int, seed: int) -> FittedFrame:
    """Of so many visual tokens."""
    rng = np.random.default_rng((seed, rows, columns))
    return FittedFrame.of(rng.integers(0, 256, (rows * form.cell, columns * form.cell, 3), dtype=np.uint8))


def sample(form: PixelFormat, frames: Sequence[FittedFrame], seed: int, before: int, answer: int) -> Sample:
    """Text, frames, text, and an answer with random advantage and log-probabilities."""
    rng = np.random.default_rng((11, seed))
    words = rng.choice(np.asarray(tokens().allowed_ids[:140_000]), before + answer + 3).tolist()
    ids = words[:before]
    for _ in frames:
        ids += [START, IMAGE, END]
    ids += words[before:]
    grids = [form.grid(f.width, f.height) for f in frames]
    expanded = len(ids) + sum(rows * columns - 1 for rows, columns in grids)
    span = ResponseSpan(
        step=seed,
        start=len(ids) - answer,
        end=len(ids),
        logprobs=tuple(rng.uniform(-12, -9, answer).tolist()),
        versions=(0,) * answer,
        advantage=float(rng.normal()),
    )
    return Sample(f"e{seed}", f"g{seed % 2}", tuple(ids), expanded, tuple(f.name for f in frames), (span,))


def mixed(form: PixelFormat) -> tuple[list[Sample], dict[str, FittedFrame]]:
    """Lengths of all kinds, with no, one and several frames of different sizes, some of them shared."""
    frames = [frame(form, *size, k) for k, size in enumerate([(6, 3), (4, 5), (2, 2), (6, 3)])]
    shown: list[list[FittedFrame]] = [[frames[0]], [], [frames[1], frames[2]], [frames[3], frames[0]], []]
    texts = [(4, 3), (9, 5), (1, 2), (3, 6), (2, 1)]
    samples = [sample(form, f, k, *text) for k, (f, text) in enumerate(zip(shown, texts, strict=True))]
    return samples, {f.name: f for f in frames}


def phone_frame(folder: Path, seed: int) -> FittedFrame:
    """A screen of 1080x2400 as the model gets it at 1280 visual tokens at most."""
    grid = VisionGrid.load(folder)
    noise = np.random.default_rng(seed).integers(0, 256, (60, 27, 3), dtype=np.uint8)
    screen = Image.fromarray(noise).resize((1080, 2400), Image.Resampling.NEAREST)
    return FittedFrame.of(np.asarray(screen.resize(grid.at_most(1280 * grid.cell**2).fit(1080, 2400))))


@dataclass(frozen=True)
class PlainFrames:
    """A `FrameSource` for a rank in this process."""

    frames: Mapping[str, FittedFrame]

    def read(self, episode: str, names: Collection[str]) -> dict[str, FittedFrame]:
        return {name: self.frames[name] for name in names}

    def lost(self, wanted: Mapping[str, Collection[str]]) -> list[str]:
        return []


class Case:
    """A family's folder, its facts, and samples for it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = ModelConfig.of_folder(folder)
        self.family = family_of(self.config)
        self.form = PixelFormat.of_folder(folder)
        self.vocabulary = vocabulary(self.config)
        self.samples, self.frames = mixed(self.form)
        self.data: TokenBatch = token_batch(self.samples, self.vocabulary)
        self.store = FrameStore(self.form)

    def model(self, **options: Any) -> Any:
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32, **options)
        return model.train()

    def policy(self, model: Any, **options: Any) -> PackedPolicy:
        return PackedPolicy(model, self.family.vision_arguments, self.form, self.vocabulary, **options)

    def micro(self, plan: MicroBatchPlan) -> Any:
        grids = {name: self.form.grid(f.width, f.height) for name, f in self.frames.items()}
        return micro_batch(self.data, plan, grids, self.vocabulary)

    def run(self, policy: Any, *plans: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities of all response tokens, by micro-batches of these samples."""
        result: list[torch.Tensor] = []
        order: list[np.ndarray] = []
        for plan in plans:
            micro = self.micro(MicroBatchPlan(tuple(plan)))
            logp, _ = policy(micro, self.store.get(micro.frames, self.frames), temperature)
            result.append(logp)
            order.append(micro.response)
        places = np.concatenate(order)
        return torch.cat(result)[torch.from_numpy(np.argsort(places))]

    def expected(self, model: Any, temperature: float = 1.0) -> torch.Tensor:
        """The same by transformers' own processor and forward pass, each sample alone."""
        return torch.cat([self._alone(model, sample, self.frames, temperature) for sample in self.samples])

    def _alone(self, model: Any, one: Sample, frames: Mapping[str, FittedFrame], temperature: float) -> torch.Tensor:
        from transformers import AutoImageProcessor

        shown = [frames[name] for name in one.frames]
        counts = [rows * columns for rows, columns in (self.form.grid(f.width, f.height) for f in shown)]
        ids = torch.tensor([tokens().expand(one.ids, counts)])
        options: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int()}
        if shown:
            images = [Image.fromarray(f.pixels()) for f in shown]
            options |= dict(AutoImageProcessor.from_pretrained(self.folder)(images, return_tensors="pt"))
        logits = model(input_ids=ids, use_cache=False, **options).logits[0] / temperature
        logits = torch.where(torch.from_numpy(self.vocabulary.allowed), logits, float("-inf"))
        answer = len(one.spans[0].logprobs)
        places = torch.arange(ids.shape[1] - answer, ids.shape[1])
        return logits.log_softmax(-1)[places - 1].gather(1, ids[0, places][:, None])[:, 0]
