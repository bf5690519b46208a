"""What a model folder says of its image processor: one reader for the adapter, the engine and the learner, so that they
can't disagree about the size of a visual token or the scale of a pixel.

Rules, in this order, as the processors themselves have them:
- `processor_config.json` with a section `image_processor` counts before `preprocessor_config.json`.
- `min_pixels` and `max_pixels` count before those of the same name in `size`, and these before `size.shortest_edge` and
  `size.longest_edge`: folders have been published in all three ways. All are areas in pixels.
- Nothing is made up: a setting that is missing is an error that names the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMON, OWN = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    #: pixels of a patch's side
    patch: int
    #: patches of a visual token's side
    merge: int
    #: area below which an image is enlarged and over which it is shrunk, pixels
    min_pixels: int
    max_pixels: int
    #: per channel, of values from 0 to 1
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of_folder(folder: Path) -> ImageProcessor:
        path, found = _read(folder)
        size = found.get("size") or {}
        try:
            return ImageProcessor(
                patch=int(found["patch_size"]),
                merge=int(found["merge_size"]),
                min_pixels=int(found.get("min_pixels") or size.get("min_pixels") or size["shortest_edge"]),
                max_pixels=int(found.get("max_pixels") or size.get("max_pixels") or size["longest_edge"]),
                mean=tuple(map(float, found["image_mean"])),
                std=tuple(map(float, found["image_std"])),
            )
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}; an image processor of the Qwen-VL family has it") from error


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    for name in (COMMON, OWN):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if name == COMMON:
            found = found.get("image_processor")
        if found is not None:
            return path, found
    raise FileNotFoundError(
        f"{folder} has no {OWN} (nor an image_processor in {COMMON}), which says how images are resized; use a "
        "complete Qwen-VL model folder"
    )
