"""A prompt as vLLM's engine takes it after its own processors: expanded ids, and patches instead of images.

vLLM's processor for Qwen3-VL would decode, (not) resize, cut and count each frame again, in a millisecond of Python per
request: as long as all sampling steps of a short answer. The learner's own code has done it already, byte for byte
(`learner/frame_store.py`), so both sides see the same patches and the same number of tokens by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from ..learner.frame_store import Patches, PixelFormat

#: frames that the vision tower merges into one temporal patch; a still image is repeated
_TEMPORAL = 2


def engine_input(
    ids: Sequence[int],
    names: Sequence[str],
    frames: dict[str, Patches],
    form: PixelFormat,
    image_id: int,
    *,
    normalize: bool,
) -> Any:
    """`ids` hold one placeholder per frame; ValueError if their numbers differ. `normalize`: the model does not scale
    bytes itself (`normalizes_bytes`)."""
    if ids.count(image_id) != len(names):
        raise ValueError(f"{ids.count(image_id)} image placeholders for {len(names)} frames")
    if not names:
        return tokens_input(list(ids))
    expanded: list[int] = []
    places: list[PlaceholderRange] = []
    shown = iter(names)
    for token in ids:
        if token == image_id:
            count = frames[next(shown)].tokens
            places.append(PlaceholderRange(offset=len(expanded), length=count))
            expanded.extend([image_id] * count)
        else:
            expanded.append(token)
    items = [_item(frames[name], form, normalize) for name in names]
    return mm_input(expanded, MultiModalKwargsItems({"image": items}), {"image": list(names)}, {"image": places})


def normalizes_bytes(llm: Any) -> bool:
    """Whether the engine's model takes patches as bytes, as the learner's does."""
    return bool(llm.model_config.multimodal_config.mm_device_do_normalize)


def _item(patches: Patches, form: PixelFormat, normalize: bool) -> MultiModalKwargsItem:
    values = torch.from_numpy(patches.values)
    count = len(values)
    pixels = values.view(count, 3, 1, -1)
    if normalize:
        mean = torch.tensor(form.mean).view(1, 3, 1, 1) * 255.0
        pixels = (pixels.float() - mean) / (torch.tensor(form.std).view(1, 3, 1, 1) * 255.0)
    pixels = pixels.expand(-1, -1, _TEMPORAL, -1).reshape(count, -1)
    grid = torch.tensor([1, patches.rows * form.merge, patches.columns * form.merge])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(pixels, MultiModalFlatField(slices=[slice(0, count)])),
            "image_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
        }
    )
