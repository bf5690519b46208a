"""Qwen2.5-VL with its tools: mobile_use for phones, computer_use for desktops.

Coordinates are pixels of the picture as the model sees it, after it was fitted to its patches; the tool's description
names that size. Its chat template leaves tools out: the schema stands in the system prompt.
"""

from __future__ import annotations

from typing import Final

from .computer_use import COMPUTER_USE
from .coordinates import ImagePixels
from .mobile_use import MOBILE_USE
from .qwen3vl import tool_dialect

MOBILE: Final = tool_dialect("qwen2.5-vl", MOBILE_USE, ImagePixels(), "phone")
COMPUTER: Final = tool_dialect("qwen2.5-vl-computer", COMPUTER_USE, ImagePixels(), "computer")
