"""300 claims a second, quietly and while 1,000 Pods change at once again and again.

The load comes from a process of its own (claims_load.py) as an open loop: each acquire is sent when its time has come,
whatever became of those before it, and its latency counts from that time. Each claim is held for a tenth of a second
and released clean. The storm (raw.py) writes a condition into the status of all Pods of the pool, claimed ones too, as
fast as 64 requests in flight can, and begins again every three seconds. Scheduler, controllers and fake kubelets are
stopped when the slots are ready: the cores belong to API server, etcd, operator and load.

Beside it a raw client (patch_load.py) sends in the same open loop the two writes that a claim is: how long the first of
them takes is what the API server alone costs a claim on this machine, quietly and in the storm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from e2e.cluster import CONTROLLER_MANAGER, KWOK, SCHEDULER, STRATEGIC

from . import patch_load, pools
from .claims_load import Load
from .figures import milliseconds, percentile
from .raw import Request, job, sending
from .testbed import NAMESPACE, Run, Testbed

_STORM_EVERY = 3.0
_CALLERS = 8


def run(options: Run) -> dict[str, Any]:
    slots, rate, seconds = (100, 30.0, 5.0) if options.quick else (1000, 300.0, 30.0)
    with Testbed(options, nodes=-(-slots // pools.PER_NODE), qps=1000) as bed:
        bed.start_operator()
        bed.make_fleet("phones", slots)
        # Eight callers, as eight runs would be: the broker lets one wait in 64 acquires only.
        tokens, authority = bed.claimers(_CALLERS), bed.broker_ca()
        load = Load(bed.broker, authority, bed.claims_path.format("phones"), tokens, rate, seconds)
        for component in (SCHEDULER, CONTROLLER_MANAGER, KWOK):
            bed.cluster.stop_component(component)
        pods = [pod["metadata"]["name"] for pod in bed.pods()]
        where = [f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}" for pod in pods]
        patches = patch_load.Load(job(bed.cluster, "bench-patches", ()), where, rate, seconds)
        quiet, raw_quiet = _measure(bed, load), _raw(patches)
        changes = [_change(pod) for pod in pods]
        work = job(bed.cluster, "bench-storm", changes, every=_STORM_EVERY, seconds=seconds + load.warm_up)
        with sending(work) as process:
            storm = _measure(bed, load)
            said, _ = process.communicate(timeout=120)
        with sending(work) as process:
            raw_storm = _raw(patches)
            process.communicate(timeout=120)
    stormed = json.loads(said)
    rounds = stormed["rounds"]
    return {
        **{f"claims_{name}": value for name, value in quiet.items()},
        **{f"claims_storm_{name}": value for name, value in storm.items()},
        **{f"raw_patch_{name}": value for name, value in raw_quiet.items()},
        **{f"raw_patch_storm_{name}": value for name, value in raw_storm.items()},
        "claims_slots": slots,
        "claims_intended_per_s": rate,
        "storm_rounds": rounds,
        "storm_pods": slots,
        "storm_changes_per_s": round(rounds * slots / stormed["seconds"], 1),
        "storm_refused": stormed["refused"],
    }


def _measure(bed: Testbed, load: Load) -> dict[str, Any]:
    cpu, before = bed.cpu_seconds(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "e2e.bench.claims_load"],
        input=load.as_json().encode(),
        stdout=subprocess.PIPE,
        timeout=load.seconds + 180,
        check=True,
    )
    share = (bed.cpu_seconds() - cpu) / (time.monotonic() - before)
    said = json.loads(done.stdout)
    acquired, released = said["acquired"], said["released"]
    return {
        "p50_ms": milliseconds(percentile(acquired, 50)),
        "p99_ms": milliseconds(percentile(acquired, 99)),
        "max_ms": milliseconds(max(acquired)),
        "release_p50_ms": milliseconds(percentile(released, 50)),
        "release_p99_ms": milliseconds(percentile(released, 99)),
        "per_s": round(len(acquired) / said["seconds"], 1),
        "errors": said["errors"],
        #: how late the load generator itself was
        "sent_late_p99_ms": milliseconds(percentile(said["late"], 99)),
        "operator_cpu_share": round(share, 3),
        "load": round(os.getloadavg()[0], 2),
    }


def _raw(load: patch_load.Load) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "e2e.bench.patch_load"],
        input=patch_load.as_json(load).encode(),
        stdout=subprocess.PIPE,
        timeout=load.seconds + 180,
        check=True,
    )
    said = json.loads(done.stdout)
    return {
        "p50_ms": milliseconds(percentile(said["took"], 50)),
        "p99_ms": milliseconds(percentile(said["took"], 99)),
        "errors": said["errors"],
    }


def _change(pod: str) -> Request:
    condition = {"type": "example.com/Seen", "status": "True", "reason": "Storm"}
    where = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status"
    return Request("PATCH", where, {"status": {"conditions": [condition]}}, STRATEGIC)
