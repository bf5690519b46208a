"""One real node of a cluster: kubelet, containerd, kube-proxy and the cluster's names, in namespaces of their own.

- It is a process of the cluster like others (`node`) and ends with it. `lose` takes its power away, `find` gives it
  back.
- Pods reach each other, services, the API server and this machine; this machine reaches pods. There is no way further:
  no outside network.
- There is no registry: images are loaded from archives, and pulls are refused.
- Network policies are accepted and not enforced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeVar

from ..api import Api, kubeconfig
from ..certificates import Authority
from . import archive, files, network, prerequisites
from .files import Layout

NODE: Final = "node"
NAME: Final = "real-0"
#: label of the real node, for pods that must not go to a fake one
LABEL: Final = ("tapforge.dev/node", "real")

_INSIDE = Path(__file__).with_name("inside.py")
_READY_SECONDS = 120.0
_LOAD_SECONDS = 300.0
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = {"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}

T = TypeVar("T")


class _Cluster(Protocol):
    """What a node needs of its cluster."""

    @property
    def folder(self) -> Path: ...
    @property
    def api(self) -> Api: ...
    @property
    def authority(self) -> Authority: ...
    def run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None: ...
    def pid(self, component: str) -> int: ...
    def stop_component(self, component: str, number: signal.Signals) -> None: ...
    def start_component(self, component: str) -> None: ...
    def wait_for(self, what: str, probe: Callable[[], T], seconds: float) -> T: ...


class RealNode:
    """`server`: the API server's address, as it is reached over the node's cable."""

    def __init__(self, cluster: _Cluster, programs: Path, addons: Path, addresses: network.Addresses, server: str):
        self._cluster = cluster
        self._server = server
        folder = cluster.folder / "node"
        self._layout = Layout(
            name=NAME,
            folder=folder,
            logs=cluster.folder / "logs",
            programs=programs,
            addons=addons,
            plugins=prerequisites.plugins(),
            addresses=addresses,
            cgroup=f"/{cluster.folder.name}",
        )

    @property
    def socket(self) -> Path:
        """containerd's."""
        return self._layout.socket

    # --- coming -------------------------------------------------------------------------------------------------------

    def start(self) -> RealNode:
        """Returns when it is Ready."""
        layout, (label, value) = self._layout, LABEL
        for folder in files.folders(layout):
            folder.mkdir(parents=True)
        _make_cgroups(layout.cgroup.strip("/"))
        for path, text in files.texts(layout).items():
            path.write_text(text)
        self._write_kubeconfig("kubelet", f"system:node:{NAME}", "system:nodes")
        self._write_kubeconfig("kube-proxy", "system:kube-proxy")
        self._write_kubeconfig("coredns", "coredns", "system:masters")
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "slave"]
        python = ["python3", "-I", "-S", str(_INSIDE), str(layout.plan)]
        self._cluster.run(NODE, [*command, "--", *python], {**os.environ, "PATH": prerequisites.PATH})
        pause = archive.write(
            layout.folder / "pause.tar", files.PAUSE, {"/pause": layout.addons / "pause"}, command=["/pause"]
        )
        self._cluster.wait_for("containerd", self._listens, _READY_SECONDS)
        self.load(pause)
        self.wait_ready()
        self._cluster.api(
            "PATCH", f"/api/v1/nodes/{NAME}", {"metadata": {"labels": {label: value}}}, "application/merge-patch+json"
        )
        return self

    def wait_ready(self, seconds: float = _READY_SECONDS) -> None:
        self._cluster.wait_for(f"node {NAME} to be Ready", self.ready, seconds)

    def ready(self) -> bool:
        """Ready, and not tainted as new or silent ones are."""
        nodes = self._cluster.api("GET", f"/api/v1/nodes?fieldSelector=metadata.name={NAME}")["items"]
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in nodes
            for condition in node["status"].get("conditions", ())
            if not any(taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints", ()))
        )

    def lose(self) -> None:
        """The machine loses its power. The control plane notices after its grace (`Options.node_grace_seconds`)."""
        first = _children(self._cluster.pid(NODE))
        self._cluster.stop_component(NODE, signal.SIGKILL)
        gone = [Path(f"/proc/{pid}") for pid in first]
        self._cluster.wait_for("the node's last process", lambda: not any(p.exists() for p in gone))

    def find(self) -> None:
        """It is back, with what is on its disk and without what ran on it. Returns when it is Ready again."""
        renewed = self._sign_of_life()
        self._cluster.start_component(NODE)
        self._cluster.wait_for("containerd", self._listens, _READY_SECONDS)
        self._cluster.wait_for("the kubelet", lambda: self._sign_of_life() != renewed, _READY_SECONDS)
        self.wait_ready()

    def _sign_of_life(self) -> str:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        leases = self._cluster.api("GET", f"{path}?fieldSelector=metadata.name={NAME}")["items"]
        # A young node has none yet.
        return str(leases[0]["spec"]["renewTime"]) if leases else ""

    # --- images -------------------------------------------------------------------------------------------------------

    def load(self, *archives: Path) -> list[str]:
        """Images that pods may use from now on: archives (docker's or OCI's), or folders in OCI's layout. Returns their
        names."""
        before = set(self.images())
        for path in archives:
            if path.is_dir():
                tar = ["tar", "--create", "--directory", str(path), "--file", "-", "."]
                with subprocess.Popen(tar, stdout=subprocess.PIPE) as packing:
                    self._ctr("images", "import", "-", input=packing.stdout)
            else:
                self._ctr("images", "import", str(path))
        return sorted(set(self.images()) - before)

    def images(self) -> list[str]:
        return [name for name in self._ctr("images", "list", "-q").split() if not name.startswith("sha256:")]

    # --- what runs on it ----------------------------------------------------------------------------------------------

    def pids(self, pod: dict[str, Any], container: str = "") -> list[int]:
        """Processes of a pod's container (the first one by default), as this machine counts them."""
        statuses = pod["status"].get("containerStatuses", ())
        found = next((s for s in statuses if container in ("", s["name"])), {})
        name = str(found.get("containerID", "")).rpartition("/")[2]
        if not name:
            raise RuntimeError(f"pod {pod['metadata']['name']} has no container {container or 'yet'} that has started")
        return sorted(set(self._members(name)))

    def kill(self, pod: dict[str, Any], container: str = "", number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to every process of a pod's container, as if they had it from nowhere."""
        for pid in self.pids(pod, container):
            with suppress(ProcessLookupError):  # gone with the one before
                os.kill(pid, number)

    def program(self, name: str) -> int:
        """Process number of `kubelet`, `containerd`, `kube-proxy` or `coredns`; one that ends takes the node along."""
        first = _children(self._cluster.pid(NODE))
        for pid in first and _children(first[0]):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2].decode() == name:
                return pid
        raise RuntimeError(f"no {name} runs on the node; its log says why")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _members(self, container: str) -> Iterator[int]:
        top = self._layout.cgroup.strip("/")
        for hierarchy in hierarchies():
            for path in (hierarchy / top).glob(f"**/{container}/**/cgroup.procs"):
                yield from map(int, path.read_text().split())

    def _listens(self) -> bool:
        return self._layout.socket.exists() and "Server" in self._ctr("version")

    def _ctr(self, *words: str, input: IO[bytes] | None = None) -> str:
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(
                ["ctr", "--address", str(self._layout.socket), "--namespace", "k8s.io", *words],
                stdin=input or subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LOAD_SECONDS,
                check=False,
                env={**os.environ, "PATH": prerequisites.PATH},
            )
            if done.returncode == 0:
                return done.stdout
            # It listens before it has everything in place.
            early = "Unavailable" in done.stderr or "connection refused" in done.stderr
            if not early or time.monotonic() > deadline:
                raise RuntimeError(f"ctr {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
            time.sleep(0.1)

    def _write_kubeconfig(self, program: str, user: str, *groups: str) -> None:
        authority = self._cluster.authority
        text = kubeconfig(self._server, authority.certificate, pair=authority.client(user, groups))
        (self._layout.folder / f"{program}.kubeconfig").write_text(text)


def _make_cgroups(name: str) -> None:
    for top in hierarchies():
        (top / name).mkdir()
        delegated = top / "cgroup.subtree_control"
        if top == _CGROUPS:
            # Version 2: what a kubelet counts and limits with has to be handed down to its cgroups.
            wanted = set((top / "cgroup.controllers").read_text().split()) & _CONTROLLERS
            for controller in sorted(wanted - set(delegated.read_text().split())):
                delegated.write_text(f"+{controller}")


def hierarchies() -> list[Path]:
    """Where cgroups are made: one place with version 2, one for each controller with version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [place for place in _CGROUPS.iterdir() if (place / "cgroup.procs").exists()]


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if parent == pid:
            found.append(int(stat.parent.name))
    return sorted(found)
