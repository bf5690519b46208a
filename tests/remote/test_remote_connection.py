"""What an API server does at its worst, on a real connection: it is played, because one that ends streams, refuses
tokens and goes away at the right moment can't be had."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import CliRunner

from tapforge_api import load
from tapforge_trainer.cli.cluster import cluster as cluster_command
from tapforge_trainer.cluster.files import events
from tapforge_trainer.remote import Cluster, ClusterError, Run
from tapforge_trainer.remote.api import Connection, NotReached
from tapforge_trainer.remote.events import START, EventOffset, read_on

#: code, and the answer: JSON or the text of a log
Answer = tuple[int, Any]
RUNS = "/apis/tapforge.dev/v1alpha1/namespaces/lab/trainingruns/run"
SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
PODS = "/api/v1/namespaces/lab/pods"
LOG = f"{PODS}/driver/log"


class Server:
    """Answers each path with the next of its answers, and the last one again and again."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, str, dict[str, list[str]], str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                server.asked.append((self.command, url.path, parse_qs(url.query), self.headers["authorization"]))
                left = server.answers.get(url.path) or [(404, {"message": "not found"})]
                code, body = left.pop(0) if len(left) > 1 else left[0]
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_PATCH = do_GET

            def log_message(self, format: str, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def times(self, path: str) -> int:
        return sum(asked == path for _, asked, _, _ in self.asked)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for module in ("patience", "cluster", "logs"):
        monkeypatch.setattr(f"tapforge_trainer.remote.{module}._POLL", 0.0)
    monkeypatch.setattr("tapforge_trainer.remote.api._PAUSE", 0.0)
    monkeypatch.setattr("tapforge_trainer.remote.api._TRIES", 1)
    found = Server()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    login(tmp_path, found.url, "first")
    yield found
    found.close()


def login(folder: Path, url: str, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}],
        "current-context": "lab",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


def run(uid: str = "u", suspend: bool = False, **true: bool) -> Answer:
    conditions = [{"type": kind, "status": str(holds), "reason": kind} for kind, holds in true.items()]
    about = {"name": "run", "namespace": "lab", "uid": uid, "generation": 1}
    return 200, {
        "metadata": about,
        "spec": {"suspend": suspend},
        "status": {"observedGeneration": 1, "conditions": conditions},
    }


def pods(phase: str) -> Answer:
    labels = {"tapforge.dev/attempt": "1"}
    about = {"name": "driver", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    pod = {"metadata": about, "spec": {"containers": [{"name": "ray-job-submitter"}]}, "status": {"phase": phase}}
    return 200, {"items": [pod]}


AGAIN = ("1+02:00 one", "3+02:00 two", "2+02:00 late", "3+02:00 two")
AWAY: Answer = (503, {"message": "starting"})


def remote() -> Run:
    return Run(Connection(), "run", "lab")


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_followed_to_the_end_of_its_pod_though_streams_end_before(server: Server) -> None:
    server.answers = {
        RUNS: [run(), run(), AWAY, run(), run(Complete=True)],
        PODS: [pods("Running"), AWAY, pods("Running"), pods("Succeeded")],
        LOG: [
            (200, "2026-01-01T12:00:00.1+02:00 one\n2026-01-01T12:00:00.3+02:00 two\n"),
            # what was shown of that second comes again, with a line that was written later under an earlier time
            (
                200,
                "".join(f"2026-01-01T12:00:00.{line}\n" for line in AGAIN),
            ),
            (200, "2026-01-01T10:00:01Z three\n"),
        ],
    }
    lines = list(remote().logs(follow=True))
    assert lines == ["--- attempt 1: Pod driver", "one", "two", "late", "two", "three"]
    since = [query.get("sinceTime") for _, path, query, _ in server.asked if path == LOG]
    assert since == [None, ["2026-01-01T10:00:00Z"], ["2026-01-01T10:00:00Z"]]


def test_a_pod_that_goes_before_its_first_line_ends_no_following(server: Server) -> None:
    server.answers = {RUNS: [run(), run(), run(Complete=True)], PODS: [pods("Running"), (200, {"items": []})]}
    assert list(remote().logs(follow=True)) == ["--- attempt 1: Pod driver"]


def test_a_log_that_can_not_be_read_is_not_followed_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.remote.logs._AWAY", 0.0)
    server.answers = {RUNS: [run(Complete=True)], PODS: [pods("Running"), pods("Succeeded")], LOG: [AWAY]}
    with pytest.raises(NotReached, match="answers 503"):
        list(remote().logs(follow=True))
    monkeypatch.setattr("tapforge_trainer.remote.patience._AWAY", 0.0)
    server.answers |= {PODS: [pods("Running"), AWAY]}
    with pytest.raises(NotReached, match="answers 503"):
        list(remote().logs(follow=True))


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_an_api_server_that_restarts_ends_no_waiting(server: Server) -> None:
    refused = (403, {"message": "no rights yet"})
    server.answers = {RUNS: [run(), AWAY, refused, AWAY, run(Complete=True)]}
    assert remote().wait().complete
    # The request to suspend goes to the same path: it is the second answer.
    stopped = run(suspend=True, Suspended=True)
    server.answers = {RUNS: [run(), run(), AWAY, run(), AWAY, refused, stopped]}
    assert remote().suspend(wait=60).suspended


def test_a_run_whose_judges_have_spent_their_budget_is_not_resumed_but_given_more(server: Server) -> None:
    status = {"observedGeneration": 1, "message": "raise spec.stop.judgeTokens, which is 10"}
    reasons = (("Ready", "JudgeBudgetSpent"), ("Suspended", "JudgeBudgetSpent"))
    conditions = [{"type": kind, "status": "True", "reason": reason} for kind, reason in reasons]
    code, body = run()
    server.answers = {RUNS: [(code, {**body, "status": {**status, "conditions": conditions}})]}
    with pytest.raises(ClusterError, match=r"can't go on yet: raise spec.stop.judgeTokens"):
        remote().resume()


def test_another_run_of_the_same_name_is_not_waited_for(server: Server) -> None:
    server.answers = {RUNS: [run(), run(uid="other", Complete=True)]}
    with pytest.raises(ClusterError, match="was deleted, and made again"):
        remote().wait()


def test_waiting_ends_in_time_also_while_the_server_is_away(server: Server) -> None:
    server.answers = {RUNS: [run(), AWAY]}
    with pytest.raises(NotReached):
        remote().wait(0.2)


# --- programs in Pods -------------------------------------------------------------------------------------------------

EXEC = f"{PODS}/ip-10-1-4-03-403/exec"


def execute(connection: Connection) -> None:
    with connection.execute("lab", "ip-10-1-4-03-403", "ray", ["true"]):
        pass


def test_what_the_server_says_to_a_program_is_told_by_its_status(server: Server) -> None:
    server.answers = {EXEC: [(500, {"message": "error 403 of the node"})]}
    with pytest.raises(NotReached, match="500.*error 403 of the node"):
        execute(Connection())
    server.answers = {EXEC: [(403, {"message": "no"})]}
    with pytest.raises(ClusterError, match=r"forbidden \(pods/exec\)") as caught:
        execute(Connection())
    assert caught.value.code == 403


def test_credentials_that_a_program_needs_are_read_again_once(server: Server, tmp_path: Path) -> None:
    connection = Connection()
    login(tmp_path, server.url, "second")
    server.answers = {EXEC: [(401, {"message": "Unauthorized"})]}
    with pytest.raises(ClusterError, match="log in again") as caught:
        execute(connection)
    assert caught.value.code == 401
    assert [token for *_, token in server.asked] == ["Bearer first", "Bearer second"]


def test_ctrl_c_while_a_program_is_reached_is_no_error_of_the_cluster(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("websocket.WebSocket.connect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(Connection())


# --- events -----------------------------------------------------------------------------------------------------------


def _program(folder: Callable[[], Path]) -> Any:
    """The Pod's own, on this machine."""

    @contextmanager
    def program(words: Sequence[str]) -> Iterator[Any]:
        out = io.BytesIO()
        events(folder(), int(words[1]), out)
        out.seek(0)
        out.readline = lambda: io.BytesIO.readline(out)[:-1]
        yield out

    return program


def test_another_attempts_events_are_read_from_their_beginning(tmp_path: Path) -> None:
    folders = [tmp_path / "attempt-1", tmp_path / "attempt-2"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "events.jsonl").write_text('{"event": "note", "text": "short"}\n')
    (folders[1] / "events.jsonl").write_text('{"event": "note", "text": "a longer first line"}\n' * 2)
    now = folders[0]
    program = _program(lambda: now)
    found, place = read_on(program, START)
    assert [one["text"] for one in found] == ["short"] and read_on(program, place) == ([], place)
    now = folders[1]
    found, place = read_on(program, place)
    assert [one["text"] for one in found] == ["a longer first line"] * 2
    assert place == EventOffset(str(folders[1]), (folders[1] / "events.jsonl").stat().st_size)


def test_lines_that_a_crash_cut_off_are_left_out(tmp_path: Path) -> None:
    lines = (b'{"event": "upda', b"\xff\xfe", b'"text"', b'{"event": "note", "text": "x"}')
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found, _ = read_on(_program(lambda: tmp_path), START)
    assert found == [{"event": "note", "text": "x"}]


# --- submitting -------------------------------------------------------------------------------------------------------


def _submit(server: Server, tmp_path: Path, *answers: Answer) -> list[dict[str, list[str]]]:
    """The queries of the requests that apply the run."""
    runs = {"kind": "TrainingRun", "name": "trainingruns", "namespaced": True}
    path = f"{RUNS.rpartition('/')[0]}/practise-alone"
    server.answers = {"/apis/tapforge.dev/v1alpha1": [(200, {"resources": [runs]})], path: list(answers)}
    run = load(SAMPLES / "run-volume.yaml", ["spec.suspend=true"])
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    Cluster(namespace="lab").submit(file)
    return [query for method, _, query, _ in server.asked if method == "PATCH"]


def _there(version: str) -> Answer:
    return 200, {"metadata": {"name": "practise-alone", "resourceVersion": version}}


def _conflict(manager: str) -> Answer:
    causes = [{"reason": "FieldManagerConflict", "field": ".spec.suspend", "message": f"conflict with {manager}"}]
    return 409, {"message": "Apply failed with 1 conflict", "details": {"causes": causes}}


def test_a_file_takes_back_what_suspend_and_resume_wrote_and_nothing_else(server: Server, tmp_path: Path) -> None:
    ours = _conflict('"tapforge" using tapforge.dev/v1alpha1 at 2026-01-01T00:00:00Z')
    asked = _submit(server, tmp_path, _there("1"), ours, _there("1"), ours, _there("2"))
    assert [query.get("force") for query in asked] == [None, ["true"], None, ["true"]]
    server.asked.clear()
    with pytest.raises(ClusterError, match="others own these fields"):
        _submit(server, tmp_path, _there("1"), _conflict('"kubectl-edit" using tapforge.dev/v1alpha1'))
    assert [query.get("force") for method, _, query, _ in server.asked if method == "PATCH"] == [None]


@pytest.mark.parametrize("metadata", ["null", "text"])
def test_an_object_without_metadata_is_named(server: Server, tmp_path: Path, metadata: str) -> None:
    file = tmp_path / "run.yaml"
    text = (SAMPLES / "run-volume.yaml").read_text()
    file.write_text(f"{text}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {metadata}\n")
    with pytest.raises(ClusterError, match=r"ConfigMap beside the run has no metadata\.name"):
        Cluster(namespace="lab").submit(file)


def test_one_line_on_stdin_is_no_files_name(server: Server) -> None:
    ran = CliRunner().invoke(cluster_command, ["submit", "-f", "-"], input="{kind: TrainingRun, spec: {}}")
    assert ran.exit_code == 2 and "standard input" in ran.output and "No such file" not in ran.output, ran.output


# --- kubeconfigs ------------------------------------------------------------------------------------------------------


def test_a_context_that_is_named_needs_no_current_one(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    del config["current-context"]
    path.write_text(yaml.safe_dump(config))
    assert Cluster("lab").namespace == "lab"
    with pytest.raises(ClusterError, match=r"no current-context: name one \(--context\). There is: lab"):
        Cluster()


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: [", "can't be read"),
        ("hello", "is not a kubeconfig"),
        ("- 1", "is not a kubeconfig"),
        ("contexts: text", "is not a kubeconfig"),
        ("", "is not a kubeconfig"),
        ("contexts: [{name: lab, context: {cluster: c}}]\nclusters: text\ncurrent-context: lab", "can't be used"),
        ("contexts: [{name: lab}]\ncurrent-context: lab", "can't be used"),
    ],
)
def test_what_is_no_kubeconfig_is_said(server: Server, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(ClusterError, match=words):
        Cluster()
