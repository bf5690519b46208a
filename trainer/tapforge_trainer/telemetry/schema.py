"""What programs may read of a run's folder: each line of events.jsonl and the fields of summary.json, as JSON schemas.

- `VERSION` grows when a field changes its meaning or goes; fields and kinds of lines that are added don't change it,
  so readers leave alone what they don't know. `started` and summary.json carry it as `schema`; without it, it is 0.
- Everything that this release writes is here: tests hold the models against the calls that write and against a run.
- Rates and shares are from 0 to 1, times are seconds; a rate over nothing is null. `at` is in seconds since 1970.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

VERSION: Final = 1
KINDS: Final = ("events", "summary")

Share = Annotated[float, Field(ge=0, le=1)]
_Interval = tuple[float, float] | None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class Measurement(_Record):
    """Success of one policy on the held-out tasks."""

    success: Share | None = Field(description="over valid episodes")
    interval: _Interval = Field(description="Wilson's 95 % interval")
    interval_by_template: _Interval = Field(description="95 % interval with templates as the random sample")
    episodes: int = Field(description="valid episodes")
    invalid: int = Field(description="episodes that the environment broke")
    success_attempted: Share | None = Field(description="over valid and invalid episodes")
    policy_version: int | None = Field(description="the one version that all answers came from")
    by_template: dict[str, Share] = Field(description="success by template")
    reasons: dict[str, int] = Field(description="episodes by the reason of their end")
    type_accuracy: Share | None = Field(None, description="recorded steps: answers with the recorded type of action")
    parameter_accuracy: Share | None = Field(None, description="of these, answers with the right parameters")
    understood: Share | None = Field(None, description="recorded steps: answers that can be read")


class Finding(_Record):
    """A problem with the base model."""

    kind: str = Field(description="what it is, in one word")
    share: Share = Field(description="of the answers")
    text: str = Field(description="the problem and its fix")


class BaseModelCheck(_Record):
    """What the answers of the first measurement show."""

    answers: int = Field(description="answers that were read")
    cut_off: int = Field(description="of these, at rollout.responseTokens")
    outside: int = Field(description="of these, with coordinates outside of the screen")
    unreadable: dict[str, int] = Field(description="of these, no valid action, by reason")
    findings: list[Finding] = Field(description="problems, with a fix")


# --- events.jsonl -----------------------------------------------------------------------------------------------------


class Event(_Record):
    """A line of events.jsonl."""

    at: float = Field(description="seconds since 1970")


class Started(Event):
    """Engines, learner and phones of a session are ready."""

    event: Literal["started"]
    schema_: int = Field(0, alias="schema", description="version of this schema")
    seconds: float = Field(description="since the session began")
    software: dict[str, str] = Field(default_factory=dict, description="release and commit of tapforge")


class Phase(Event):
    """What begins now."""

    event: Literal["phase"]
    text: str = Field(description="for people")


class Note(Event):
    """A person should read it; a problem comes with its fix."""

    event: Literal["note"]
    text: str = Field(description="for people")


class Demonstrations(Event):
    """The warm start's own demonstrations were made."""

    event: Literal["demonstrations"]
    episodes: int = Field(description="demonstrated episodes")
    samples: int = Field(description="their steps")
    success: Share = Field(description="of the demonstrator")


class ImitationData(Event):
    """The warm start's data set was opened."""

    event: Literal["imitation_data"]
    episodes: int = Field(description="episodes of the set")
    samples: int = Field(description="their steps")
    path: str = Field(description="the folder")


class ImitationLeftOut(Event):
    """Steps of the data set that were not imitated."""

    event: Literal["imitation_left_out"]
    steps: int = Field(description="their number")
    reasons: dict[str, Any] = Field(description="why, with numbers")


class ImitationEpoch(Event):
    """A pass over the data set is finished."""

    event: Literal["imitation_epoch"]
    number: int = Field(description="of the pass, from 1")
    steps: int = Field(description="optimizer steps so far")
    loss: float = Field(description="mean of its optimizer steps, nats per token")
    held_out_loss: float | None = Field(None, description="of the held-out steps, nats per token; absent without any")
    best: bool | None = Field(None, description="`tapforge sft`: no earlier pass had a lower held-out loss")
    answers: dict[str, Any] | None = Field(None, description="`tapforge sft`: what it answers to held-out steps")


class WarmStart(Event):
    """The warm start is finished."""

    event: Literal["warm_start"]
    seconds: float = Field(description="that it took")
    learner: dict[str, float] = Field(description="figures of its last optimizer step")


class Evaluation(Event, Measurement):
    """The held-out tasks were measured."""

    event: Literal["evaluation"]
    name: str = Field(description="before, after, or the update")
    mode: str = Field(description="sampled, greedy or other_templates")
    update: int = Field(description="updates so far")


class Baseline(Event, Measurement):
    """A policy that has learned nothing played the held-out tasks."""

    event: Literal["baseline"]
    policy: str = Field(description="random or always_infeasible")


class BaseModelEvent(Event, BaseModelCheck):
    """What the answers of the first measurement show."""

    event: Literal["base_model"]


class Reinforcement(Event):
    """Reinforcement begins, or goes on after a restart; later lines of updates with a larger number are void."""

    event: Literal["reinforcement"]
    update: int = Field(description="updates so far")
    version: int = Field(description="policy version of the weights")


class Stage(Event):
    """A stage begins."""

    event: Literal["stage"]
    stage: int = Field(description="its number, from 1")
    update: int = Field(description="updates so far")
    order: int = Field(description="issue order of its first group")


class Rate(_Record):
    """Success over an update's valid episodes of a template."""

    success: Share = Field(description="rate")
    low: Share = Field(description="Wilson's 95 % interval")
    high: Share = Field(description="Wilson's 95 % interval")
    episodes: int = Field(description="valid episodes")


class SoFar(_Record):
    """Of the run up to here."""

    version: int = Field(description="policy version of the weights")
    episodes: int = Field(description="finished episodes")
    invalid: int = Field(description="of these, invalid")
    dropped: int = Field(description="groups with too few valid episodes")
    episodes_per_hour: float | None = Field(description="of this session")
    env_steps_per_second: float | None = Field(description="of this session")
    busy_share: Share | None = Field(description="of the phones' time")


class Update(Event):
    """An update is finished. [Figures](figures.md) has the meaning of every number: those at the top are `batch/*`."""

    event: Literal["update"]
    update: int = Field(description="its number, from 1")
    seconds: float = Field(description="of reinforcement so far, all sessions")
    groups: int
    groups_dropped: int
    groups_zero_variance: int
    mixed_group_share: Share | None
    group_size_mean: float | None
    group_size_min: int | None
    episodes: int
    episodes_invalid: int
    episodes_stopped: int
    episodes_without_steps: int
    success_rate: Share | None
    success_rate_attempted: Share | None
    steps_mean: float | None
    valid_action_ratio: Share | None
    step_limit_rate: Share | None
    answer_limit_rate: Share | None
    samples: int
    response_tokens: int
    state_groups: int
    state_group_size_mean: float | None
    state_group_size_max: int | None
    singleton_group_share: Share | None
    singleton_step_share: Share | None
    step_advantage_spread: float | None
    episode_advantage_spread: float | None
    explained_variance: float | None
    success_rate_all: Share | None = Field(description="`rollout/success_rate`")
    attempts: dict[str, int] = Field(description="`rollout/attempts_*`")
    sample_age: float | None = Field(description="`rollout/sample_age`")
    members: dict[str, dict[str, int]] = Field(description="episodes of the run by what they counted as and by steps")
    so_far: SoFar
    driver_stall_seconds: dict[str, float] = Field(description="`time/driver_stall_*`")
    rollout_workers: dict[str, Any] = Field(description="`workers/*`")
    phones: dict[str, int] = Field(description="`phones/*`")
    templates: dict[str, Rate] = Field(description="`template/*`")
    tasks: dict[str, int] = Field(description="`tasks/*`")
    staleness: dict[str, float] = Field(description="`rollout/staleness_*`")
    consumed: dict[str, list[str]] = Field(description="ids of the groups learned from, `groups` and `replayed`")
    replay: dict[str, float | None] | None = Field(None, description="`replay/*`, with rollout.replay")
    rewards: dict[str, Any] | None = Field(None, description="`rewards/*`, where judges are asked")
    learner: dict[str, Any] = Field(description="`learner/*`, `engine/*` and `time/*`")
    alarms: list[str] = Field(description="alarms that have not cleared")


class Alarm(Event):
    """An alarm holds."""

    event: Literal["alarm"]
    text: str = Field(description="the problem and its fix")
    update: int
    alarm: str = Field(description="its name")


class AlarmCleared(Event):
    """An alarm hasn't held for five updates."""

    event: Literal["alarm_cleared"]
    text: str = Field(description="for people")
    update: int
    alarm: str = Field(description="its name")


class Checkpoint(Event):
    """A checkpoint is complete."""

    event: Literal["checkpoint"]
    update: int = Field(description="updates that it contains")
    path: str = Field(description="folder or URI")
    seconds: float = Field(description="that it took")
    seconds_stalled: float = Field(description="that the learner waited for it")
    bytes: int = Field(description="its size")


class Restart(Event):
    """Learner and engines are started again in the same session, from the last checkpoint."""

    event: Literal["restart"]
    update: int = Field(description="updates that this checkpoint contains")
    why: str = Field(description="the reason")


AnyEvent = (
    Started
    | Phase
    | Note
    | Demonstrations
    | ImitationData
    | ImitationLeftOut
    | ImitationEpoch
    | WarmStart
    | Evaluation
    | Baseline
    | BaseModelEvent
    | Reinforcement
    | Stage
    | Update
    | Alarm
    | AlarmCleared
    | Checkpoint
    | Restart
)
_LINE: Final[TypeAdapter[AnyEvent]] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="event")])
#: by the name in `event`
EVENTS: Final[dict[str, type[Event]]] = {
    get_args(one.model_fields["event"].annotation)[0]: one for one in get_args(AnyEvent)
}


# --- summary.json -----------------------------------------------------------------------------------------------------


class Throughput(_Record):
    """Of the learner, over all updates."""

    tokens_per_second: float = Field(description="of the samples; what a micro-batch's samples share counts once")
    positions_per_second: float = Field(description="computed ones, padding included")
    mfu: float | None = Field(description="model FLOPs utilisation; null on machines without a known peak")
    seconds_by_phase: dict[str, float] = Field(description="of all updates")


class HeldOut(_Record):
    """What the measured tasks share with those that were demonstrated and practised."""

    tasks: int | None = Field(None, description="measured tasks")
    practised: int | None = Field(None, description="practised and demonstrated tasks")
    same_task: int | None = Field(None, description="measured tasks that are among these")
    same_goal: int | None = Field(None, description="with the same words")
    same_parameters: int | None = Field(None, description="with the same template and parameters")
    held_out: str = Field(description="what is held out, in words")
    shared: str | None = Field(None, description="what is shared, in words")


class Summary(_Record):
    """What a run came to. Numbers count all its sessions."""

    schema_: int = Field(0, alias="schema", description="version of this schema")
    run: str = Field(description="metadata.name")
    seed: int = Field(description="spec.seed")
    algorithm: str = Field(description="the learning rule with its values, in words")
    success_before: dict[str, Measurement] = Field(description="by mode: sampled, greedy, other_templates")
    success_after: dict[str, Measurement] = Field(description="likewise")
    baselines: dict[str, Measurement] = Field(description="by policy: random, always_infeasible")
    seconds_total: float = Field(description="all of it")
    seconds_start: float = Field(description="until the sessions could work")
    seconds_sft: float = Field(description="of the warm start")
    seconds_rl: float = Field(description="of the reinforcement")
    updates: int = Field(description="finished updates")
    ended_after: str | None = Field(description="the condition of spec.stop that ended it, in words")
    episodes: int = Field(description="finished episodes")
    invalid_episodes: int = Field(description="of these, invalid")
    members: dict[str, dict[str, int]] = Field(description="episodes by what they counted as and by steps")
    env_steps: int = Field(description="steps on phones")
    env_steps_per_second: float | None = Field(description="during reinforcement")
    slot_busy_share: Share | None = Field(description="of the phones' time")
    throughput: Throughput | None = Field(description="null: no update")
    base_model: BaseModelCheck | None = Field(description="null: nothing was measured before")
    held_out: HeldOut
    practised: dict[str, Any] = Field(description="every template, and up to 200 tasks, with rates")
    machine: dict[str, int] = Field(description="cores and gpus")
    stop: dict[str, Any] = Field(description="spec.stop")
    evaluation: dict[str, Any] = Field(description="spec.evaluation")


def json_schema(kind: str) -> dict[str, Any]:
    """Draft 2020-12 of a line of events.jsonl or of summary.json. Fields that it doesn't know are allowed."""
    made = Summary.model_json_schema() if kind == "summary" else _LINE.json_schema()
    schema = _open(made)
    title = "summary.json" if kind == "summary" else "a line of events.jsonl"
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "x-version": VERSION}
    return head | {name: value for name, value in schema.items() if name != "title"}


def _open(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            name: _open(value)
            for name, value in node.items()
            if not (name == "additionalProperties" and value is False)
            and not (name == "title" and isinstance(value, str))
        }
    return [_open(one) for one in node] if isinstance(node, list) else node
