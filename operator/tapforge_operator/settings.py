"""What the operator is started with. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .kube.election import Timing
from .world import Scope


@dataclass(frozen=True, slots=True)
class Settings:
    #: this process' name in the leader Lease; the same after a restart in place, another one for another Pod
    identity: str
    #: namespace of the operator's own objects: leader Lease, certificate, keys
    namespace: str = "tapforge-system"
    scope: Scope = field(default_factory=Scope)
    host: str = "0.0.0.0"
    broker_port: int = 8443
    health_port: int = 8080
    #: address of the broker for runs' Pods; "": that of its Service
    broker_url: str = ""
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
    def broker(self) -> str:
        """Where runs' Pods find the broker."""
        return self.broker_url or f"https://tapforge-broker.{self.namespace}.svc:8443"
