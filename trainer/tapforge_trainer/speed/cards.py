"""What a GPU computes and reads in a second, as its maker says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..learner.flops import peak_flops

#: a card without a name
DEFAULT: Final = "H100"
#: bytes per second of the device's memory, by a part of its name; longer names are more exact
_BANDWIDTHS: Final = {
    "GB200": 8.0e12,
    "GB300": 8.0e12,
    "B300": 8.0e12,
    "B200": 8.0e12,
    "B100": 8.0e12,
    "H200": 4.8e12,
    "GH200": 4.0e12,
    "H100 PCIe": 2.0e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100": 1.94e12,
    "A800": 1.94e12,
    "A10G": 6.0e11,
    "A10": 6.0e11,
    "A30": 9.33e11,
    "A40": 6.96e11,
    "RTX A6000": 7.68e11,
    "RTX 6000 Ada": 9.6e11,
    "RTX 3090": 9.36e11,
    "RTX 4090": 1.008e12,
    "RTX 5090": 1.792e12,
    "L40S": 8.64e11,
    "L40": 8.64e11,
    "L4": 3.0e11,
    "MI300X": 5.3e12,
    "MI325X": 6.0e12,
    "MI250X": 3.2e12,
}


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """`name`: as it was given. Dense bfloat16 operations, and bytes of memory, per second."""

    name: str
    peak: float
    bandwidth: float


def card_speed(name: str) -> CardSpeed | None:
    """Of the GPU of this name, or of an nvidia.com/gpu.product; None for one that is not known."""
    words = name.upper().replace("-", " ")
    peak = peak_flops(words)
    found = [(part, rate) for part, rate in _BANDWIDTHS.items() if part.upper() in words]
    if peak is None or not found:
        return None
    return CardSpeed(name, peak, max(found, key=lambda one: len(one[0]))[1])
