"""What a teacher's answers were like: those that are not actions, by reason, and what its coordinates look like."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from ..agents.coordinates import Coordinates, Fraction, Grid
from ..data.convert import looks_like
from ..data.folder import Rejected
from ..records import EpisodeRecord

#: two numbers, as every family writes a place
_PLACE: Final = re.compile(r"[\[(]\s*(-?\d{1,6}(?:\.\d+)?)\s*,\s*(-?\d{1,6}(?:\.\d+)?)\s*[\])]")
#: places from which on they are reported
_SOME: Final = 8
#: characters of an answer that are shown
_EXCERPT: Final = 120


@dataclass
class AnswerStatistics:
    """Of the answers of some episodes."""

    answers: int = 0
    unread: Rejected = field(default_factory=Rejected)
    places: int = 0
    #: of the places, those with both numbers from 0 to 1 that aren't both whole
    shares: int = 0
    #: the largest number
    most: float = 0.0

    def take(self, episode: EpisodeRecord) -> None:
        for step in episode.steps:
            self.answers += 1
            if step.parse_error is not None:
                words = " ".join(step.text.split())[:_EXCERPT]
                reason, _, detail = step.parse_error.partition(": ")
                self.unread.add(reason, f"{episode.id} step {step.index}", f"{detail}; it begins: {words}")
            for x, y in _PLACE.findall(step.text):
                numbers = float(x), float(y)
                self.places += 1
                self.shares += max(numbers) <= 1 and ("." in x or "." in y)
                self.most = max(self.most, *numbers)

    def convention(self, asked: Coordinates) -> str:
        """The convention that the places look like, where it is another than the one that was asked for; else ""."""
        if self.places < _SOME:
            return ""
        mostly_shares = 2 * self.shares > self.places
        if mostly_shares and not isinstance(asked, Fraction):
            return "fraction"
        largest = asked.largest if isinstance(asked, Grid) else 1 if isinstance(asked, Fraction) else None
        if largest is not None and self.most > largest and not mostly_shares:
            return looks_like(self.most)
        return ""
