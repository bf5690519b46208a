"""What the operator is started with. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .kube.election import Timing
from .listening import EVERYWHERE
from .world import Scope


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
    #: address of the broker for runs' Pods; "": that of its Service
    broker_url: str = ""
    #: host:port at which other replicas reach this one's broker; "": they can't pass callers on to it
    advertised: str = ""
    #: names and addresses that the broker's certificate is good for, beside those of its Service
    names: tuple[str, ...] = ()
    #: calls to the API server under way at once
    in_flight: int = 64
    timing: Timing = field(default_factory=Timing)
    #: between two lists that put right what the watches missed
    resync_seconds: float = 600.0
    #: silence of all watches after which the process counts as hung
    silence_seconds: float = 60.0

    @property
    def service(self) -> str:
        """Name of the broker's Service; its certificate is good for it, wherever the broker is reached."""
        return f"tapforge-broker.{self.namespace}.svc"

    @property
    def broker(self) -> str:
        """Where runs' Pods find the broker."""
        return self.broker_url or f"https://{self.service}:8443"


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
