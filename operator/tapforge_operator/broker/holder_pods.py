"""Whether a silent holder is still there: what the API server says of its Pod.

1. Only what the API server says counts, never its silence: a question without an answer is no evidence.
2. A Pod is gone when there is none of its name with its UID; it has ended by its phase, and stopped when its node said
   so of every container in it; it is cut off when its node is lost.
3. A Pod that may not be read (any more) says nothing.

Questions go to the API server one by one, each with the client's deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..kube.client import ApiError, path
from .writes import Api

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gone:
    """Evidence that a holder is not there any more."""

    why: str
    #: its node said so: nothing in it acts any more. Otherwise it may only be out of reach
    stopped: bool


def pod_name(namespace: str, name: str, uid: str) -> str:
    """As it is written in a claim's record."""
    return f"{namespace}/{name}/{uid}"


async def evidence(api: Api, pod: str, lost: Callable[[str], bool]) -> Gone | None:
    """None: it is there, or nobody can say. `lost` knows nodes by name."""
    namespace, name, uid = pod.split("/")
    try:
        found = await api.get(path("pods", namespace, name))
    except ApiError as error:
        if error.status == 404:
            return Gone(f"its holder's Pod {namespace}/{name} is gone", stopped=False)
        log.warning("whether Pod %s/%s still holds claims can't be read: %s", namespace, name, error)
        return None
    if found["metadata"]["uid"] != uid:
        return Gone(f"its holder's Pod {namespace}/{name} is another one by now", stopped=False)
    node = (found.get("spec") or {}).get("nodeName") or ""
    status = found.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return Gone(f"its holder's Pod {namespace}/{name} has ended", stopped=_stopped(status))
    if node and lost(node):
        return Gone(f"its holder's Pod {namespace}/{name} is on the lost node {node}", stopped=False)
    return None


def _stopped(status: Mapping[str, Any]) -> bool:
    """Its node said so: somebody else may have written the phase."""
    containers = status.get("containerStatuses") or ()
    return bool(containers) and all("terminated" in (c.get("state") or {}) for c in containers)
