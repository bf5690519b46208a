"""`TrainingRun`: the model, its tasks, the algorithm and the hardware. The same file runs on a laptop and on a cluster.

On a cluster a run that has started keeps what it was started with: of its spec only the fields in `CHANGEABLE` may be
edited from then on, because only those can reach a run that is under way.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from .algorithm import Algorithm
from .base import API_VERSION, DNS_LABEL, Change, Keyed, Metadata, Rule, Seed, Spec, camel, compare
from .checkpoints import Checkpoints
from .cluster import ClusterSpec
from .environment import EnvironmentSpec, Tasks
from .learning import (
    Engine,
    Evaluation,
    Learner,
    Placement,
    PolicyDeadlines,
    Rollout,
    Stop,
    Sync,
    WarmStart,
)
from .loggers import Logging
from .model import Model
from .models import ServedModel, models_named
from .recording import Recording
from .rewards import Rewards
from .run_status import TrainingRunStatus
from .stages import Stage

#: Kubernetes objects derived from a run append a suffix to its name and still have to fit in 63 characters
MAX_RUN_NAME = 43

#: fields of a run's spec that may be edited after its start
CHANGEABLE = ("suspend", "stop")


class RunMetadata(Metadata):
    """Name, namespace and labels of a run."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_RUN_NAME, pattern=DNS_LABEL)] = Field(
        description="name of the run; also of its folder and its cluster objects"
    )


def _enough_slots(source: str) -> Rule:
    """A run doesn't wait for more phones than it would take."""
    at = f"self.environment.source.{camel(source)}"

    def holds(spec: TrainingRunSpec) -> bool:
        pool = getattr(spec.environment.source, source)
        return spec.cluster is None or pool is None or spec.cluster.min_ready_slots <= pool.slots

    return Rule(
        message=f"cluster.minReadySlots must be <= environment.source.{camel(source)}.slots: it would wait for phones "
        "that it doesn't take",
        cel=f"!has(self.cluster) || !has({at}) || self.cluster.minReadySlots <= {at}.slots",
        holds=holds,
    )


def _of_judges(name: str, holds: str) -> str:
    """CEL: `holds` is true of a judge's model m, in streams that `name` leads to."""
    return (
        f"{name}.streams.exists(s, has(s.judge) && "
        f"(s.judge.models.exists(m, {holds}) || s.judge.cascade.exists(m, {holds})))"
    )


def _of_all_judges(holds: str) -> str:
    """CEL: the same, in any stage."""
    stages = _of_judges("g.rewards", holds)
    return f"({_of_judges('self.rewards', holds)} || self.stages.exists(g, has(g.rewards) && {stages}))"


def _no_npu(value: object) -> object:
    if value == "npu":
        raise ValueError("engines and learner don't run on NPUs: docs/other-hardware.md says what is in the way")
    return value


class TrainingRunSpec(Spec):
    """What a run does."""

    seed: Seed = Field(0, description="seed of task order, layouts and sampling")
    model: Model = Field(Model(), description="the policy")
    environment: EnvironmentSpec = Field(EnvironmentSpec(), description="the phones")
    tasks: Tasks = Field(Tasks(), description="what is practised")
    warm_start: WarmStart | None = Field(None, description="supervised phase before; without it there is none")
    rollout: Rollout = Field(Rollout(), description="how episodes are played")
    rewards: Rewards = Field(Rewards(), description="what an episode is worth, and how its success is known")
    models: Annotated[tuple[ServedModel, ...], Field(max_length=8), Keyed("name")] = Field(
        (),
        description="models that are served beside the policy and never trained: a run serves those that its judges "
        "ask, `tapforge collect` its teacher",
    )
    algorithm: Algorithm = Field(Algorithm(), description="how episodes become gradients")
    learner: Learner = Field(Learner(), description="the optimizer's side")
    engine: Engine = Field(Engine(), description="the sampling side")
    sync: Sync = Field(Sync(), description="how new weights reach the engines")
    deadlines: PolicyDeadlines = Field(PolicyDeadlines(), description="how long engines and learner may take")
    device: Annotated[Literal["cpu", "cuda"] | None, BeforeValidator(_no_npu)] = Field(
        None,
        description="where engines and learner compute; without it on GPUs where Pods of `cluster` ask for some, on a "
        "laptop where the machine has some",
    )
    placement: Placement = Field(Placement(), description="which GPUs learner ranks and engines get")
    evaluation: Evaluation = Field(Evaluation(), description="how success is measured")
    recording: Recording = Field(Recording(), description="what is recorded of the episodes")
    logging: Logging = Field(Logging(), description="where metrics go besides the run's folder")
    checkpoints: Checkpoints = Field(Checkpoints(), description="what is kept")
    stages: Annotated[tuple[Stage, ...], Field(max_length=4)] = Field(
        (), description="what is practised one after another, instead of tasks all the time; without any there is one"
    )
    stop: Stop = Field(Stop(), description="when the run ends")
    cluster: ClusterSpec | None = Field(
        None, description="the machines on a cluster; needed there. A laptop pays no attention"
    )
    suspend: bool = Field(
        False,
        description="true: the run gives its phones and machines back after a checkpoint, or doesn't start; false: it "
        "goes on from there. A laptop pays no attention",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("rollout.response_tokens", "<", "model.context_tokens", "the answer has to leave room for a prompt"),
        compare(
            "learner.mini_batches", "<=", "rollout.groups_per_update", "a group is never split between minibatches"
        ),
        Rule(
            message="learner.ranks must be engine.replicas x engine.tensorParallel with placement.mode colocated: "
            "every rank shares its GPU with one of an engine's",
            cel="self.placement.mode != 'colocated' || "
            "self.learner.ranks == self.engine.replicas * self.engine.tensorParallel",
            holds=lambda o: (
                o.placement.mode != "colocated" or o.learner.ranks == o.engine.replicas * o.engine.tensor_parallel
            ),
        ),
        Rule(
            message="sync.lora adapter needs model.lora: without adapters engines get whole weights",
            cel="self.sync.lora != 'adapter' || has(self.model.lora)",
            holds=lambda o: o.sync.lora != "adapter" or o.model.lora is not None,
        ),
        Rule(
            message="evaluation.judged needs rewards.success, the stream that says how episodes ended",
            cel="!self.evaluation.judged || has(self.rewards.success)",
            holds=lambda o: not o.evaluation.judged or o.rewards.success is not None,
        ),
        Rule(
            message="rollout.replay must be left out with algorithm.loss.anchor old: what comes again is older than "
            "the old policy, and only anchor behavior compares with the policies that sampled it",
            cel="!has(self.rollout.replay) || self.algorithm.loss.anchor == 'behavior'",
            holds=lambda o: o.rollout.replay is None or o.algorithm.loss.anchor == "behavior",
        ),
        Rule(
            message="rollout.replay needs recording.frames all, recording.encoding png and no recording.maxGiB: the "
            "screens of what comes again are read from the recording",
            cel="!has(self.rollout.replay) || (self.recording.frames == 'all' && self.recording.encoding == 'png' && "
            "!has(self.recording.maxGiB))",
            holds=lambda o: (
                o.rollout.replay is None
                or (o.recording.frames, o.recording.encoding, o.recording.max_gib) == ("all", "png", None)
            ),
        ),
        Rule(
            message="tasks.file must be left out with environment.source.dataset: its steps are the tasks",
            cel="!has(self.environment.source.dataset) || (!has(self.tasks.file) && !has(self.evaluation.tasks.file))",
            holds=lambda o: (
                o.environment.source.dataset is None or (o.tasks.file is None and o.evaluation.tasks.file is None)
            ),
        ),
        Rule(
            message="rewards.streams: the gate of the reward format must be mixedOutcomes or success with "
            "environment.source.dataset: where no answer is right, form alone would be learned",
            cel="!has(self.environment.source.dataset) || self.rewards.streams.all(s, (has(s.reward) ? s.reward : "
            "s.name) != 'format' || s.gate in ['mixedOutcomes', 'success'])",
            holds=lambda o: (
                o.environment.source.dataset is None
                or all(s.kind != "format" or s.gate in ("mixedOutcomes", "success") for s in o.rewards.streams)
            ),
        ),
        Rule(
            message="algorithm.invalidAnswerPenalty must be 0 with environment.source.dataset: it would separate "
            "answers by their form where none is right",
            cel="!has(self.environment.source.dataset) || self.algorithm.invalidAnswerPenalty == 0.0",
            holds=lambda o: o.environment.source.dataset is None or o.algorithm.invalid_answer_penalty == 0,
        ),
        Rule(
            message="evaluation.judged must be false where stages set rewards: what other judges say can't be compared",
            cel="!self.evaluation.judged || self.stages.all(s, !has(s.rewards))",
            holds=lambda o: not o.evaluation.judged or all(stage.rewards is None for stage in o.stages),
        ),
        Rule(
            message="a judge's model without url must be the name of one of models: give it a url, or add the model",
            cel="!" + _of_all_judges("!has(m.url) && !self.models.exists(e, e.name == m.model)"),
            holds=lambda o: models_named(o.models, o.rewards, o.stages),
        ),
        *(_enough_slots(name) for name in ("pool", "own_pool")),
    )


def _started(run: TrainingRun) -> bool:
    return run.status is not None and bool(run.status.start_time)


def _fixed_after_start(name: str) -> Change:
    """A field of spec that a run keeps from its start on."""
    field, old, new = camel(name), f"oldSelf.spec.{camel(name)}", f"self.spec.{camel(name)}"
    same = f"{new} == {old}"
    if TrainingRunSpec.model_fields[name].default is None:
        same = f"has({new}) == has({old}) && (!has({new}) || {same})"
    return Change(
        message=f"can't be changed after the run's start, only {' and '.join(CHANGEABLE)} can; make another run",
        cel=f"!has(oldSelf.status) || oldSelf.status.startTime == '' || ({same})",
        holds=lambda before, after: (
            not _started(before) or bool(getattr(before.spec, name) == getattr(after.spec, name))
        ),
        at=f"spec.{field}",
    )


class TrainingRun(Spec):
    """A model that learns to use phones by online reinforcement learning: its tasks, algorithm and hardware. The same
    file runs on a laptop, by `tapforge run -f FILE`."""

    api_version: Literal["tapforge.dev/v1alpha1"] = Field(API_VERSION, description="version of this API")
    kind: Literal["TrainingRun"] = Field("TrainingRun", description="kind of this object")
    metadata: RunMetadata = Field(description="name, namespace, labels")
    spec: TrainingRunSpec = Field(TrainingRunSpec(), description="what the run does")
    status: TrainingRunStatus | None = Field(None, description="what the operator last saw; not part of a file")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="metadata.name must begin with a letter where spec.cluster is set: RayJobs are named after the run",
            cel="!has(self.spec.cluster) || self.metadata.name.matches('^[a-z]')",
            holds=lambda o: o.spec.cluster is None or o.metadata.name[0].isalpha(),
        ),
    )
    changes: ClassVar[tuple[Change, ...]] = tuple(
        _fixed_after_start(name) for name in TrainingRunSpec.model_fields if name not in CHANGEABLE
    )
