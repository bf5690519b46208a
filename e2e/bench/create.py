"""A pool grows from nothing to 1,000 and to 5,000 slots, beside a raw client that creates equal Pods in its cluster.

The scheduler is stopped. The two take turns (operator, raw, raw, operator); in a turn there are no Pods to begin with.
While the raw client works no operator runs, so it has the machine for itself. The operator's time begins when the new
size comes in at the API server and ends when the last Pod's creation was answered; the raw client's begins when its
first create comes in. Writes are everything that the operator's user wrote but its leader Lease, and CPU what it used,
until it has observed all its Pods and is at rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from e2e.cluster import SCHEDULER

from . import pools
from .audit import Write
from .raw import Request, job, send
from .testbed import LEASE, NAMESPACE, USER, Run, Testbed

_RAW = "raw-client"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Grown:
    """One step of a side: from how many to how many, and what it took."""

    slots: int
    seconds: float


def run(options: Run) -> dict[str, Any]:
    steps = (40, 120) if options.quick else (1000, 5000)
    turns = ("operator", "raw") if options.quick else ("operator", "raw", "raw", "operator")
    grown: dict[str, list[Grown]] = {"operator": [], "raw": []}
    writes, cpu, raw_cpu = 0, 0.0, 0.0
    with Testbed(options) as bed:
        bed.cluster.stop_component(SCHEDULER)
        bed.make_pool("phones", 0)
        raw_pool = bed.make_pool("raw", 0)
        for turn in turns:
            if turn == "operator":
                made, wrote, used = _operator(bed, steps)
                writes, cpu = writes + wrote, cpu + used
            else:
                made, used = _raw(bed, raw_pool, steps)
                raw_cpu += used
            grown[turn] += made
            bed.drop_pods()
    slots = steps[-1] * turns.count("operator")
    rates = {side: _rates(made, steps) for side, made in grown.items()}
    return {
        "creates_per_s": rates["operator"]["all"],
        "raw_creates_per_s": rates["raw"]["all"],
        "creates_ratio": round(rates["operator"]["all"] / rates["raw"]["all"], 3),
        "writes_per_slot": round(writes / slots, 4),
        "cpu_s_per_1000_slots": round(1000 * cpu / slots, 2),
        "raw_cpu_s_per_1000_slots": round(1000 * raw_cpu / slots, 2),
        "steps": {
            str(step): {
                "creates_per_s": rates["operator"][str(step)],
                "raw_creates_per_s": rates["raw"][str(step)],
                "ratio": round(rates["operator"][str(step)] / rates["raw"][str(step)], 3),
            }
            for step in steps
        },
        **{f"create_ratio_{step}": round(rates["operator"][str(step)] / rates["raw"][str(step)], 3) for step in steps},
        "turns": len(turns),
    }


def _operator(bed: Testbed, steps: Iterable[int]) -> tuple[list[Grown], int, float]:
    """What it grew, its writes and its CPU seconds, from the first new size on."""
    bed.start_operator()
    bed.wait_idle()
    mark, before, there = bed.audit.mark(), bed.cpu_seconds(), 0
    grown = []
    for step in steps:
        here = bed.audit.mark()
        bed.resize("phones", step)
        made = bed.audit.wait(f"{step} slots", here, _created_by(USER), step - there, _SECONDS)
        asked = next(w for w in bed.audit.since(here) if w.resource == "emulatorpools" and w.verb == "patch")
        grown.append(Grown(step - there, max(write.ended for write in made) - asked.began))
        bed.wait_status("phones", 60, pods=step)
        bed.wait_idle()
        there = step
    used = bed.cpu_seconds() - before
    wrote = sum(_counts(write) for write in bed.audit.since(mark))
    bed.stop_operator()
    bed.resize("phones", 0)
    return grown, wrote, used


def _raw(bed: Testbed, pool: Mapping[str, Any], steps: Iterable[int]) -> tuple[list[Grown], float]:
    grown, there, used = [], 0, 0.0
    for step in steps:
        here = bed.audit.mark()
        pods = pools.equal_pods(dict(pool), step - there, first=there)
        used += send(job(bed.cluster, _RAW, [Request("POST", _PODS, pod) for pod in pods])).cpu_seconds
        made = bed.audit.wait(f"{step} Pods", here, lambda w: w.agent == _RAW, step - there, _SECONDS)
        seconds = max(write.ended for write in made) - min(write.began for write in made)
        grown.append(Grown(step - there, seconds))
        there = step
    return grown, used


def _created_by(user: str) -> Any:
    return lambda w: w.user == user and w.verb == "create" and w.resource == "pods" and w.done


def _counts(write: Write) -> bool:
    return write.user == USER and not (write.resource == "leases" and write.name == LEASE)


def _rates(grown: Iterable[Grown], steps: Iterable[int]) -> dict[str, float]:
    """Creates per second by step, and over all."""
    grown = list(grown)
    first, sizes = 0, {}
    for step in steps:
        sizes[step - first] = str(step)
        first = step
    rates = {}
    for size, name in sizes.items():
        same = [g for g in grown if g.slots == size]
        rates[name] = round(sum(g.slots for g in same) / sum(g.seconds for g in same), 1)
    rates["all"] = round(sum(g.slots for g in grown) / sum(g.seconds for g in grown), 1)
    return rates
