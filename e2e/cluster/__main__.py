"""`python -m e2e.cluster up [--nodes N] [--real-node]`: a cluster for a person; gone after Ctrl-C. `build`: only the
programs."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from . import CannotBuild, Cluster, Options, binaries, kuberay
from .node import CannotRun, host

_CRDS = Path(__file__).parents[2] / "crds"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the programs, where that hasn't been done")
    up = commands.add_parser("up", help="a cluster in the foreground, until Ctrl-C")
    up.add_argument("--nodes", type=int, default=3, help="fake nodes of 110 pods (default: 3)")
    up.add_argument("--qps", type=int, default=0, help="requests/s of the scheduler and of each controller")
    up.add_argument("--audit", action="store_true", help="write every change into audit.log")
    up.add_argument("--real-node", action="store_true", help="beside the fake ones: containers that run, and KubeRay")
    asked = parser.parse_args()
    try:
        if asked.command == "build":
            print(binaries.ensure())
            print(binaries.ensure(of=binaries.ADDONS))
            return 0
        return _up(Options(nodes=asked.nodes, qps=asked.qps, audit=asked.audit, real_node=asked.real_node))
    except KeyboardInterrupt:
        print("cluster: given up", file=sys.stderr)
        return 130
    except (CannotBuild, CannotRun) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _up(options: Options) -> int:
    done = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        done.set()

    with Cluster(options) as cluster:
        cluster.apply(*sorted(_CRDS.glob("*.yaml")))
        if options.real_node:
            kuberay.start(cluster)
            cluster.node.load(host.image(cluster.folder / "host.tar"))
        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        programs = binaries.ensure()
        print("cluster: up, with the kinds of tapforge. In another shell:", flush=True)
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        print(f"export PATH={programs}:$PATH    # kubectl", flush=True)
        if options.real_node:
            print(
                f"cluster: images are loaded by: ctr -a {cluster.node.socket} -n k8s.io images import ARCHIVE",
                flush=True,
            )
        print("cluster: Ctrl-C ends it", flush=True)
        done.wait()
    print("cluster: gone", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
