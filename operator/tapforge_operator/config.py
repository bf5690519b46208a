"""What the operator is started with. Times are seconds."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tapforge_operator.broker.devices import EVERYBODY, DeviceRules, Network
from tapforge_operator.broker.types import ClaimQuotas
from tapforge_operator.clusternetwork import RunNetwork
from tapforge_operator.kube.informers import Scope
from tapforge_operator.kube.leaderelection import Timing
from tapforge_operator.server import EVERYWHERE

#: a label of DNS, which a namespace's name is
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: of a URL without blanks, query and fragment
_PLAIN: Final = re.compile(r"[!\"$->@-~]+")


@dataclass(frozen=True, slots=True)
class Settings:
    #: this process' name in the leader Lease; the same after a restart in place, another one for another Pod
    identity: str
    #: namespace of the operator's own objects: leader Lease, certificate, keys
    namespace: str = "tapforge-system"
    scope: Scope = field(default_factory=Scope)
    host: str = EVERYWHERE
    broker_port: int = 8443
    health_port: int = 8080
    #: metrics need a bearer token that RBAC allows to get /metrics
    metrics_token: bool = False
    #: address of the broker for runs' Pods; "": that of its Service
    broker_url: str = ""
    #: what reaches runs' Pods
    run_network: RunNetwork = field(default_factory=RunNetwork)
    #: host:port at which other replicas reach this one's broker; "": they can't pass callers on to it
    advertised: str = ""
    #: slots that the claimants of a namespace may hold at once
    quotas: ClaimQuotas = field(default_factory=ClaimQuotas)
    #: which namespace's pools may name which external devices
    devices: DeviceRules = field(default_factory=DeviceRules)
    #: folder with tls.crt, tls.key and ca.crt for the broker, as a Secret is mounted; None: a certificate of its own
    tls_dir: Path | None = None
    #: names and addresses that the broker's certificate is good for, beside those of its Service
    names: tuple[str, ...] = ()
    #: of callers to the broker at once, and of one address; 0: of one address half of all
    connections: int = 4096
    address_connections: int = 0
    #: calls to the API server under way at once
    in_flight: int = 64
    timing: Timing = field(default_factory=Timing)
    #: between two lists that correct what the watches missed
    resync_seconds: float = 600.0
    #: silence of all watches after which the process counts as hung
    silence_seconds: float = 60.0

    @property
    def service(self) -> str:
        """Name of the broker's Service; its certificate is good for it, wherever the broker is reached."""
        return f"tapforge-broker.{self.namespace}.svc"

    @property
    def called(self) -> tuple[str, ...]:
        """Names that callers know the broker by: what its certificate has to be good for, also one that is given."""
        return tuple(dict.fromkeys((self.service, urlsplit(self.broker).hostname or self.service, *self.names)))

    @property
    def broker(self) -> str:
        """Where runs' Pods find the broker."""
        return self.broker_url or f"https://{self.service}:8443"


def claim_quotas(given: Iterable[str], person: int | None = None) -> ClaimQuotas:
    """Of NAMESPACE=N, and *=N for every other namespace; `person`: of each person. Raises ValueError."""
    found: dict[str, int] = {}
    for text in given:
        namespace, _, number = text.partition("=")
        if not (namespace == "*" or _LABEL.fullmatch(namespace)) or not number.isdecimal():
            raise ValueError(f"{text!r} is not a quota: NAMESPACE=N with a whole number, or *=N for every other one")
        if found.setdefault(namespace, int(number)) != int(number):
            raise ValueError(f"{namespace} has two quotas, {found[namespace]} and {int(number)}: name one")
    default = found.pop("*", None)
    return ClaimQuotas(found, default, person)


def device_rules(given: Iterable[str]) -> DeviceRules:
    """Of NAMESPACE=NETWORK and NAMESPACE=HOST; *=... for every namespace. Raises ValueError."""
    networks: defaultdict[str, list[Network]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for text in given:
        namespace, _, what = text.partition("=")
        if not (namespace == EVERYBODY or _LABEL.fullmatch(namespace)):
            raise ValueError(f"{text!r} names no namespace: NAMESPACE=NETWORK, NAMESPACE=HOST, or *=... for all")
        name = what.lower().rstrip(".")
        try:
            networks[namespace].append(ipaddress.ip_network(what))
        except ValueError as error:
            dotted = name.removeprefix("*.").split(".")
            if not all(map(_LABEL.fullmatch, dotted)) or dotted[-1].isdecimal():
                raise ValueError(
                    f"{text!r} names neither a network (10.1.0.0/16, 10.1.0.5) nor a host (phone.example, *.example), "
                    f"without port: {error}"
                ) from error
            names[namespace].append(name)
    return DeviceRules({k: v for k, v in networks.items() if v}, dict(names))


def certificate_names(given: Iterable[str]) -> tuple[str, ...]:
    """DNS names, of which the first label may be `*`, and addresses. Raises ValueError."""
    names = tuple(given)
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if not all(_LABEL.fullmatch(label) for label in name.removeprefix("*.").lower().split(".")):
                raise ValueError(f"{name!r} is neither a DNS name nor an address") from None
    return names


def broker_address(given: str) -> str:
    """An address that drivers of runs take, and a certificate can be good for; "" for none. Raises ValueError."""
    if not given:
        return ""
    wrong = f"{given!r} is not an address for runs' drivers; expected, for example, https://broker.example:8443"
    try:
        url = urlsplit(given)
        host = url.hostname if url.port is None or url.port > 0 else None
    except ValueError as error:
        raise ValueError(f"{wrong} ({error})") from error
    if url.scheme != "https" or not host or "@" in url.netloc or not _PLAIN.fullmatch(given):
        raise ValueError(wrong)
    certificate_names([host])
    return given


def advertised(address: str, port: int) -> str:
    """host:port of a host, which may be an IPv6 address, with or without a port; "" for none, or of no known port."""
    if not address:
        return ""
    host = address.strip("[]")
    if address.count(":") > 1 and not address.rpartition("]")[2].startswith(":"):
        host = f"[{host}]"
    elif ":" in address:
        return address
    return f"{host}:{port}" if port else ""
