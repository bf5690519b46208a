"""The model's own image processor has nothing left to resize, so its placeholder count is ours."""

import io
from collections.abc import Callable

import pytest
from PIL import Image

from tapforge_envs.protocol import Frame
from tapforge_trainer.agents.vision import VisionGrid, fit_frame

ODD_SIZES = [(96, 160), (97, 161), (131, 227), (33, 999), (1, 77), (1079, 2399), (1080, 2400), (777, 333), (15, 17)]


def processors(min_tokens: int, max_tokens: int) -> list:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    size = {"shortest_edge": min_tokens * 32 * 32, "longest_edge": max_tokens * 32 * 32}
    return [kind(patch_size=16, merge_size=2, size=size) for kind in (Qwen2VLImageProcessor, Qwen2VLImageProcessorPil)]


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(4, 256), (15, 15), (1, 7), (64, 16384)])
def test_any_fitted_size_has_as_many_patches_as_we_say(min_tokens: int, max_tokens: int) -> None:
    grid = VisionGrid(16, 2, min_tokens, max_tokens)
    for processor in processors(min_tokens, max_tokens):
        for width in range(1, 2600, 67):
            for height in range(1, 2600, 71):
                if max(width, height) <= 200 * min(width, height):
                    w, h = grid.fit(width, height)
                    patches = processor.get_number_of_image_patches(h, w)
                    assert patches == (w // 16) * (h // 16) == 4 * grid.visual_tokens(width, height)


@pytest.mark.parametrize("size", ODD_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_processor_leaves_the_pixels_of_a_fitted_frame_alone(
    frame: Callable[..., Frame], size: tuple[int, int]
) -> None:
    grid = VisionGrid(16, 2, 4, 256)
    fitted, _ = fit_frame(frame(*size), grid)
    image = Image.open(io.BytesIO(fitted.data)).convert("RGB")
    for processor in processors(4, 256):
        as_is = processor(image, do_resize=False, return_tensors="pt")
        resized = processor(image, return_tensors="pt")
        assert resized["image_grid_thw"].tolist() == [[1, fitted.height // 16, fitted.width // 16]]
        assert resized["image_grid_thw"].prod() == 4 * grid.visual_tokens(*size)
        assert resized["pixel_values"].equal(as_is["pixel_values"])
