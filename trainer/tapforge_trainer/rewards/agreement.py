"""How a judge and the environment's verifier agree about the episodes of an update, where both were asked. Pure.

A policy that learns to please its judge is rewarded more and more, while the verifier sees no more successes: the
difference of the two rates says so first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapforge_api.rewards import Rewards
from tapforge_envs.protocol import Outcome

from ..records import GroupRecord


def pairs_of(groups: Sequence[GroupRecord], rewards: Rewards) -> list[tuple[bool, bool]]:
    """Success by a stream and by the verifier, of each valid episode of which both said how it ended. The stream is
    `success`, or the first one that judges episodes; without any, or where verifiers are ignored, there are no
    pairs."""
    if rewards.verifier == "ignored":  # some episodes have failed whatever it would say
        return []
    judges = [stream.name for stream in rewards.streams if stream.kind == "judge"]
    name = rewards.success or next(iter(judges), None)
    return [
        (sum(value or 0.0 for value in values) >= rewards.threshold, episode.verified is Outcome.SUCCESS)
        for group in groups
        for episode in group.episodes
        if episode.valid and episode.rewards is not None and episode.verified in (Outcome.SUCCESS, Outcome.FAILURE)
        if name is not None and (values := episode.rewards.streams.get(name)) is not None
    ]


def agreement(pairs: Sequence[tuple[bool, bool]]) -> dict[str, float | None]:
    """How many, success by either, their difference, and the share in which they differ. Empty without pairs."""
    if not pairs:
        return {}
    judged, verified = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return {
        "compared": len(pairs),
        "success_judged": judged,
        "success_verified": verified,
        "judge_minus_verifier": judged - verified,
        "disagreements": sum(one != other for one, other in pairs) / len(pairs),
    }
