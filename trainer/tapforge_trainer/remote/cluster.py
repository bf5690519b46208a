"""A cluster and its runs: the functions of `tapforge cluster`, for programs and notebooks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tapforge_api import Source, TrainingRun, read_run
from tapforge_api.cluster import RAY
from tapforge_api.training_run import RunMetadata

from .api import FIELD_MANAGER, MERGE, SECONDS, ClusterError, Connection, Exec, Json, NotReached, Refused, nearest
from .events import START, EventOffset, read_on
from .fetch import Fetched, Report, chosen, fetch_checkpoint, fetch_files, fetched
from .logs import read_logs
from .patience import next_status
from .pods import READER, RUN_UID_LABEL, log_pods, reader_job, running_head
from .reader import reader
from .status import RunStatus, status_of
from .submit import Applied, apply, read
from .target import Target, opened

if TYPE_CHECKING:
    from rich.console import Console

_GROUP: Final = "/apis/tapforge.dev/v1alpha1"
_NOT_FOUND: Final = 404
#: between two requests, seconds
_POLL: Final = 2.0


class Cluster:
    """A namespace of a cluster. `context`: of the kubeconfig, without it the current one, or in a Pod without a
    kubeconfig the Pod's own cluster; `namespace`: without it the context's. Raises ClusterError."""

    def __init__(self, context: str | None = None, namespace: str | None = None):
        self._connection = Connection(context, namespace)
        self._given = namespace

    @property
    def namespace(self) -> str:
        return self._connection.namespace

    def submit(self, file: Source, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Run:
        """Applies a file: its run, and what stands beside it. `overrides`: as --set, or as {path: value}. A run that is
        there already is changed as far as runs can be. Raises SpecError, ClusterError."""
        return self.apply(file, overrides)[0]

    def apply(self, file: Source, overrides: Sequence[str] | Mapping[str, Any] = ()) -> tuple[Run, tuple[Applied, ...]]:
        """As `submit`; also says what became of each object."""
        if isinstance(overrides, Mapping):
            overrides = [f"{path}={json.dumps(value)}" for path, value in overrides.items()]
        run, objects = read(file, overrides, self._given, self.namespace)
        done = apply(self._connection, objects)
        return Run(self._connection, run.metadata.name, objects[-1]["metadata"]["namespace"]), tuple(done)

    def run(self, name: str) -> Run:
        """One that is there. Raises ClusterError with the nearest names."""
        found = Run(self._connection, name, self.namespace)
        found.status()
        return found

    def runs(self) -> list[RunStatus]:
        """Of the namespace, the newest last."""
        items = self._connection.get(f"{_GROUP}/namespaces/{self.namespace}/trainingruns")["items"]
        return sorted((status_of(one) for one in items), key=lambda one: (one.created, one.name))


class Run:
    """A run on a cluster. Every method asks the cluster anew, and raises ClusterError."""

    def __init__(self, connection: Connection, name: str, namespace: str):
        self._connection = connection
        self.name = name
        self.namespace = namespace
        self._path = f"{_GROUP}/namespaces/{namespace}/trainingruns/{name}"

    def __repr__(self) -> str:
        return f"Run({self.namespace}/{self.name})"

    def __str__(self) -> str:
        return f"run {self.namespace}/{self.name}"

    # --- how it is ----------------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        return status_of(self._object())

    def wait(self, seconds: float = 30 * 86400.0) -> RunStatus:
        """Until it is complete, has failed, or is suspended; at most so long. Returns what it is then. Once it
        was found, a cluster that doesn't answer for a while ends nothing."""
        end = time.monotonic() + seconds
        status = self.status()
        while status.exit_code is None:
            if time.monotonic() > end:
                raise ClusterError(f"{self} has not ended within {seconds:g} s: it is {status.word}, {status.message}")
            time.sleep(_POLL)
            status = next_status(self.status, status, end)
        return status

    def watch(self, console: Console | None = None) -> RunStatus:
        """Shows the live view of `tapforge run` until the run ends."""
        from rich.console import Console

        from .watch import watch

        return watch(self, console or Console())

    def logs(self, follow: bool = False, attempt: int | None = None) -> Iterator[str]:
        """Lines of the driver's log, attempt after attempt."""

        def pods() -> list[Any]:
            return log_pods(self._pods(), attempt)

        return read_logs(self._connection, self.status, pods, follow)

    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary for each update: `update`, and its figures by the names that trackers get (docs/loggers.md). An
        update that was made again after a crash is there once, as it was made last."""
        from ..loggers.figures import figures_of

        events: list[Mapping[str, Any]] = []
        place = START
        with self._files_at() as pod:
            while True:
                found, end = read_on(lambda words: self._program(pod, words), place)
                events += found
                if end.offset == place.offset and not found:
                    break
                place = end
        rows = {event["update"]: figures_of(event) for event in events if event["event"] == "update"}
        return [{"update": update, **figures} for update, figures in sorted(rows.items())]

    def events(self, place: EventOffset = START) -> tuple[list[Mapping[str, Any]], EventOffset]:
        """Lines of events.jsonl from a place on, and where they end: while a driver's Pod runs."""
        head = running_head(self._pods())
        if head is None:
            raise NotReached(f"{self} has no Pod that runs")
        return read_on(lambda words: self._program((head, RAY), words), place)

    # --- what can be changed ------------------------------------------------------------------------------------------

    def suspend(self, wait: float = 0.0) -> RunStatus:
        """Asks for a checkpoint, and for its phones and machines back. `wait`: until that is done, seconds at most."""
        return self._suspend(True, wait)

    def resume(self, wait: float = 0.0) -> RunStatus:
        """`wait`: until it is running again, seconds at most."""
        return self._suspend(False, wait)

    def _suspend(self, suspend: bool, wait: float) -> RunStatus:
        status = self.status()
        if status.finished:
            raise ClusterError(f"{self} is {status.word or 'over'}: it can't be suspended or resumed any more")
        if not suspend and status.judges_spent:
            raise ClusterError(f"{self} can't go on yet: {status.message}")
        body = {"spec": {"suspend": suspend}}
        self._connection.request("PATCH", self._path, body, query={"fieldManager": FIELD_MANAGER}, kind=MERGE)
        end = time.monotonic() + wait
        status = next_status(self.status, status, max(end, time.monotonic() + SECONDS))
        while not _arrived(status, suspend) and time.monotonic() < end:
            time.sleep(_POLL)
            status = next_status(self.status, status, end)
        if wait and not _arrived(status, suspend):
            asked = "suspended" if suspend else "running"
            raise ClusterError(f"{self} is not {asked} within {wait:g} s: it is {status.word}, {status.message}")
        return status

    # --- its files ----------------------------------------------------------------------------------------------------

    def fetch(self, to: str | Path = "runs", what: Sequence[str] = (), report: Report | None = None) -> Fetched:
        """Brings the newest checkpoint with the exported model, the summary and the recording to the folder `to`/NAME,
        which `tapforge view` reads. `what`: summary, replay, checkpoint; without it all. `report`: is called with the
        bytes that are there and those in all."""
        wanted, found = chosen(what), self._object()
        self._started(found)
        with opened(Path(to) / self.name, found["metadata"]["uid"]) as target:
            paths = self._bring(found, target, wanted, report or (lambda there, total: None))
            if not paths:
                target.discard()
                raise ClusterError(f"{self} has nothing of {', '.join(wanted)} yet: it is {status_of(found).word}")
            target.publish(wanted, paths)
            return fetched(target.folder, paths, wanted)

    def _bring(self, found: Json, target: Target, wanted: Sequence[str], report: Report) -> set[str]:
        """Returns the paths that are in the partial folder."""
        from ..storage.object_storage import StorageError

        elsewhere = self._spec(found).spec.checkpoints.uri
        paths: set[str] = set()
        if elsewhere is not None and "checkpoint" in wanted:
            uri = f"{elsewhere.rstrip('/')}/{self.namespace}/{found['metadata']['uid']}/{self.name}"
            try:
                paths |= fetch_checkpoint(uri, target, report)
            except (StorageError, ImportError) as error:
                raise ClusterError(
                    f"the checkpoints of {self} are in {uri}, and this machine can't read them: {error}. Give it "
                    "credentials for the bucket (docs/checkpoints.md), or leave them out: --what summary --what replay"
                ) from error
        inside = tuple(one for one in wanted if one != "checkpoint" or elsewhere is None)
        if inside:
            with self._programs(found["metadata"]["uid"]) as program:
                paths |= fetch_files(program, target, inside, report)
        return paths

    @contextmanager
    def _programs(self, uid: str) -> Iterator[Callable[[Sequence[str]], AbstractContextManager[Exec]]]:
        """Runs `cluster/files.py` where the files of the run of that UID are: elsewhere, once a Pod is gone."""
        with ExitStack() as places:
            place: tuple[str, str] | None = None
            broke = False

            @contextmanager
            def program(words: Sequence[str]) -> Iterator[Exec]:
                nonlocal place, broke
                if place is not None and broke and not self._there(place[0]):
                    place = None
                    places.close()
                if place is None:
                    place = places.enter_context(self._files_at(uid))
                broke = True
                with self._program(place, words) as answer:
                    yield answer
                broke = False

            yield program

    def _there(self, pod: str) -> bool:
        try:
            found = self._connection.get(f"/api/v1/namespaces/{self.namespace}/pods/{pod}")
        except ClusterError as error:
            if error.code == _NOT_FOUND:
                return False
            raise
        return found["status"].get("phase") == "Running" and "deletionTimestamp" not in found["metadata"]

    @contextmanager
    def _files_at(self, uid: str = "") -> Iterator[tuple[str, str]]:
        """A Pod, and a container of it, that has the run's files until the block ends. `uid`: of no other run."""
        found = self._object()
        mine = found["metadata"]["uid"]
        if uid not in ("", mine):
            raise ClusterError(f"{self} was deleted, and another one of that name is there now: fetch that one anew")
        head = running_head(self._pods(f"{RUN_UID_LABEL}={mine}"))
        if head is not None:
            yield head, RAY
            return
        self._started(found)
        run = self._spec(found)
        if run.spec.checkpoints.storage is None:
            raise ClusterError(
                f"what {self} kept was lost with its Ray cluster: spec.checkpoints.storage names a volume that stays"
            )
        with reader(self._connection, self.namespace, reader_job(run, self.namespace, mine), str(self)) as pod:
            yield pod, READER

    def _program(self, place: tuple[str, str], words: Sequence[str]) -> Any:
        command = ["python3", "-m", "tapforge_trainer.cluster.files", *words]
        return self._connection.execute(self.namespace, *place, command)

    # --- objects ------------------------------------------------------------------------------------------------------

    def _object(self) -> Json:
        try:
            return self._connection.get(self._path)
        except ClusterError as error:
            if error.code != _NOT_FOUND:
                raise
        group = f"{_GROUP}/namespaces/{self.namespace}/trainingruns"
        try:
            known = [one["metadata"]["name"] for one in self._connection.get(group)["items"]]
        except ClusterError as error:
            if error.code == _NOT_FOUND:
                raise ClusterError(
                    f"{self._connection.where} knows no TrainingRuns: install tapforge's operator there", _NOT_FOUND
                ) from error
            raise
        hint = nearest(self.name, known) if known else "there is none; is it in another one (-n NAMESPACE)?"
        raise Refused(f"there is no run {self.name} in namespace {self.namespace}; {hint}", _NOT_FOUND)

    def _started(self, found: Json) -> None:
        if not (found.get("status") or {}).get("startTime"):
            raise ClusterError(f"{self} has not started yet: it is {status_of(found).word or 'new'}")

    def _spec(self, found: Json) -> TrainingRun:
        reading = read_run(found)
        if reading.spec is None:
            raise ClusterError(f"the spec of {self} can't be read by this release: {reading.message}")
        return TrainingRun(metadata=RunMetadata(name=self.name, namespace=self.namespace), spec=reading.spec)

    def _pods(self, selector: str = "") -> list[Json]:
        """Its own, or those of a selector."""
        selector = selector or f"{RUN_UID_LABEL}={self._object()['metadata']['uid']}"
        return self._connection.get(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)["items"]


def _arrived(status: RunStatus, suspend: bool) -> bool:
    if suspend:
        return status.suspended or status.finished
    return status.finished or (not status.suspend and status.word == "Running")
