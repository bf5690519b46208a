"""What a Pod of ours may do where its template is silent: nothing. Slots and Ray Pods alike.

1. What the template says stands, field by field: a template that adds a capability still drops all others.
2. Where it is silent: no service-account token, no service environment, the runtime's default seccomp profile; in each
   container no privilege escalation and no capabilities. A privileged container is left as it is.
3. With `non_root` a container has to run as another user than root, as the Pod Security level `restricted` asks. Not
   where the template says that it is root: by its user, or by capabilities, which are of no use to another user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Json = dict[str, Any]

#: what `restricted` lets a container that is not root have
_HARMLESS: Final = frozenset({"NET_BIND_SERVICE"})


def harden(spec: Json, *, non_root: bool) -> None:
    """Completes the spec of a Pod in place."""
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)
    spec["securityContext"] = {"seccompProfile": {"type": "RuntimeDefault"}, **(spec.get("securityContext") or {})}
    for container in [*spec["containers"], *(spec.get("initContainers") or ())]:
        context = container.get("securityContext") or {}
        # The API server refuses a privileged container that may not escalate.
        if not context.get("privileged"):
            context = _unprivileged(context)
            if non_root and not _says_who({**spec["securityContext"], **context}):
                context = {"runAsNonRoot": True, **context}
        container["securityContext"] = context


def _unprivileged(context: Json) -> Json:
    capabilities = {"drop": ["ALL"], **(context.get("capabilities") or {})}
    escalates = "CAP_SYS_ADMIN" in (capabilities.get("add") or ())
    return {**({} if escalates else {"allowPrivilegeEscalation": False}), **context, "capabilities": capabilities}


def _says_who(context: Mapping[str, Any]) -> bool:
    """It is root, or the template has decided whether it may be. `context` of a container, its Pod's where it says
    nothing."""
    powers = set(context["capabilities"].get("add") or ()) - _HARMLESS
    return "runAsNonRoot" in context or context.get("runAsUser") == 0 or bool(powers)
