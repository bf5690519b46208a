"""A rule between fields says the same in Python and in CEL."""

from collections.abc import Iterator
from typing import Any

import pytest
from cel_evaluator import Cel, without_nulls
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tapforge_api import KINDS
from tapforge_api.algorithm import Advantage, Algorithm, Grpo, Kl, Loss, LossPlugin, Rloo, Teacher
from tapforge_api.base import Metadata, Rule, Spec
from tapforge_api.checkpoints import Checkpoints, Storage, VolumeClaim
from tapforge_api.cluster import ClusterSpec, Head, RayMetadata, Workers
from tapforge_api.corrections import Corrections, IcePop, OffPolicyMask, Rejection, Truncation
from tapforge_api.environment import (
    Cooldown,
    EnvironmentSource,
    EnvironmentSpec,
    EvaluationTasks,
    Latency,
    OwnPool,
    PoolReference,
    Processes,
    Screen,
    Settle,
    Urls,
)
from tapforge_api.judge import ApiKey, JudgeModel, JudgeSpec
from tapforge_api.learning import (
    Evaluation,
    ImitationData,
    Placement,
    Rollout,
    SuccessReplay,
    WarmStart,
)
from tapforge_api.loggers import LoggedEpisodes, LoggerPlugin, Logging, MLflow, SwanLab, TensorBoard, Wandb
from tapforge_api.model import Adapter, History, HistoryBlocks, Lora, Model, ModelSource, SlidingHistory
from tapforge_api.models import ServedModel
from tapforge_api.pool import EmulatorPoolSpec, External, Kvm, Recycle, Scaling, UpdateStrategy
from tapforge_api.recording import Recording
from tapforge_api.rewards import Rewards, RewardStream
from tapforge_api.shapes import model_of
from tapforge_api.stages import Stage, StageStop
from tapforge_api.template import Container, ContainerPort, PodSpec, PodTemplate, TemplateMetadata
from tapforge_api.training_run import RunMetadata, TrainingRun, TrainingRunSpec


def verdicts(rule: Rule, instance: Spec) -> tuple[bool, bool]:
    data = without_nulls(instance.model_dump(mode="json", by_alias=True))
    return rule.holds(instance), Cel(rule.cel)({"self": data})


def unchecked(model: type[Spec], /, **fields: Any) -> Spec:
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
    rollout = spec.rollout.model_copy(
        update={
            "response_tokens": draw(small),
            "groups_per_update": draw(small),
            "replay": draw(st.none() | st.just(SuccessReplay())),
        }
    )
    recording = Recording(
        frames=draw(st.sampled_from(["all", "none"])),
        encoding=draw(st.sampled_from(["png", "webp"])),
        max_gib=draw(st.sampled_from([None, 1.0])),
    )
    anchored = Algorithm(loss=Loss(anchor=draw(st.sampled_from(["old", "behavior"]))))
    learner = spec.learner.model_copy(update={"mini_batches": draw(small), "ranks": draw(small)})
    engine = spec.engine.model_copy(update={"replicas": draw(small), "tensor_parallel": draw(small)})
    placement = Placement(mode=draw(st.sampled_from(["apart", "colocated"])))
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
    judged = RewardStream.model_validate(
        {"name": "judge", "judge": {"models": [{"url": "http://a:1/v1", "model": "m"}]}}
    )
    own = [
        RewardStream.model_validate({"name": "own", "reward": "judge", "judge": judge})
        for judge in (
            {"models": [{"model": "a"}]},
            {"models": [{"url": "http://a:1/v1", "model": "m"}], "cascade": [{"name": "dear", "model": "b"}]},
        )
    ]
    rewards = draw(
        st.sampled_from([Rewards(), Rewards(streams=(judged,), success="judge"), *(Rewards(streams=(o,)) for o in own)])
    )
    evaluation = spec.evaluation.model_copy(update={"judged": draw(presence)})
    changed = {"rollout": rollout, "learner": learner, "model": model, "cluster": cluster, "environment": environment}
    by_b = {"streams": [{"name": "steps", "judge": {"models": [{"model": "b"}]}}]}
    staged = st.sampled_from([{}, {"rewards": {}}, {"rewards": by_b}, {"temperature": 0.5}])
    stages = draw(st.lists(staged.map(lambda s: Stage.model_validate({**s, "stop": {"maxUpdates": 1}})), max_size=2))
    served = draw(st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True))
    changed_models = tuple(ServedModel.model_validate({"name": name, "source": {"tiny": {}}}) for name in served)
    changed |= {"rewards": rewards, "evaluation": evaluation, "stages": tuple(stages), "models": changed_models}
    changed |= {"engine": engine, "placement": placement, "recording": recording, "algorithm": anchored}
    return spec.model_copy(update=changed)


@st.composite
def runs(draw: st.DrawFn) -> Spec:
    name = draw(st.sampled_from(["a", "1", "1a", "a1"]))
    spec = TrainingRunSpec(cluster=draw(st.sampled_from([None, ClusterSpec(image="i")])))
    return unchecked(TrainingRun, metadata=unchecked(RunMetadata, name=name), spec=spec)


def _own(protocol: str) -> EnvironmentSource:
    spec = EmulatorPoolSpec.model_validate({"external": {"urls": ["http://a"]}, "protocol": protocol})
    return EnvironmentSource(own_pool=OwnPool(spec=spec))


environments = st.builds(
    lambda source, protocol, width, height: unchecked(
        EnvironmentSpec, source=source, protocol=protocol, screen=Screen(width=width, height=height)
    ),
    st.sampled_from(
        [
            EnvironmentSource(processes=Processes()),
            EnvironmentSource(processes=Processes(environment="miniwob")),
            EnvironmentSource(urls=Urls(file="f")),
            EnvironmentSource(urls=Urls(list=("http://a", "https://b"))),
            EnvironmentSource(urls=Urls(list=("http://a", "emulator-5554"))),
            _own("adb"),
            _own("tapforge"),
        ]
    ),
    st.sampled_from(["tapforge", "adb", "mobileworld"]),
    st.sampled_from([96, 160, 320]),
    st.sampled_from([160, 210, 420]),
)

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
ratios = st.sampled_from([0.0, 0.5, 1.0, 2.0])
corrections = st.builds(
    lambda a, b, c: unchecked(Corrections, truncate=a, icepop=b, opsm=c),
    st.sampled_from([None, Truncation()]),
    st.sampled_from([None, IcePop()]),
    st.sampled_from([None, OffPolicyMask(), OffPolicyMask(against="old")]),
)


def judge_named(name: str) -> JudgeModel:
    return JudgeModel(name=name, url="http://a:1/v1", model="m")


streams = st.builds(
    lambda a, b, c: unchecked(RewardStream, name=a, reward=b, judge=c),
    st.sampled_from(["judge", "outcome", "mine"]),
    st.sampled_from([None, "steps", "format", "other"]),
    st.sampled_from([None, JudgeSpec.model_validate({"models": [{"url": "http://a:1/v1", "model": "m"}]})]),
)
INSTANCES: dict[type[Spec], st.SearchStrategy[Spec]] = {
    ModelSource: one_of(ModelSource),
    Teacher: one_of(Teacher),
    EnvironmentSource: one_of(EnvironmentSource),
    Urls: one_of(Urls),
    EnvironmentSpec: environments,
    Advantage: one_of(Advantage),
    Cooldown: st.builds(
        lambda a, b: unchecked(Cooldown, after_failed=a, after_solved=b),
        st.sampled_from([None, 2]),
        st.sampled_from([None, 2]),
    ),
    EvaluationTasks: st.builds(
        lambda a, b: unchecked(EvaluationTasks, suite=a, file=b),
        st.sampled_from([None, "s"]),
        st.sampled_from([None, "f"]),
    ),
    Kl: st.builds(lambda a: unchecked(Kl, estimator=a), st.sampled_from(["k1", "k2", "k3"])),
    Rejection: st.builds(
        lambda a, b, c, d: unchecked(Rejection, by=a, measure=b, low=c, high=d),
        st.sampled_from(["token", "sequence_max"]),
        st.sampled_from(["k1", "k2", "k3"]),
        st.sampled_from([None, 0.5]),
        ratios,
    ),
    Corrections: corrections,
    Loss: st.builds(
        lambda a, b, c, d, e, f: unchecked(
            Loss, plugin=a, **dict([b]), anchor=c, importance_cap=d, corrections=e, **dict([f])
        ),
        st.sampled_from([None, LossPlugin(name="cispo")]),
        st.sampled_from([("clip_high", 0.28), ("clip_low", 0.1), ("dual_clip", 3.0), ("ratio", "sequence")]),
        st.sampled_from(["behavior", "old"]),
        st.sampled_from([None, 2.0]),
        corrections,
        st.sampled_from([("aggregation", "constant"), ("constant_length", 8)]),
    ),
    Algorithm: st.builds(
        lambda a, b: unchecked(Algorithm, advantage=a, statistics=b),
        st.sampled_from([Advantage(rloo=Rloo()), Advantage(grpo=Grpo())]),
        st.sampled_from(["trajectories", "steps"]),
    ),
    Processes: st.builds(
        lambda a, b, c, d: unchecked(Processes, count=a, servers=b, environment=c, latency=d),
        small,
        small,
        st.sampled_from(["phone", "miniwob"]),
        st.sampled_from([None, Latency()]),
    ),
    WarmStart: st.builds(
        lambda a, b, c, d: unchecked(WarmStart, steps=a, warmup_steps=b, epochs=c, data=d),
        st.sampled_from([1, 2, 300]),
        small,
        st.sampled_from([None, 2]),
        st.sampled_from([None, unchecked(ImitationData, path="a")]),
    ),
    ImitationData: st.builds(
        lambda a, b: unchecked(ImitationData, path=a, held_out=b),
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, "a", "b"]),
    ),
    Logging: st.builds(
        lambda a, b, c: unchecked(Logging, episodes=a, plugins=b, **c),
        st.sampled_from([None, LoggedEpisodes()]),
        st.sampled_from([(), (LoggerPlugin(name="mine"),)]),
        st.sampled_from(
            [{}, {"tensorboard": TensorBoard()}, {"wandb": Wandb()}, {"swanlab": SwanLab()}, {"mlflow": MLflow()}]
        ),
    ),
    ApiKey: one_of(ApiKey),
    JudgeModel: st.builds(
        lambda a, b, c, d: unchecked(JudgeModel, url=c, model="m", samples=a, temperature=b, **dict([d])),
        st.sampled_from([1, 2]),
        st.sampled_from([0.0, 0.5]),
        st.sampled_from([None, "http://a:1/v1", "http://me@a:1/v1", "http://a:1/v1?key=1"]),
        st.sampled_from(
            [("wire", "openai"), ("wire", "w"), ("api_key", ApiKey(environment="K")), ("served_as", "other")]
        ),
    ),
    JudgeSpec: st.builds(
        lambda a, b: unchecked(JudgeSpec, models=(judge_named(a),), cascade=tuple(map(judge_named, b))),
        st.sampled_from(["judge", "dear"]),
        st.lists(st.sampled_from(["dear", "other"]), max_size=2),
    ),
    RewardStream: streams,
    Rewards: st.builds(
        lambda a, b, c: unchecked(Rewards, streams=tuple(a), success=b, verifier=c),
        st.lists(streams, max_size=2),
        st.sampled_from([None, "judge", "outcome", "mine"]),
        st.sampled_from(["asked", "ignored"]),
    ),
    Rollout: st.builds(lambda a, b: unchecked(Rollout, group_size=a, min_valid=b), small, small),
    Evaluation: st.builds(lambda a, b: unchecked(Evaluation, sampled=a, greedy=b), presence, presence),
    StageStop: one_of(StageStop, 1),
    TrainingRunSpec: run_specs(),
    TrainingRun: runs(),
    Checkpoints: st.builds(
        lambda a, b, c: unchecked(Checkpoints, directory=a, storage=b, uri=c),
        st.sampled_from([None, "d", "s3://a"]),
        st.sampled_from([None, Storage(volume_claim=VolumeClaim(claim_name="c"))]),
        st.sampled_from([None, "s3://bucket/folder"]),
    ),
    Model: st.builds(
        lambda a, b, c, d, e: unchecked(
            Model, adapter=Adapter(max_pixels=a), max_pixels=b, min_pixels=c, lora=d, freeze_vision=e
        ),
        st.sampled_from([None, 1024]),
        st.sampled_from([None, 1024, 2048]),
        st.sampled_from([None, 1024, 2048]),
        st.sampled_from([None, Lora()]),
        presence,
    ),
    History: st.sampled_from(
        [unchecked(History, sliding=a, blocks=b) for a in (None, SlidingHistory()) for b in (None, HistoryBlocks())]
    ),
    HistoryBlocks: st.builds(lambda a, b: unchecked(HistoryBlocks, keep=a, up_to=b), small, small),
    Adapter: st.builds(
        lambda a, b, c: unchecked(Adapter, history=a, prompt=b, history_images=c),
        st.sampled_from([History(sliding=SlidingHistory()), History(blocks=HistoryBlocks())]),
        st.sampled_from(["full", "compact", "turns"]),
        st.sampled_from([1, 3]),
    ),
    Head: start_params.map(lambda given: unchecked(Head, ray_start_params=given)),
    Workers: start_params.map(lambda given: unchecked(Workers, name="w", ray_start_params=given)),
    ClusterSpec: st.builds("{}.{}.0".format, st.sampled_from((0, 1, 2, 3, 10)), st.integers(45, 110)).map(
        lambda version: unchecked(ClusterSpec, image="i", ray_version=version)
    ),
    RayMetadata: template_metadata.map(lambda m: unchecked(RayMetadata, labels=m.labels, annotations=m.annotations)),
    Settle: st.builds(
        lambda a, b, c: unchecked(Settle, min_seconds=a, quiet_seconds=b, max_seconds=c), small, small, small
    ),
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
        lambda a, b, c, d, kvm, recycle, protocol: unchecked(
            EmulatorPoolSpec, replicas=a, scaling=b, external=c, template=d, kvm=kvm, recycle=recycle, protocol=protocol
        ),
        st.sampled_from([None, 0, 3]),
        st.sampled_from([None, Scaling(max_replicas=2)]),
        st.sampled_from([None, External(urls=("http://a",)), External(urls=("https://a", "device-1:5555"))]),
        st.none() | pod_specs.map(lambda spec: unchecked(PodTemplate, spec=spec)),
        st.sampled_from([Kvm(), Kvm(mode="DevicePlugin")]),
        st.sampled_from([Recycle(), Recycle(after_episodes=1), Recycle(after_seconds=1), Recycle(retain_failed=1)]),
        st.sampled_from(["tapforge", "adb"]),
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
