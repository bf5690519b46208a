"""Grounding, as ScreenSpot has it: a JSON list or JSON Lines of {img_filename, bbox, instruction}.

`bbox` is [x, y, width, height] in pixels (ScreenSpot, ScreenSpot-v2), or with `box=corners` [left, top, right, bottom]
(ScreenSpot-Pro); copies of ScreenSpot have shares of the screen instead, `coordinates=fraction`. A row with
pixels that says its image's size (`img_size`, `image_size`) has an image of that size. A row is one step: a tap at the
middle, right anywhere inside the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tapforge_envs.protocol import Tap

from ...agents.coordinates import Coordinates, Fraction, Grid, is_number
from ..convert import Bad, Row, RowStep
from ..episodes import Box, DataError, wrong
from ..images import image_at, plane_of
from ..rows import convention, json_rows

#: pixels that no image has; larger integers are not floats
_FAR: Final = 1e9
#: fields in which ScreenSpot-Pro and OSWorld-G have [width, height]
_SIZES: Final = ("img_size", "image_size")


def screenspot(
    path: Path, /, *, images: str = "", box: str = "size", coordinates: str = "pixels"
) -> Iterator[Row | Bad]:
    """`images`: the folder of the images; default: the file's own. `box`: size or corners. `coordinates`: pixels,
    fraction, grid or grid1000."""
    if box not in ("size", "corners"):
        raise DataError(f"box={box}; known are size, corners")
    how = convention(coordinates)
    folder = Path(images) if images else path.parent
    for name, value in json_rows(path):
        if isinstance(value, DataError) or not isinstance(value, dict):
            yield Bad(name, "row", str(value)[:200])
            continue
        try:
            yield _row(name, value, folder, box, how)
        except DataError as error:
            yield Bad(name, "image", str(error))


def _row(name: str, value: dict[str, Any], folder: Path, form: str, how: Coordinates) -> Row | Bad:
    goal, numbers, file = value.get("instruction"), value.get("bbox"), value.get("img_filename")
    if not isinstance(goal, str) or not goal.strip():
        return Bad(name, "row", "no instruction")
    if not isinstance(file, str) or not file:
        return Bad(name, "image", "the row names no image")
    if (
        not isinstance(numbers, list)
        or len(numbers) != 4
        or not all(is_number(one) and abs(one) < _FAR for one in numbers)
    ):
        return Bad(name, "row", f"bbox {str(numbers)[:60]} is not four numbers")
    image = image_at(folder, file)
    plane = plane_of(image, how)
    size = [plane.width, plane.height]
    shares = isinstance(how, Grid | Fraction)  # of an image of any size: a smaller copy is as good
    for field in () if shares else _SIZES:
        said = value.get(field)
        if isinstance(said, list) and len(said) == 2 and all(map(is_number, said)) and said != size:
            return Bad(name, "image", f"the image is {size[0]}x{size[1]}, and {field} says {str(said)[:60]}")
    left, top, right, bottom = numbers
    if form == "size":
        right, bottom = left + right, top + bottom
    wide, high = (how.largest, how.largest) if isinstance(how, Grid) else (1, 1) if isinstance(how, Fraction) else size
    try:
        target = Box(left=left / wide, top=top / high, right=right / wide, bottom=bottom / high)
    except ValidationError as error:
        return Bad(name, "coordinates", f"{wrong(error)}; the image is {size[0]}x{size[1]}", numbers)
    tap = Tap(x=(target.left + target.right) / 2, y=(target.top + target.bottom) / 2)
    return Row(name, goal.strip(), [RowStep(image, tap, target=target)])
