"""What the numbers mean that a model writes for a place on the screen.

Rules:
- A convention is stated once, by its adapter, and used both ways: `read` (model's number -> relative, 0.0 the first
  pixel of a side and 1.0 the last) and `write` (relative -> the model's canonical number).
- Nothing is clamped: a number outside the convention's range is a ValueError that names the number and the range.
- `write(read(v))` is v for every canonical number v. Numbers that count pixels mean the middle of the pixel, so that
  every pixel of a screen that the model sees at its own size, or enlarged, survives both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from tapforge_envs.protocol import pixel


class Coordinates(Protocol):
    def read(self, value: object, side: int, what: str) -> float:
        """The relative coordinate. `side`: pixels of this side of the image that the model saw; `what`: the field's
        name, for the message. Raises ValueError."""
        ...

    def write(self, relative: float, side: int) -> int | float:
        """The model's number."""
        ...

    def range(self, side: int) -> str:
        """The allowed numbers of a side, for tool descriptions and people."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers from 0 (first pixel) to `largest` (last pixel) on either side, whatever the size of the image."""

    largest: int

    def read(self, value: object, side: int, what: str) -> float:
        if is_number(value) and 0 <= value <= self.largest:
            return value / self.largest
        raise ValueError(f"{what} holds {short(value)}, which is not a number from 0 to {self.largest}")

    def write(self, relative: float, side: int) -> int:
        return round(relative * self.largest)

    def range(self, side: int) -> str:
        return f"0 to {self.largest}"


@dataclass(frozen=True, slots=True)
class Fraction:
    """Numbers from 0 to 1, written with `digits` decimals. Four of them tell the pixels of sides up to 4,999 apart."""

    digits: int = 4

    def read(self, value: object, side: int, what: str) -> float:
        if is_number(value) and 0 <= value <= 1:
            return float(value)
        raise ValueError(f"{what} holds {short(value)}, which is not a number from 0 to 1")

    def write(self, relative: float, side: int) -> float:
        return round(relative, self.digits)

    def range(self, side: int) -> str:
        return "0 to 1"


@dataclass(frozen=True, slots=True)
class ImagePixels:
    """Pixels of the image as the model saw it, after it was fitted: 0 to side - 1."""

    def read(self, value: object, side: int, what: str) -> float:
        if is_number(value) and 0 <= value < side:
            return (math.floor(value) + 0.5) / side
        raise ValueError(f"{what} holds {short(value)}, which is not a pixel of a side of {side}")

    def write(self, relative: float, side: int) -> int:
        return pixel(relative, side)

    def range(self, side: int) -> str:
        return f"0 to {side - 1}"


@dataclass(frozen=True, slots=True)
class Plane:
    """A convention on an image of a known size, in pixels."""

    coordinates: Coordinates
    width: int
    height: int

    def place(self, x: object, y: object, what: str = "coordinate") -> tuple[float, float]:
        """Relative (x, y). Raises ValueError."""
        return self.coordinates.read(x, self.width, what), self.coordinates.read(y, self.height, what)

    def point(self, value: object, what: str = "coordinate") -> tuple[float, float]:
        """Of a list [x, y]. Raises ValueError."""
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"{what} {short(value)} is not [x, y]")
        return self.place(value[0], value[1], what)

    def at(self, x: float, y: float) -> list[int | float]:
        """The model's [x, y] of a relative place."""
        return [self.coordinates.write(x, self.width), self.coordinates.write(y, self.height)]

    def words(self) -> str:
        x, y = self.coordinates.range(self.width), self.coordinates.range(self.height)
        return f"x from {x} (left to right), y from {y} (top to bottom)"


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(value: object) -> str:
    """A value for an error message: printable, of bounded length, and without recursion into what a model wrote."""
    if isinstance(value, list) and len(value) <= 4 and not any(isinstance(item, list | Mapping) for item in value):
        return f"[{', '.join(short(item) for item in value)}]"
    if isinstance(value, list | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
