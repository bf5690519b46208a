"""Files become objects, or errors that say where, what and what was probably meant."""

from pathlib import Path

import pytest

from tapforge_api import (
    MAX_RUN_NAME,
    EmulatorPool,
    SpecError,
    TrainingRun,
    dump_set,
    from_object,
    load,
    load_pool,
    resolve,
    to_yaml,
)

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
POOL = "apiVersion: tapforge.dev/v1alpha1\nkind: EmulatorPool\nmetadata: {name: x}\n"


def problems(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(text)
    return str(caught.value)


def pool_problems(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_pool(text)
    return str(caught.value)


def test_the_smallest_file_has_every_default() -> None:
    run = load(HEAD)
    assert run.spec.model.source.kind == "tiny"
    assert run.spec.environment.source.kind == "processes"
    assert run.spec.algorithm.advantage.kind == "gigpo"
    assert run.spec.algorithm.advantage.value.gamma == 0.95
    assert run.spec.learner.betas == (0.9, 0.99)
    assert (run.spec.warm_start, run.spec.checkpoints.directory, run.spec.rollout.concurrency) == (None, None, None)


def test_an_npu_is_refused_with_the_page_that_says_why() -> None:
    said = problems(HEAD + "spec: {device: npu}\n")
    assert "line 4: spec.device" in said and "docs/other-hardware.md" in said and "did you mean" not in said
    assert (Path(__file__).parents[2] / "docs" / "other-hardware.md").is_file()


#: samples with an object of ours; those of other projects' kinds alone are read by their own tests
OURS = sorted(path for path in SAMPLES.glob("*.yaml") if "tapforge.dev/v1alpha1" in path.read_text())


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.name)
def test_samples_are_valid_and_survive_being_written_and_resolved(path: Path) -> None:
    read = load_pool if "kind: EmulatorPool" in path.read_text() else load
    sample = read(path)
    assert read(str(path)) == sample
    assert read(to_yaml(dump_set(sample))).spec == sample.spec
    assert resolve(sample) == sample
    assert resolve(resolve(sample)).model_fields_set == resolve(sample).model_fields_set


def test_only_what_was_set_is_written_and_resolving_writes_it_all() -> None:
    run = load(HEAD + "spec: {rollout: {groupSize: 4}}\n")
    dumped = dump_set(run)
    assert dumped["spec"] == {"rollout": {"groupSize": 4}}
    assert dumped["metadata"] == {"name": "x", "annotations": {"tapforge.dev/schema-revision": "1"}}
    everything = dump_set(resolve(run))["spec"]
    assert everything["rollout"]["groupSize"] == 4 and everything["rollout"]["minValid"] == 2
    assert everything["engine"]["tensorParallel"] == 1
    assert everything["algorithm"]["advantage"] == {
        "gigpo": {"normalization": "mean_std", "minDeviation": 0.1, "gamma": 0.95, "weight": 1.0}
    }


def test_a_file_of_a_newer_revision_is_refused_by_name() -> None:
    newer = HEAD.replace("name: x", 'name: x, annotations: {tapforge.dev/schema-revision: "999"}')
    assert "schema revision 999" in problems(newer)
    assert "expected a number" in problems(newer.replace("999", "soon"))
    assert "is 999; expected a number as text" in problems(newer.replace('"', ""))


def test_the_right_document_is_taken_of_several() -> None:
    pool = f"{POOL.replace('name: x', 'name: phones')}spec: {{external: {{urls: [http://a]}}}}\n"
    both = pool + "---\n" + (SAMPLES / "quickstart.yaml").read_text()
    assert load(both).metadata.name == "quickstart"
    assert load_pool(both).metadata.name == "phones"
    assert "2 of kind TrainingRun" in problems(HEAD + "---\n" + HEAD)


def test_objects_of_the_api_server_are_read_without_its_own_metadata() -> None:
    data = {
        "apiVersion": "tapforge.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "x", "namespace": "n", "uid": "1-2", "resourceVersion": "7", "managedFields": [{}]},
        "spec": {"seed": 3},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    run = from_object(TrainingRun, data)
    assert (run.metadata.namespace, run.spec.seed) == ("n", 3)
    assert run.status is not None and run.status.conditions[0].type == "Ready"
    assert "status" not in dump_set(run)


def test_a_pod_template_passes_through_unchanged() -> None:
    container = {
        "name": "emulator",
        "image": "i",
        "env": [{"name": "A", "value": None}],
        "resources": {"limits": {"a/b": 1}},
    }
    spec = {"containers": [container, {"name": "log", "image": "i"}], "nodeSelector": {"k": "v"}, "tolerations": []}
    data = {**from_yaml_head("EmulatorPool"), "spec": {"replicas": 0, "template": {"spec": spec}}}
    pool = from_object(EmulatorPool, data)
    assert dump_set(pool)["spec"]["template"] == {"spec": spec}


def from_yaml_head(kind: str) -> dict[str, object]:
    return {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": "x"}}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{sed: 3}", "line 4: spec.sed: unknown field (value 3); did you mean seed?"),
        ("{groupSize: 4}", "spec.groupSize: unknown field (value 4); did you mean spec.rollout.groupSize?"),
        ("{rollout: {group_size: 8}}", "spec.rollout.group_size: unknown field (value 8); did you mean groupSize?"),
        ("{engine: {kvCacheMib: 8}}", "did you mean kvCacheMiB?"),
        ("{xyz: {a: [1, 2]}}", 'spec.xyz: unknown field (value {"a": [1, 2]}); valid here: seed, model, '),
        (
            "{model: {source: {tiny: {size: 1}}}}",
            "spec.model.source.tiny.size: unknown field (value 1); valid here: weights",
        ),
        ("{model: {adapter: {history: {sliding: {tall: 1}}}}}", "sliding.tall: unknown field (value 1); no fields are"),
        ('{seed: "3"}', 'spec.seed: should be a valid integer, not "3"'),
        ("{seed: true}", "spec.seed: should be a valid integer, not true"),
        ("{seed: -1}", "spec.seed: should be greater than or equal to 0, not -1"),
        ("{seed: }", "spec.seed: is empty; remove the line or give a value"),
        ("{model: {dtype: bfloat}}", 'not "bfloat"; did you mean bfloat16?'),
        (
            "{model: {source: {tiny: }}}",
            "exactly one of tiny, path, huggingFace, objectStorage must be set; written: tiny (an empty",
        ),
        ("{model: {source: {}}}", "must be set; written: nothing"),
        ("{environment: {source: {processes: {}, pool: {name: p}}}}", "written: processes, pool"),
        ("{model: {source: {path: {}}}}", "spec.model.source.path.folder: is required and missing"),
        ("{learner: {learningRate: .nan}}", 'should be a valid number, not ".nan"'),
        ("{tasks: {templates: [a, b, a]}}", "is there more than once: a"),
        ("{tasks: {templates: a}}", 'spec.tasks.templates: should be a valid array, not "a"'),
        (
            "{environment: {source: {urls: {list: [phone:8000]}}}}",
            "spec.environment: source.urls.list must hold URLs, http://HOST:PORT; other addresses are of protocol adb",
        ),
        (
            "{environment: {source: {urls: {list: ['a b']}}, protocol: adb}}",
            "source.urls.list[0]: should be a URL that",
        ),
        ("{environment: {protocol: mobileworld}}", "protocol must be tapforge with source.processes"),
        ("{environment: {protocol: braille, source: {urls: {list: ['http://a:1']}}}}", "spec.environment.protocol"),
        (
            "{environment: {protocol: adb, source: {ownPool: {spec: {external: {urls: ['http://a:1']}}}}}}",
            "protocol must be that of source.ownPool.spec.protocol",
        ),
        ("{rollout: {minValid: 9}}", "minValid must be <= groupSize: no group could ever have"),
        ("{rollout: {groupSize: 1}}", "spec.rollout.groupSize: should be greater than or equal to 2"),
        ("{rollout: {responseTokens: 8192}}", "spec: rollout.responseTokens must be < model.contextTokens"),
        ("{learner: {miniBatches: 17}}", "learner.miniBatches must be <= rollout.groupsPerUpdate"),
        ("{warmStart: {steps: 5, warmupSteps: 6}}", "spec.warmStart: warmupSteps must be <= steps"),
        ("{evaluation: {sampled: false, greedy: false}}", "at least one of sampled and greedy must be true"),
        ("{environment: {source: {processes: {count: 1, servers: 2}}}}", "servers must be <= count"),
        ("[1]", "spec: should be an object, not [1]"),
    ],
)
def test_what_is_wrong_is_named(spec: str, expected: str) -> None:
    assert expected in problems(f"{HEAD}spec: {spec}\n")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{}", "exactly one of replicas, scaling, external must be set"),
        ("{replicas: 1}", "template must be set, unless external is"),
        ("{replicas: 1, scaling: {maxReplicas: 1}}", "exactly one of replicas, scaling, external"),
        (
            "{replicas: 1, template: {spec: {containers: [{name: phone, image: i}]}}}",
            "exactly one container must be named emulator",
        ),
        ("{replicas: 1, template: {spec: {containers: []}}}", "should have at least 1 item"),
        ("{external: {urls: [http://a, http://a]}}", "is there more than once: http://a"),
        ("{scaling: {minReplicas: 3, maxReplicas: 2}}", "minReplicas must be <= maxReplicas"),
        ("{scaling: {minReplicas: 3}}", "spec.scaling.maxReplicas: is required and missing"),
        ("{updateStrategy: {maxSurge: 0, maxUnavailable: 0%}}", "can't both be 0"),
        ("{updateStrategy: {maxSurge: 101%}}", "spec.updateStrategy.maxSurge: should be a number of slots up to"),
        ("{updateStrategy: {maxSurge: 1.5}}", "or a percentage such as 10%, not 1.5"),
        ("{updateStrategy: {maxSurge: true}}", "or a percentage such as 10%, not True"),
    ],
)
def test_what_is_wrong_with_a_pool_is_named(spec: str, expected: str) -> None:
    assert expected in pool_problems(f"{POOL}spec: {spec}\n")


def test_all_problems_come_at_once_in_the_order_of_the_lines() -> None:
    text = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: Nope}
spec:
  sed: 1
  rollout:
    groupSize: many
    groupSizes: 3
  engine: {replicas: 0}
  model: {source: {path: {folder: a}, tiny: {}}}
"""
    with pytest.raises(SpecError) as caught:
        load(text)
    assert [p.place for p in caught.value.problems] == ["line 3", "line 5", "line 7", "line 8", "line 9", "line 10"]
    assert str(caught.value).startswith("text: 6 problems\n  line 3: metadata.name: ")


@pytest.mark.parametrize(
    ("name", "good"),
    [("a", True), ("a-1", True), ("a" * MAX_RUN_NAME, True), ("a" * (MAX_RUN_NAME + 1), False)]
    + [(bad, False) for bad in ("", "-a", "a-", "A", "a_b", "a.b", "ä", '"a\\n"')],
)
def test_run_names_fit_into_the_names_of_cluster_objects(name: str, good: bool) -> None:
    text = HEAD.replace("name: x", f"name: {name}" if name else "name: ''")
    if good:
        assert load(text).metadata.name == name
    else:
        assert "metadata.name" in problems(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n", "is empty; expected an object of kind TrainingRun"),
        ("- a\n", "holds no object but list"),
        ("spec: {}\n", "apiVersion: is missing; expected tapforge.dev/v1alpha1"),
        (HEAD.replace("TrainingRun", "Pod"), 'line 2: kind: is "Pod"; expected TrainingRun'),
        (HEAD.replace("v1alpha1", "v2"), 'line 1: apiVersion: is "tapforge.dev/v2"; expected tapforge.dev/v1alpha1'),
        (HEAD.replace("{name: x}", "{}"), "metadata.name: is required and missing"),
    ],
)
def test_files_that_are_something_else(text: str, expected: str) -> None:
    assert expected in problems(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    for name, expected in [("nope.yaml", "No such file"), (".", "Is a directory"), ("latin.yaml", "is not UTF-8 text")]:
        with pytest.raises(SpecError, match=expected):
            load(tmp_path / name)
    with pytest.raises(SpecError, match="can't be read"):
        load("a\0b")
