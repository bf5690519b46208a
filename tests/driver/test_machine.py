"""Where a run computes is what it says, or what its Pods ask for; never what happens to be there."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tapforge_api import TrainingRun, dump_set, to_yaml
from tapforge_api.gpus import cluster_gpus_error, gpus_needed, gpus_offered
from tapforge_api.loading import from_object
from tapforge_trainer.cli.main import cli
from tapforge_trainer.placement import ray_start as driver
from tapforge_trainer.placement.machine import (
    Machine,
    NoDevice,
    device_of,
    missing,
    rollout_workers,
    visible_gpus,
)
from tapforge_trainer.run import policy_settings

LAPTOP, WORKSTATION, CPU_IMAGE = Machine(8, 0), Machine(16, 2), Machine(16, 0, cuda=False)


def run_of(*, gpus: int = 0, replicas: int = 2, **spec):
    limits = {"memory": "64Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    workers = {
        "name": "gpu",
        "replicas": replicas,
        "template": {"spec": {"containers": [{"name": "ray", "resources": {"limits": limits}}]}},
    }
    cluster = {"image": "trainer:1", "workers": [workers]}
    body = {name: value for name, value in {"cluster": cluster, **spec}.items() if value is not None}
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    return from_object(TrainingRun, {**about, "spec": body})


@pytest.mark.parametrize(
    ("device", "in_cluster", "each", "phones", "workers"),
    [
        ("cpu", False, None, 4, 0),  # a laptop: the driver plays
        ("cuda", False, None, 64, 1),  # eight GPUs in one box: the driver has other things to do
        ("cuda", False, None, 200, 4),
        ("cuda", False, None, None, 1),
        ("cpu", True, None, 65, 2),
        ("cpu", False, 4, 8, 2),  # whoever asks for them gets them
    ],
)
def test_rollout_workers_are_processes_of_their_own_in_a_cluster_and_beside_gpus(
    device: Any, in_cluster: bool, each: int | None, phones: int | None, workers: int
):
    run = run_of(rollout={} if each is None else {"phonesPerWorker": each})
    assert rollout_workers(run, phones, device, in_cluster=in_cluster) == workers


def test_in_a_cluster_the_pods_that_the_run_asks_for_decide():
    run = run_of(gpus=1)
    assert gpus_offered(run.spec.cluster) == (0, 1, 1)
    # The head has no GPU, nor has anybody else at this moment: it is the same run.
    assert device_of(run, LAPTOP, in_cluster=True) == "cuda"
    assert device_of(run_of(), WORKSTATION, in_cluster=True) == "cpu"


def test_a_laptop_has_what_it_has_and_pays_no_attention_to_the_cluster():
    assert device_of(run_of(gpus=1), LAPTOP, in_cluster=False) == "cpu"
    assert device_of(run_of(), WORKSTATION, in_cluster=False) == "cuda"
    assert device_of(run_of(gpus=8), CPU_IMAGE, in_cluster=False) == "cpu"


def test_a_ray_cluster_that_the_run_says_nothing_of_has_what_its_nodes_have_now():
    """Somebody's own; or a run that began under a release whose files held no `spec.cluster`."""
    asks = {"learner": {"ranks": 2}, "engine": {"replicas": 2}}
    silent, told = run_of(cluster=None, **asks), run_of(cluster=None, device="cuda", **asks)
    assert device_of(silent, LAPTOP, in_cluster=True, in_ray=0) == "cpu"
    # A Pod of four GPUs may just be being replaced: all of them are waited for, and nothing is refused for good.
    for gpus in (1, 4):
        assert device_of(silent, LAPTOP, in_cluster=True, in_ray=gpus) == "cuda"
    assert device_of(told, LAPTOP, in_cluster=True, in_ray=0) == "cuda"
    assert device_of(silent, CPU_IMAGE, in_cluster=True, in_ray=4) == "cpu"
    with pytest.raises(NoDevice, match="built for CPUs"):
        device_of(told, CPU_IMAGE, in_cluster=True, in_ray=4)


def test_what_the_spec_says_is_what_is_used_or_refused():
    assert device_of(run_of(gpus=1, device="cpu"), WORKSTATION, in_cluster=True) == "cpu"
    with pytest.raises(NoDevice, match=r"spec\.device is cuda, but the vLLM of this image is built for CPUs"):
        device_of(run_of(device="cuda"), CPU_IMAGE, in_cluster=False)
    with pytest.raises(NoDevice, match="this machine has 0"):
        device_of(run_of(device="cuda"), LAPTOP, in_cluster=False)


def test_gpus_do_not_compute_in_float32():
    for model in ({"dtype": "bfloat16"}, {}):
        assert device_of(run_of(gpus=1, model=model), LAPTOP, in_cluster=True) == "cuda"
    wide = run_of(gpus=1, model={"dtype": "float32"})
    with pytest.raises(NoDevice, match=r"spec\.model\.dtype is float32.*to bfloat16"):
        device_of(wide, LAPTOP, in_cluster=True)
    assert device_of(wide, LAPTOP, in_cluster=False) == "cpu"


@pytest.mark.parametrize(
    ("gpus", "nodes", "ranks", "replicas", "parallel", "mode", "needed", "words"),
    [
        (1, 2, 1, 1, 1, "apart", 2, ""),
        (1, 2, 4, 2, 1, "apart", 6, "learner.ranks (4) and engine.replicas (2) need 6 GPUs, but Pods of spec.cluster"),
        (1, 2, 2, 2, 1, "apart", 4, "with placement.mode colocated, ranks and engines share theirs"),
        (8, 1, 4, 2, 2, "apart", 8, ""),
        (8, 1, 4, 1, 4, "apart", 8, ""),
        (8, 1, 5, 1, 4, "apart", 9, "engine.replicas (1) x engine.tensorParallel (4) need 9 GPUs"),
        (2, 4, 4, 1, 4, "apart", 8, "by node: there is room for 0 of 1 engines; lower engine.tensorParallel"),
        (3, 2, 2, 2, 2, "apart", 6, ""),
        (3, 3, 3, 3, 2, "apart", 9, ""),
        (3, 3, 1, 4, 2, "apart", 9, "room for 3 of 4 engines"),
        (8, 1, 8, 8, 1, "colocated", 8, ""),
        (4, 2, 8, 2, 4, "colocated", 8, ""),
        (4, 2, 8, 1, 8, "colocated", 8, "4, 4 by node: there is room for 0 of 1 engines"),
        (4, 1, 8, 8, 1, "colocated", 8, "engine.replicas (8) need 8 GPUs, but Pods of spec.cluster ask for 4"),
    ],
)
def test_gpus_are_counted_before_anything_is_started(gpus, nodes, ranks, replicas, parallel, mode, needed, words):
    engine = {"replicas": replicas, "tensorParallel": parallel}
    run = run_of(gpus=gpus, replicas=nodes, learner={"ranks": ranks}, engine=engine, placement={"mode": mode})
    assert gpus_needed(run.spec) == needed
    if not words:
        assert device_of(run, LAPTOP, in_cluster=True) == "cuda" and cluster_gpus_error(run.spec) is None
        return
    with pytest.raises(NoDevice) as error:
        device_of(run, LAPTOP, in_cluster=True)
    assert words in str(error.value) and str(error.value) == cluster_gpus_error(run.spec)


@pytest.mark.parametrize(
    ("gpus", "nodes", "parallel", "models", "needed", "words"),
    [
        (1, 4, 1, [("small", 2, 1)], 4, ""),
        (1, 3, 1, [("small", 2, 1)], 4, "and engine.replicas (1) and model small (2 x 1) need 4 GPUs, but Pods of"),
        (4, 2, 2, [("large", 1, 4), ("small", 1, 1)], 8, ""),
        (3, 3, 2, [("small", 3, 2)], 9, "3, 3, 3 by node: model small finds no room; lower a tensorParallel"),
        (2, 4, 1, [("large", 1, 4)], 6, "2, 2, 2, 2 by node: model large finds no room"),
    ],
)
def test_models_of_a_run_count_with_its_gpus(gpus, nodes, parallel, models, needed, words):
    served = [{"name": n, "source": {"tiny": {}}, "replicas": r, "tensorParallel": t} for n, r, t in models]
    asked = [{"name": name, "model": name} for name, _, _ in models]
    rewards = {"streams": [{"name": "judge", "judge": {"models": asked}}]}
    engine = {"tensorParallel": parallel}
    run = run_of(gpus=gpus, replicas=nodes, models=served, rewards=rewards, engine=engine)
    assert gpus_needed(run.spec) == needed
    found = cluster_gpus_error(run.spec)
    assert words in found if words else found is None, found


def test_a_teacher_that_no_judge_asks_counts_where_it_is_served():
    served = [{"name": n, "source": {"tiny": {}}, "replicas": r} for n, r in (("large", 1), ("small", 3))]
    run = run_of(cluster=None, models=served)
    large, small = run.spec.models
    assert gpus_needed(run.spec) == 2 and device_of(run, WORKSTATION, in_cluster=False) == "cuda"
    one = Machine(16, 1)  # no room for ranks and engines, which `collect` doesn't start
    assert device_of(run, one, in_cluster=False, models=[large]) == "cuda"
    with pytest.raises(NoDevice, match=r"model small \(3 x 1\) need 3 GPUs, but this machine has 2 by node"):
        device_of(run, WORKSTATION, in_cluster=False, models=[small])
    assert device_of(run, LAPTOP, in_cluster=False, models=[small]) == "cpu"


def test_a_plan_refuses_what_does_not_fit_the_clusters_pods(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(dump_set(run_of(gpus=4, replicas=1, learner={"ranks": 4}, engine={"replicas": 2}))))
    said = CliRunner().invoke(cli, ["plan", "-f", str(file)])
    assert said.exit_code == 2 and "need 6 GPUs, but Pods of spec.cluster ask for 4" in said.output
    said = CliRunner().invoke(cli, ["plan", "-f", str(file), "--set", "spec.learner.ranks=2"])
    assert said.exit_code == 0, said.output


def test_a_run_on_cpus_has_no_gpus_to_count():
    assert cluster_gpus_error(run_of().spec) is None
    assert cluster_gpus_error(run_of(gpus=1, device="cpu", learner={"ranks": 64}).spec) is None
    assert "ask for 0" in str(cluster_gpus_error(run_of(device="cuda").spec))


@pytest.mark.parametrize(
    ("limits", "params", "offered"),
    [
        ({"amd.com/gpu": "2"}, {}, 2),
        ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8000"}, {}, 2),
        ({"nvidia.com/gpu.shared": "0"}, {}, 0),
        ({"nvidia.com/mig-1g.10gb": "4"}, {}, None),
        ({"nvidia.com/gpu.shared": "2"}, {}, None),
        ({"gpu.intel.com/i915": "1"}, {"num-cpus": "4"}, None),
        ({"nvidia.com/gpu": "4000m"}, {}, None),
        ({"nvidia.com/gpu": 4}, {}, 4),
        ({"nvidia.com/mig-1g.10gb": "4"}, {"num-gpus": "2"}, 2),
        ({"nvidia.com/gpu.shared": "4"}, {"num-gpus": "0"}, 0),
    ],
)
def test_what_ray_would_count_otherwise_is_refused_in_words(limits, params, offered):
    container = {"name": "ray", "resources": {"limits": limits}}
    workers = {"name": "gpu", "rayStartParams": params, "template": {"spec": {"containers": [container]}}}
    run = run_of(cluster={"image": "trainer:1", "workers": [workers]})
    if offered is not None:
        assert gpus_offered(run.spec.cluster) == (0, offered) and cluster_gpus_error(run.spec) is None
        assert device_of(run, LAPTOP, in_cluster=True) == ("cuda" if offered else "cpu")
        return
    words = str(cluster_gpus_error(run.spec))
    assert f"spec.cluster.workers[0] asks for {next(iter(limits))}" in words
    assert "set spec.cluster.workers[0].rayStartParams.num-gpus, or spec.device to cpu" in words
    with pytest.raises(NoDevice) as error:
        device_of(run, LAPTOP, in_cluster=True)
    assert str(error.value) == words
    cpu = run_of(cluster={"image": "trainer:1", "workers": [workers]}, device="cpu")
    assert cluster_gpus_error(cpu.spec) is None and device_of(cpu, LAPTOP, in_cluster=True) == "cpu"


@pytest.mark.parametrize(
    ("containers", "params", "offered"),
    [
        ([{"name": "ray", "resources": {"claims": [{"name": "gpu"}]}}], {}, None),
        ([{"name": "ray", "resources": {"claims": [{"name": "gpu", "request": "all"}]}}], {"num-cpus": "4"}, None),
        ([{"name": "ray", "resources": {"claims": [{"name": "gpu"}]}}], {"num-gpus": "8"}, 8),
        ([{"name": "ray", "resources": {"claims": [{"name": "nic"}]}}], {"num-gpus": "0"}, 0),
        # Beside counted GPUs a claim is of something else.
        ([{"name": "ray", "resources": {"claims": [{"name": "nic"}], "limits": {"nvidia.com/gpu": 8}}}], {}, 8),
        # What another container has is not Ray's.
        ([{"name": "ray"}, {"name": "judge", "resources": {"claims": [{"name": "gpu"}]}}], {}, 0),
        ([{"name": "judge", "resources": {"limits": {"nvidia.com/gpu": "1"}}}, {"name": "ray"}], {}, 0),
        # Not looked at by anybody yet.
        ([{"name": "ray", "resources": {"claims": "gpu"}}], {}, 0),
    ],
)
def test_gpus_by_resource_claims_are_said_by_number_or_refused(containers, params, offered):
    pod = {"containers": containers, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "eight-h100"}]}
    workers = {"name": "gpu", "rayStartParams": params, "template": {"spec": pod}}
    run = run_of(cluster={"image": "trainer:1", "workers": [workers]})
    words = cluster_gpus_error(run.spec)
    if offered is not None:
        assert gpus_offered(run.spec.cluster) == (0, offered) and words is None
        return
    assert str(words).startswith("spec.cluster.workers[0] asks for resource claim gpu, which says nothing about how")
    assert "set spec.cluster.workers[0].rayStartParams.num-gpus, or spec.device to cpu" in str(words)


def test_eight_gpus_in_one_box_work_from_the_same_file():
    box = Machine(64, 8)
    run = run_of(gpus=8, replicas=1, learner={"ranks": 4}, engine={"replicas": 2, "tensorParallel": 2})
    assert device_of(run, box, in_cluster=False) == "cuda"
    with pytest.raises(NoDevice, match="need 8 GPUs, but this machine has 2"):
        device_of(run, WORKSTATION, in_cluster=False)


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, 8), ("", 0), ("-1", 0), ("3", 1), ("0,1, 2", 3), ("0,9,1", 1), ("GPU-1b3,GPU-2c4", 2), ("NoDevFiles,", 1)],
)
def test_gpus_that_this_process_may_not_see_are_not_there(visible, left):
    assert visible_gpus(8, visible) == left and visible_gpus(0, visible) == 0


async def test_gpus_that_are_not_there_yet_are_waited_for_and_told_of(monkeypatch):
    there, told = iter([0, 0, 1, 2]), []
    monkeypatch.setattr(driver, "start_ray", lambda: None)
    monkeypatch.setattr(driver, "_resources", lambda: {"GPU": float(next(there))})
    monkeypatch.setattr(driver, "_GPU_LOOK_SECONDS", 0.0)
    await driver.wait_for_gpus(2, told.append, 3600.0)
    assert told == [
        "waiting for GPUs: 0 of 2 are in the Ray cluster",
        "waiting for GPUs: 1 of 2 are in the Ray cluster",
    ]
    assert missing(0, 0) == ""


async def test_the_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(driver, "start_ray", lambda: None)
    monkeypatch.setattr(driver, "_resources", dict)
    with pytest.raises(TimeoutError, match="0 of 1 are in the Ray cluster, after 0 s: look at the Pods"):
        await asyncio.wait_for(driver.wait_for_gpus(1, lambda words: None, 0.0), 60)


def test_limits_are_the_runs_and_fit_a_large_model_by_default(tmp_path):
    size = {"min_pixels": 1024, "max_pixels": 12_845_056}
    look = {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size | look))
    run = run_of()
    assert policy_settings.answer_seconds(run) == 120 + 2 * 256
    assert policy_settings.answer_seconds(run_of(deadlines={"answerSeconds": 7})) == 7
    agent = SimpleNamespace(allowed_ids=(1,), stop_ids=(1,))
    strict = run_of(engine={"maxRestartsPerHour": 0}, deadlines={"syncSeconds": 10})
    engine = policy_settings.engine_settings(strict, tmp_path, agent, LAPTOP, "cpu")
    assert (engine.restarts_per_hour, engine.pause_seconds) == (0, 180)
