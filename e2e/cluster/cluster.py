"""One cluster: from nothing to Ready, and gone again.

    with Cluster(nodes=3) as cluster:
        cluster.kubectl("get", "nodes")

- Each has its own folder, ports, certificates and processes, so several can be up at once.
- It is gone when the block is left, when `stop` returns, or when the process that started it dies, also of SIGKILL.
- Its components can be stopped, paused, killed and started again one by one; they come back with their data and port.
- Every wait has a deadline, and what runs out says what was waited for and what the component said last.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import yaml

from . import binaries, components, fake
from .api import Api, Refused, kubeconfig
from .certificates import Authority, Pair, signing_keys
from .components import API_SERVER, CONTROLLER_MANAGER, ETCD, KWOK, SCHEDULER, Options, Place
from .node import RealNode, network, prerequisites
from .nodes import FakeNodes
from .processes import Family, free_ports

#: what comes in the end is not late before that: machines stall, seconds
PATIENCE: Final = 120.0
_START_SECONDS = 120.0
#: between two looks, seconds: a tenth of the time that was waited, within these
_POLL_SECONDS = (0.05, 0.5)
_REMOVE_SECONDS = 60.0
_ADMINS = "system:masters"

T = TypeVar("T")


class NotInTime(RuntimeError):
    """Something that was waited for didn't happen."""


class Cluster:
    """Kubernetes' control plane and fake nodes. Blocking; may be used from any thread, by one at a time."""

    def __init__(self, options: Options | None = None, *, nodes: int | None = None, keep: bool = False) -> None:
        """`nodes` is short for the option of that name; `keep` leaves the folder where it is after the end."""
        self.options = options or Options()
        self._nodes = self.options.nodes if nodes is None else nodes
        self._keep = keep or bool(os.environ.get("TAPFORGE_E2E_KEEP"))
        self._authority = Authority("tapforge test cluster")
        self._place: Place | None = None
        self._family: Family | None = None
        self._api: Api | None = None
        self._node: RealNode | None = None

    # --- coming and going ---------------------------------------------------------------------------------------------

    def start(self) -> Cluster:
        """Returns when the API server serves, the controllers run and the nodes are Ready."""
        programs, kubernetes = binaries.ensure(), binaries.ensure(of=binaries.kubernetes())
        addresses = None
        if self.options.real_node:
            prerequisites.ensure()
            addresses = network.choose(network.routes())
            self.options = replace(self.options, bind="0.0.0.0", advertise=str(addresses.host))
        folder = Path(tempfile.mkdtemp(prefix="tapforge-cluster-"))
        (folder / "logs").mkdir()
        self._place = place = Place(folder, programs, kubernetes, *free_ports(4))
        self._family = Family(folder, folder / "logs", keep=self._keep, cgroup=folder.name)
        try:
            self._write_files(place)
            self._api = Api(place.server, folder / "ca.crt", folder / "admin.crt", folder / "admin.key")
            self._run(ETCD, components.etcd(place, self.options))
            self._run(API_SERVER, components.api_server(place, self.options))
            self.wait_ready()
            self._run(CONTROLLER_MANAGER, components.controller_manager(place, self.options))
            self._run(SCHEDULER, components.scheduler(place, self.options))
            self._run(KWOK, components.kwok(place, self.options))
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self.wait_for("the first service account", lambda: self.exists(account), _START_SECONDS)
            if self._nodes:
                self.nodes.add(self._nodes)
            if addresses is not None:
                server = f"https://{addresses.host}:{place.api_port}"
                self._node = RealNode(self, programs, binaries.ensure(of=binaries.ADDONS), addresses, server).start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Nothing is asked to finish: what it held is thrown away. To stop twice is to stop once."""
        family, self._family = self._family, None
        if family is None:
            return
        family.close()
        deadline = time.monotonic() + _REMOVE_SECONDS
        # The guardian removes it as well, and each of the two finds things gone that it was about to remove.
        while not self._keep and self.folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.01)

    def __enter__(self) -> Cluster:
        return self if self._family is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- reaching it --------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self._there_is(self._place).folder

    @property
    def server(self) -> str:
        """https://127.0.0.1:port"""
        return self._there_is(self._place).server

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return self.folder / "admin.kubeconfig"

    @property
    def ca(self) -> Path:
        """Certificate of the authority that signed the API server's."""
        return self.folder / "ca.crt"

    @property
    def admin(self) -> tuple[Path, Path]:
        """Certificate and key of an administrator."""
        return self.folder / "admin.crt", self.folder / "admin.key"

    @property
    def authority(self) -> Authority:
        """Signs further certificates that this cluster believes."""
        return self._authority

    @property
    def nodes(self) -> FakeNodes:
        """The fake ones: more, fewer, lost."""
        return FakeNodes(self.api, self.wait_for)

    @property
    def node(self) -> RealNode:
        """The real one, of a cluster with `real_node`."""
        if self._node is None:
            raise RuntimeError("this cluster has no real node: make it with Options(real_node=True)")
        return self._node

    @property
    def api(self) -> Api:
        """As an administrator: `cluster.api("GET", "/api/v1/nodes")`; raises Refused."""
        return self._there_is(self._api)

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,
        check: bool = True,
        kubeconfig: Path | None = None,
        seconds: float = 2 * PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """`check`: a refusal raises, with what kubectl said."""
        place = self._there_is(self._place)
        done = subprocess.run(
            [str(place.programs / "kubectl"), "--kubeconfig", str(kubeconfig or self.kubeconfig), *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "KUBECACHEDIR": place.file("kubectl-cache")},
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def exists(self, path: str) -> bool:
        """Whether the API server has an object at `path`."""
        try:
            self.api("GET", path)
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def apply(self, *documents: Mapping[str, Any] | Path | str) -> None:
        """Objects, files or YAML text, by server-side apply."""
        texts = [
            item.read_text()
            if isinstance(item, Path)
            else item
            if isinstance(item, str)
            else yaml.safe_dump(dict(item))
            for item in documents
        ]
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input="\n---\n".join(texts))

    def wait_kinds(self) -> None:
        """Until every CustomResourceDefinition is served, and kubectl knows its short names: it looks for those in what
        it remembers of the server, which is from before, and asks again only when a whole name is missing."""
        where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        served = {"type": "Established", "status": "True"}

        def all_served() -> bool:
            kinds = self.api("GET", where)["items"]
            return all(
                any(served.items() <= condition.items() for condition in kind.get("status", {}).get("conditions") or ())
                for kind in kinds
            )

        def all_known() -> bool:
            kinds = {kind["metadata"]["name"] for kind in self.api("GET", where)["items"]}
            return kinds <= set(self.kubectl("api-resources", "-o", "name", check=False).stdout.split())

        self.wait_for("the kinds to be served", all_served)
        self.wait_for("kubectl to know the kinds", all_known)

    def user(self, name: str, *groups: str) -> Path:
        """A kubeconfig for a user of this name, with a certificate; may do nothing before RBAC says so."""
        path = self.folder / f"user-{name.replace('/', '-').replace(':', '-')}.kubeconfig"
        path.write_text(kubeconfig(self.server, self._authority.certificate, pair=self._authority.client(name, groups)))
        return path

    def user_with_token(self, name: str, token: str) -> Path:
        """A kubeconfig with this token; `name` is only the file's."""
        path = self.folder / f"token-{name}.kubeconfig"
        path.write_text(kubeconfig(self.server, self._authority.certificate, token=token))
        return path

    def token(
        self,
        namespace: str,
        account: str,
        audience: str = "",
        *,
        pod: tuple[str, str] | None = None,
        seconds: int = 3600,
    ) -> str:
        """A service account's token, as a projected volume would hold it; `pod` is the name and UID it is bound to."""
        spec: dict[str, Any] = {"expirationSeconds": seconds, "audiences": [audience] if audience else []}
        if pod is not None:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod[0], "uid": pod[1]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return self.api("POST", path, body)["status"]["token"]

    # --- its components -----------------------------------------------------------------------------------------------

    def run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """One more process that belongs to this cluster and ends with it, such as a kubelet or another operator."""
        self._there_is(self._family).start(name, arguments, environment)

    def pid(self, component: str) -> int:
        return self._there_is(self._family).pid(component)

    def running(self, component: str) -> bool:
        return self._there_is(self._family).running(component)

    def may_end(self, component: str) -> None:
        """By itself, from now on until it is started again: waiting goes on then."""
        self._there_is(self._family).may_end(component)

    def stop_component(self, component: str, number: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM lets it finish what it does, for at most a minute; SIGKILL is a crash."""
        self._there_is(self._family).stop(component, number)

    def start_component(self, component: str) -> None:
        """Again, as it was. Waits until the API server serves, where it is that or etcd."""
        self._there_is(self._family).start_again(component)
        if component in (API_SERVER, ETCD):
            self.wait_ready()

    def restart(self, component: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.stop_component(component, number)
        self.start_component(component)

    def restart_apiserver(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.restart(API_SERVER, number)

    @contextmanager
    def paused(self, component: str) -> Iterator[None]:
        """It hangs inside the block: connections stay open and are not answered."""
        with self._there_is(self._family).paused(component):
            yield

    @contextmanager
    def without(self, component: str, number: signal.Signals = signal.SIGKILL) -> Iterator[None]:
        """It is away inside the block."""
        self.stop_component(component, number)
        try:
            yield
        finally:
            self.start_component(component)

    def log(self, component: str) -> Path:
        return self._there_is(self._family).log(component)

    def pod_log(self, text: str) -> None:
        """What `kubectl logs` of every fake container says from now on."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z", time.gmtime())
        (self.folder / "pod.log").write_text("".join(f"{stamp} stdout F {line}\n" for line in text.splitlines()))

    def memory(self) -> dict[str, float]:
        """MiB that every component holds now (resident)."""
        family = self._there_is(self._family)
        pages = {name: Path(f"/proc/{family.pid(name)}/statm").read_text().split()[1] for name in family.names()}
        return {name: int(count) * os.sysconf("SC_PAGE_SIZE") / 2**20 for name, count in pages.items()}

    def metrics(self) -> str:
        """The API server's, as Prometheus text."""
        return self.api.text("GET", "/metrics")

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_ready(self, seconds: float = _START_SECONDS) -> None:
        """Until the API server serves."""
        self.wait_for("the API server", lambda: self.api.text("GET", "/readyz", seconds=5) == "ok", seconds)

    def wait_for(self, what: str, probe: Callable[[], T], seconds: float = PATIENCE) -> T:
        """What `probe` answers as soon as that is true. An API server that is away or starting has not answered yet."""
        began = time.monotonic()
        deadline, (least, most) = began + seconds, _POLL_SECONDS
        while True:
            said = ""
            try:
                if found := probe():
                    return found
            except Refused as error:
                if error.status < 500 and error.status not in (401, 403, 429):
                    raise
                said = f"; the API server said: {error}"
            except OSError as error:
                said = f"; the API server: {error}"
            self._all_run()
            if time.monotonic() > deadline:
                raise NotInTime(f"{what}: not there after {seconds:g} s{said}")
            time.sleep(min(most, max(least, (time.monotonic() - began) / 10)))

    def _all_run(self) -> None:
        family = self._there_is(self._family)
        for name in family.crashed():
            raise RuntimeError(f"{name} has ended by itself; {family.log(name)} ends with:\n{family.last_words(name)}")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self, component: str, arguments: Sequence[str]) -> None:
        self._there_is(self._family).start(component, arguments)

    def _there_is(self, thing: T | None) -> T:
        if thing is None:
            raise RuntimeError("this cluster is not up: call start() first, or use it as `with Cluster() as cluster:`")
        return thing

    def _write_files(self, place: Place) -> None:
        here, accounts = place.folder, signing_keys()
        names = ["kubernetes.default.svc.cluster.local", "kubernetes.default.svc", "kubernetes.default", "kubernetes"]
        names += ["localhost", "127.0.0.1", components.SERVICE_ADDRESS]
        names += [self.options.advertise] if self.options.advertise else []
        server, admin = self._authority.server(names), self._authority.client("admin", [_ADMINS])
        (here / "ca.crt").write_bytes(self._authority.certificate)
        for name, pair in (("server", server), ("admin", admin)):
            (here / f"{name}.crt").write_bytes(pair.certificate)
            (here / f"{name}.key").write_bytes(pair.key)
        (here / "accounts.pub").write_bytes(accounts.certificate)
        (here / "accounts.key").write_bytes(accounts.key)
        users = {
            "admin": admin,
            "controller-manager": self._authority.client("system:kube-controller-manager"),
            "scheduler": self._authority.client("system:kube-scheduler"),
        }
        for name, pair in users.items():
            self._write_kubeconfig(here / f"{name}.kubeconfig", pair)
        (here / "scheduler.yaml").write_text(yaml.safe_dump(components.scheduler_configuration(place, self.options)))
        (here / "audit.yaml").write_text(yaml.safe_dump(components.audit_policy()))
        (here / "kwok.yaml").write_text(yaml.safe_dump_all(fake.configuration(place.file("pod.log"))))
        self.pod_log("a fake container has nothing to say")

    def _write_kubeconfig(self, path: Path, pair: Pair) -> None:
        path.write_text(kubeconfig(self.server, self._authority.certificate, pair=pair))
