"""What the operator writes for people's machines, through `tapforge cluster`: how a run is, where its log is, and where
its files are; and the program that hands those out, through the client that fetches them.

Writers: `trainingrun.plan`, `trainingrun.rayjob`, `cluster.status_report`, `cluster.storage`,
`cluster.files`. Readers: `remote`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from brokers_office import more
from operators_part import RUN_FILES, environment, made, pods_of, ray_job, seen, written
from runs_made import NOON, UID, Story, job, lasting
from runs_made import made as made_run

from tapforge_api import TrainingRun
from tapforge_api import attempt as place
from tapforge_api.learning import Stop
from tapforge_api.progress import Progress
from tapforge_operator import labels
from tapforge_trainer.cluster import storage
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.status_report import ending, report_of
from tapforge_trainer.remote.events import START, read_on
from tapforge_trainer.remote.fetch import chosen, fetch_files, fetched
from tapforge_trainer.remote.pods import RUN_UID_LABEL, log_pods, reader_job, running_head
from tapforge_trainer.remote.status import RunStatus, status_of
from tapforge_trainer.remote.target import opened
from tapforge_trainer.run.local_files import folder_of
from tapforge_trainer.run.shutdown import StopReason, StopSignal
from tapforge_trainer.telemetry.progress import Saved
from tapforge_trainer.telemetry.telemetry import ProgressView

# --- how a run is -----------------------------------------------------------------------------------------------------


def said(story: Story) -> RunStatus:
    """Of the object as the operator leaves it in the API server."""
    run = story.run
    return status_of(
        {
            "metadata": {"name": run.name, "namespace": run.namespace, "uid": run.uid, "generation": run.generation},
            "spec": run.spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
            "status": run.status.model_dump(mode="json", by_alias=True),
        }
    )


def test_a_run_that_works_is_shown_as_its_driver_reports() -> None:
    """`progress.Progress` -> `plan_run` -> status -> `status_of`."""
    story = lasting().started()
    advance = {"update": 4, "maxUpdates": 10, "episodes": 64, "success": 0.25, "secondsLeft": 9.0, "policyVersion": 5}
    saved = {"update": 3, "time": "2026-11-20T12:00:00Z", "path": "/storage/update-00000003"}
    story.reports(advance=advance, phase="Training", leases={"wanted": 4, "held": 3}, checkpoint=saved, restarts=2)
    found = said(story)
    assert (found.word, found.phase, found.exit_code, found.finished) == ("Running", "Training", None, False)
    assert (found.update, found.max_updates, found.episodes, found.success) == (4, 10, 64, 0.25)
    assert (found.seconds_left, found.policy_version, found.restarts) == (9.0, 5, 2)
    assert (found.phones_held, found.phones_wanted, found.checkpoint, found.attempt) == (3, 4, 3, 1)


@pytest.mark.parametrize(
    ("state", "message", "code"),
    [
        ("SUCCEEDED/Complete", "", 0),
        ("FAILED/Failed", "exit code 1: boom", 1),
        ("FAILED/Failed", "exit code 2: unknown task", 2),
        ("/ValidationFailed", "name too long", 2),
        ("STOPPED/Complete", "", 1),
    ],
)
def test_a_run_that_is_over_ends_the_command_as_it_would_have_ended_on_a_laptop(
    state: str, message: str, code: int
) -> None:
    """`trainingrun.outcome` -> status -> `RunStatus.exit_code`."""
    story = lasting().started()
    story.plan(jobs=(job(1, state, message=message),))
    assert said(story).exit_code == code and said(story).finished


@pytest.mark.parametrize(("final", "code"), [("complete", 0), ("failed", 1), ("configuration", 2)])
def test_so_does_one_whose_driver_said_how_it_ended(final: str, code: int) -> None:
    story = lasting().started()
    story.reports(final=final, message="no such task")
    story.plan(jobs=(job(1, "RUNNING/Failed", reason="SubmissionFailed"),))
    assert said(story).exit_code == code


def test_a_run_is_suspended_when_its_machines_are_gone_and_not_before() -> None:
    """`spec.suspend` -> `plan_run` -> status -> `status_of`."""
    story = lasting().started()
    story.edit(suspend=True)
    assert not said(story).suspended, "the operator has not seen it"
    for jobs in ((job(1, "RUNNING/Running"),), (job(1, "RUNNING/Running", deleting=True),)):
        story.plan(400.0, jobs=jobs)
        assert not said(story).suspended
    for _ in range(3):
        story.plan(jobs=())
    assert (said(story).suspended, said(story).word, said(story).exit_code) == (True, "Suspended", 75)
    story.edit(suspend=False)
    assert not said(story).suspended


def test_a_run_whose_judges_have_spent_their_budget_has_stopped_until_more_is_given() -> None:
    """`status_report.report_of` -> `progress.Progress` -> `plan_run` -> status -> `status_of`."""
    story = lasting().started()
    story.edit(stop=Stop(judge_tokens=1000))
    stop, view = StopSignal(), ProgressView("run", 10, judge_tokens=1010, saved=Saved(3, NOON, "/storage/3"))
    stop.request(StopReason.JUDGE_BUDGET, remedy=story.run.spec.stop.spent_on_judges(view.judge_tokens, 0.0))
    final, message = ending(stop.exit_code, stop, view, 0)
    attempt = RunAttempt("run", "team", UID, 1, Path("/storage"))
    report = report_of(attempt, int(story.now * 1000), view, final, message, stop.reason)
    wire = Progress.model_validate_json(report.model_dump_json(by_alias=True))
    story.plan(report=wire, reported=story.now + 1)
    assert not said(story).suspended
    story.plan()
    story.plan(jobs=())
    story.plan()
    found = said(story)
    assert (found.word, found.suspended, found.judges_spent, found.exit_code) == ("JudgeBudgetSpent", True, True, 75)
    assert "raise spec.stop.judgeTokens, which is 1,000" in found.message and found.checkpoint == 3
    story.edit(stop=Stop(judge_tokens=5000))
    assert not said(story).suspended, "the operator is about to go on"


def _told(status: dict[str, Any]) -> RunStatus:
    about = {"name": "run", "namespace": "team", "uid": UID, "generation": 1}
    return status_of({"metadata": about, "spec": {"stop": {"maxUpdates": 9}}, "status": status})


def test_a_status_of_another_release_is_shown_as_far_as_it_is_known() -> None:
    """status of a newer operator, and of an older one that said a field less -> `status_of`."""
    story = lasting().started()
    story.reports(advance={"update": 4, "maxUpdates": 10}, phase="Training", leases={"wanted": 4, "held": 3})
    written = story.run.status.model_dump(mode="json", by_alias=True)
    assert _told(more(written)) == _told(written)
    for name in written:
        found = _told({field: value for field, value in written.items() if field != name})
        assert (found.name, found.finished) == ("run", False)
    for name in written["progress"]:
        less = {field: value for field, value in written["progress"].items() if field != name}
        assert _told({**written, "progress": less}).phones_held == 3


def test_a_run_that_waits_says_for_what() -> None:
    story = Story(made_run(cluster=None))
    story.plan()
    assert said(story).word == "ClusterMissing" and "spec.cluster is missing" in said(story).message


# --- where its log and its files are ----------------------------------------------------------------------------------


def as_pods(run: TrainingRun, attempt: int) -> list[dict[str, Any]]:
    """What KubeRay and the submitter's Job make of the templates: labels of their own beside those."""
    pods = []
    for group, template in pods_of(ray_job(seen(run), attempt)).items():
        kind = {"head": "head", "submitter": ""}.get(group, "worker")
        ray = {"ray.io/node-type": kind, "ray.io/group": group} if kind else {}
        name = f"{group}-{attempt}"
        about = {"name": name, "creationTimestamp": f"2026-11-20T12:00:0{attempt}Z"}
        state = [{"name": container["name"], "state": {"running": {}}} for container in template["spec"]["containers"]]
        pods.append(
            {
                "metadata": {**about, "labels": {**template["metadata"]["labels"], **ray}},
                "spec": template["spec"],
                "status": {"phase": "Running", "containerStatuses": state},
            }
        )
    return pods


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_the_log_and_the_files_of_a_sample_are_found(file: Path) -> None:
    """`rayjob.ray_job` -> `log_pods`, `running_head`, by the labels that Pods are asked for."""
    run = written(file)
    if run.spec.cluster is None:
        return
    pods = [*as_pods(run, 1), *as_pods(run, 2)]
    assert all(pod["metadata"]["labels"][RUN_UID_LABEL] == UID for pod in pods) and labels.RUN_UID == RUN_UID_LABEL
    assert [(pod.name, pod.attempt) for pod in log_pods(pods)] == [("submitter-1", 1), ("submitter-2", 2)]
    assert running_head(pods) == "head-2"


STORED = {"storage": {"volumeClaim": {"claimName": "disk", "subPath": "runs"}}}
CLUSTER = {"image": "i", "workers": [{"name": "gpu"}]}


def test_whoever_reads_the_volume_later_looks_where_the_driver_wrote() -> None:
    """`rayjob.ray_job`'s mount and environment = `remote.pods.reader_job`'s."""
    run = made({"cluster": CLUSTER, "checkpoints": STORED})
    head = pods_of(ray_job(seen(run)))["head"]
    reader = reader_job(run, "team", UID)["spec"]["template"]
    variables = (place.RUN, place.STORAGE)
    assert [environment(reader)[name] for name in variables] == [environment(head)[name] for name in variables]
    assert _claim(reader) == _claim(head) == ("disk", "runs", place.STORAGE_MOUNT)


def _claim(pod: dict[str, Any]) -> tuple[str, str, str]:
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    (found,) = (
        (volumes[mount["name"]]["persistentVolumeClaim"]["claimName"], mount["subPath"], mount["mountPath"])
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if "persistentVolumeClaim" in volumes[mount["name"]]
    )
    return found


class Answer:
    """The program's, as `remote.api.Exec` has it from a Pod."""

    def __init__(self, process: subprocess.Popen[bytes]):
        assert process.stdin and process.stdout
        self._in: IO[bytes] = process.stdin
        self._out: IO[bytes] = process.stdout

    def write(self, data: bytes) -> None:
        self._in.write(data)
        self._in.flush()

    def readline(self) -> bytes:
        return self._out.readline().removesuffix(b"\n")

    def read(self, size: int) -> bytes:
        return self._out.read(size)


@pytest.mark.parametrize("reader", [False, True], ids=["in the head", "in a reader"])
def test_what_a_driver_wrote_is_fetched(tmp_path: Path, reader: bool) -> None:
    """`rayjob.ray_job` -> `RunAttempt.of`, `storage.take_over` -> `cluster.files` (the program) -> `remote.fetch`,
    `remote.events`."""
    run = made({"cluster": CLUSTER, "checkpoints": STORED})
    head = pods_of(ray_job(seen(run), 2))["head"]
    told = _mounted(environment(head), tmp_path)
    attempt = RunAttempt.of(told)
    assert attempt is not None
    folder = folder_of(run, storage.take_over(attempt.storage, attempt.holder))
    for path in ("spec.yaml", "summary.json", "checkpoints/latest", "checkpoints/update-00000003/state.json"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("update-00000003" if path == "checkpoints/latest" else path)
    (folder / "events.jsonl").write_text('{"event": "update", "update": 1}\n')
    if reader:
        told = _mounted(environment(reader_job(run, "team", UID)["spec"]["template"]), tmp_path)

    @contextmanager
    def program(words: Sequence[str]) -> Iterator[Any]:
        command = [sys.executable, "-m", "tapforge_trainer.cluster.files", *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env={**os.environ, **told}, **pipes) as process:  # type: ignore[call-overload]
            try:
                yield Answer(process)
            finally:
                process.kill()

    with opened(tmp_path / "here", UID) as target:
        paths = fetch_files(program, target, chosen(()), lambda there, total: None)
        target.publish(chosen(()), paths)
    found = fetched(tmp_path / "here", paths, chosen(()))
    assert (found.checkpoint, found.files, found.missing) == (3, 5, ("replay",))
    assert (tmp_path / "here" / "summary.json").read_text() == "summary.json"
    events, _ = read_on(program, START)
    assert events == [{"event": "update", "update": 1}]


def _mounted(told: dict[str, str], folder: Path) -> dict[str, str]:
    """With the volume in a folder of this machine."""
    return {**told, place.STORAGE: told[place.STORAGE].replace(place.STORAGE_MOUNT, str(folder / "volume"))}
