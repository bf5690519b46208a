"""Configuration of a real node's programs: pure functions of where it lies and what its addresses are.

Nothing leaves its folder but the container's cgroups, which lie below one of its own. Small, quick to start, and
tolerant of what test machines are: full disks, cgroups of version 1, swap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..components import SERVICES
from .network import Addresses

DOMAIN = "cluster.local"
PAUSE = "tapforge.test/pause:e2e"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a node lies."""

    name: str
    folder: Path
    logs: Path
    #: of the control plane, and of the add-ons
    programs: Path
    addons: Path
    #: folder of the CNI plugins
    plugins: Path
    addresses: Addresses
    #: where in the hierarchy of cgroups its containers are
    cgroup: str

    @property
    def socket(self) -> Path:
        """containerd's."""
        return self.folder / "containerd.sock"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"


_FOLDERS = ("cni", "addresses", "kernel", "kubelet", "pods", "containerd", "opt", "volumes")
#: settings that a kubelet wants of its machine: it is shown files that have them, and leaves the machine's as they are
_KERNEL = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
    "/proc/sys/kernel/keys/root_maxkeys": "1000000",
    "/proc/sys/kernel/keys/root_maxbytes": "25000000",
}


def _kernel_file(layout: Layout, path: str) -> Path:
    return layout.folder / "kernel" / path.rpartition("/")[2]


def texts(layout: Layout) -> dict[Path, str]:
    """Every file but the kubeconfigs, which hold keys."""
    here = layout.folder
    return {
        here / "containerd.toml": containerd(layout),
        here / "cni" / "10-pods.conflist": json.dumps(pod_network(layout), indent=1),
        here / "kubelet.yaml": yaml.safe_dump(kubelet(layout)),
        here / "kube-proxy.yaml": yaml.safe_dump(proxy(layout)),
        here / "Corefile": corefile(layout),
        **{_kernel_file(layout, path): f"{value}\n" for path, value in _KERNEL.items()},
        layout.plan: json.dumps(plan(layout), indent=1),
    }


def folders(layout: Layout) -> list[Path]:
    return [layout.folder / name for name in _FOLDERS]


def containerd(layout: Layout) -> str:
    here = layout.folder
    return f"""version = 2
root = "{here}/containerd"
state = "/run/containerd"

[grpc]
address = "{layout.socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{here}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{layout.plugins}"
conf_dir = "{here}/cni"
"""


def pod_network(layout: Layout) -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": str(layout.addresses.pods)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": str(layout.folder / "addresses"),
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{layout.socket}",
        # Only this machine reaches it.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [str(layout.addresses.node)],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": layout.cgroup,
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 110,
        "podLogsDir": str(layout.folder / "pods"),
        "serializeImagePulls": False,
        "volumePluginDir": str(layout.folder / "volumes"),
        "shutdownGracePeriod": "0s",
        "logging": {"verbosity": 1},
    }


def proxy(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(layout.folder / "kube-proxy.kubeconfig")},
        "clusterCIDR": str(layout.addresses.pods),
        "hostnameOverride": layout.name,
        "iptables": {"minSyncPeriod": "0s"},
        # The whole machine's: not a node's to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def corefile(layout: Layout) -> str:
    """The cluster's names; others are refused at once."""
    return f"""{DOMAIN} in-addr.arpa {{
    bind {layout.addresses.node}
    errors
    kubernetes {{
        kubeconfig {layout.folder}/coredns.kubeconfig
        ttl 2
    }}
}}
. {{
    bind {layout.addresses.node}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def plan(layout: Layout) -> dict[str, Any]:
    """For inside.py."""
    here, addresses = layout.folder, layout.addresses

    def program(name: str, *arguments: str, after: str = "") -> dict[str, Any]:
        return {"name": name, "arguments": arguments, "log": str(layout.logs / f"{name}.log"), "after": after}

    return {
        "bind": [(str(_kernel_file(layout, path)), path) for path in _KERNEL],
        "tmpfs": ["/run", "/var/log", "/var/lib/cni"],
        "cable": {
            "interface": addresses.interface(),
            "host": str(addresses.host),
            "node": str(addresses.node),
            "prefix": str(addresses.cable.prefixlen),
            "block": str(addresses.block),
            "services": SERVICES,
        },
        "write": [
            ("/proc/sys/net/ipv4/ip_forward", "1"),
            # What a service's pod answers to its neighbour on the bridge has to take the way back through the service.
            ("/proc/sys/net/bridge/bridge-nf-call-iptables", "1"),
        ],
        "run": [
            program("containerd", "containerd", "--config", str(here / "containerd.toml")),
            program(
                "kubelet",
                str(layout.programs / "kubelet"),
                f"--config={here / 'kubelet.yaml'}",
                f"--kubeconfig={here / 'kubelet.kubeconfig'}",
                f"--root-dir={here / 'kubelet'}",
                f"--cert-dir={here / 'kubelet' / 'pki'}",
                f"--hostname-override={layout.name}",
                f"--node-ip={addresses.node}",
                after=str(layout.socket),
            ),
            program("kube-proxy", str(layout.programs / "kube-proxy"), f"--config={here / 'kube-proxy.yaml'}"),
            program("coredns", str(layout.addons / "coredns"), "-conf", str(here / "Corefile")),
        ],
    }
