"""tapforge beside agent-sandbox, which keeps warm pools of Pods and hands out claims on them as well.

Each side has a fresh cluster of fake nodes and grows a pool of 1,000 from nothing: `slots_created_s` ends when the last
Pod's creation was answered, `slots_ready_s` when the last Pod's readiness was written, both from the time at which the
pool came in at the API server; `cpu_s` is what the controller used until it came to rest. Then 300 claims come in as an
open loop of 30 a second, and none is given back. A claim of theirs is an object that is created and watched until it is
Ready, one of ours a call of the broker; each counts from the time at which it was meant to be sent. What comes in the
first second is not counted.

The peer runs with the flags that its documentation names for load (100, 100 and 50 workers) and with ten workers each.
Ours are compared with a raw client's write at the same rate as well (patch_load.py), right after the claims.
"""

from __future__ import annotations

from typing import Any

from .. import claims, pools
from ..claims_load import Load
from ..figures import milliseconds, percentile
from ..testbed import OPERATOR, Run, Testbed
from .agent_sandbox import AgentSandbox, Workers
from .growth import Growth

_RATE, _WARM_UP = 30.0, 1.0
_RECOMMENDED, _TEN = Workers(100, 100, 50), Workers(10, 10, 10)
#: beside the pool's, for what replaces claimed Pods
_SPARE_NODES = 5
_POOL = "phones"


def run(options: Run) -> dict[str, Any]:
    slots, seconds = (120, 2.0) if options.quick else (1000, 10.0)
    ours, raw = _ours(options, slots, seconds)
    recommended = _theirs(options, slots, seconds, _RECOMMENDED)
    ten = _theirs(options, slots, seconds, _TEN)
    return {
        "peer": recommended,
        "peer_ten": ten,
        "peer_ours": ours,
        "peer_times": _times(recommended, ours),
        "peer_ten_times": _times(ten, ours),
        "peer_raw": raw,
        "peer_raw_p50_ratio": round(ours["claims_p50_ms"] / raw["claims_p50_ms"], 3),
        "peer_raw_p99_ratio": round(ours["claims_p99_ms"] / raw["claims_p99_ms"], 3),
        "peer_slots": slots,
        "peer_claims": int(seconds * _RATE),
    }


def _bed(options: Run, slots: int) -> Testbed:
    return Testbed(options, nodes=-(-slots // pools.PER_NODE) + _SPARE_NODES, qps=1000)


def _ours(options: Run, slots: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    with _bed(options, slots) as bed:
        bed.start_operator()
        bed.wait_idle()
        with Growth(bed, OPERATOR, "emulatorpools", slots) as growth:
            bed.make_pool(_POOL, slots)
        bed.wait_status(_POOL, 60, ready=slots)
        tokens, authority = bed.claimers(1), bed.broker_ca()
        load = Load(bed.broker, authority, bed.claims_path.format(_POOL), tokens, _RATE, seconds, 0.0, _WARM_UP)
        measured = claims.Measured()
        claims.measure(bed, "claims", load, {"raw": claims.raw_load(bed, _RATE, seconds)}, measured)
        free = claims.raw_load(bed, _RATE, seconds, hold=0.0, warm_up=_WARM_UP)
        claims.measure(bed, "raw", load, {"raw": free}, measured)
    return {
        **growth.figures(),
        **_claims(measured.acquired),
        "claims_refused_share": claims.share(measured.refused, measured.acquired),
        "claims_never_granted": measured.never,
    }, _claims(measured.raw)


def _theirs(options: Run, slots: int, seconds: float, workers: Workers) -> dict[str, Any]:
    with _bed(options, slots) as bed:
        peer = AgentSandbox(bed)
        peer.start(workers)
        bed.wait_idle(peer.name)
        with Growth(bed, peer.name, "sandboxwarmpools", slots) as growth:
            peer.make_pool(_POOL, slots)
        said = peer.claim(_POOL, _RATE, seconds, _WARM_UP)
    return {
        **growth.figures(),
        **_claims(said.took),
        "claims_never_granted": said.never,
        "claims_errors": said.errors,
        "workers": workers.figures(),
    }


def _claims(took: list[float]) -> dict[str, float]:
    return {"claims_p50_ms": milliseconds(percentile(took, 50)), "claims_p99_ms": milliseconds(percentile(took, 99))}


def _times(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """How many times as long, or as much, the peer takes."""
    figures = ("slots_created_s", "slots_ready_s", "cpu_s", "claims_p50_ms", "claims_p99_ms")
    return {figure: round(theirs[figure] / ours[figure], 2) for figure in figures}
