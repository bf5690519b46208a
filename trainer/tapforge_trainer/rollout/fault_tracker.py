"""Where phones break: counted by call or action type, by step and by task; and which tasks break them for certain.

Long and crash-prone episodes are invalid more often, so leaving them out is a selection; these counts make it visible.

Quarantine: a task is the culprit when the same action breaks two slots, under two conditions.
- One after the other: the second episode began after the first break was seen. Breaks at the same time on several slots
  are one event (a dead host, a network), and say nothing about the task.
- Each slot was proven before: its last episode was valid. A phone that breaks at everything accuses no task.

A task that its environment doesn't have goes into quarantine at once: the phone is well, and every other would say so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tapforge_envs.protocol import Reason

from ..attempt import EpisodeResult, PhoneCall

_K = TypeVar("_K")
#: taps that fall into the same cell of this many per side count as the same action
GRID = 16


def signature(call: PhoneCall) -> str:
    """Equal for calls that count as the same action."""
    if call.action is None:
        return call.name
    parts = [str(call.action.get("type"))]
    for key, value in sorted(call.action.items()):
        if key != "type":
            parts.append(f"{key}={_coarse(key, value)}")
    return " ".join(parts)


def _coarse(key: str, value: Any) -> Any:
    if key in ("x", "y", "x2", "y2") and isinstance(value, float | int):
        return min(int(value * GRID), GRID - 1)
    return value


@dataclass(slots=True)
class Exposure:
    """How often something was tried, and how often the phone broke at it."""

    tried: int = 0
    broke: int = 0

    @property
    def rate(self) -> float:
        return self.broke / self.tried if self.tried else 0.0


@dataclass(slots=True)
class _Break:
    slot: str
    at: float


@dataclass(slots=True)
class FaultTracker:
    by_step: dict[int, Exposure] = field(default_factory=dict)
    by_action: dict[str, Exposure] = field(default_factory=dict)
    by_task: dict[str, Exposure] = field(default_factory=dict)
    by_reason: Counter[str] = field(default_factory=Counter)
    #: task -> why it is in quarantine
    quarantined: dict[str, str] = field(default_factory=dict)
    _breaks: dict[tuple[str, str], list[_Break]] = field(default_factory=dict)
    #: slots whose last episode was valid
    _proven: set[str] = field(default_factory=set)

    def note(self, result: EpisodeResult) -> str | None:
        """Takes in an episode. Returns why its task has to go into quarantine, if this is the moment."""
        record, key = result.record, result.record.task.key
        if record.reason is Reason.LEASE_LOST:  # neither the phone nor what was done on it is to blame
            self.by_reason[record.reason] += 1
            return None
        if result.unknown_task:
            self.by_reason[record.reason] += 1
            return self._accuse(key, record.message)
        call = result.broke
        self._expose(self.by_action, "reset", call is not None and call.name == "reset")
        for step in record.steps:
            if step.action is not None:
                here = call is not None and call.name == "step" and call.step == step.index
                self._expose(self.by_step, step.index, here)
                self._expose(self.by_action, step.action["type"], here)
        if record.score is not None or (call is not None and call.name == "evaluate"):
            self._expose(self.by_action, "evaluate", call is not None and call.name == "evaluate")
        self._expose(self.by_task, key, call is not None)
        was_proven = record.slot in self._proven
        if record.valid or record.awaits_rewards:
            self._proven.add(record.slot)
        if call is None:
            return None
        self._proven.discard(record.slot)
        self.by_reason[record.reason] += 1
        return self._suspect(key, call, record.slot, record.started, record.ended) if was_proven else None

    def _suspect(self, key: str, call: PhoneCall, slot: str, started: float, ended: float) -> str | None:
        earlier = self._breaks.setdefault((key, signature(call)), [])
        proof = next((b for b in earlier if b.slot != slot and b.at <= started), None)
        earlier.append(_Break(slot, ended))
        return None if proof is None else self._accuse(key, f"'{signature(call)}' broke {proof.slot} and then {slot}")

    def _accuse(self, key: str, why: str) -> str | None:
        if key in self.quarantined:
            return None
        self.quarantined[key] = why
        return why

    @staticmethod
    def _expose(table: dict[_K, Exposure], key: _K, broke: bool) -> None:
        exposure = table.setdefault(key, Exposure())
        exposure.tried += 1
        exposure.broke += broke

    def as_dict(self) -> dict[str, Any]:
        """For summaries: only what broke at least once, worst first."""

        def worst(table: dict[Any, Exposure]) -> dict[str, dict[str, float]]:
            hit = sorted(((k, e) for k, e in table.items() if e.broke), key=lambda item: -item[1].rate)
            return {str(k): {"tried": e.tried, "broke": e.broke} for k, e in hit[:50]}

        return {
            "by_step": worst(self.by_step),
            "by_action": worst(self.by_action),
            "by_task": worst(self.by_task),
            "by_reason": dict(self.by_reason),
            "quarantined": dict(self.quarantined),
        }
