"""Whether a holder that is silent is still there, by what the API server says of its Pod.

1. Only what the API server says counts, never its silence: a question without an answer is not evidence.
2. A Pod is gone when there is none of its name with its UID; it has ended by its phase, and stopped when its node said
   so of every container in it; it is cut off when its node is lost.
3. A Pod that may not be read (any more) says nothing, and neither does what is not the name of a Pod: any client may
   write records that can't be proved.
4. Where nodes aren't watched, a lost node is found out by what it leaves of the Pod, twice: the node controller has
   taken its readiness away, which a kubelet does only together with that of its containers (`ContainersReady`); or it
   was to be deleted, and its grace is over. It has to look so for `CUT_OFF_SECONDS` without an answer that it does not
   and without a question that failed (a refusal is an answer, and says nothing of other Pods), and another node has to
   have a Pod that is ready: where all are silent at once, what died is the way to them.

Times are seconds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tapforge_operator.broker.writer import Api
from tapforge_operator.kube.client import ApiError, path

log = logging.getLogger(__name__)

#: as long as a node is silent before it counts as lost where nodes are watched
CUT_OFF_SECONDS: Final = 30.0
#: of a Pod that is to be deleted and doesn't say so itself; Kubernetes' own
_GRACE: Final = 30.0
_NAME: Final = re.compile(r"([a-z0-9][a-z0-9.-]*)/([a-z0-9][a-z0-9.-]*)/([A-Za-z0-9-]+)")


@dataclass(frozen=True, slots=True)
class Gone:
    """Evidence that a holder is not there any more."""

    why: str
    #: its node said so: nothing in it acts any more. Otherwise it may only be out of reach
    stopped: bool


def pod_name(namespace: str, name: str, uid: str) -> str:
    """As it is written in a claim's record."""
    return f"{namespace}/{name}/{uid}"


class Evidence:
    def __init__(self, api: Api, lost: Callable[[str], bool], elsewhere: Callable[[str], bool] | None = None):
        """`lost` knows nodes by name; `elsewhere`, where they aren't watched, whether another one has a ready Pod."""
        self._api = api
        self._lost = lost
        self._elsewhere = elsewhere
        #: since when Pods have looked cut off
        self._since: dict[str, float] = {}

    def forget_others(self, pods: Collection[str]) -> None:
        """Holders that are not in question any more."""
        self._since = {pod: since for pod, since in self._since.items() if pod in pods}

    async def of(self, pod: str, clock: Callable[[], float]) -> Gone | None:
        """None: it is there, or that is unknown."""
        if (named := _NAME.fullmatch(pod)) is None:
            return None
        namespace, name, uid = named.groups()
        try:
            found = await self._api.get(path("pods", namespace, name))
        except ApiError as error:
            if error.status == 404:
                return Gone(f"its holder's Pod {namespace}/{name} is gone", stopped=False)
            log.warning("whether Pod %s/%s still holds claims can't be read: %s", namespace, name, error)
            if error.passing:  # the Pod was not watched
                self._since.clear()
            self._since.pop(pod, None)
            return None
        if found["metadata"]["uid"] != uid:
            return Gone(f"its holder's Pod {namespace}/{name} is another one by now", stopped=False)
        node = (found.get("spec") or {}).get("nodeName") or ""
        status = found.get("status") or {}
        if status.get("phase") in ("Succeeded", "Failed"):
            return Gone(f"its holder's Pod {namespace}/{name} has ended", stopped=_stopped(status))
        if node and self._lost(node):
            return Gone(f"its holder's Pod {namespace}/{name} is on the lost node {node}", stopped=False)
        if node and self._elsewhere is not None and self._cut_off(pod, found, clock()) and self._elsewhere(node):
            why = f"its holder's Pod {namespace}/{name} is cut off: its node {node} says nothing of it any more"
            return Gone(why, stopped=False)
        return None

    def _cut_off(self, pod: str, found: Mapping[str, Any], now: float) -> bool:
        wait = looks_cut_off(found)
        if wait is None:
            self._since.pop(pod, None)
            return False
        return now - self._since.setdefault(pod, now) >= wait


def looks_cut_off(pod: Mapping[str, Any]) -> float | None:
    """For how long a Pod has to look as it does, until its node counts as lost; None: it looks as if its node spoke."""
    if "deletionTimestamp" in pod["metadata"]:
        grace = pod["metadata"].get("deletionGracePeriodSeconds")
        return CUT_OFF_SECONDS + (_GRACE if grace is None else float(grace))
    conditions = {c.get("type"): c.get("status") for c in (pod.get("status") or {}).get("conditions") or ()}
    # With gates of its own a Pod is also unready by the word of others.
    gates = (pod.get("spec") or {}).get("readinessGates")
    marked = conditions.get("Ready") == "False" and conditions.get("ContainersReady") == "True" and not gates
    return CUT_OFF_SECONDS if marked else None


def _stopped(status: Mapping[str, Any]) -> bool:
    """Its node said so: another client may have written the phase."""
    containers = status.get("containerStatuses") or ()
    return bool(containers) and all("terminated" in (c.get("state") or {}) for c in containers)
