"""What judges have used.

Every request counts that was sent, also one that failed. Tokens are those that endpoints report; money follows from
their prices. Where an endpoint reports none, tokens are estimated, on the high side, so that a limit on them holds: one
for every three bytes of text, and one for each square of 28 pixels of an image, as Qwen2.5-VL has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Final

from tapforge_api.judge import JudgeModel

_MILLION: Final = 1_000_000
_BYTES_PER_TOKEN: Final = 3
_SIDE: Final = 28
#: of an image whose size can't be read
_LARGE: Final = 4096


@dataclass(slots=True)
class Usage:
    """Totals of one process."""

    requests: int = 0
    #: requests without an answer that could be used
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    #: from request to answer, summed over requests
    seconds: float = 0.0
    money: float = 0.0
    votes: int = 0
    unreadable: int = 0
    verdicts: int = 0
    #: verdicts for which nothing was asked
    cached: int = 0
    missing: int = 0
    #: questions for which the models of the cascade were asked
    cascaded: int = 0
    #: requests whose tokens the endpoint didn't say
    estimated: int = 0

    def sent(self, seconds: float, failed: bool) -> None:
        self.requests += 1
        self.failed += failed
        self.seconds += seconds

    def answered(self, model: JudgeModel, prompt_tokens: int, answer_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.answer_tokens += answer_tokens
        self.money += (prompt_tokens * model.price.prompt + answer_tokens * model.price.answer) / _MILLION

    def add(self, other: Usage) -> None:
        for name in (field.name for field in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def estimated_tokens(parts: Iterable[str | bytes | None]) -> int:
    """Of texts and PNGs; None counts nothing."""
    total = 0
    for part in parts:
        if isinstance(part, bytes):
            total += _of_image(part)
        elif part:
            total += -(-len(part.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)
    return total


def _of_image(png: bytes) -> int:
    if len(png) < 24:
        return _LARGE
    width, height = struct.unpack(">II", png[16:24])
    return -(-width // _SIDE) * -(-height // _SIDE)
