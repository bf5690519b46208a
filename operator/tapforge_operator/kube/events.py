"""Events (core/v1): what `kubectl describe` shows below an object of ours.

1. An Event that can't be written is a warning in the log and nothing else: no decision rests on Events.
2. Each call makes one Event. A caller that reports a state, and not a change of it, reports it again with every call.

The caller checks first whether this process leads, as for every write.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Final

from tapforge_api.base import API_VERSION
from tapforge_operator import labels
from tapforge_operator.kube.client import ApiError, Client, path
from tapforge_operator.kube.objectmeta import timestamp
from tapforge_operator.kube.types import Event, Reference

log = logging.getLogger(__name__)

_DEADLINE: Final = 5.0
#: the API server refuses more than 1024 characters
_MAX_MESSAGE: Final = 1000


async def record(client: Client, about: Reference, event: Event) -> None:
    """Writes the Event into the namespace of the object."""
    now = time.time()
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about.name}.{labels.digest(about.uid, event.reason, now)}",
            "namespace": about.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MAX_MESSAGE],
        "source": {"component": labels.OPERATOR},
        "reportingComponent": labels.OPERATOR,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
    try:
        await client.create(path("events", about.namespace), body, deadline=_DEADLINE)
    except ApiError as error:
        log.warning("an Event could not be written: %s", error, extra={"ref": asdict(about)})
