"""Whether the cluster took a Pod away, in the Pod's own words. Pure.

The condition `DisruptionTarget` (Kubernetes 1.26 and newer) is believed; otherwise the status' reason counts, as
kubelets write it. `Evicted` alone may also mean that the Pod used more than its own limit of storage: that would happen
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: reasons of a Pod's status: its node was shut down, or its room was needed
DISRUPTIONS: Final = frozenset({"Preempting", "Terminated", "NodeShutdown", "Shutdown", "NodeLost"})

_CONDITION: Final = "DisruptionTarget"
_EVICTED: Final = "Evicted"
#: of each message about a Pod's own limit: "exceeds the limit", "exceeded its local ephemeral storage limit"
_OWN_LIMIT: Final = "exceed"
_WORD: Final = 128
_WORDS: Final = 1000


def disruption(pod: Mapping[str, Any]) -> tuple[str, str]:
    """(reason as one word, message for people) of a Pod that was or is being taken away; ("", "") of any other."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == _CONDITION and condition.get("status") == "True":
            return (condition.get("reason") or _CONDITION)[:_WORD], (condition.get("message") or "")[:_WORDS]
    reason, message = status.get("reason") or "", (status.get("message") or "")[:_WORDS]
    evicted = reason == _EVICTED and _OWN_LIMIT not in message
    return (reason, message) if evicted or reason in DISRUPTIONS else ("", "")
