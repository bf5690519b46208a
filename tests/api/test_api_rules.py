"""A rule between fields says the same in Python and in CEL.

The CEL side runs through a small evaluator of the part of the language that the rules use; a rule that uses more fails
here and has to extend it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tapforge_api import KINDS, forbidden_changes, from_object
from tapforge_api.base import Metadata, Rule, Spec
from tapforge_api.cluster import ClusterSpec, Head, RayMetadata, Workers
from tapforge_api.environment import EnvironmentSource, OwnPool, PoolReference, Processes, Urls
from tapforge_api.learning import (
    Advantage,
    Checkpoints,
    Evaluation,
    ModelSource,
    Rollout,
    Storage,
    VolumeClaim,
    WarmStart,
)
from tapforge_api.pool import EmulatorPool, EmulatorPoolSpec, Kvm, Recycle, Scaling, UpdateStrategy
from tapforge_api.shapes import model_of
from tapforge_api.template import Container, ContainerPort, PodSpec, PodTemplate, TemplateMetadata
from tapforge_api.training_run import CHANGEABLE, RunMetadata, TrainingRun, TrainingRunSpec

Scope = dict[str, Any]
Term = Callable[[Scope], Any]
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|r?'(?P<text>[^']*)'|(?P<name>[A-Za-z_]\w*)|(?P<sign>&&|\|\||[=!<>]=|[-+!<>?:.,()\[\]]))"
)
_ABSENT = object()


def either_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) or b(s)


def both_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) and b(s)


def sum_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) + b(s)


def member_of(owner: Term, name: str) -> Term:
    return lambda s: owner(s).get(name, _ABSENT)


def quantified(name: str, items: Term, variable: str, body: Term) -> Term:
    """Over the items of a list, or the keys of a map."""

    def hits(s: Scope) -> list[bool]:
        return [bool(body({**s, variable: item})) for item in items(s)]

    return (lambda s: all(hits(s))) if name == "all" else (lambda s: sum(hits(s)) == 1)


class Cel:
    """Recursive descent over one expression; `Cel(text)(scope)` evaluates it."""

    def __init__(self, text: str):
        self.tokens = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text)]
        assert "".join(t.replace(" ", "") for _, t in self.tokens) == re.sub(r"\br(?=')|[\s']", "", text), (
            f"not read whole: {text}"
        )
        self.term = self.ternary()
        assert not self.tokens, f"left over: {self.tokens}"

    def __call__(self, scope: Scope) -> Any:
        return self.term(scope)

    def take(self, *signs: str) -> str:
        if self.tokens and self.tokens[0][1] in signs and self.tokens[0][0] in ("sign", "name"):
            return self.tokens.pop(0)[1]
        return ""

    def must(self, sign: str) -> None:
        assert self.take(sign), f"expected {sign}, not {self.tokens[:1]}"

    def ternary(self) -> Term:
        test = self.either()
        if not self.take("?"):
            return test
        yes = self.ternary()
        self.must(":")
        no = self.ternary()
        return lambda s: yes(s) if test(s) else no(s)

    def either(self) -> Term:
        left = self.both()
        while self.take("||"):
            left = either_of(left, self.both())
        return left

    def both(self) -> Term:
        left = self.relation()
        while self.take("&&"):
            left = both_of(left, self.relation())
        return left

    def relation(self) -> Term:
        left = self.total()
        sign = self.take("==", "!=", "<=", "<", "in")
        if not sign:
            return left
        right = self.total()
        compare: dict[str, Callable[[Any, Any], bool]] = {
            "==": lambda a, b: bool(a == b),
            "!=": lambda a, b: bool(a != b),
            "<=": lambda a, b: bool(a <= b),
            "<": lambda a, b: bool(a < b),
            "in": lambda a, b: a in b,
        }
        return lambda s: compare[sign](left(s), right(s))

    def total(self) -> Term:
        left = self.single()
        while self.take("+"):
            left = sum_of(left, self.single())
        return left

    def single(self) -> Term:
        if self.take("!"):
            inner = self.single()
            return lambda s: not inner(s)
        if self.take("("):
            inner = self.ternary()
            self.must(")")
            return inner
        if self.take("["):
            items = [self.ternary()]
            while self.take(","):
                items.append(self.ternary())
            self.must("]")
            return lambda s: [item(s) for item in items]
        kind, token = self.tokens.pop(0)
        if kind in ("number", "text"):
            value: Any = int(token) if kind == "number" else token
            return lambda s: value
        assert kind == "name", f"unexpected {token}"
        if token in ("has", "type", "size"):
            self.must("(")
            inner = self.ternary()
            self.must(")")
            functions: dict[str, Callable[[Any], Any]] = {
                "has": lambda value: value is not _ABSENT,
                "type": lambda value: type(value).__name__,
                "size": len,
            }
            return lambda s: functions[token](inner(s))
        return self.members(lambda s: token if token == "int" else s[token])

    def members(self, term: Term) -> Term:
        while self.take("."):
            name = self.tokens.pop(0)[1]
            if name in ("exists_one", "all"):
                self.must("(")
                variable = self.tokens.pop(0)[1]
                self.must(",")
                body = self.ternary()
                self.must(")")
                return quantified(name, term, variable, body)
            if name in ("startsWith", "matches"):
                self.must("(")
                argument = self.ternary()
                self.must(")")
                test = str.startswith if name == "startsWith" else lambda text, pattern: bool(re.search(pattern, text))
                return lambda s, t=term: test(t(s), argument(s))
            term = member_of(term, name)
        return term


def without_nulls(value: Any) -> Any:
    """As CEL sees it: a null field is absent."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def verdicts(rule: Rule, instance: Spec) -> tuple[bool, bool]:
    data = without_nulls(instance.model_dump(mode="json", by_alias=True))
    return rule.holds(instance), Cel(rule.cel)({"self": data})


def unchecked(model: type[Spec], **fields: Any) -> Spec:
    """An instance that may break its rules."""
    return model.model_construct(**{n: f.get_default() for n, f in model.model_fields.items()} | fields)


small = st.integers(0, 4)
presence = st.booleans()


def one_of(model: type[Spec], member: Any = "x") -> st.SearchStrategy[Spec]:
    chosen = st.lists(presence, min_size=len(model.model_fields), max_size=len(model.model_fields))
    return chosen.map(
        lambda on: unchecked(model, **{n: member if o else None for n, o in zip(model.model_fields, on, strict=True)})
    )


@st.composite
def run_specs(draw: st.DrawFn) -> Spec:
    spec = TrainingRunSpec()
    rollout = spec.rollout.model_copy(update={"response_tokens": draw(small), "groups_per_update": draw(small)})
    learner = spec.learner.model_copy(update={"mini_batches": draw(small)})
    model = spec.model.model_copy(update={"context_tokens": draw(small)})
    cluster = draw(st.none() | st.builds(lambda n: ClusterSpec(image="i", min_ready_slots=n), small))
    few = {"slots": draw(small)}
    sources = [
        {},
        {"pool": unchecked(PoolReference, name="p", **few)},
        {
            "own_pool": unchecked(
                OwnPool, spec=EmulatorPoolSpec.model_validate({"external": {"urls": ["http://a"]}}), **few
            )
        },
    ]
    source = unchecked(EnvironmentSource, **draw(st.sampled_from(sources)))
    environment = spec.environment.model_copy(update={"source": source})
    changed = {"rollout": rollout, "learner": learner, "model": model, "cluster": cluster, "environment": environment}
    return spec.model_copy(update=changed)


@st.composite
def runs(draw: st.DrawFn) -> Spec:
    name = draw(st.sampled_from(["a", "1", "1a", "a1"]))
    spec = TrainingRunSpec(cluster=draw(st.sampled_from([None, ClusterSpec(image="i")])))
    return unchecked(TrainingRun, metadata=unchecked(RunMetadata, name=name), spec=spec)


start_params = st.dictionaries(st.sampled_from(["num-cpus", "labels", "redis-password"]), st.just("1"), max_size=2)


template_metadata = st.builds(
    lambda labels, notes: unchecked(TemplateMetadata, labels=dict.fromkeys(labels, "v"), annotations=notes),
    st.lists(
        st.sampled_from(
            [
                "a",
                "a b",
                "-/a",
                "a" * 64,
                "x/" + "a" * 63,
                "tapforge.dev/pool",
                "tapforge.dev",
                "app.kubernetes.io/managed-by",
            ]
        ),
        max_size=2,
    ),
    st.dictionaries(
        st.sampled_from(["a", "tapforge.dev/fence", "karpenter.sh/do-not-disrupt"]), st.just("x"), max_size=2
    ),
)


def pod_spec(containers: list[tuple[str, list[int] | None]]) -> Spec:
    made = [
        unchecked(
            Container, name=n, image="i", ports=ports and [unchecked(ContainerPort, container_port=p) for p in ports]
        )
        for n, ports in containers
    ]
    return unchecked(PodSpec, containers=made)


pod_specs = st.lists(
    st.tuples(
        st.sampled_from(["emulator", "log"]),
        st.none() | st.lists(st.sampled_from([1, 2, 8000]), min_size=1, max_size=2),
    ),
    max_size=3,
).map(pod_spec)
percent = st.sampled_from([0, 1, "0%", "00%", "5%"])
INSTANCES: dict[type[Spec], st.SearchStrategy[Spec]] = {
    ModelSource: one_of(ModelSource),
    EnvironmentSource: one_of(EnvironmentSource),
    Urls: one_of(Urls),
    Advantage: one_of(Advantage),
    Processes: st.builds(lambda a, b: unchecked(Processes, count=a, servers=b), small, small),
    WarmStart: st.builds(lambda a, b: unchecked(WarmStart, steps=a, warmup_steps=b), small, small),
    Rollout: st.builds(lambda a, b: unchecked(Rollout, group_size=a, min_valid=b), small, small),
    Evaluation: st.builds(lambda a, b: unchecked(Evaluation, sampled=a, greedy=b), presence, presence),
    TrainingRunSpec: run_specs(),
    TrainingRun: runs(),
    Checkpoints: st.builds(
        lambda a, b, c: unchecked(Checkpoints, directory=a, storage=b, resume_from=c),
        st.sampled_from([None, "d", "s3://a"]),
        st.sampled_from([None, Storage(volume_claim=VolumeClaim(claim_name="c"))]),
        st.sampled_from([None, "d", "/d://", "file://d"]),
    ),
    Head: start_params.map(lambda given: unchecked(Head, ray_start_params=given)),
    Workers: start_params.map(lambda given: unchecked(Workers, name="w", ray_start_params=given)),
    RayMetadata: template_metadata.map(lambda m: unchecked(RayMetadata, labels=m.labels, annotations=m.annotations)),
    Scaling: st.builds(
        lambda a, b, c: unchecked(Scaling, min_replicas=a, max_replicas=b, warm_spares=c), small, small, small
    ),
    UpdateStrategy: st.builds(lambda a, b: unchecked(UpdateStrategy, max_surge=a, max_unavailable=b), percent, percent),
    PodSpec: pod_specs,
    TemplateMetadata: template_metadata,
    RunMetadata: template_metadata,
    Metadata: template_metadata,
    Kvm: st.builds(
        lambda mode, privileged: unchecked(Kvm, mode=mode, privileged=privileged),
        st.sampled_from(["None", "DevicePlugin", "HostPath"]),
        presence,
    ),
    EmulatorPoolSpec: st.builds(
        lambda a, b, c, d, kvm, recycle: unchecked(
            EmulatorPoolSpec, replicas=a, scaling=b, external=c, template=d, kvm=kvm, recycle=recycle
        ),
        st.sampled_from([None, 0, 3]),
        st.sampled_from([None, Scaling(max_replicas=2)]),
        st.sampled_from([None, "x"]),
        st.none() | pod_specs.map(lambda spec: unchecked(PodTemplate, spec=spec)),
        st.sampled_from([Kvm(), Kvm(mode="DevicePlugin")]),
        st.sampled_from([Recycle(), Recycle(after_episodes=1), Recycle(after_seconds=1), Recycle(retain_failed=1)]),
    ),
}


def with_rules(model: type[BaseModel]) -> Iterator[type[Spec]]:
    if issubclass(model, Spec) and model.rules:
        yield model
    for field in model.model_fields.values():
        if (inner := model_of(field.annotation)) is not None:
            yield from with_rules(inner)


def test_every_struct_with_rules_is_tried_below() -> None:
    assert {m for kind in KINDS.values() for m in with_rules(kind)} == set(INSTANCES)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("model", INSTANCES, ids=lambda m: m.__name__)
def test_python_and_cel_agree(model: type[Spec]) -> None:
    seen: set[bool] = set()

    @given(INSTANCES[model])
    def agree(instance: Spec) -> None:
        for rule in model.rules:
            python, cel = verdicts(rule, instance)
            assert python == cel, (rule, instance)
            seen.add(python)

    agree()
    assert seen == {True, False}, "the examples broke no rule, or every one"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 == 3", True),
        ("!(1 < 1) && 'a' in ['a', 'b']", True),
        ("has(self.x) ? 1 : 2", 2),
        ("type(self.y) == int", True),
    ],
)
def test_the_evaluator(text: str, value: Any) -> None:
    assert Cel(text)({"self": {"y": 3}}) == value


def test_broken_rules_are_all_said() -> None:
    with pytest.raises(
        ValidationError, match=r"minReplicas must be <= maxReplicas.*; warmSpares must be <= maxReplicas"
    ):
        Scaling(min_replicas=3, max_replicas=1, warm_spares=2)


# --- updates ----------------------------------------------------------------------------------------------------------

POD = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}
POOLS: list[dict[str, Any]] = [
    {"replicas": 1, "template": POD},
    {"scaling": {"maxReplicas": 2}, "template": POD, "protocol": "mobileworld"},
    {"replicas": 1, "template": {**POD, "metadata": {"labels": {"a": "b"}}}, "port": 9000},
    {"external": {"urls": ["http://a"]}},
    {"external": {"urls": ["http://b"]}, "port": 9000},
]
RUNS: list[dict[str, Any]] = [
    {},
    {"suspend": True, "stop": {"maxUpdates": 7}},
    {"seed": 2},
    {"warmStart": {}},
    {"warmStart": {"steps": 7}},
    {"environment": {"source": {"pool": {"name": "p"}}}},
]


def objects(kind: str) -> st.SearchStrategy[Any]:
    specs = POOLS if kind == "EmulatorPool" else RUNS
    statuses = [
        {},
        {"status": {}},
        *([] if kind == "EmulatorPool" else [{"status": {"startTime": "2026-01-01T00:00:00Z"}}]),
    ]
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": "x"}}
    return st.builds(
        lambda spec, status: from_object(KINDS[kind], {**head, "spec": spec, **status}),
        st.sampled_from(specs),
        st.sampled_from(statuses),
    )


def as_stored(instance: Spec) -> Any:
    """With every default, as the API server keeps it."""
    return without_nulls(json.loads(instance.model_dump_json(by_alias=True)))


@pytest.mark.parametrize(("kind", "model"), [("EmulatorPool", EmulatorPoolSpec), ("TrainingRun", TrainingRun)])
def test_python_and_cel_agree_on_changes(kind: str, model: type[Spec]) -> None:
    seen: set[bool] = set()

    @given(objects(kind), objects(kind))
    def agree(old: Any, new: Any) -> None:
        if kind == "EmulatorPool":
            old, new = old.spec, new.spec
        for change in model.changes:
            python = change.holds(old, new)
            assert python == Cel(change.cel)({"self": as_stored(new), "oldSelf": as_stored(old)}), (change, old, new)
            seen.add(python)
        refused = forbidden_changes(old, new)
        assert bool(refused) == any(not c.holds(old, new) for c in model.changes)
        assert all("can't be" in problem.message for problem in refused)

    agree()
    assert seen == {True, False}
    assert model.changes


def test_what_may_change_and_what_may_not() -> None:
    def pool(spec: dict[str, Any]) -> EmulatorPool:
        return from_object(EmulatorPool, {**HEAD, "kind": "EmulatorPool", "spec": spec})

    assert [str(p) for p in forbidden_changes(pool(POOLS[0]), pool(POOLS[1]))] == [
        "spec.protocol: can't be changed: holders of a slot were told what it speaks; make another pool"
    ]
    assert [p.path for p in forbidden_changes(pool(POOLS[0]), pool(POOLS[4]))] == [("spec", "port"), ("spec",)]
    assert not forbidden_changes(pool(POOLS[3]), pool({"external": {"urls": ["http://c"]}}))
    other_image = {"spec": {"containers": [{"name": "emulator", "image": "j"}]}}
    assert not forbidden_changes(
        pool(POOLS[0]), pool({"scaling": {"maxReplicas": 2}, "template": other_image, "kvm": {"mode": "DevicePlugin"}})
    )


HEAD = {"apiVersion": "tapforge.dev/v1alpha1", "metadata": {"name": "x"}}


def test_a_run_keeps_from_its_start_on_all_but_what_can_reach_it() -> None:
    def run(spec: dict[str, Any], started: str) -> TrainingRun:
        return from_object(TrainingRun, {**HEAD, "kind": "TrainingRun", "spec": spec, "status": {"startTime": started}})

    changed = {"seed": 5, "learner": {"ranks": 2}, "suspend": True, "stop": {"maxUpdates": 1}}
    assert not forbidden_changes(run({}, ""), run(changed, ""))
    refused = forbidden_changes(run({}, "2026-01-01T00:00:00Z"), run(changed, ""))
    assert [p.path for p in refused] == [("spec", "seed"), ("spec", "learner")]
    assert "only suspend and stop can" in refused[0].message
    assert {c.at for c in TrainingRun.changes} == {
        f"spec.{f.alias}" for n, f in TrainingRunSpec.model_fields.items() if n not in CHANGEABLE
    }
