"""What is read out of a run's objects, and what is said when a cluster can't be reached. Pure, or without a cluster."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tapforge_api import SpecError, load, load_bundle
from tapforge_api.installing import install_extra
from tapforge_trainer.remote import Cluster, ClusterError, RunStatus
from tapforge_trainer.remote.api import NotReached, nearest
from tapforge_trainer.remote.events import EventOffset
from tapforge_trainer.remote.pods import log_pods, reader_job, running_head, why_waiting
from tapforge_trainer.remote.status import status_of
from tapforge_trainer.remote.watch import watch

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


def _run(word: str = "Running", suspend: bool = False, observed: int = 2, **true: bool) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True", "reason": word}]
    conditions += [{"type": kind, "status": str(holds), "reason": word} for kind, holds in true.items()]
    return {
        "metadata": {"name": "run", "namespace": "lab", "uid": "u", "generation": 2, "creationTimestamp": "2026"},
        "spec": {"suspend": suspend, "stop": {"maxUpdates": 7}},
        "status": {
            "observedGeneration": observed,
            "conditions": conditions,
            "progress": {"update": 3, "success": 0.5, "phase": "Training"},
            "leases": {"held": 1, "wanted": 2},
            "checkpoint": {"update": 2, "path": "/x"},
        },
    }


@pytest.mark.parametrize(
    "run, code",
    [
        (_run(), None),
        (_run("Complete", Complete=True), 0),
        (_run("DriverFailed", Failed=True), 1),
        (_run("Configuration", Failed=True), 2),
        (_run("Suspended", suspend=True, Suspended=True), 75),
        # resumed, and the operator has not seen it yet; or suspended, and it still speaks of the time before
        (_run("Suspended", suspend=False, Suspended=True), None),
        (_run("Suspended", suspend=True, observed=1, Suspended=True), None),
        (_run("JudgeBudgetSpent", Suspended=True), 75),
        (_run("Queued", Suspended=True), None),
    ],
)
def test_a_run_ends_with_the_code_of_tapforge_run(run: dict[str, Any], code: int | None) -> None:
    assert status_of(run).exit_code == code


def test_a_status_is_read_also_before_there_is_one() -> None:
    found = status_of(_run())
    assert (found.update, found.max_updates, found.checkpoint, found.phones_held) == (3, 7, 2, 1)
    bare = status_of({"metadata": {"name": "run"}})
    assert (bare.word, bare.update, bare.checkpoint, bare.exit_code) == ("", 0, None, None)


# --- Pods -------------------------------------------------------------------------------------------------------------


def _pod(name: str, container: str, at: int, attempt: int = 1, state: str = "running", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": f"2026-01-01T00:00:{at:02d}Z",
            "labels": {"tapforge.dev/attempt": str(attempt), **labels},
        },
        "spec": {"containers": [{"name": container}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": container, "state": {state: {}}}]},
    }


def test_an_attempts_log_is_that_of_its_newest_submitter() -> None:
    pods = [
        _pod("second", "ray-job-submitter", 5, attempt=2),
        _pod("lost", "ray-job-submitter", 1),
        _pod("again", "ray-job-submitter", 2),
        _pod("head", "ray", 0),
    ]
    assert [pod.name for pod in log_pods(pods)] == ["again", "second"]
    assert [pod.name for pod in log_pods(pods, attempt=2)] == ["second"]


def test_files_are_read_in_the_newest_head_that_runs() -> None:
    head = {"ray.io/node-type": "head"}
    leaving = _pod("leaving", "ray", 9, **head)
    leaving["metadata"]["deletionTimestamp"] = "2026"
    pods = [_pod("old", "ray", 1, **head), _pod("new", "ray", 2, **head), _pod("worker", "ray", 3), leaving]
    assert running_head([*pods, _pod("starting", "ray", 8, state="waiting", **head)]) == "new"
    assert running_head([leaving]) is None


def test_why_a_pod_waits_is_said_in_the_clusters_words() -> None:
    pod = _pod("reader", "reader", 1)
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}],
    }
    assert why_waiting(pod) == "Unschedulable no node"
    assert why_waiting({}) == "it is not there yet"


def test_a_reader_is_unprivileged_and_goes_by_itself() -> None:
    run = load(
        SAMPLES / "run-volume.yaml",
        [
            'spec.cluster.head.template.spec.nodeSelector={"disk": "near"}',
            'spec.cluster.head.template.spec.securityContext={"runAsUser": 1000, "fsGroup": 2000}',
            "spec.checkpoints.storage.volumeClaim.subPath=team",
        ],
    )
    job = reader_job(run, "lab", "u-1")
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert job["spec"]["ttlSecondsAfterFinished"] == 60 and job["spec"]["activeDeadlineSeconds"] > 0
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "tapforge/trainer:dev" and pod["nodeSelector"] == {"disk": "near"}
    assert pod["automountServiceAccountToken"] is False
    # What Pod Security asks for at its strictest level.
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # As whoever wrote the files.
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["supplementalGroups"]) == (1000, [2000])
    (mount,) = container["volumeMounts"]
    assert mount["readOnly"] is True and mount["subPath"] == "team"
    assert {"name": "TAPFORGE_STORAGE", "value": f"{mount['mountPath']}/lab/u-1"} in container["env"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_bundle_holds_what_is_beside_the_run_and_the_run_last(tmp_path: Path) -> None:
    run, objects = load_bundle(SAMPLES / "run-volume.yaml", ["spec.seed=9"])
    assert [one["kind"] for one in objects] == ["PersistentVolumeClaim", "TrainingRun"]
    assert run.spec.seed == objects[-1]["spec"]["seed"] == 9
    pool = yaml.safe_load((SAMPLES / "pool-phones.yaml").read_text())
    pool["spec"]["prot"] = 1
    file = tmp_path / "both.yaml"
    file.write_text(f"{(SAMPLES / 'run-phones.yaml').read_text()}\n---\n{yaml.safe_dump(pool)}")
    with pytest.raises(SpecError, match=r"spec.prot: unknown field .*did you mean port"):
        load_bundle(file)
    file.write_text(f"{(SAMPLES / 'run-phones.yaml').read_text()}\n---\n- 1\n")
    with pytest.raises(SpecError, match="holds no object but list"):
        load_bundle(file)


# --- watching ---------------------------------------------------------------------------------------------------------


class Source:
    """A run whose status is the next one each time it is asked for."""

    def __init__(self, *statuses: RunStatus | ClusterError, events: Sequence[Mapping[str, Any]] | ClusterError = ()):
        self.statuses, self.found = list(statuses), events

    def status(self) -> RunStatus:
        found = self.statuses.pop(0)
        if isinstance(found, ClusterError):
            raise found
        return found

    def events(self, place: EventOffset) -> tuple[Sequence[Mapping[str, Any]], EventOffset]:
        if isinstance(self.found, ClusterError):
            raise self.found
        return self.found[place.offset :], EventOffset("", len(self.found))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("watch", "patience"):
        monkeypatch.setattr(f"tapforge_trainer.remote.{module}._POLL", 0.0)
    monkeypatch.setattr("tapforge_trainer.remote.watch._EVENTS", 0.0)


def _status(update: int, word: str = "Running", uid: str = "u", **more: Any) -> RunStatus:
    return RunStatus("run", "lab", uid, word, update=update, max_updates=9, success=update / 10, **more)


def _watched(source: Source, terminal: bool = False) -> tuple[RunStatus, str]:
    out = io.StringIO()
    status = watch(source, Console(file=out, force_terminal=terminal, width=110))
    return status, out.getvalue()


UPDATE = {
    "event": "update",
    "update": 4,
    "seconds": 8.0,
    "success_rate_all": 0.4,
    "success_rate": 0.5,
    "valid_action_ratio": 0.93,
    "group_size_mean": 8.0,
    "state_group_size_mean": 2.0,
    "groups_zero_variance": 1,
    "groups": 4,
    "sample_age": 0.5,
    "so_far": {"episodes": 123, "invalid": 2, "busy_share": 0.75, "name": "not a figure"},
    "learner": {"gap": 1e-3, "tokens_per_second": 777.0},
}


def test_without_a_driver_in_reach_the_status_is_shown() -> None:
    source = Source(_status(1), _status(2), _status(2, "Complete", complete=True), events=NotReached("no Pod"))
    status, text = _watched(source)
    assert status.exit_code == 0 and [line.split()[2:4] for line in text.splitlines() if "update" in line] == [
        ["update", "1/9"],
        ["update", "2/9"],
    ]


def test_with_the_drivers_events_the_view_is_that_of_a_run_on_a_laptop() -> None:
    measured = {"event": "evaluation", "name": "before", "mode": "greedy", "success": 0.25}
    alarm = {"event": "alarm", "update": 4, "alarm": "capped", "text": "update 4: 50% of the tokens are capped"}
    events = [measured, {"event": "note", "text": "the disk is slow"}, UPDATE, alarm]
    done = _status(4, "Complete", complete=True)
    _, text = _watched(Source(_status(4), done, events=events))
    assert (
        "valid actions 93.0 %" in text
        and "the disk is slow" in text
        and alarm["text"] in text
        and "before: greedy 25.0 %" in text
    )
    _, drawn = _watched(Source(_status(4), done, events=events), terminal=True)
    for words in ("4/9", "123 (2 invalid)", "1 of 4", "777", "75.0 %", "greedy 25.0 %", "Complete"):
        assert words in drawn, words


def test_a_cluster_that_does_not_answer_for_a_while_ends_no_watch() -> None:
    away = NotReached("the cluster of context lab doesn't answer")
    status, text = _watched(Source(_status(1), away, away, _status(2, "DriverFailed", failed=True)))
    assert status.exit_code == 1 and text.count("the run goes on") == 1
    expired = ClusterError("log in again, as for kubectl", 401)
    status, text = _watched(Source(_status(1), expired, _status(2, "Complete", complete=True)))
    assert status.exit_code == 0 and "log in again" in text
    with pytest.raises(ClusterError, match="there is no run"):
        _watched(Source(_status(1), ClusterError("there is no run run", 404)))


def test_who_may_run_no_command_in_pods_sees_the_status_and_is_told_once() -> None:
    events = ClusterError("commands in Pod lab/head are forbidden", 403)
    _, text = _watched(Source(_status(1), _status(2), _status(3, complete=True), events=events))
    assert text.count("only the run's status is shown: commands in Pod lab/head are forbidden") == 1


def test_any_other_trouble_with_the_events_ends_no_details() -> None:
    _, text = _watched(Source(_status(1), _status(3, complete=True), events=ClusterError("log in again", 401)))
    assert "only the run's status" not in text


def test_a_run_that_is_made_again_under_its_name_is_another_one() -> None:
    with pytest.raises(ClusterError, match="was deleted, and made again"):
        _watched(Source(_status(1), _status(1, uid="other")))


# --- reaching it ------------------------------------------------------------------------------------------------------


def _kubeconfig(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": "research"}}],
        "current-context": "lab",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))


def test_a_kubeconfig_that_is_not_there_and_a_context_that_it_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match=r"no kubeconfig at .*/none"):
        Cluster()
    _kubeconfig(tmp_path, monkeypatch)
    with pytest.raises(ClusterError, match="no context lap; did you mean lab"):
        Cluster("lap")
    assert Cluster().namespace == "research" and Cluster(namespace="other").namespace == "other"


def test_a_cluster_that_does_not_answer_is_named_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapforge_trainer.remote.api._PAUSE", 0.0)
    _kubeconfig(tmp_path, monkeypatch)
    with pytest.raises(NotReached, match=r"context lab doesn't answer at http://127.0.0.1:9: .*refused.*VPN"):
        Cluster().runs()


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ClusterError, match=re.escape(install_extra("cluster"))):
        Cluster()


def test_names_that_are_near_come_first() -> None:
    assert nearest("practise", ["practice", "other"]) == "did you mean practice? There is: other, practice"
    assert nearest("x", []) == "there is none"
