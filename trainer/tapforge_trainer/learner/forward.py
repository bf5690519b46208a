"""The policy as one module: micro-batch in, log-probability and entropy of every response token out. Plain torch.

What it promises:
- Equal to transformers' Qwen3-VL on each sample alone, and to what vLLM calls processed log-probabilities: tokens
  that the policy may not say are masked out, logits are divided by the temperature, the rest is renormalised.
- Each distinct frame of a micro-batch goes through the vision tower once. With a frozen tower features are remembered
  by content hash in bounded memory; they never go stale, because the tower never changes.
- Logits exist at response positions only, and for a bounded number of them at a time.
- Rows are padded on the right and attention is causal, so padding is never seen and needs no mask.

It computes with the modules of transformers (names and shapes of its checkpoints stay), but not with their forward
functions: patches are a matrix product instead of a convolution in three dimensions, all frames of a size attend in one
call. It is for the tiny model on CPUs, in fp32; whatever is larger is packed without padding (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import head
from .batches import MicroBatch, Vocabulary
from .features import FrozenFeatures
from .frame_store import Patches, PixelFormat
from .linear import accelerate, linear


class VLPolicy(nn.Module):
    """Wraps a `Qwen3VLForConditionalGeneration`, whose parameters keep their checkpoint names below `model.`."""

    packed = False

    def __init__(self, model: nn.Module, form: PixelFormat, vocabulary: Vocabulary, *, freeze_vision: bool = False):
        super().__init__()
        self.model = model
        self.form = form
        self.freeze_vision = freeze_vision
        self.register_buffer("allowed", torch.from_numpy(vocabulary.allowed.copy()), persistent=False)
        self._features = FrozenFeatures()
        if freeze_vision:
            self.visual.requires_grad_(False)
        accelerate(model)
        head.install(self.model.lm_head)
        for block in self.visual.blocks:
            block.forward = MethodType(_vision_block, block)
        for layer in self.language.layers:
            layer.forward = MethodType(_decoder_layer, layer)

    @property
    def visual(self) -> Any:
        return self.model.model.visual

    @property
    def language(self) -> Any:
        return self.model.model.language_model

    @property
    def device(self) -> torch.device:
        return self.allowed.device

    def forward(
        self, batch: MicroBatch, frames: Mapping[str, Patches], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) [response tokens] in the order of `batch.response`; entropy has no gradient."""
        hidden = self.hidden(batch, frames)
        predict = torch.from_numpy(batch.predict).to(self.device)
        target = torch.from_numpy(batch.target).to(self.device)
        return self.model.lm_head(hidden.index_select(0, predict), target, self.allowed, temperature)

    def hidden(self, batch: MicroBatch, frames: Mapping[str, Patches]) -> Tensor:
        """Final hidden states [rows * width, hidden]."""
        language = self.language
        ids = torch.from_numpy(batch.ids).to(self.device)
        rows, width = ids.shape
        x = language.embed_tokens(ids)
        features = self.features(batch.frames, frames)
        place = feature = None
        if features is not None and len(batch.visual):
            place = torch.from_numpy(batch.visual).to(self.device)
            feature = torch.from_numpy(batch.feature).to(self.device)
            flat = x.view(rows * width, -1)
            x = flat.index_copy(0, place, features[0].index_select(0, feature).to(x.dtype)).view(x.shape)
        cos, sin = language.rotary_emb(x, torch.from_numpy(batch.positions).to(self.device))
        rope = (cos.unsqueeze(1), _signed(sin).unsqueeze(1))
        for depth, layer in enumerate(language.layers):
            x = layer(x, rope)
            if place is not None and features is not None and depth + 1 < len(features):
                deep = features[depth + 1].index_select(0, feature).to(x.dtype)
                x = x.view(rows * width, -1).index_add(0, place, deep).view(x.shape)
        if features is not None and place is None:
            # A stand-in frame: nothing of it is used, but its gradient (zero) has to pass through the tower.
            x = x + 0.0 * sum(feature.sum() for feature in features)
        return language.norm(x).view(rows * width, -1)

    # --- vision -------------------------------------------------------------------------------------------------------

    def features(self, names: Sequence[str], frames: Mapping[str, Patches]) -> list[Tensor] | None:
        """[visual tokens, hidden] of the named frames one after another: the tower's output, then one per deepstack
        level. Equal sizes lie side by side in `names`. A tower that learns is entered by every rank in every
        micro-batch, because its parameters are gathered by all ranks together: without a frame, on a stand-in."""
        if not self.freeze_vision:
            if names:
                return self._tower([frames[name] for name in names])
            blank = np.zeros((self.form.merge**2, 3 * self.form.patch**2), np.uint8)
            return self._tower([Patches(blank, 1, 1)])
        if not names:
            return None
        new = [name for name in names if name not in self._features]
        if new:
            with torch.no_grad():
                parts = self._tower([frames[name] for name in new])
            self._features.add(new, [frames[name].tokens for name in new], parts)
        return self._features.take(names)

    def share_tower(self, other: Any) -> None:
        """`other`: a policy of the same kind with a frozen tower. One tower, and one memory of what it made."""
        self.model.model.visual, self._features = other.visual, other._features

    def forget_features(self) -> None:
        """For whoever puts other weights into a frozen tower."""
        self._features.clear()

    def _tower(self, shown: Sequence[Patches]) -> list[Tensor]:
        visual = self.visual
        groups: list[tuple[int, int, int]] = []  # (frames, rows, columns) of patches
        for patches in shown:
            rows, columns = patches.rows * self.form.merge, patches.columns * self.form.merge
            if groups and groups[-1][1:] == (rows, columns):
                groups[-1] = (groups[-1][0] + 1, rows, columns)
            else:
                groups.append((1, rows, columns))
        values = torch.from_numpy(np.concatenate([patches.values for patches in shown])).to(self.device)
        x = self._embed_patches(values) + self._positions(groups)
        cos, sin = self._vision_rope(groups)
        x = x.to(visual.patch_embed.proj.weight.dtype)
        outputs: list[Tensor] = []
        for depth, block in enumerate(visual.blocks):
            x = block(x, groups, cos, sin)
            if depth in visual.deepstack_visual_indexes:
                outputs.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(depth)](x))
        return [visual.merger(x), *outputs]

    def _embed_patches(self, values: Tensor) -> Tensor:
        """The convolution's kernel is as large as its patch, so it is a matrix product; a still image fills all of its
        temporal extent with copies, so the kernel is summed over time."""
        proj = self.visual.patch_embed.proj
        kernel = proj.weight.sum(2).reshape(proj.weight.shape[0], -1)
        scale = torch.tensor([1 / (255 * std) for std in self.form.std], device=values.device).view(1, 3, 1)
        shift = torch.tensor([m / s for m, s in zip(self.form.mean, self.form.std, strict=True)], device=values.device)
        pixels = values.float().view(len(values), 3, -1).mul_(scale).sub_(shift.view(1, 3, 1)).view(len(values), -1)
        return linear(pixels.to(kernel.dtype), kernel, proj.bias)

    def _positions(self, groups: Sequence[tuple[int, int, int]]) -> Tensor:
        visual = self.visual
        parts = []
        for count, rows, columns in groups:
            index, weight = _interpolation(rows, columns, visual.num_grid_per_side, self.form.merge)
            index, weight = index.to(self.device), weight.to(self.device)
            one = (visual.pos_embed(index) * weight[:, :, None]).sum(1)
            parts.append(one.expand(count, *one.shape).reshape(-1, one.shape[-1]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _vision_rope(self, groups: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """[patches of one frame of each group, head dim], groups one after another."""
        places = torch.cat([_patch_places(rows, columns, self.form.merge) for _, rows, columns in groups])
        cos, sin = self.visual.rotary_pos_emb(places.float().to(self.device), places.to(self.device))
        return cos.float(), _signed(sin.float())


def _signed(sin: Tensor) -> Tensor:
    """rotate_half negates the second half before it moves it to the front; the sign goes into the sine once instead."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * signed_sin


def _decoder_layer(layer: Any, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    attention = layer.self_attn
    rows, width, _ = x.shape
    h = layer.input_layernorm(x)
    shape = (rows, width, -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(h).view(shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(h).view(shape)).transpose(1, 2)
    v = attention.v_proj(h).view(shape).transpose(1, 2)
    q, k = _rotate(q, *rope), _rotate(k, *rope)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True)
    x = x + attention.o_proj(h.transpose(1, 2).reshape(rows, width, -1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _vision_block(block: Any, x: Tensor, groups: Sequence[tuple[int, int, int]], cos: Tensor, sin: Tensor) -> Tensor:
    attention = block.attn
    qkv = attention.qkv(block.norm1(x))
    outputs, at, place = [], 0, 0
    for count, rows, columns in groups:
        size = rows * columns
        part = qkv[at : at + count * size].view(count, size, 3, attention.num_heads, -1)
        q, k, v = part.permute(2, 0, 3, 1, 4).unbind(0)
        here = slice(place, place + size)
        q = _rotate(q.float(), cos[here], sin[here]).to(v.dtype)
        k = _rotate(k.float(), cos[here], sin[here]).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, scale=attention.scaling)
        outputs.append(out.transpose(1, 2).reshape(count * size, -1))
        at, place = at + count * size, place + size
    x = x + attention.proj(torch.cat(outputs) if len(outputs) > 1 else outputs[0])
    return x + block.mlp(block.norm2(x))


@lru_cache(maxsize=256)
def _interpolation(rows: int, columns: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    return get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, rows, columns]]),
        num_grid_per_side=side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge,
    )


@lru_cache(maxsize=256)
def _patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """(row, column) of each patch in the processor's order."""
    from transformers.vision_utils import get_vision_position_ids

    return get_vision_position_ids(torch.tensor([[1, rows, columns]]), merge)
