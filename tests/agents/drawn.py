"""Screens of rectangles: equal arguments give equal bytes."""

import io
import random

from PIL import Image

from tapforge_envs.protocol import Frame


def draw_png(width: int, height: int, seed: int = 0, mode: str = "RGB") -> bytes:
    """A screen of rectangles; equal arguments give equal bytes."""
    dice = random.Random(seed)
    image = Image.new("RGB", (width, height), (dice.randrange(256), dice.randrange(256), dice.randrange(256)))
    for _ in range(12):
        corner = (dice.randrange(width), dice.randrange(height))
        image.paste((dice.randrange(256), dice.randrange(256), dice.randrange(256)), (*corner, width, height))
    out = io.BytesIO()
    image.convert(mode).save(out, "PNG")
    return out.getvalue()


def draw_frame(width: int = 96, height: int = 160, seed: int = 0, mode: str = "RGB") -> Frame:
    return Frame.of(draw_png(width, height, seed, mode), width, height)
