"""`python -m e2e.bench [--quick] [--only create --only claims]`: runs scenarios, prints figures next to targets.

Writes bench-results/operator.json. A scenario that is not run keeps its figures of the last time; each says how loaded
the machine was. One that fails is named at the end, with exit code 1; the others run all the same. `--quick` takes tiny
sizes and writes bench-results/operator-quick.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.load.machine import machine, show, write

from e2e.cluster import binaries

from . import availability, batches, claims, claims_busy, confinement, create, kill, memory, ready, replace, steady
from .peer import scenario as peer
from .peer.agent_sandbox import SOURCES as PEER
from .targets import results, rows
from .testbed import Run

SCENARIOS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "create": create.run,
    "ready": ready.run,
    "replace": replace.run,
    "steady": steady.run,
    "kill": kill.run,
    "memory": memory.run,
    "claims": claims.run,
    "claims-busy": claims_busy.run,
    "batches": batches.run,
    "availability": availability.run,
    "confinement": confinement.run,
    "peer": peer.run,
}
_RESULTS = Path("bench-results")
#: the control plane collects its garbage less often: in a cluster it has cores of its own
_GO = {"GOGC": "400", "GOMEMLIMIT": "3GiB"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="this scenario; may be repeated")
    parser.add_argument("--profile", type=Path, help="run the operator under cProfile; its profiles go to this folder")
    parser.add_argument("--out", type=Path, help="default: bench-results/operator.json")
    args = parser.parse_args()
    out = args.out or _RESULTS / ("operator-quick.json" if args.quick or args.profile else "operator.json")
    for name, value in _GO.items():
        os.environ.setdefault(name, value)
    binaries.ensure()
    if "peer" in (args.only or SCENARIOS):
        binaries.ensure(of=PEER)
    done, failed = _scenarios_of(out), list[str]()
    for name in args.only or SCENARIOS:
        before, began = os.getloadavg()[0], time.monotonic()
        print(f"{name}: {(SCENARIOS[name].__module__)} begins at a load of {before:.1f}", file=sys.stderr, flush=True)
        try:
            found = SCENARIOS[name](Run(args.quick, args.profile))
        except Exception:  # noqa: BLE001 - whatever it was: the quarter of an hour of the others is not lost with it
            traceback.print_exc()
            failed.append(name)
            continue
        took = round(time.monotonic() - began, 1)
        done[name] = {**found, "load_before": round(before, 2), "load_after": _load(), "scenario_seconds": took}
        print(f"{name}: {took:g} s: {json.dumps(found)}", file=sys.stderr, flush=True)
        # After each, so that a run that is stopped keeps what it found.
        write(out, results({name: done[name] for name in SCENARIOS if name in done}, _about()))
    if not out.exists():
        sys.exit(f"no scenario came to its end: {', '.join(failed)}")
    written = json.loads(out.read_text())
    title = f"Operator, {written['machine']['cores']} cores shared with API server, etcd and load"
    show(title, ("what", "found", "target", "met"), rows(written))
    print(out)
    if failed:
        sys.exit(f"these scenarios failed; their figures, if any, are of an earlier run: {', '.join(failed)}")


def _scenarios_of(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())["scenarios"] if out.exists() else {}


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _about() -> dict[str, Any]:
    packages = {name: version(name) for name in ("tapforge", "aiohttp", "kopf")}
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "machine": {**machine(), "memory_gib": memory_gib},
        "control_plane": {name: os.environ[name] for name in _GO},
        "versions": {**packages, **_components()},
    }


def _components() -> dict[str, str]:
    """Versions of what the cluster is built of, and of the peer."""
    required = _required(binaries.MODULE)
    return {
        "kubernetes": required["k8s.io/kubernetes"],
        "kwok": required["sigs.k8s.io/kwok"],
        "agent-sandbox": _required(PEER.module)["sigs.k8s.io/agent-sandbox"],
    }


def _required(module: Path) -> dict[str, str]:
    lines = [line.split() for line in (module / "go.mod").read_text().splitlines()]
    return {words[0]: words[1] for words in lines if len(words) >= 2}


if __name__ == "__main__":
    main()
