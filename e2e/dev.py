"""`make dev`: the operator from this checkout on a Kubernetes control plane of this machine, started again after each
save.

- The control plane and KubeRay are real, nodes and Pods are fake: Pods get Ready and run nothing.
- The operator is a process with the rights that `manifests/overlays/cluster` gives it and no others. It logs here.
- A saved file of `operator/` or `crds/` starts it again; one of `crds/` or `manifests/` is applied before. What can't
  be applied or ends at once says why, and the next save tries again.
- Ctrl-C ends everything; nothing is kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import yaml

from .cluster import CannotBuild, Cluster, Options, binaries, kuberay
from .cluster.processes import free_ports
from .installed import ENABLED

ROOT: Final = Path(__file__).parents[1]
OPERATOR: Final = "operator"
_OWN: Final = "tapforge-system"
_ACCOUNT: Final = "tapforge-operator"
_OVERLAY: Final = ROOT / "manifests" / "overlays" / "cluster"
#: what is watched, and the files of it that count
_SOURCES: Final = {"operator": "*.py", "crds": "*.py", "manifests": "*.yaml"}
#: between two looks at the files, seconds
_LOOK: Final = 0.3
_TOKEN_SECONDS: Final = 7 * 86_400


def main() -> int:
    done = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        done.set()

    try:
        for of in (binaries.CONTROL_PLANE, binaries.kubernetes(), binaries.kuberay()):
            binaries.ensure(of=of)
        with Cluster(Options(nodes=3)) as cluster:
            dev = Dev(cluster)
            dev.install()
            kuberay.start(cluster)
            dev.start()
            signal.signal(signal.SIGINT, end)
            signal.signal(signal.SIGTERM, end)
            dev.greet()
            while not done.wait(_LOOK):
                dev.look()
        say("gone")
        return 0
    except KeyboardInterrupt:
        say("given up")
        return 130
    except (CannotBuild, RuntimeError) as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1


def say(line: str) -> None:
    print(f"dev: {line}", flush=True)


class Dev:
    """The operator on one cluster, and the files that it comes from."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._broker, self._health = free_ports(2)
        self._stamps = dict(_stamps())
        self._running = False
        #: of its log that was shown
        self._shown = 0

    def install(self) -> None:
        """The kinds as this checkout's models say, and what the manifests install beside the operator's Pods."""
        kinds = subprocess.run(
            [sys.executable, "-m", "tapforge_api"], capture_output=True, text=True, timeout=60, check=False
        )
        if kinds.returncode != 0:
            raise RuntimeError(f"the kinds can't be written:\n{kinds.stderr}")
        kustomized = self._cluster.kubectl("kustomize", str(_OVERLAY)).stdout
        documents: list[dict[str, Any]] = list(yaml.safe_load_all(kustomized))
        others = [d for d in documents if d["kind"] not in ("CustomResourceDefinition", "Deployment")]
        self._cluster.apply(kinds.stdout, *others)
        self._cluster.wait_kinds()
        self._cluster.kubectl("label", "namespace", "default", *(f"{key}={value}" for key, value in ENABLED.items()))
        asked = ("auth", "can-i", "list", "nodes", f"--as=system:serviceaccount:{_OWN}:{_ACCOUNT}")
        self._cluster.wait_for("its rights", lambda: self._cluster.kubectl(*asked, check=False).returncode == 0)

    def start(self) -> None:
        token = self._cluster.token(_OWN, _ACCOUNT, seconds=_TOKEN_SECONDS)
        command = [sys.executable, "-m", "tapforge_operator.main", "--plain-logs", "--host=127.0.0.1"]
        command += [f"--own-namespace={_OWN}", f"--broker-port={self._broker}", f"--health-port={self._health}"]
        theirs = {k: v for k, v in os.environ.items() if not k.startswith(("KUBERNETES_", "POD_", "TAPFORGE_"))}
        kubeconfig = self._cluster.user_with_token(OPERATOR, token)
        self._cluster.run(OPERATOR, command, {**theirs, "KUBECONFIG": str(kubeconfig)})
        self._cluster.may_end(OPERATOR)
        self._running = True

    def greet(self) -> None:
        say(f"the operator runs: health and metrics on http://127.0.0.1:{self._health}. In another shell:")
        print(f"export KUBECONFIG={self._cluster.kubeconfig} PATH={binaries.ensure()}:$PATH", flush=True)
        print(f"kubectl apply -f {ROOT / 'manifests' / 'samples' / 'pool-phones.yaml'}", flush=True)
        say("it starts again at every save; Ctrl-C ends it")

    def look(self) -> None:
        """Shows what the operator has logged; starts it again where files were saved."""
        self._show()
        if self._running and not self._cluster.running(OPERATOR):
            self._running = False
            say("the operator has ended; it starts again at the next save")
        before, self._stamps = self._stamps, dict(_stamps())
        saved = sorted(file for file, _ in before.items() ^ self._stamps.items())
        if not saved:
            return
        say(f"saved: {', '.join(sorted({str(file.relative_to(ROOT)) for file in saved}))}")
        self._cluster.stop_component(OPERATOR)
        self._show()
        self._running = False
        if any(file.parts[len(ROOT.parts)] != "operator" for file in saved):
            try:
                self.install()
            except RuntimeError as error:
                say(str(error))
                return
        self.start()
        say("the operator was started again")

    def _show(self) -> None:
        log = self._cluster.log(OPERATOR)
        if log.exists():
            with log.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()


def _stamps() -> Iterator[tuple[Path, int]]:
    """When each file that counts was last saved."""
    for folder, pattern in _SOURCES.items():
        for file in (ROOT / folder).rglob(pattern):
            try:
                yield file, file.stat().st_mtime_ns
            except FileNotFoundError:  # an editor exchanges it at this moment; the next look sees the new one
                continue


if __name__ == "__main__":
    sys.exit(main())
