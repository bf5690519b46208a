"""300 claims a second, quietly and while 1,000 Pods change at once again and again, beside a raw client's writes.

The load comes from a process of its own (claims_load.py) as an open loop: each acquire is sent when its time has come,
whatever became of those before it, and its latency counts from that time until it is granted, however often it is
refused. Each claim is held for a tenth of a second and released clean. The storm (raw.py) writes a condition into the
status of all Pods of the pool, claimed ones too, as fast as 64 requests in flight can, and begins again every three
seconds. Scheduler, controllers and fake kubelets are stopped when the slots are ready: the cores belong to API server,
etcd, operator and load.

The raw client (patch_load.py) sends in the same open loop the two writes that a claim is: how long the first of them
takes is what the API server alone costs a claim on this machine, quietly and in the storm. The two take turns (claims,
raw, relay, ...) with a peer that the same writes go through (relay.py), so that a machine that becomes slower does so
for all; ratios are of all their turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from e2e.cluster import CONTROLLER_MANAGER, KWOK, MERGE, SCHEDULER, STRATEGIC

from . import patch_load, pools
from .claims_load import Load
from .figures import ratios, spread
from .raw import Job, Request, job, send, sending
from .relay import relaying
from .testbed import NAMESPACE, Run, Testbed

_STORM_EVERY = 3.0
_CALLERS = 8
#: a process of the load starts and prints, beside what it measures
_OVER_SECONDS = 60.0

Side = Literal["claims", "raw", "relay"]
_TURNS: tuple[Side, ...] = ("claims", "raw", "relay", "relay", "raw", "claims", "claims", "raw", "relay")


@dataclass(slots=True)
class Measured:
    """All turns of both sides in one kind of weather."""

    acquired: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    relay: list[float] = field(default_factory=list)
    refused: int = 0
    never: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    raw_errors: Counter[str] = field(default_factory=Counter)
    relay_errors: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    #: (claims' median, raw median, ...) of each turn, to see whether the machine changed
    turns: list[dict[str, Any]] = field(default_factory=list)

    def figures(self, claims: str, raw: str, relay: str) -> dict[str, Any]:
        """Under names that begin with `claims`, `raw` and `relay`."""
        return {
            **spread(self.acquired, claims),
            **spread(self.released, f"{claims}release_"),
            **spread(self.late, f"{claims}sent_late_"),
            f"{claims}refused_share": share(self.refused, self.acquired),
            f"{claims}never_granted": self.never,
            f"{claims}errors": dict(self.errors),
            f"{claims}operator_cpu_share": round(self.cpu_seconds / self.seconds, 3) if self.seconds else None,
            **spread(self.raw, raw),
            f"{raw}errors": dict(self.raw_errors),
            **spread(self.relay, relay),
            f"{relay}errors": dict(self.relay_errors),
            f"{claims}turns": self.turns,
        }


def run(options: Run) -> dict[str, Any]:
    slots, rate, seconds = (100, 30.0, 5.0) if options.quick else (1000, 300.0, 10.0)
    turns: tuple[Side, ...] = ("claims", "raw", "relay") if options.quick else _TURNS
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000))
        bed.start_operator()
        bed.make_fleet("phones", slots)
        # Eight callers, as eight runs would be: the broker lets one wait in 64 acquires only.
        tokens, authority = bed.claimers(_CALLERS), bed.broker_ca()
        load = Load(bed.broker, authority, bed.claims_path.format("phones"), tokens, rate, seconds)
        for component in (SCHEDULER, CONTROLLER_MANAGER, KWOK):
            bed.cluster.stop_component(component)
        patches = raw_load(bed, rate, seconds)
        peer = stack.enter_context(relaying(patches.job))
        relayed = replace(patches, relay=peer.url, relay_authority=peer.authority)
        writes = {"raw": patches, "relay": relayed}
        forget_fields(bed)
        quiet, storm = Measured(), Measured()
        for side in turns:
            measure(bed, side, load, writes, quiet)
        pods = [pod["metadata"]["name"] for pod in bed.pods()]
        work = job(
            bed.cluster,
            "bench-storm",
            [_change(pod) for pod in pods],
            every=_STORM_EVERY,
            seconds=seconds + load.warm_up,
        )
        said = [_in_storm(work, partial(measure, bed, side, load, writes, storm)) for side in turns]
    return {
        **quiet.figures("claims_", "raw_patch_", "relay_patch_"),
        **storm.figures("claims_storm_", "raw_patch_storm_", "relay_patch_storm_"),
        **{f"claims_{name}": value for name, value in ratios(quiet.acquired, quiet.raw).items()},
        **{f"storm_{name}": value for name, value in ratios(storm.acquired, storm.raw).items()},
        **{f"claims_relay_{name}": value for name, value in ratios(quiet.acquired, quiet.relay).items()},
        **{f"storm_relay_{name}": value for name, value in ratios(storm.acquired, storm.relay).items()},
        "claims_slots": slots,
        "claims_intended_per_s": rate,
        **_storms(said, slots),
    }


def raw_load(bed: Testbed, rate: float, seconds: float, **more: float) -> patch_load.Load:
    """The writes of claims, on the Pods that are there, by a client that need not know which are free."""
    found = [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in bed.pods()]
    where = [(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", uid) for name, uid in found]
    return patch_load.Load(job(bed.cluster, "bench-patches", ()), where, rate, seconds, **more)


def forget_fields(bed: Testbed) -> None:
    """The operator's first claim of a slot drops what the API server notes of its fields, and every write of the Pod is
    cheaper from then on. Here it is done before anything is measured, so that both sides write equal Pods."""
    body = {"metadata": {"managedFields": [{}]}}
    names = [pod["metadata"]["name"] for pod in bed.pods()]
    paths = [f"/api/v1/namespaces/{NAMESPACE}/pods/{name}" for name in names]
    send(job(bed.cluster, "bench-patches", [Request("PATCH", path, body, MERGE) for path in paths]))
    bed.wait_idle()


def measure(bed: Testbed, side: Side, load: Load, writes: Mapping[str, patch_load.Load], into: Measured) -> None:
    """One turn of a side."""
    if side != "claims":
        said = _process("e2e.bench.patch_load", patch_load.as_json(writes[side]), writes[side].seconds)
        took, errors = (into.raw, into.raw_errors) if side == "raw" else (into.relay, into.relay_errors)
        took += said["took"]
        errors.update(said["errors"])
        into.turns.append({side: spread(said["took"]), "load": round(os.getloadavg()[0], 2)})
        return
    cpu, began = bed.cpu_seconds(), time.monotonic()
    said = _process("e2e.bench.claims_load", load.as_json(), load.seconds + load.patience)
    into.cpu_seconds += bed.cpu_seconds() - cpu
    into.seconds += time.monotonic() - began
    into.acquired += said["acquired"]
    into.released += said["released"]
    into.late += said["late"]
    into.refused += said["refused"]
    into.never += said["never"]
    into.errors.update(said["errors"])
    into.turns.append({"claims": spread(said["acquired"]), "load": round(os.getloadavg()[0], 2)})


def share(refused: int, acquires: Iterable[float]) -> float:
    """Of the acquires, how many were not granted at their first try."""
    count = sum(1 for _ in acquires)
    return round(refused / count, 5) if count else 0.0


def _process(module: str, given: str, seconds: float) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=given.encode(),
        stdout=subprocess.PIPE,
        timeout=seconds + _OVER_SECONDS,
        check=True,
    )
    return json.loads(done.stdout)


def _in_storm(work: Job, turn: Callable[[], None]) -> dict[str, Any]:
    """What the storm says of itself."""
    with sending(work) as process:
        turn()
        said, _ = process.communicate(timeout=120)
    return json.loads(said)


def _storms(said: list[dict[str, Any]], slots: int) -> dict[str, Any]:
    rounds, refused = sum(storm["rounds"] for storm in said), Counter[str]()
    for storm in said:
        refused.update(storm["refused"])
    return {
        "storm_rounds": rounds,
        "storm_pods": slots,
        "storm_changes_per_s": round(rounds * slots / sum(storm["seconds"] for storm in said), 1),
        "storm_refused": dict(refused),
    }


def _change(pod: str) -> Request:
    condition = {"type": "example.com/Seen", "status": "True", "reason": "Storm"}
    where = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status"
    return Request("PATCH", where, {"status": {"conditions": [condition]}}, STRATEGIC)
