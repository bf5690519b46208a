"""Frames, prompts and samples for a tiny random Qwen3-VL, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.frames.handles import BatchFrames
from tapforge_trainer.learner.batches import (
    MicroBatch,
    MicroBatchPlan,
    TokenBatch,
    Vocabulary,
    micro_batch,
    token_batch,
)
from tapforge_trainer.learner.families.qwen3_vl import FAMILY
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.learner.packed import PackedPolicy
from tapforge_trainer.learner.rank import Rank
from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings
from tapforge_trainer.records import Generation, Prompt, ResponseSpan, Sample


def frame(width: int, height: int, seed: int) -> FittedFrame:
    rng = np.random.default_rng((seed, width, height))
    return FittedFrame.of(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@dataclass(frozen=True)
class Tiny:
    """The model folder and its facts."""

    folder: Path
    form: PixelFormat
    tokens: Tokens
    size: int

    @staticmethod
    def of(folder: Path) -> Tiny:
        tokens = Tokens.load(folder)
        return Tiny(folder, PixelFormat.of_folder(folder), tokens, len(tokens.allowed_ids) + len(tokens.banned_ids))

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.size, self.tokens.image_pad, self.tokens.allowed_ids)

    def policy(self, model: Any, **options: Any) -> PackedPolicy:
        return PackedPolicy(model, FAMILY.vision_arguments, self.form, self.vocabulary, **options)

    def words(self, count: int, rng: np.random.Generator) -> list[int]:
        return rng.choice(np.asarray(self.tokens.allowed_ids), count).tolist()

    def prompt(self, frames: Sequence[FittedFrame], seed: int = 0, before: int = 9, after: int = 5) -> Prompt:
        """Text, frames, text; one placeholder per frame."""
        rng = np.random.default_rng(seed)
        ids = [self.tokens.im_start, *self.words(before, rng)]
        for _ in frames:
            ids += [self.tokens.vision_start, self.tokens.image_pad, self.tokens.vision_end]
        ids += self.words(after, rng)
        return Prompt(tuple(ids), tuple(frames), len(self.expand(ids, frames)))

    def expand(self, ids: Sequence[int], frames: Sequence[FittedFrame]) -> tuple[int, ...]:
        counts = [rows * columns for rows, columns in (self.form.grid(f.width, f.height) for f in frames)]
        return self.tokens.expand(tuple(ids), counts)

    def sample(
        self,
        frames: Sequence[FittedFrame],
        seed: int = 0,
        *,
        before: int = 9,
        after: int = 5,
        answer: int = 6,
        group: str = "g",
    ) -> Sample:
        """A random answer with random advantage and log-probabilities."""
        rng = np.random.default_rng((7, seed))
        prompt = self.prompt(frames, seed, before, after)
        said = self.words(answer, rng)
        span = ResponseSpan(
            step=seed,
            start=len(prompt.ids),
            end=len(prompt.ids) + answer,
            logprobs=tuple(rng.uniform(-6, -1, answer).tolist()),
            versions=(0,) * answer,
            advantage=float(rng.normal()),
        )
        ids, length = (*prompt.ids, *said), prompt.expanded_length + answer
        return Sample(f"episode-{seed}", group, ids, length, tuple(f.name for f in frames), (span,))

    def token_batch(self, samples: Sequence[Sample], *, share: bool = True) -> TokenBatch:
        return token_batch(samples, self.vocabulary, share=share)

    def micro_batch(self, data: TokenBatch, plan: MicroBatchPlan, frames: Mapping[str, FittedFrame]) -> MicroBatch:
        return micro_batch(data, plan, self.grids(frames), self.vocabulary)

    def grids(self, frames: Mapping[str, FittedFrame]) -> dict[str, tuple[int, int]]:
        return {name: self.form.grid(f.width, f.height) for name, f in frames.items()}

    def expanded(self, sample: Sample, frames: Mapping[str, FittedFrame]) -> tuple[int, ...]:
        """The sample's ids as engine and learner compute with them."""
        return self.expand(sample.ids, [frames[name] for name in sample.frames])

    def mixed(self, count: int = 9) -> tuple[list[Sample], dict[str, FittedFrame]]:
        """Samples of many lengths, with no, one and several frames of different sizes, some of them shared."""
        shapes = [(96, 160), (64, 64), (128, 64), (96, 160)]
        frames = [frame(width, height, k) for k, (width, height) in enumerate(shapes)]
        shown: list[list[FittedFrame]] = [
            [frames[0]],
            [frames[1], frames[2]],
            [],
            [frames[3], frames[0], frames[1]],
            [frames[2]],
        ]
        samples = [
            self.sample(shown[k % 5], k, before=1 + 5 * k % 23, after=k % 4, answer=1 + k % 7, group=f"g{k % 3}")
            for k in range(count)
        ]
        return samples, {f.name: f for f in frames}

    def engine_settings(self, **changes: Any) -> EngineSettings:
        options: dict[str, Any] = {"context_tokens": 1024, "kv_cache_mib": 64, "max_sequences": 32} | changes
        return EngineSettings(str(self.folder), self.tokens.allowed_ids, self.tokens.stop_ids, **options)

    def learner_settings(self, **changes: Any) -> LearnerSettings:
        options: dict[str, Any] = {"freeze_vision": False} | changes
        return LearnerSettings(str(self.folder), self.tokens.allowed_ids, **options)


def at_hand(samples: Sequence[Sample], frames: Mapping[str, FittedFrame]) -> BatchFrames:
    """Frames of this process, the same for all episodes."""
    return BatchFrames({sample.episode: frames for sample in samples})


@dataclass(frozen=True)
class PlainFrames:
    """A `FrameSource` for a rank in this process."""

    frames: Mapping[str, FittedFrame]

    def read(self, episode: str, names: Collection[str]) -> dict[str, FittedFrame]:
        return {name: self.frames[name] for name in names}

    def lost(self, wanted: Mapping[str, Collection[str]]) -> list[str]:
        return [episode for episode, names in wanted.items() if not set(names) <= self.frames.keys()]


def of_generation(prompt: Prompt, generation: Generation, advantage: float = 1.0) -> Sample:
    start = len(generation.prompt_ids)
    span = ResponseSpan(0, start, start + len(generation.ids), generation.logprobs, generation.versions, advantage)
    frames = tuple(f.name for f in prompt.frames)
    ids = (*generation.prompt_ids, *generation.ids)
    return Sample("e", "g", ids, generation.prompt_length + len(generation.ids), frames, (span,))


def plain_model(tiny: Tiny) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(tiny.folder, dtype=torch.float32)


def plain_logprobs(
    model: Any, tiny: Tiny, sample: Sample, frames: dict[str, FittedFrame], temperature: float = 1.0
) -> torch.Tensor:
    """The response tokens' log-probabilities by transformers' own processor and forward pass, one sample alone."""
    from transformers import AutoImageProcessor

    ids = torch.tensor([tiny.expanded(sample, frames)])
    options: dict[str, Any] = {}
    if sample.frames:
        images = [Image.fromarray(frames[name].pixels()) for name in sample.frames]
        options = dict(AutoImageProcessor.from_pretrained(tiny.folder)(images, return_tensors="pt"))
        options["mm_token_type_ids"] = (ids == tiny.tokens.image_pad).int()
    logits = model(input_ids=ids, **options).logits[0] / temperature
    logits = torch.where(torch.from_numpy(tiny.vocabulary.allowed), logits, float("-inf"))
    shift = ids.shape[1] - len(sample.ids)  # all frames come before the answer
    places = torch.cat([torch.arange(span.start, span.end) for span in sample.spans]) + shift
    return logits.log_softmax(-1)[places - 1].gather(1, ids[0, places][:, None])[:, 0]


@contextmanager
def one_rank(tiny: Tiny, **changes: Any) -> Iterator[Rank]:
    """In this process, without Ray."""
    rank = Rank(tiny.learner_settings(**changes), 0, torch.distributed.HashStore())
    try:
        yield rank
    finally:
        torch.distributed.destroy_process_group()
