"""What the operator's flags say of a cluster's network: from where KubeRay and Prometheus come to a run's Pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

NamespaceLabels = Mapping[str, str]

#: where a cluster usually has its Prometheus
MONITORING: Final[NamespaceLabels] = {"kubernetes.io/metadata.name": "monitoring"}


@dataclass(frozen=True, slots=True)
class RunNetwork:
    """What the operator's flags say of a cluster's network."""

    #: False: no policies are made; those that are there stay
    closed: bool = True
    #: of KubeRay's namespace; none: it may be any
    kuberay: NamespaceLabels = field(default_factory=dict)
    #: of the namespaces that reach metrics
    metrics: tuple[NamespaceLabels, ...] = (MONITORING,)


def namespace_labels(text: str) -> dict[str, str]:
    """Of KEY=VALUE, separated by commas; "" for every namespace. Raises ValueError."""
    found: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        key, sign, value = pair.partition("=")
        if not key or not sign:
            raise ValueError(f"{pair!r} is not a namespace label: expected KEY=VALUE, several separated by commas")
        found[key] = value
    return found
