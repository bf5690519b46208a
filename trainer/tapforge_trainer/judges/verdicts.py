"""What a judge sees, and what it says. Plain data, which travels between processes and into the journal.

- A vote is one answer of one model: a value of 0 or 1, or None where it can't be read. None is counted, never guessed.
- `Verdict.as_json` and `Verdict.of` are each other's inverse; texts are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..frames.frame import FittedFrame
from ..records import EpisodeRecord

#: characters of a reason that are kept
REASON: Final = 500


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a judge may see of one episode that ended. `screens[i]` is the one before step i, `screens[i + 1]` the one
    after it: there is one more than steps if the screen after the last action is known, else as many. Screens are as
    the device drew them where they were kept so, else as the model saw them."""

    episode: EpisodeRecord
    #: PNG
    screens: tuple[bytes, ...]

    def __post_init__(self) -> None:
        steps, screens = len(self.episode.steps), len(self.screens)
        if screens not in (steps, steps + 1):
            raise ValueError(
                f"episode {self.episode.id} has {steps} steps and {screens} screens: expected {steps} or {steps + 1}"
            )

    @staticmethod
    def of(episode: EpisodeRecord, frames: Mapping[str, FittedFrame]) -> Trajectory:
        """`frames`: at least those of the episode. An answer that was not an action leaves the screen as it was. Raises
        what reading a frame raises."""
        names = [step.screen or step.frames[-1] for step in episode.steps]
        if last := episode.last_screen or episode.last_frame:
            names.append(last)
        elif episode.steps and episode.steps[-1].parse_error is not None:
            names.append(names[-1])
        return Trajectory(episode, tuple(frames[name].data for name in names))


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer. `value` None: unreadable, or none came; `reason` says which."""

    model: str
    value: float | None
    reason: str
    #: of the models that decide where the first ones don't agree
    cascade: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value` is in [0, 1]. Tokens, money and seconds are those of all requests that it took."""

    value: float
    reason: str
    votes: tuple[Vote, ...]
    unreadable: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    #: names of the models that decided
    model: str
    #: from the cache or the journal: nothing was asked
    cached: bool = False
    money: float = 0.0

    def from_cache(self) -> Verdict:
        return replace(self, cached=True, prompt_tokens=0, answer_tokens=0, seconds=0.0, money=0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(line: Mapping[str, Any]) -> Verdict:
        """Raises KeyError, TypeError and ValueError for what `as_json` didn't write."""
        value = float(line["value"])
        if not 0 <= value <= 1:
            raise ValueError(f"a verdict of {value} is outside [0, 1]")
        return Verdict(
            value=value,
            reason=str(line["reason"]),
            votes=tuple(Vote(**vote) for vote in line["votes"]),
            unreadable=int(line["unreadable"]),
            prompt_tokens=int(line["prompt_tokens"]),
            answer_tokens=int(line["answer_tokens"]),
            seconds=float(line["seconds"]),
            model=str(line["model"]),
            cached=bool(line["cached"]),
            money=float(line.get("money", 0.0)),
        )


class VerdictMissing(Exception):
    """There is no verdict. The message names the endpoint, what came, and the remedy. `permanent`: asked again, it
    would be the same. `votes`: those that didn't decide."""

    def __init__(self, message: str, permanent: bool = False, votes: tuple[Vote, ...] = ()):
        super().__init__(message)
        self.permanent = permanent
        self.votes = votes


def shortened(text: str, limit: int = REASON) -> str:
    """One line of at most `limit` characters, without what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
