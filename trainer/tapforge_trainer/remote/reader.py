"""The Job whose Pod reads a run's volume (`pods.reader_job`), for as long as a block lasts.

1. A Pod that can't come is not waited for: a Job that failed or is gone ends the wait at once, and Pods that the API
   server refuses end it after `_REFUSED` seconds, with what was said.
2. What was read counts, also where the Job can't be removed: its own deadline and TTL end it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .api import FIELD_MANAGER, ClusterError, Connection, Json, NotReached
from .pods import why_waiting

log = logging.getLogger(__name__)

_NOT_FOUND: Final = 404
_POLL: Final = 1.0
#: until a reader's Pod runs: its image may have to be pulled, seconds
_STARTS: Final = 600.0
#: for which Pods may be refused, seconds: a quota may get free
_REFUSED: Final = 30.0
#: of removing it
_TRIES: Final = 3


@contextmanager
def reader(connection: Connection, namespace: str, job: Json, run: str) -> Iterator[str]:
    """Name of the Job's Pod, which runs. Raises ClusterError."""
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    connection.request("POST", jobs, job, query={"fieldManager": FIELD_MANAGER})
    name = job["metadata"]["name"]
    try:
        yield _running(connection, namespace, name, run)
    finally:
        _remove(connection, f"{jobs}/{name}")


def _running(connection: Connection, namespace: str, name: str, run: str) -> str:
    start = time.monotonic()
    why, subject = "no Pod was made", f"the Pod that reads the volume of {run}"
    while (waited := time.monotonic() - start) < _STARTS:
        try:
            job = connection.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}")
        except ClusterError as error:
            if error.code != _NOT_FOUND:
                raise
            raise ClusterError(f"{subject} did not start: its Job {name} is gone; {why}") from error
        selector = f"batch.kubernetes.io/job-name={name}"
        pods = connection.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)["items"]
        for pod in pods:
            if (pod.get("status") or {}).get("phase") == "Running":
                return str(pod["metadata"]["name"])
            why = why_waiting(pod)
        refused = "" if pods else _refused(connection, namespace, name)
        why = refused or why
        failed = [one for one in (job.get("status") or {}).get("conditions") or () if one["type"] == "Failed"]
        if any(one["status"] == "True" for one in failed):
            said = f"{failed[0].get('reason', '')} {failed[0].get('message', '')}".strip()
            raise ClusterError(f"{subject} did not start: its Job failed ({said}); {why}")
        if refused and waited > _REFUSED:
            raise ClusterError(f"{subject} can't be made: {why}")
        time.sleep(_POLL)
    raise ClusterError(f"{subject} did not start in {_STARTS:g} s: {why}")


def _refused(connection: Connection, namespace: str, name: str) -> str:
    """Why no Pod could be made; "" where nothing says so."""
    chosen = f"involvedObject.kind=Job,involvedObject.name={name},reason=FailedCreate"
    try:
        events = connection.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=chosen)["items"]
    except ClusterError as error:
        log.debug("Events can't be read: %s", error)  # the wait has an end without them
        return ""
    return str(events[-1].get("message", "")) if events else ""


def _remove(connection: Connection, path: str) -> None:
    for tries_left in reversed(range(_TRIES)):
        try:
            connection.request("DELETE", path, {"propagationPolicy": "Background"})
            return
        except ClusterError as error:
            if error.code == _NOT_FOUND:
                return
            if isinstance(error, NotReached) and tries_left:
                time.sleep(_POLL)
                continue
            log.warning("%s is left to end by itself: %s", path.rpartition("/")[2], error)
            return
