"""The log of a run's driver over its attempts, line by line.

1. Following, a connection that ends or breaks is made again until the Pod has ended, and no line is shown twice or left
   out. A cluster that doesn't answer is borne as by `patience`.
2. It ends with the run, or when the run is suspended.
3. What is gone from the cluster (the Pods of earlier attempts) is gone here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from tapforge_api.cluster import SUBMITTER

from .api import ClusterError, Connection, NotReached
from .patience import Patience, next_status, patiently
from .pods import LogPod
from .status import RunStatus

_POLL: Final = 2.0
#: a log may be silent that long before the connection is made again, seconds
_SILENCE: Final = 60.0
#: how long a run may have no Pod with a log, or that log no line, while it is followed: a queue may hold it for days,
#: seconds
_PATIENCE: Final = 14 * 86400.0
#: how long the log of a Pod that has ended may not be read, seconds
_AWAY: Final = 3600.0
_BAD_REQUEST, _NOT_FOUND = 400, 404


def read_logs(
    connection: Connection,
    status: Callable[[], RunStatus],
    pods: Callable[[], Sequence[LogPod]],
    follow: bool,
) -> Iterator[str]:
    """`pods`: those with a log, by now. A line before each attempt's says which it is."""
    shown: set[str] = set()
    deadline = time.monotonic() + _PATIENCE
    now = status()
    while True:
        found = [pod for pod in (patiently(pods) if follow else pods()) if pod.name not in shown]
        for pod in found:
            shown.add(pod.name)
            yield f"--- attempt {pod.attempt}: Pod {pod.name}"
            if follow:
                yield from _followed(connection, now.namespace, pod, pods)
            else:
                yield from _Log(connection, now.namespace, pod).read(False)
        if not follow or (now.exit_code is not None and not found):
            break
        if time.monotonic() > deadline:
            raise NotReached(f"run {now.name} had no log for {_PATIENCE / 86400:.0f} days")
        time.sleep(_POLL)
        now = next_status(status, now)
    if not shown:
        ended = " They go with the RayJob: spec.cluster.ttlSecondsAfterFinished keeps them longer." * now.finished
        raise ClusterError(
            f"run {now.name} has no logs: it is {now.word or 'not seen by the operator yet'}"
            f"{': ' + now.message if now.message else ''}.{ended}"
        )


def _followed(
    connection: Connection, namespace: str, pod: LogPod, pods: Callable[[], Sequence[LogPod]]
) -> Iterator[str]:
    """To the Pod's end: a stream may end before, cleanly or not. The last one begins when the Pod has ended, so that
    nothing is left out."""
    log = _Log(connection, namespace, pod)
    ended, refused, heard = pod.ended, Patience(), time.monotonic()
    while True:
        try:
            for line in log.read(not ended):
                heard = time.monotonic()
                yield line
            if ended:
                return
            refused.answered()
        except NotReached:
            # The log of a Pod that runs may be silent for long.
            if time.monotonic() - heard > (_AWAY if ended else _PATIENCE):
                raise
        except ClusterError as error:
            if error.code != _BAD_REQUEST:
                refused.bear(error)
            elif ended:  # its container never started
                return
            elif time.monotonic() - heard > _PATIENCE:
                raise
        time.sleep(_POLL)
        if not ended:
            ended = all(one.ended for one in patiently(pods) if one.name == pod.name)
            heard = time.monotonic() if ended else heard


class _Log:
    """Of a Pod, stream after stream."""

    def __init__(self, connection: Connection, namespace: str, pod: LogPod):
        self._connection = connection
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}/log"
        #: the newest second that a line is of, and the lines that were shown since: a stream begins with a second
        self._second = ""
        self._since: Counter[bytes] = Counter()
        #: the last line without a time: what the node says of the log
        self._said = b""

    def read(self, follow: bool) -> Iterator[str]:
        """What was not shown yet. A Pod that is gone has nothing."""
        query = {"container": SUBMITTER, "timestamps": "true", **({"follow": "true"} if follow else {})}
        if self._second:
            query["sinceTime"] = self._second
        again = self._since.copy()
        try:
            with self._connection.lines(self._path, query, _SILENCE) as lines:
                for line in lines:
                    stamp, _, text = line.partition(b" ")
                    second = _second(stamp)
                    if not second:
                        if line == self._said:
                            continue
                        self._said, text = line, line
                    elif again[line]:
                        again[line] -= 1
                        continue
                    if second > self._second:
                        self._second = second
                        self._since.clear()
                    if second == self._second:
                        self._since[line] += 1
                    yield text.decode(errors="replace")
        except ClusterError as error:
            if error.code != _NOT_FOUND:
                raise


def _second(stamp: bytes) -> str:
    """A node writes the offset of its own time zone. In UTC: sinceTime counts in seconds, and texts of one zone can be
    compared. "": it is not a time."""
    try:
        found = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return ""
    return found.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if found.tzinfo else ""
