"""How fast a run learns and where its time goes: pure functions of its update events.

An update's time by phase, seconds: `rollout_wait` until its groups were played; `prepare`: batch, plan, and waiting for
frames; `forward`, `backward`, `optimizer` of the learner, as a mean over its ranks; `sync`: new weights for the
engines, with their proof; `checkpoint`: for which the last checkpoint held the learner. What is left of the wall's time
is the driver's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

PHASES: Final = ("rollout_wait", "prepare", "forward", "backward", "optimizer", "sync", "checkpoint")


def phases_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase of an update's metrics, as far as they were measured."""
    return {phase: metrics[name] for phase in PHASES if (name := f"seconds_{phase}") in metrics}


def throughput_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over all updates of a run's events that learned something; None: there is none. An update that was made again
    after a crash counts once."""
    updates = {e["update"]: e["learner"] for e in events if e["event"] == "update"}
    learned = [metrics for metrics in updates.values() if metrics.get("seconds") and "tokens" in metrics]
    if not learned:
        return None
    seconds = sum(metrics["seconds"] for metrics in learned)
    used = [metrics["mfu"] * metrics["seconds"] for metrics in learned if "mfu" in metrics]
    by_phase = dict.fromkeys(PHASES, 0.0)
    for metrics in updates.values():
        for phase, spent in phases_of(metrics).items():
            by_phase[phase] += spent
    return {
        "tokens_per_second": round(sum(metrics["tokens"] for metrics in learned) / seconds, 1),
        "positions_per_second": round(sum(metrics.get("positions", 0.0) for metrics in learned) / seconds, 1),
        "mfu": round(sum(used) / seconds, 4) if len(used) == len(learned) else None,
        "seconds_by_phase": {phase: round(spent, 2) for phase, spent in by_phase.items()},
    }


def shares(metrics: Mapping[str, Any]) -> str:
    """Where an update's time went, in words: the largest phases first."""
    spent = phases_of(metrics)
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda one: -one[1])
    return ", ".join(f"{name.replace('_', ' ')} {100 * s / total:.0f} %" for name, s in largest if s >= total / 100)
