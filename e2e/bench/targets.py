"""What is aimed at, and the figures next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    #: dotted where it is inside
    figure: str
    sign: Literal["<=", ">="]
    value: float
    unit: str = ""

    def met(self, found: float) -> bool:
        return found <= self.value if self.sign == "<=" else found >= self.value


#: of the scenario `availability`: what happens, and the longest gap that it may cost, in seconds. A leader that is lost
#: with its node is replaced when the Lease has run out, 15 s after its last renewal
TROUBLES: Mapping[str, tuple[str, float]] = {
    "update": ("rolling update", 5.0),
    "drain": ("leader drained", 5.0),
    "kill": ("leader killed, started again", 5.0),
    "lost": ("leader lost", 20.0),
}
#: slots that a call of the scenario `batches` asks for
SIZES: Sequence[int] = (1, 16, 100)
_GAPS: Mapping[str, str] = {"renew": "renewals", "grant": "grants"}

TARGETS: Sequence[Target] = (
    Target("creates, of the raw client's rate: 0 to 1,000", "create_ratio_1000", ">=", 0.85),
    Target("creates, of the raw client's rate: to 5,000", "create_ratio_5000", ">=", 0.85),
    Target("writes per slot", "writes_per_slot", "<=", 1.05),
    Target("sick slot to replacement, 1 % of 5,000: p99", "replace_p99_s", "<=", 1.0, "s"),
    Target("claims at 300/s, of the raw client's time: p50", "claims_p50_ratio", "<=", 1.5),
    Target("claims at 300/s, of the raw client's time: p99", "claims_p99_ratio", "<=", 1.5),
    Target("claims in a storm of 1,000 Pods, of the raw client's time: p50", "storm_p50_ratio", "<=", 2.0),
    Target("claims in a storm of 1,000 Pods, of the raw client's time: p99", "storm_p99_ratio", "<=", 2.0),
    *(
        Target(f"beside two busy processes, {where}: {p}", f"busy_{name}_{p}_ratio", "<=", most)
        for where, name, most in (("claims at 300/s", "claims", 1.5), ("in a storm", "storm", 2.0))
        for p in ("p50", "p99")
    ),
    Target("share of acquires that were refused", "claims_refused_share", "<=", 0.0),
    Target("share of acquires that were refused in the storm", "claims_storm_refused_share", "<=", 0.0),
    *(
        Target(f"a call for {size} slots, of the raw client's {size} writes: {p}", f"batch_{size}_{p}_ratio", "<=", 1.5)
        for size in SIZES
        for p in ("p50", "p99")
    ),
    *(
        Target(f"calls for {size} slots whose answer had not all", f"batch_{size}_incomplete", "<=", 0.0)
        for size in SIZES
    ),
    Target("peer's time to 1,000 Pods created, of ours", "peer_times.slots_created_s", ">=", 10.0),
    Target("peer's time to 1,000 Pods ready, of ours", "peer_times.slots_ready_s", ">=", 5.0),
    Target("peer's claims, of ours: p99", "peer_times.claims_p99_ms", ">=", 40.0),
    Target("with ten workers: to 1,000 Pods created, of ours", "peer_ten_times.slots_created_s", ">=", 10.0),
    Target("with ten workers: to 1,000 Pods ready, of ours", "peer_ten_times.slots_ready_s", ">=", 5.0),
    Target("with ten workers: claims, of ours: p99", "peer_ten_times.claims_p99_ms", ">=", 40.0),
    Target("claims at 30/s, of the raw client's time: p99", "peer_raw_p99_ratio", "<=", 2.0),
    Target("kill -9 at 5,000 slots to the first right grant", "first_grant_after_kill_s", "<=", 5.0, "s"),
    Target("peak memory, 5,000 Pods of 5 KB", "peak_mib_5000", "<=", 200.0, "MiB"),
    Target("peak memory, 20,000 Pods of 5 KB", "peak_mib_20000", "<=", 450.0, "MiB"),
    Target("steady writes per minute, beside the Lease", "steady_writes_per_minute", "<=", 0.0),
    *(
        Target(f"{what}: longest gap in {_GAPS[kind]}", f"{name}_longest_gap_{kind}_s", "<=", most, "s")
        for name, (what, most) in TROUBLES.items()
        for kind in _GAPS
    ),
)

#: measured without a target: (what, figure, unit)
REPORTED: Sequence[tuple[str, str, str]] = (
    ("creates per second", "creates_per_s", "1/s"),
    ("creates per second, raw client", "raw_creates_per_s", "1/s"),
    ("operator CPU per 1,000 slots created", "cpu_s_per_1000_slots", "s"),
    ("raw client CPU per 1,000 Pods created", "raw_cpu_s_per_1000_slots", "s"),
    ("pool until all Ready", "ready_seconds", "s"),
    ("ReplicaSet until all Ready", "replicaset_ready_seconds", "s"),
    ("pool : ReplicaSet", "ready_ratio", ""),
    ("sick slot to replacement: p50", "replace_p50_s", "s"),
    ("claims: p50", "claims_p50_ms", "ms"),
    ("claims: p99", "claims_p99_ms", "ms"),
    ("claims in a storm: p50", "claims_storm_p50_ms", "ms"),
    ("claims in a storm: p99", "claims_storm_p99_ms", "ms"),
    ("claims at 300/s, of the relayed writes' time: p50", "claims_relay_p50_ratio", ""),
    ("claims at 300/s, of the relayed writes' time: p99", "claims_relay_p99_ratio", ""),
    ("claims in a storm, of the relayed writes' time: p50", "storm_relay_p50_ratio", ""),
    ("claims in a storm, of the relayed writes' time: p99", "storm_relay_p99_ratio", ""),
    ("beside two busy processes, at 300/s, of the relayed writes' time: p50", "busy_claims_relay_p50_ratio", ""),
    ("beside two busy processes, at 300/s, of the relayed writes' time: p99", "busy_claims_relay_p99_ratio", ""),
    ("beside two busy processes, in a storm, of the relayed writes' time: p50", "busy_storm_relay_p50_ratio", ""),
    ("beside two busy processes, in a storm, of the relayed writes' time: p99", "busy_storm_relay_p99_ratio", ""),
    ("raw client's write at 300/s: p50", "raw_patch_p50_ms", "ms"),
    ("raw client's write at 300/s: p99", "raw_patch_p99_ms", "ms"),
    ("raw client's write in a storm: p50", "raw_patch_storm_p50_ms", "ms"),
    ("raw client's write in a storm: p99", "raw_patch_storm_p99_ms", "ms"),
    ("a call for 100 slots: p50", "batch_100_p50_ms", "ms"),
    ("a call for 100 slots: p99", "batch_100_p99_ms", "ms"),
    ("raw client's 100 writes: p50", "batch_100_raw_p50_ms", "ms"),
    ("raw client's 100 writes: p99", "batch_100_raw_p99_ms", "ms"),
    ("a write that the confinement policy judges", "confinement_write_ms", "ms"),
    ("the same without the policy", "confinement_write_free_ms", "ms"),
    ("with : without, the operator's writes", "confinement_write_ratio", ""),
    ("with : without, writes of others", "confinement_others_write_ratio", ""),
)

#: of the scenario `claims`
_CLAIMS: Sequence[str] = (
    "claims_p50_ratio",
    "claims_p99_ratio",
    "storm_p50_ratio",
    "storm_p99_ratio",
    "claims_relay_p50_ratio",
    "claims_relay_p99_ratio",
    "storm_relay_p50_ratio",
    "storm_relay_p99_ratio",
    "claims_refused_share",
    "claims_storm_refused_share",
    "claims_p50_ms",
    "claims_p99_ms",
    "claims_storm_p50_ms",
    "claims_storm_p99_ms",
    "raw_patch_p50_ms",
    "raw_patch_p99_ms",
    "raw_patch_storm_p50_ms",
    "raw_patch_storm_p99_ms",
)

#: what stands at the top of the results, and the scenario it comes from
HEADLINES: Mapping[str, Sequence[str]] = {
    "create": (
        "creates_per_s",
        "raw_creates_per_s",
        "creates_ratio",
        "create_ratio_1000",
        "create_ratio_5000",
        "writes_per_slot",
        "cpu_s_per_1000_slots",
        "raw_cpu_s_per_1000_slots",
    ),
    "ready": ("ready_seconds", "replicaset_ready_seconds", "ready_ratio"),
    "replace": ("replace_p50_s", "replace_p99_s"),
    "steady": ("steady_writes_per_minute",),
    "kill": ("first_grant_after_kill_s",),
    "memory": ("peak_mib_5000", "peak_mib_20000"),
    "confinement": (
        "confinement_write_ms",
        "confinement_write_free_ms",
        "confinement_write_ratio",
        "confinement_others_write_ratio",
    ),
    "availability": tuple(f"{trouble}_longest_gap_{what}_s" for trouble in TROUBLES for what in _GAPS),
    "claims": _CLAIMS,
    "claims-busy": tuple(f"busy_{name}" for name in _CLAIMS),
    "batches": tuple(
        f"batch_{size}_{name}"
        for size in SIZES
        for name in ("p50_ratio", "p99_ratio", "incomplete", "p50_ms", "p99_ms", "raw_p50_ms", "raw_p99_ms")
    ),
    "peer": (
        "peer",
        "peer_ten",
        "peer_ours",
        "peer_times",
        "peer_ten_times",
        "peer_raw_p50_ratio",
        "peer_raw_p99_ratio",
    ),
}


def results(scenarios: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content: headlines, targets, and each scenario's own figures."""
    # A scenario that was not run this time may be of a time when it had fewer figures.
    top = {figure: found[figure] for name, found in scenarios.items() for figure in HEADLINES[name] if figure in found}
    where = {**scenarios, **top}
    targets = []
    for target in TARGETS:
        if (found := _at(where, target.figure)) is not None:
            entry = {"what": target.what, "figure": target.figure, "found": found, "met": target.met(found)}
            targets.append({**entry, "target": f"{target.sign} {target.value:g}", "unit": target.unit})
    return {**top, "targets": targets, **about, "scenarios": dict(scenarios)}


def rows(written: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Of the table: what, found, target, whether it is met."""
    shown = [
        (t["what"], f"{t['found']:g} {t['unit']}".strip(), f"{t['target']} {t['unit']}".strip(), _word(t["met"]))
        for t in written["targets"]
    ]
    shown += [
        (what, f"{written[figure]:g} {unit}".strip(), "", "") for what, figure, unit in REPORTED if figure in written
    ]
    return shown


def _word(met: bool) -> str:
    return "yes" if met else "NO"


def _at(figures: Mapping[str, Any], name: str) -> float | None:
    found: Any = figures
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
