"""Trains the tiny judge: the tiny base, taught to say whether an episode of the simulated phone succeeded.

It reads the goal, what the agent reported, and every screen with its touches marked (`judges/prompts/tiny.jinja`), and
answers `score: 1` or `score: 0`, each one token. The folder is a Qwen3-VL like any other, with a chat template: vLLM's
server answers with it. From a seed; one process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from shutil import copyfile
from typing import TYPE_CHECKING, Any, Final

from ..judges.answers import form
from ..judges.prompt_file import quoted
from .judged_episodes import JudgedEpisode

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from ..learner.batches import Vocabulary
    from ..learner.frame_store import Patches
    from ..learner.packed import PackedPolicy

EPISODES, STEPS, BATCH = 4000, 320, 32
#: episodes of the test split by which it is measured
EXAM: Final = 800
#: further episodes of the train split, by which it is balanced
FURTHER: Final = 2000
LEARNING_RATE: Final = 1e-3
_WARMUP, _FLOOR = 50, 0.02
ANSWERS: Final = ("score: 0", "score: 1")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    # Jinja drops a template's last line end, but not one that is a value.
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)


@dataclass(frozen=True, slots=True)
class Exam:
    """Of episodes that it never saw the like of; positive: called a success."""

    true_positives: int
    false_positives: int
    true_negatives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        return self.true_positives / max(1, self.true_positives + self.false_positives)

    @property
    def recall(self) -> float:
        return self.true_positives / max(1, self.true_positives + self.false_negatives)

    def __str__(self) -> str:
        return f"precision {self.precision:.3f}, recall {self.recall:.3f}"


def train_judge(
    folder: Path,
    base: Path,
    lessons: Sequence[JudgedEpisode],
    further: Sequence[JudgedEpisode],
    unseen: Sequence[JudgedEpisode],
    *,
    seed: int = 0,
    steps: int = STEPS,
    report: Callable[[int, float, float, Exam | None], None] = lambda step, seconds, loss, exam: None,
) -> Exam:
    """Writes the judge to `folder`, from the tiny base in `base`; on a GPU where torch has one. Balanced on `further`
    episodes, none of the `lessons`. Returns how it judges `unseen`. `report(step, seconds, loss, exam)` is called every
    50 steps, every 250 with a small exam."""
    import torch

    torch.manual_seed(seed)
    begun = time.monotonic()
    learner = Learner.made(folder, base)
    optimizer = torch.optim.AdamW(learner.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    order, rng, losses = list[int](), Random(f"tiny judge:{seed}"), list[float]()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(step, steps)
        if len(order) < BATCH:
            order = rng.sample(range(len(lessons)), len(lessons))
        batch = [lessons[order.pop()] for _ in range(min(BATCH, len(lessons)))]
        loss = -learner.logprobs(batch, [one.solved for one in batch]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 50 == 0:
            small = learner.examined(unseen[:200]) if step % 250 == 0 else None
            report(step, time.monotonic() - begun, sum(losses[-50:]) / 50, small)
    learner.balance(further)
    # As it is stored and served.
    learner.policy.model.to(torch.bfloat16).save_pretrained(folder)
    learner.policy.model.float()
    return learner.examined(unseen)


def _rate(step: int, steps: int) -> float:
    late = step / steps
    return min(1.0, step / _WARMUP) * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * late)))


def text_of(episode: JudgedEpisode) -> str:
    """The user's text, as `judges/prompts/tiny.jinja` says it."""
    return f"{quoted(episode.goal)} {quoted(episode.status)} {form(None)}"


@dataclass
class Learner:
    """The model that is trained."""

    policy: PackedPolicy
    vocabulary: Vocabulary
    tokenizer: Tokenizer

    @staticmethod
    def made(folder: Path, base: Path) -> Learner:
        """The base with a row of the embedding for each new token; its folder without the weights."""
        import torch
        from tokenizers import AddedToken, Tokenizer
        from transformers import Qwen3VLForConditionalGeneration

        folder.mkdir(parents=True, exist_ok=True)
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            copyfile(base / name, folder / name)
        config = json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        new = [*ANSWERS, form(None), *(quoted(status) for status in ("success", "failure", "infeasible", ""))]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in new])
        tokenizer.save(str(folder / "tokenizer.json"))
        model = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
        model.resize_token_embeddings(tokenizer.get_vocab_size(with_added_tokens=True), mean_resizing=False)
        return Learner.of_model(model, tokenizer, folder)

    @staticmethod
    def of_folder(folder: Path) -> Learner:
        """A judge that was trained, in fp32."""
        import torch
        from tokenizers import Tokenizer
        from transformers import Qwen3VLForConditionalGeneration

        model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        return Learner.of_model(model, Tokenizer.from_file(str(folder / "tokenizer.json")), folder)

    @staticmethod
    def of_model(model: Any, tokenizer: Tokenizer, folder: Path) -> Learner:
        import torch

        from ..learner.batches import Vocabulary
        from ..learner.families.qwen3_vl import FAMILY
        from ..learner.frame_store import PixelFormat
        from ..learner.linear import accelerate
        from ..learner.packed import PackedPolicy

        size = model.config.text_config.vocab_size
        vocabulary = Vocabulary.of(size, model.config.image_token_id, tuple(range(size)))
        accelerate(model)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        policy = PackedPolicy(model, FAMILY.vision_arguments, PixelFormat.of_folder(folder), vocabulary)
        return Learner(policy, vocabulary, tokenizer)

    def logprobs(self, batch: Sequence[JudgedEpisode], answers: Sequence[bool]) -> Tensor:
        """Of each whole answer."""
        import torch

        from ..learner.batches import MicroBatchPlan, micro_batch, token_batch
        from ..records import ResponseSpan, Sample

        frames, samples = {}, []
        cells = 0
        for number, (episode, answer) in enumerate(zip(batch, answers, strict=True)):
            names = []
            for screen in episode.screens:
                name, patches = self._patches(screen)
                frames[name] = patches
                names.append(name)
                cells = patches.rows * patches.columns
            ids = self.prompt_ids(episode)
            said = self.ids_of(f"{ANSWERS[answer]}<|im_end|>")
            span = ResponseSpan(0, len(ids), len(ids) + len(said), (0.0,) * len(said), (0,) * len(said), 1.0)
            length = len(ids) + len(said) + len(names) * (cells - 1)
            samples.append(Sample(f"{number}", f"{number}", (*ids, *said), length, tuple(names), (span,)))
        data = token_batch(samples, self.vocabulary)
        grids = {name: (one.rows, one.columns) for name, one in frames.items()}
        packed = micro_batch(data, MicroBatchPlan(tuple(range(len(samples)))), grids, self.vocabulary)
        logprob, _ = self.policy(packed, frames)
        owner = torch.from_numpy(data.sample[packed.response]).to(logprob.device)
        return torch.zeros(len(batch), device=logprob.device).index_add_(0, owner, logprob)

    def balance(self, further: Sequence[JudgedEpisode]) -> None:
        """Moves the row of `score: 1` in the head until as many episodes are called a success as are one, which makes
        precision and recall equal. Training alone leaves a judge that calls the unsure ones failures."""
        import torch

        states, kept = list[torch.Tensor](), list[torch.Tensor]()
        head = self.policy.model.lm_head
        hook = head.register_forward_pre_hook(lambda module, given: states.append(given[0].detach()))
        try:
            with torch.no_grad():
                for start in range(0, len(further), BATCH):
                    states.clear()
                    self.logprobs(batch := further[start : start + BATCH], [True] * len(batch))
                    kept.append(torch.cat(states).float().reshape(len(batch), -1, states[0].shape[-1])[:, 0])
        finally:
            hook.remove()
        hidden = torch.cat(kept)
        no, yes = (self.ids_of(answer)[0] for answer in ANSWERS)
        with torch.no_grad():
            margins = hidden @ (head.weight[yes] - head.weight[no]).float()
            solved = sum(one.solved for one in further)
            ordered = margins.sort(descending=True).values
            bound = (ordered[max(0, solved - 1)] + ordered[min(solved, len(ordered) - 1)]) / 2
            # a direction along which all states are 1, as nearly as there is one: the head has no bias
            square = hidden.T @ hidden + torch.eye(hidden.shape[1], device=hidden.device)
            along = torch.linalg.solve(square, hidden.sum(dim=0))
            head.weight[yes] -= (bound * along).to(head.weight.dtype)

    def examined(self, unseen: Sequence[JudgedEpisode]) -> Exam:
        import torch

        found = []
        with torch.no_grad():
            for start in range(0, len(unseen), BATCH):
                batch = unseen[start : start + BATCH]
                yes, no = (self.logprobs(batch, [answer] * len(batch)).tolist() for answer in (True, False))
                found += [(y > n, one.solved) for y, n, one in zip(yes, no, batch, strict=True)]
        return Exam(
            sum(said and solved for said, solved in found),
            sum(said and not solved for said, solved in found),
            sum(not said and not solved for said, solved in found),
            sum(not said and solved for said, solved in found),
        )

    def prompt_ids(self, episode: JudgedEpisode) -> list[int]:
        """With a placeholder for each screen."""
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(episode.screens)
        return self.ids_of(f"<|im_start|>user\n{text_of(episode)}\n{shown}<|im_end|>\n<|im_start|>assistant\n")

    def ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _patches(self, screen: bytes) -> tuple[str, Patches]:
        """By content: screens that are the same are read once in a batch."""
        import hashlib
        import io

        import numpy as np
        from PIL import Image

        from ..learner.frame_store import Patches, cut

        form = self.policy.form
        with Image.open(io.BytesIO(screen)) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        height, width = pixels.shape[:2]
        return hashlib.sha256(screen).hexdigest(), Patches(cut(pixels, form), *form.grid(width, height))
