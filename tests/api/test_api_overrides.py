"""`--set path=value` on top of a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api import SpecError, dump_set, load, load_pool

HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
RUN = (
    HEAD + "spec: {tasks: {templates: [a, b]}, environment: {source: {processes: {count: 3}}}, stop: {maxSeconds: 5}}\n"
)
POOL = """\
apiVersion: tapforge.dev/v1alpha1
kind: EmulatorPool
metadata: {name: x}
spec: {replicas: 1, template: {spec: {containers: [{name: emulator, image: old}]}}}
"""


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("spec.seed=3", "seed", 3),
        ("seed=3", "seed", 3),
        (" seed = 3 ", "seed", 3),
        ("rollout.groupSize=4", "rollout.group_size", 4),
        ("spec.rollout.group_size=4", "rollout.group_size", 4),
        ("engine.kv_cache_mib=64", "engine.kv_cache_mib", 64),
        ("engine.kvCacheMiB=64", "engine.kv_cache_mib", 64),
        ("learner.learningRate=1e-4", "learner.learning_rate", 1e-4),
        ("tasks.templates[0]=c", "tasks.templates", ("c", "b")),
        ("tasks.templates.1=c", "tasks.templates", ("a", "c")),
        ("tasks.templates[2]=c", "tasks.templates", ("a", "b", "c")),
        ("tasks.templates=[c, d]", "tasks.templates", ("c", "d")),
        ("tasks.templates=null", "tasks.templates", ()),
        ("tasks.file=a=b.jsonl", "tasks.file", "a=b.jsonl"),
        ('tasks.file="3"', "tasks.file", "3"),
        ("stop.maxSeconds=null", "stop.max_seconds", None),
        ("warmStart.steps=7", "warm_start.steps", 7),
        ("warmStart={}", "warm_start.steps", 300),
        ("environment.source.processes.count=9", "environment.source.processes.count", 9),
        ("environment.source.pool.name=p", "environment.source.kind", "pool"),
        ("environment.source.urls.list[0]=http://a", "environment.source.urls.list", ("http://a",)),
        ("algorithm.advantage.rloo={}", "algorithm.advantage.kind", "rloo"),
        ("algorithm={advantage: {grpo: {}}}", "algorithm.advantage.kind", "grpo"),
    ],
)
def test_setting(override: str, path: str, value: object) -> None:
    here = load(RUN, [override]).spec
    for part in path.split("."):
        here = getattr(here, part)
    assert here == value


def test_the_last_one_wins_and_choosing_a_member_lets_the_others_go() -> None:
    run = load(RUN, ["seed=1", "seed=2", "environment.source.pool.name=p", "environment.source.urls.file=f"])
    assert run.spec.seed == 2
    assert dump_set(run)["spec"]["environment"]["source"] == {"urls": {"file": "f"}}


def test_what_nobody_has_said_may_be_set_beneath() -> None:
    said = RUN.replace("spec: {", "spec: {algorithm: {advantage: {gigpo: {gamma: 0.5}}, kl: {coefficient: 0.0}}, ")
    run = load(
        said,
        [
            "seed=3",
            "seed ?= 4",
            "stop.maxSeconds?=6",
            "stop.maxUpdates?=7",
            "rollout.groupSize?=4",
            "algorithm.advantage.gigpo.gamma?=0.9",
            "algorithm.advantage.gigpo.weight?=2",
            "algorithm.advantage.rloo?={}",
            "algorithm.kl.coefficient?=1",
            "tasks.templates[1]?=c",
            "tasks.templates[2]?=c",
        ],
    ).spec
    assert (run.seed, run.stop.max_seconds, run.stop.max_updates, run.rollout.group_size) == (3, 5, 7, 4)
    gigpo = run.algorithm.advantage.gigpo
    assert gigpo is not None and (gigpo.gamma, gigpo.weight, run.algorithm.kl.coefficient) == (0.5, 2, 0)
    assert tuple(run.tasks.templates or ()) == ("a", "b", "c")
    with pytest.raises(SpecError, match="unknown field spec.sede"):
        load(said, ["sede?=3"])


def test_names_with_dots_and_pod_templates() -> None:
    run = load(RUN, ['metadata.labels["a.b/c"]=x', "metadata.name=b"])
    assert (run.metadata.labels, run.metadata.name) == ({"a.b/c": "x"}, "b")
    image = "template.spec.containers[0].image=a/b:1"
    pool = load_pool(POOL, [image, 'template.spec.nodeSelector["k.io/x"]=v', "replicas=null", "scaling.maxReplicas=3"])
    spec = dump_set(pool)["spec"]
    assert spec["template"]["spec"] == {
        "containers": [{"name": "emulator", "image": "a/b:1"}],
        "nodeSelector": {"k.io/x": "v"},
    }
    assert "replicas" not in spec and spec["scaling"] == {"maxReplicas": 3}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "--set seed: expected PATH=VALUE"),
        ("=3", "--set =3: expected PATH=VALUE"),
        ("a..b=3", "--set a..b=3: the path can't be read from '..b' on"),
        (".seed=3", "the path can't be read from '.seed' on"),
        ("seed=", "--set seed=: has no value (an unset shell variable?); give one, or null"),
        ("tasks.file= ", "has no value"),
        ("tasks.file=#1", "has no value"),
        ("seed[=3", "the path can't be read from '[' on"),
        ("sede=3", "--set sede=3: unknown field spec.sede; did you mean seed?"),
        ("spec.group_size=3", "unknown field spec.group_size; did you mean spec.rollout.groupSize?"),
        ("seed.x=1", "spec.seed is a single value; 'x' can't be set in it"),
        ("tasks.templates[3]=x", "spec.tasks.templates has 2 items; next index: 2"),
        ("tasks.templates.x=1", "spec.tasks.templates is a list; 'x' can't be set in it"),
        ("tasks[0]=1", "spec.tasks is a struct; 0 can't be set in it"),
        ("seed=[1", "not valid YAML"),
        ("seed=abc", '--set seed=abc: spec.seed: should be a valid integer, not "abc"'),
        ("rollout={groupSise: 3}", "spec.rollout.groupSise: unknown field (value 3); did you mean groupSize?"),
        ("rollout.minValid=9", "minValid must be <= groupSize"),
    ],
)
def test_what_cannot_be_set_is_named(override: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(RUN, [override])
    assert expected in str(caught.value)


def test_all_overrides_are_looked_at() -> None:
    with pytest.raises(SpecError) as caught:
        load(RUN, ["sede=3", "seed=4", "x"])
    assert [p.place for p in caught.value.problems] == ["--set sede=3", "--set x"]


@given(
    st.lists(
        st.sampled_from(["spec", "seed", "tasks", "templates", "0", "[1]", '["a.b"]', "x", "", "urls", "[", '"']),
        max_size=5,
    ),
    st.text(alphabet="a1=[]{}:,-.\"' \n~&*", max_size=8),
)
def test_an_override_is_carried_out_or_refused(parts: list[str], value: str) -> None:
    try:
        load(RUN, [f"{'.'.join(parts)}={value}"])
    except SpecError as error:
        assert all(str(p) for p in error.problems)
