"""How judges and the environment's verifier agree about the episodes of an update, where both were asked. Pure.

A policy that learns to please its judge is rewarded more and more, while the verifier sees no more successes: the
difference of the two rates says so first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapforge_envs.protocol import Outcome

from ..records import GroupRecord


def agreement(groups: Sequence[GroupRecord]) -> dict[str, float | None]:
    """Over valid episodes of which both said how they ended: success by either, their difference, and the share in
    which they differ. Empty where the verifier was not asked."""
    both = [
        (episode.outcome is Outcome.SUCCESS, episode.rewards.verified is Outcome.SUCCESS)
        for group in groups
        for episode in group.episodes
        if episode.valid
        and episode.rewards is not None
        and episode.rewards.verified in (Outcome.SUCCESS, Outcome.FAILURE)
    ]
    if not both:
        return {}
    judged, verified = (sum(column) / len(both) for column in zip(*both, strict=True))
    return {
        "success_judged": judged,
        "success_verified": verified,
        "judge_minus_verifier": judged - verified,
        "disagreements": sum(one != other for one, other in both) / len(both),
    }
