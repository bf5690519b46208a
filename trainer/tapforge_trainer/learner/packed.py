"""The policy as one module: micro-batch in, log-probability and entropy of every response token out. It computes with
the modules of transformers, and has sequences end to end in one row: no padding, for every family.

What it promises:
- Equal to transformers on each sample alone, and to what vLLM calls processed log-probabilities: tokens that the policy
  may not say are masked out, logits are divided by the temperature, the rest is renormalised.
- Log-probabilities do not depend on which sequences share a row, nor on whether they share a prompt in it.
- Logits exist at response positions only, and for a bounded number of them at a time.
- `inputs` computes on the host, from plain numbers, everything whose size or value depends on the data; `forward` reads
  nothing back from the device. So it never waits for a GPU, and can be traced with fake tensors: call `inputs` outside
  of the fake mode and give its result, made fake, to `forward`.
- Each distinct frame of a micro-batch goes through the vision tower once. A tower that learns is entered in every
  micro-batch, without a frame on a stand-in of one visual token, because its parameters are gathered by all ranks
  together. What a frozen one made of frames is remembered by content hash in bounded memory (`features.py`); that never
  goes stale, because the tower never changes.
- Numbers have the format of the weights, but for attention on GPUs, which has no kernel for fp32 (`attention.py`) and
  runs do not ask for it there (`placement/machine.py`); the softmax of the head is fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..placement.settings import AttentionKernel
from . import attention, head
from .batches import MicroBatch, Vocabulary
from .features import FrozenFeatures
from .frame_store import Patches, PixelFormat

#: (vision configuration, patches (time, rows, columns) [frames, 3]) -> what the tower would else compute from numbers
#: that it reads from the device; each family has its own
VisionArguments = Callable[[Any, Tensor], dict[str, Any]]


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda":
        # From pageable memory a copy would wait for all that the device still has to do.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on its device. T tokens, S sequences, R response tokens, V visual tokens, P patches."""

    ids: Tensor  # [1, T]
    positions: Tensor  # [3, 1, T]
    bounds: Tensor  # [S + 1] int32: where sequences begin, and the last one's end
    longest: int
    #: where sequences share tokens, those that each attends to [K], in order; their bounds [S + 1]; the longest one's
    keys: Tensor | None
    key_bounds: Tensor | None
    longest_keys: int
    predict: Tensor  # [R]
    target: Tensor  # [R]
    place: Tensor  # [V] of visual tokens among all tokens
    feature: Tensor  # [V] of visual tokens among the frames' features
    #: all frames, those that go through the tower, and how many visual tokens each of the latter has
    frames: tuple[str, ...]
    new: tuple[str, ...]
    counts: tuple[int, ...]
    #: of the new frames: bytes [P, 3 * patch * patch], patches (time, rows, columns) [frames, 3], the tower's arguments
    pixels: Tensor | None
    grids: Tensor | None
    vision: Mapping[str, Any]


class PackedPolicy(nn.Module):
    """Wraps a model of one of the families, whose parameters keep their names below `model.`."""

    def __init__(
        self,
        model: nn.Module,
        vision_arguments: VisionArguments,
        form: PixelFormat,
        vocabulary: Vocabulary,
        *,
        freeze_vision: bool = False,
        kernel: AttentionKernel = "torch",
    ):
        super().__init__()
        self.model = model
        self.form, self.freeze_vision = form, freeze_vision
        self._vision_arguments = vision_arguments
        self.register_buffer("allowed", torch.from_numpy(vocabulary.allowed.copy()), persistent=False)
        mean, std = (torch.tensor(values).view(1, 3, 1) for values in (form.mean, form.std))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        #: hidden states [tokens, width] -> values [tokens]; None: there is no critic
        self.critic: Callable[[Tensor], Tensor] | None = None
        self._features = FrozenFeatures()
        self._arguments = lru_cache(maxsize=32)(self._computed)
        if freeze_vision:
            self.visual.requires_grad_(False)
        attention.use(model, kernel)
        head.install(self.model.lm_head)
        embed = self.visual.patch_embed
        embed.forward = MethodType(_embed_patches, embed)

    @property
    def visual(self) -> Any:
        return self.model.model.visual

    @property
    def language(self) -> Any:
        return self.model.model.language_model

    @property
    def device(self) -> torch.device:
        return self.allowed.device

    def share_tower(self, other: Any) -> None:
        """`other`: a policy of the same kind with a frozen tower. One tower, and one memory of what it made."""
        self.model.model.visual, self._features = other.visual, other._features

    def forget_features(self) -> None:
        """For callers that put other weights into a frozen tower."""
        self._features.clear()

    # --- on the host --------------------------------------------------------------------------------------------------

    def inputs(self, batch: MicroBatch, frames: Mapping[str, Patches]) -> Inputs:
        """`frames`: at least those of the batch."""
        new = tuple(name for name in batch.frames if not (self.freeze_vision and name in self._features))
        shown = [frames[name] for name in new]
        if not batch.frames and not self.freeze_vision:
            shown = [Patches(np.zeros((self.form.merge**2, 3 * self.form.patch**2), np.uint8), 1, 1)]
        pixels = grids = None
        vision: Mapping[str, Any] = {}
        if shown:
            pixels = self._put(np.concatenate([patches.values for patches in shown]))
            sizes = tuple((patches.rows, patches.columns) for patches in shown)
            plain, arguments = self._arguments(sizes)
            grids = self._put(plain)
            vision = {key: self._put(value) if torch.is_tensor(value) else value for key, value in arguments.items()}
        attended = batch.lengths if batch.before is None else batch.lengths + batch.before
        return Inputs(
            ids=self._put(batch.ids),
            positions=self._put(batch.positions),
            bounds=self._put(_bounds(batch.lengths)),
            longest=int(batch.lengths.max()),
            keys=None if batch.keys is None else self._put(batch.keys),
            key_bounds=None if batch.keys is None else self._put(_bounds(attended)),
            longest_keys=int(attended.max()),
            predict=self._put(batch.predict),
            target=self._put(batch.target),
            place=self._put(batch.visual),
            feature=self._put(batch.feature),
            frames=batch.frames,
            new=new,
            counts=tuple(patches.tokens for patches in shown),
            pixels=pixels,
            grids=grids,
            vision=vision,
        )

    def _computed(self, sizes: tuple[tuple[int, int], ...]) -> tuple[Tensor, Mapping[str, Any]]:
        """Patches (time, rows, columns) and the tower's arguments for frames of these visual tokens (rows, columns)."""
        merge = self.form.merge
        grids = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in sizes])
        return grids, self._vision_arguments(self.visual.config, grids)

    def _put(self, values: np.ndarray | Tensor) -> Tensor:
        return on_device(values, self.device)

    # --- on the device ------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: MicroBatch | Inputs,
        frames: Mapping[str, Patches] | None = None,
        temperature: float = 1.0,
        beside: head.Beside = "entropy",
        taught: tuple[Tensor, Tensor] | None = None,
        likely: int = 0,
    ) -> tuple[Tensor, ...]:
        """(log-probability, what `beside` says) [response tokens] in the order of `batch.response`, what the head has
        of `taught` or `likely`, and where there is a critic, its values."""
        given = batch if isinstance(batch, Inputs) else self.inputs(batch, frames or {})
        hidden = self.hidden(given).index_select(0, given.predict)
        found: tuple[Tensor, ...]
        found = self.model.lm_head(hidden, given.target, self.allowed, temperature, beside, taught, likely)
        return found if self.critic is None else (*found, self.critic(hidden))

    def hidden(self, given: Inputs) -> Tensor:
        """Final hidden states [T, width]."""
        language = self.language
        x = language.embed_tokens(given.ids)
        levels = self._levels(given)
        if levels:
            # Without frames nothing is copied, but a gradient (zero) passes through the tower.
            seen = levels[0].index_select(0, given.feature).to(x.dtype)
            x = x.index_copy(1, given.place, seen.unsqueeze(0))
        rope = language.rotary_emb(x, given.positions)
        shared: dict[str, Any] = {}
        if given.keys is not None:
            shared = {"keys": given.keys, "cu_seq_lens_k": given.key_bounds, "max_length_k": given.longest_keys}
        for depth, layer in enumerate(language.layers):
            x = layer(
                x,
                attention_mask=None,
                position_embeddings=rope,
                cu_seq_lens_q=given.bounds,
                max_length_q=given.longest,
                **shared,
            )
            if depth + 1 < len(levels):
                deep = levels[depth + 1].index_select(0, given.feature).to(x.dtype)
                x = x.index_add(1, given.place, deep.unsqueeze(0))
        return language.norm(x).squeeze(0)

    def _levels(self, given: Inputs) -> list[Tensor]:
        """Features [visual tokens, width] of the frames: the tower's output, then one per deepstack level."""
        if not self.freeze_vision:
            return self._tower(given)
        if given.new:
            with torch.no_grad():
                self._features.add(given.new, given.counts, self._tower(given))
        return self._features.take(given.frames) if given.frames else []

    def _tower(self, given: Inputs) -> list[Tensor]:
        assert given.pixels is not None
        values = given.pixels.float().view(len(given.pixels), 3, -1)
        pixels = ((values / 255 - self.mean) / self.std).flatten(1)
        found = self.visual(pixels, grid_thw=given.grids, return_dict=True, **given.vision)
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _embed_patches(embed: Any, pixels: Tensor) -> Tensor:
    """The convolution's kernel is as large as its patch, so it is a matrix product. A still image fills all of its
    temporal extent with copies. `pixels` [patches, 3 * patch * patch]."""
    weight = embed.proj.weight
    x = pixels.to(weight.dtype).view(len(pixels), 3, 1, -1).expand(-1, -1, weight.shape[2], -1)
    return F.linear(x.reshape(len(pixels), -1), weight.flatten(1), embed.proj.bias)
