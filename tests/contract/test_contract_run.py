"""What the operator tells a run's driver by its file, its environment and its commands, through the driver's readers:
for every sample file, and for runs that nobody wrote down.

Writers: `tapforge_operator.trainingrun.rayjob`. Readers: `tapforge_trainer`, as `tapforge run` calls them.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operators_part import (
    RUN_FILES,
    Started,
    body_of,
    environment,
    made,
    place_of,
    pods_of,
    ray_job,
    written,
)
from runs_made import UID

from tapforge_api import TrainingRun
from tapforge_api import attempt as place
from tapforge_api.gpus import cluster_gpus_error, gpus_offered
from tapforge_api.reading import read_pool, read_run
from tapforge_envs.slots.broker_calls import Access
from tapforge_operator.trainingrun import rayjob
from tapforge_operator.trainingrun.state import Run
from tapforge_operator.trainingrun.templates import StoredConfig, as_started
from tapforge_trainer.cli.main import cli
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.prestop import lock_path
from tapforge_trainer.placement.machine import Machine, device_of
from tapforge_trainer.run.folder import read_spec, write_spec

#: a head without GPUs, whose image can use them; and one with more than any run here needs
HEADS = (Machine(8, 0), Machine(8, 64))

# --- runs that nobody wrote down --------------------------------------------------------------------------------------

amounts = st.sampled_from(["0", "1", "2", "4", "8", 4])
secrets = st.fixed_dictionaries({"name": st.just("HF_TOKEN"), "value": st.just("hush")})


@st.composite
def containers(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "cpu", "memory", "nvidia.com/mig-1g.10gb"])
    limits = draw(st.dictionaries(kinds, amounts, max_size=2))
    ray: dict[str, Any] = {"name": "ray", "env": draw(st.lists(secrets, max_size=1))}
    ray |= {"resources": {"limits": limits}} if limits else {}
    judge = {"name": "judge", "image": "judge:1", "resources": {"limits": {"nvidia.com/gpu": draw(amounts)}}}
    return draw(st.permutations([ray, judge][: draw(st.integers(1, 2))]))


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    params = {"num-gpus": draw(st.sampled_from(["0", "1", "8"])), "num-cpus": "0", "storage": "hush"}
    chosen = draw(st.lists(st.sampled_from(sorted(params)), unique=True, max_size=2))
    template = draw(st.sampled_from([{}, {"spec": {"containers": draw(containers())}}]))
    return {"template": template, "rayStartParams": {name: params[name] for name in chosen}}


@st.composite
def runs(draw: st.DrawFn) -> TrainingRun:
    names = draw(st.lists(st.sampled_from(["gpu", "cpu", "more"]), unique=True, max_size=3))
    workers = [{"name": name, "replicas": draw(st.integers(0, 4)), **draw(groups())} for name in names]
    cluster: dict[str, Any] = {"image": "trainer:1", "head": draw(groups()), "workers": workers}
    cluster |= {"suspendGraceSeconds": draw(st.sampled_from([0, 60, 2**31 - 1]))}
    cluster |= {"driverRestarts": draw(st.sampled_from([0, 1, 1000]))}
    parallel, replicas = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    colocated = draw(st.booleans())
    spec: dict[str, Any] = {
        "cluster": cluster,
        "learner": {"ranks": replicas * parallel if colocated else draw(st.integers(1, 4))},
        "engine": {"replicas": replicas, "tensorParallel": parallel},
        "placement": {"mode": "colocated" if colocated else "apart"},
        "environment": {"source": draw(st.sampled_from(SOURCES))},
        "checkpoints": draw(st.sampled_from(STORAGES)),
        "suspend": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }
    if (device := draw(st.sampled_from([None, "cpu", "cuda"]))) is not None:
        spec["device"] = device
    return made(spec, draw(st.sampled_from(["run", "a", "yes", "null", "x1e5"])))


SOURCES: tuple[dict[str, Any], ...] = (
    {"processes": {"count": 2}},
    {"pool": {"name": "phones", "slots": 4}},
    {"ownPool": {"slots": 2, "spec": {"external": {"urls": ["http://a", "http://b"]}}}},
    {"urls": {"list": ["http://10.0.0.1:8000"]}},
)
STORAGES: tuple[dict[str, Any], ...] = (
    {},
    {"storage": {"volumeClaim": {"claimName": "disk", "subPath": "runs/a"}}},
    {"uri": "s3://lab/runs"},
)


# --- run.yaml ---------------------------------------------------------------------------------------------------------


def _agrees(started: Started) -> None:
    """The driver reads the run that its user wrote, and decides for the device that the Pods ask for."""
    run, read = started.run, started.read
    assert "hush" not in started.text, "what is in Pod templates may be secret"
    mine, theirs = (one.spec.model_dump(exclude={"cluster", "suspend", "environment"}) for one in (read, run))
    assert mine == theirs and read.metadata.name == run.metadata.name
    assert read.spec.environment.source.own_pool is None
    if run.spec.environment.source.own_pool is None:
        assert read.spec.environment == run.spec.environment
    assert read.spec.cluster is not None and run.spec.cluster is not None
    if cluster_gpus_error(run.spec):
        return  # the operator makes no Pod of such a run
    nodes = gpus_offered(run.spec.cluster)
    assert gpus_offered(read.spec.cluster) == nodes or run.spec.device == "cpu"
    device = run.spec.device or ("cuda" if any(nodes) else "cpu")
    for head in HEADS:
        assert device_of(read, head, in_cluster=True) == device


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_the_driver_of_a_sample_reads_its_run_and_computes_where_its_pods_have_gpus(file: Path) -> None:
    """`rayjob.resolve` -> `tapforge_api.load` -> `machine.device_of`."""
    run = written(file)
    assert run.spec.cluster is None or cluster_gpus_error(run.spec) is None
    if run.spec.cluster is not None:
        _agrees(Started.of(run))


@settings(max_examples=20)
@given(runs())
def test_a_run_whose_file_holds_no_cluster_goes_on(run: TrainingRun) -> None:
    """`rayjob.resolve` of the release before, as it is kept in the status -> `machine.device_of`. The Ray cluster then
    says how many GPUs there are."""
    assume(cluster_gpus_error(run.spec) is None)
    read = Started.of(run).read
    before = read.model_copy(update={"spec": read.spec.model_copy(update={"cluster": None})})
    assert run.spec.cluster is not None
    there = sum(gpus_offered(run.spec.cluster))
    device = run.spec.device or ("cuda" if there else "cpu")
    assert device_of(before, Machine(8, 0), in_cluster=True, in_ray=there) == device


def test_a_folder_of_the_run_as_it_was_resolved_before_takes_it_as_it_is_now(tmp_path: Path) -> None:
    """Recording (spec.yaml) -> resume, over an upgrade of the operator: what is new in run.yaml is nothing learned."""
    now = Started.of(made({"cluster": {"image": "i"}})).read
    before = now.model_copy(update={"spec": now.spec.model_copy(update={"cluster": None})})
    (tmp_path / "events.jsonl").write_text('{"event": "checkpoint"}\n')
    for one in (before, now, before):
        write_spec(tmp_path, one)
        assert read_spec(tmp_path).spec == one.spec


# --- the next attempt -------------------------------------------------------------------------------------------------


def _goes_on_as_it_began(began: Started) -> None:
    """What the start left in the status and in the ConfigMap is what every attempt is built from, whatever became of
    the live templates; and an own pool is the one that the driver asks for."""
    run, stored = began.run, StoredConfig(began.text, began.config[rayjob.TEMPLATES_KEY])
    live = body_of(run)
    live["spec"]["cluster"]["head"]["template"] = {"spec": {"hostNetwork": True}}
    live["status"] = {"resolved": began.text}
    started = as_started(live, stored)
    reading = read_run(dict(started.body))
    assert reading.spec is not None and started.templates
    again = replace(Run.of(started.body, reading.spec), status=began.seen.status)
    assert ray_job(again, 2) == ray_job(began.seen, 2)
    if run.spec.environment.source.own_pool is not None:
        pool = rayjob.own_pool(again)
        mine = read_pool(pool)
        assert mine.spec == run.spec.environment.source.own_pool.spec and not mine.unknown
        reference = began.read.spec.environment.source.pool
        assert reference is not None and reference.name == pool["metadata"]["name"]


# --- environment, files, commands -------------------------------------------------------------------------------------


def _is_told(started: Started, attempt: int) -> None:
    run, cluster = started.run, started.run.spec.cluster
    assert cluster is not None
    job = ray_job(started.seen, attempt)
    pods = pods_of(job)
    head = pods["head"]
    told = environment(head)
    found = RunAttempt.of(told)
    assert found is not None
    assert (found.run, found.namespace, found.uid, found.number) == (run.metadata.name, "team", UID, attempt)
    assert found.storage.parts[-2:] == ("team", UID)
    access = Access.of(told)
    assert access.namespace == "team" and access.ca is not None and access.url.scheme == "https"
    volume, token = place_of(head, str(access.token))
    sources = {kind: source for one in volume["projected"]["sources"] for kind, source in one.items()}
    assert sources["serviceAccountToken"]["path"] == token
    assert sources["configMap"]["items"][0]["path"] == place_of(head, str(access.ca))[1]
    volume, name = place_of(head, place.RUN_FILE)
    # What else the ConfigMap holds (Pod templates) may be secret.
    assert name == "run.yaml" and [item["path"] for item in volume["configMap"]["items"]] == [name]
    for group, pod in pods.items():
        if group == "submitter":
            continue
        its = environment(pod)
        # Ranks and engines find the same run and storage; only the driver may speak for the run.
        assert {k: its[k] for k in (place.RUN, place.RUN_UID, place.ATTEMPT, place.STORAGE)} == {
            k: told[k] for k in (place.RUN, place.RUN_UID, place.ATTEMPT, place.STORAGE)
        }
        assert (place.BROKER_TOKEN_FILE in its) == (group == "head")
        # The hook finds the driver by the same file as the driver is put down in.
        assert lock_path(its) == lock_path(told)
        hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert _parsed(hook) == {"seconds": cluster.suspend_grace_seconds + 30}
    given = _parsed(shlex.split(job["spec"]["entrypoint"]), told)
    assert given["file"] == Path(place.RUN_FILE) and given["restarts"] == cluster.driver_restarts
    assert given["grace"] == cluster.suspend_grace_seconds


def _parsed(command: list[str], told: dict[str, str] | None = None) -> dict[str, Any]:
    """The options that `tapforge` understands a command's words as."""
    program, name, *words = command
    assert program == "tapforge"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (told or {}).items():
            patch.setenv(variable, value)
        return dict(cli.commands[name].make_context(name, words).params)


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_the_driver_of_a_sample_finds_what_it_was_promised(file: Path) -> None:
    """`rayjob.ray_job` -> `Attempt.of`, `Access.of`, and the commands `tapforge run` and `tapforge prestop`."""
    run = written(file)
    if run.spec.cluster is not None:
        _is_told(Started.of(run), 1)


@settings(max_examples=200)
@given(runs(), st.integers(1, 999))
def test_any_run_is_told_to_its_driver_as_a_sample_is(run: TrainingRun, attempt: int) -> None:
    """All of the above: what is drawn is dear, and all start from it. Besides `rayjob.config_map`, `own_pool` ->
    `templates.as_started`, `read_run`, `read_pool`."""
    started = Started.of(run)
    _agrees(started)
    _is_told(started, attempt)
    _goes_on_as_it_began(started)
