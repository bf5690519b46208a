"""The Job that reads a volume, and where a run's files are read. The API server's answers are the test's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.api import NotReached
from tapforge_trainer.remote.cluster import Run
from tapforge_trainer.remote.reader import reader

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "run-volume.yaml"
JOB = {"metadata": {"name": "run-fetch"}}
RUNS = {"metadata": {"name": "reader"}, "status": {"phase": "Running"}}
Answers = dict[str, Any]


class Server:
    """`answers`: by the last part of a path; an error is raised."""

    def __init__(self, answers: Answers):
        self.answers = {"jobs": {}, "run-fetch": {}, "pods": {"items": []}, "events": {"items": []}, **answers}
        self.asked: list[str] = []
        self.programs: list[str] = []

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        last = path.rpartition("/")[2]
        self.asked.append(f"{method} {last}")
        answer = self.answers.get(f"{method} {last}", self.answers.get(last, {}))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get(self, path: str, **_: str) -> Any:
        return self.request("GET", path)

    @contextmanager
    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[str]:
        self.programs.append(pod)
        yield pod


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.remote.reader._POLL", 0.0)
    monkeypatch.setattr("tapforge_trainer.remote.reader._REFUSED", 0.0)


def _read(server: Server) -> str:
    with reader(server, "lab", JOB, "run lab/run") as pod:  # type: ignore[arg-type]
        return pod


@pytest.mark.parametrize("error, tries", [(NotReached("not now", 503), 3), (ClusterError("forbidden", 403), 1)])
def test_a_job_that_can_not_be_removed_spoils_nothing(
    error: ClusterError, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server({"pods": {"items": [RUNS]}, "DELETE run-fetch": error})
    with caplog.at_level(logging.WARNING):
        assert _read(server) == "reader"
    assert server.asked.count("DELETE run-fetch") == tries
    assert "run-fetch is left to end by itself" in caplog.text


FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}
ENDED = {"state": {"terminated": {"reason": "StartError", "message": "sleep: not found"}}}


@pytest.mark.parametrize(
    "answers, said",
    [
        ({"events": {"items": [{"message": "exceeded quota: team"}]}}, "can't be made: exceeded quota: team"),
        ({"GET run-fetch": ClusterError("not found", 404)}, "its Job run-fetch is gone"),
        (
            {
                "GET run-fetch": FAILED,
                "pods": {"items": [{"status": {"phase": "Failed", "containerStatuses": [ENDED]}}]},
            },
            r"its Job failed \(BackoffLimitExceeded\); StartError sleep: not found",
        ),
    ],
)
def test_a_pod_that_can_not_come_is_not_waited_for(answers: Answers, said: str) -> None:
    server = Server(answers)
    with pytest.raises(ClusterError, match=said):
        _read(server)
    assert server.asked[-1] == "DELETE run-fetch"


# --- the place of the files -------------------------------------------------------------------------------------------


def _head(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "creationTimestamp": "2026", "labels": {"ray.io/node-type": "head"}},
        "status": {"phase": "Running", "containerStatuses": [{"name": "ray", "state": {"running": {}}}]},
    }


def _run(server: Server, uid: str = "u-1") -> Run:
    found: dict[str, Any] = next(one for one in yaml.safe_load_all(SAMPLE.read_text()) if one["kind"] == "TrainingRun")
    server.answers["run"] = {**found, "metadata": {"name": "run", "namespace": "lab", "uid": uid}}
    return Run(server, "run", "lab")  # type: ignore[arg-type]


def _breaks(program: Callable[[Sequence[str]], Any]) -> None:
    with pytest.raises(NotReached), program(["send"]):
        raise NotReached("the connection broke")


def test_files_come_from_the_next_head_once_the_first_is_gone() -> None:
    server = Server({"pods": {"items": [_head("first")]}, "first": _head("first")})
    with _run(server)._programs("u-1") as program:
        _breaks(program)
        _breaks(program)  # the Pod is still there
        server.answers |= {"pods": {"items": [_head("second")]}, "first": ClusterError("not found", 404)}
        with program(["list"]):
            pass
    assert server.programs == ["first", "first", "second"]


def test_files_of_another_run_of_that_name_are_not_mixed_in() -> None:
    server = Server({"pods": {"items": [_head("first")]}, "first": ClusterError("not found", 404)})
    run = _run(server)
    with run._programs("u-1") as program:
        _breaks(program)
        _run(server, uid="u-2")
        with pytest.raises(ClusterError, match="was deleted, and another one of that name is there now"), program([]):
            pass
