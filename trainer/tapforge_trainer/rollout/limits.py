"""The numbers that bound a rollout. Seconds where nothing else is said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    #: malformed answers in a row that end an episode
    max_parse_failures: int = 3
    #: all calls to the phone in an episode together
    episode_seconds: float = 600.0
    #: one answer of the engine; past it the run fails, because every episode would
    generate_seconds: float = 300.0
    #: frames with more pixels are resized in a thread, so that other episodes go on meanwhile
    thread_pixels: int = 256 * 256


@dataclass(frozen=True, slots=True)
class GroupLimits:
    group_size: int = 8
    groups_per_update: int = 16
    #: policy versions that a group may lag behind at its update; 0 is strictly on-policy
    max_staleness: int = 1
    #: times an invalid episode is played again on another slot
    max_reruns: int = 2
    #: valid episodes that a group needs to count
    min_valid: int = 2
    #: that calls to phones may take for a member and its re-runs together, until the group goes on without it; waiting
    #: for a slot and the model's time don't count. None: no deadline
    deadline_seconds: float | None = None
    #: drop groups whose members all have the same outcome and refill with the next task
    dynamic_sampling: bool = False
    #: refills per update: at most `max_rounds * groups_per_update` groups are dropped for it
    max_rounds: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.min_valid <= self.group_size:
            raise ValueError(f"min_valid is {self.min_valid}: it must be from 2 to group_size ({self.group_size})")
        if self.groups_per_update < 1 or self.max_staleness < 0 or self.max_reruns < 0 or self.max_rounds < 1:
            raise ValueError(f"negative or zero limits: {self}")

    @property
    def capacity(self) -> int:
        """Groups that may be under way: running, waiting for their update, or being learned from."""
        return (self.max_staleness + 1) * self.groups_per_update
