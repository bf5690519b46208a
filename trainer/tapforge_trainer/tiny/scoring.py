"""How likely the tiny model finds the right answers to examples: the loss of its building and the exam after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tapforge_envs.phone import draw
from tapforge_envs.phone.screen import Screen
from tapforge_envs.protocol import Observation

from ..agents import ContextLimit, make_agent
from ..agents.agent import Agent, Turn
from ..records import ResponseSpan, Sample
from .grounding import Example

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..learner.batches import Vocabulary
    from ..learner.packed import PackedPolicy

WIDTH, HEIGHT = 96, 160


@dataclass
class Scorer:
    policy: PackedPolicy
    vocabulary: Vocabulary
    agent: Agent

    @staticmethod
    def of_folder(folder: Path) -> Scorer:
        """The model of a folder in fp32, in this process."""
        import torch
        from transformers import Qwen3VLForConditionalGeneration

        from ..learner.batches import Vocabulary
        from ..learner.families.qwen3_vl import FAMILY
        from ..learner.frame_store import PixelFormat
        from ..learner.linear import accelerate
        from ..learner.packed import PackedPolicy

        agent = make_agent(
            "qwen3-vl",
            folder,
            prompt="compact",
            history_images=1,
            history_steps=8,
            context_tokens=128,
            response_tokens=16,
        )
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        size, image = model.config.text_config.vocab_size, model.config.image_token_id
        vocabulary = Vocabulary.of(size, image, agent.allowed_ids)
        accelerate(model)
        policy = PackedPolicy(model, FAMILY.vision_arguments, PixelFormat.of_folder(folder), vocabulary)
        return Scorer(policy, vocabulary, agent)

    def logprobs(self, examples: Sequence[Example]) -> tuple[Tensor, np.ndarray]:
        """(log-probability of each answer token, example of each token)."""
        import numpy as np

        from ..learner.batches import MicroBatchPlan, micro_batch, token_batch
        from ..learner.frame_store import Patches, cut

        form = self.policy.form
        # The prompt's words don't depend on the pixels, so that no example needs to be encoded as PNG.
        blank, _ = self.agent.prepare(Observation(draw.frame(Screen((0, 0, 0), ()), WIDTH, HEIGHT)))
        samples, frames = [], {}
        for k, example in enumerate(examples):
            name = f"example {k}"
            pixels = np.asarray(draw.picture(example.screen, WIDTH, HEIGHT))
            frames[name] = Patches(cut(pixels, form), *form.grid(WIDTH, HEIGHT))
            prompt = self.agent.prompt(example.goal, [Turn(blank, "", done) for done in example.history], blank)
            if isinstance(prompt, ContextLimit):
                raise ValueError(f"the example {example.goal!r} is too long: {prompt}")
            ids, answer = prompt.ids, self.agent.answer_ids(example.action, blank.frame)
            span = ResponseSpan(0, len(ids), len(ids) + len(answer), (0.0,) * len(answer), (0,) * len(answer), 1.0)
            length = prompt.expanded_length + len(answer)
            samples.append(Sample(name, name, (*ids, *answer), length, (name,), (span,)))
        data = token_batch(samples, self.vocabulary)
        grids = {name: (p.rows, p.columns) for name, p in frames.items()}
        batch = micro_batch(data, MicroBatchPlan(tuple(range(len(samples)))), grids, self.vocabulary)
        logprob, _ = self.policy(batch, frames)
        return logprob, data.sample[batch.response]

    def accuracy(self, examples: Sequence[Example]) -> float:
        """Mean probability of the whole right answer."""
        import torch

        with torch.no_grad():
            logprob, owner = self.logprobs(examples)
            return float(torch.zeros(len(examples)).index_add_(0, torch.from_numpy(owner), logprob).exp().mean())
