"""How long a pool takes from nothing to all Pods created and ready, and what its controller spends on it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..audit import Write
from ..testbed import Testbed

_SECONDS = 600.0


class Growth:
    """`with Growth(bed, component, resource, slots) as growth:` makes the pool, an object of that resource, inside the
    block; leaving it waits until the pool has grown and the component is at rest."""

    def __init__(self, bed: Testbed, component: str, resource: str, slots: int):
        self._bed, self._component, self._resource, self._slots = bed, component, resource, slots
        self._created = self._ready = self._cpu = 0.0

    def __enter__(self) -> Self:
        self._mark, self._before = self._bed.audit.mark(), self._bed.cpu_seconds(self._component)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        audit, slots = self._bed.audit, self._slots
        made = audit.wait(f"{slots} Pods", self._mark, _creates, slots, _SECONDS)
        ready = audit.wait(f"{slots} ready Pods", self._mark, _makes_ready, slots, _SECONDS)
        asked = next(w for w in audit.since(self._mark) if w.resource == self._resource and w.verb == "create")
        self._created = max(write.ended for write in made) - asked.began
        self._ready = max(write.ended for write in ready) - asked.began
        self._bed.wait_idle(self._component)
        self._cpu = self._bed.cpu_seconds(self._component) - self._before

    def figures(self) -> dict[str, float]:
        return {
            "slots_created_s": round(self._created, 2),
            "slots_ready_s": round(self._ready, 2),
            "cpu_s": round(self._cpu, 2),
        }


def _creates(write: Write) -> bool:
    return write.resource == "pods" and write.verb == "create" and write.done


def _makes_ready(write: Write) -> bool:
    """kwok writes one status per Pod here: that it is Ready."""
    return write.resource == "pods/status" and write.agent.startswith("kwok") and write.done
