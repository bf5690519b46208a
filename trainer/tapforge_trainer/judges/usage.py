"""What judges have used.

Every request counts that was sent, also one that failed. Tokens are those that endpoints report; money follows from
their prices.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Final

from tapforge_api.judge import JudgeModel

_MILLION: Final = 1_000_000


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
