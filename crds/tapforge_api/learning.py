"""How a run learns: from weights and a warm start over rollouts and an algorithm to updated weights.

Defaults are those of the published GUI-agent runs; a sample manifest for a small machine overrides most of them.
Times are seconds, sizes are tokens unless a field's name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import UNIQUE, Count, Fraction, Path, Positive, Rule, Seconds, Seed, Spec, compare
from .environment import EvaluationTasks

#: how an episode of a data set ended
Ended = Literal["success", "failure", "unknown"]

# --- warm start -------------------------------------------------------------------------------------------------------


#: of an answer in the loss
_Weight = Annotated[float, Field(gt=0, le=100)]


class OutcomeWeights(Spec):
    """What answers count in the loss of imitation, by how their episode ended."""

    success: _Weight = Field(1.0, description="of a success")
    unknown: _Weight = Field(1.0, description="of an episode whose end the data doesn't say")
    failure: _Weight = Field(1.0, description="of a failure, where `outcomes` has failures")


class ImitationData(Spec):
    """A data set that is imitated: recordings, people, published files (`tapforge data`)."""

    path: Path = Field(description="folder of the data set, or its URI")
    outcomes: Annotated[tuple[Ended, ...], Field(min_length=1, max_length=3), UNIQUE] = Field(
        ("success", "unknown"), description="of the episodes that are imitated; unknown: the data doesn't say"
    )
    weights: OutcomeWeights = Field(
        OutcomeWeights(), description="what answers count in the loss, by how their episode ended"
    )
    held_out: Path | None = Field(
        None,
        description="folder or URI of a data set that isn't imitated: after each pass over the other one its loss is "
        "measured, by `tapforge sft` also type and parameters of answers to it, and the best model is kept",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="heldOut must not be path: what is imitated is not held out",
            cel="!has(self.heldOut) || self.heldOut != self.path",
            holds=lambda o: o.held_out is None or o.held_out != o.path,
        ),
    )


class WarmStart(Spec):
    """A short supervised phase on demonstrated episodes before reinforcement learning."""

    data: ImitationData | None = Field(
        None, description="what is imitated; without it a demonstrator plays the tasks of the suite"
    )
    demonstrations: Positive = Field(1000, description="episodes shown, without data")
    steps: Positive = Field(300, description="optimizer steps")
    epochs: Positive | None = Field(None, description="passes over the data, in place of steps")
    batch_size: Annotated[int, Field(ge=1, le=65536)] = Field(32, description="answers per optimizer step")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(1e-3, description="peak learning rate; cosine decay")
    warmup_steps: Count = Field(0, description="optimizer steps over which the rate rises from 0")
    error_rate: Fraction = Field(
        0.0, description="probability that the demonstrator errs at a decision where a person in a hurry would"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("warmup_steps", "<=", "steps", "the learning rate would never reach its peak"),
        Rule(
            message="epochs must be left out without data: a demonstrator plays as many episodes as it is asked for",
            cel="!has(self.epochs) || has(self.data)",
            holds=lambda o: o.epochs is None or o.data is not None,
        ),
        Rule(
            message="steps must be left out with epochs, which say how many there are",
            cel="!has(self.epochs) || self.steps == 300",
            holds=lambda o: o.epochs is None or o.steps == 300,
        ),
    )


# --- rollout ----------------------------------------------------------------------------------------------------------


class DynamicSampling(Spec):
    """Groups whose members all succeed or all fail teach nothing to group methods; this replaces them."""

    enabled: bool = Field(False, description="replace zero-variance groups by further tasks")
    max_rounds: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="refills per update, after which the update takes what there is"
    )


class SuccessReplay(Spec):
    """Successes of tasks that seldom succeed are learned from again, with the advantages of their groups. They may be
    older than maxStaleness."""

    share: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.1, description="episodes that come again at most, over groupsPerUpdate x groupSize"
    )
    max_success: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25, description="largest success rate of a group whose successes are kept"
    )
    groups: Annotated[int, Field(ge=1, le=65536)] = Field(
        64, description="groups that are kept; beyond, the oldest ones go"
    )
    max_age: Positive = Field(20, description="policy versions after which a group comes no more")


class Rollout(Spec):
    """How episodes are played."""

    group_size: Annotated[int, Field(ge=2, le=1024)] = Field(
        8, description="episodes of the same task, compared with each other"
    )
    groups_per_update: Annotated[int, Field(ge=1, le=65536)] = Field(
        16, description="groups that an update learns from"
    )
    max_staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="policy versions that a sample may lag behind at its update; 0: strictly on-policy"
    )
    concurrency: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="episodes at once; without it as many as there are slots"
    )
    phones_per_worker: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description=(
            "phones that a rollout worker, a process of its own, plays on; without it 64 in a cluster and beside "
            "GPUs, and on a machine without them the driver's own process plays"
        ),
    )
    frames_gib: Annotated[float, Field(gt=0, le=65536)] | None = Field(
        None,
        alias="framesGiB",
        description=(
            "frames of episodes that no update has used yet, GiB, held by rollout workers in Ray's object stores: "
            "beyond, no further group is begun; without it 60 % of these stores"
        ),
    )
    max_steps: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="answers after which an episode ends at its step limit, where its task allows more"
    )
    temperature: Annotated[float, Field(gt=0, le=2)] = Field(1.0, description="sampling temperature in training")
    response_tokens: Annotated[int, Field(ge=1, le=65536)] = Field(256, description="longest answer, tokens")
    max_reruns: Annotated[int, Field(ge=0, le=100)] = Field(
        2, description="times an invalid episode is played again on another slot"
    )
    min_valid: Annotated[int, Field(ge=2, le=1024)] = Field(
        2, description="valid episodes that a group needs; with fewer it is dropped and counted"
    )
    group_deadline_seconds: Seconds | None = Field(
        None,
        description=(
            "for all calls to phones of a member and its re-runs, after which its group goes on without it, seconds; "
            "without it what 1 + maxReruns episodes may take, so that no episode is left out for being slow"
        ),
    )
    dynamic_sampling: DynamicSampling = Field(DynamicSampling(), description="replacement of zero-variance groups")
    replay: SuccessReplay | None = Field(
        None, description="rare successes that are learned from again; without it each episode is learned from once"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("min_valid", "<=", "group_size", "no group could ever have that many valid episodes"),
    )


# --- learner, engine, sync --------------------------------------------------------------------------------------------

Threads = Annotated[int, Field(ge=1, le=1024)]


class Learner(Spec):
    """The optimizer's side: FSDP2 ranks and AdamW."""

    ranks: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="processes that share the model (FSDP2)")
    threads: Threads | None = Field(None, description="CPU threads of a rank; without it chosen by the machine's cores")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(1e-6, description="learning rate of AdamW")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of AdamW's first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="decay of AdamW's second moment")
    weight_decay: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="AdamW's weight decay")
    warmup_updates: Count = Field(0, description="updates over which the learning rate rises from 0")
    gradient_clip: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="largest norm of the gradient")
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="optimizer steps per update; a group is never split between two"
    )
    tokens_per_micro_batch: Annotated[int, Field(ge=64, le=16_777_216)] = Field(
        8192, description="tokens in one forward pass of a rank; a longer sample goes alone"
    )
    activation_checkpointing: bool | None = Field(
        None,
        description="keep only each layer's input and compute the rest again in the backward pass; without it on GPUs",
    )
    checkpointed_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the layers, the first ones, with activationCheckpointing; the others are faster"
    )
    attention: Literal["auto", "torch", "flash-attn"] = Field(
        "auto",
        description="torch's kernel, which auto is, or that of the package flash-attn (on GPUs; it never ran here)",
    )
    gradient_accumulation: Literal["sharded", "unsharded"] | None = Field(
        None,
        description="sharded: ranks reduce gradients after every micro-batch and keep a share each; unsharded: once "
        "per optimizer step, with all gradients on every rank. Without it sharded on GPUs, unsharded elsewhere",
    )
    cpu_offload: bool = Field(
        False, description="keep master weights, gradients and moments in the host's memory, and step there"
    )
    reshard_after_forward: bool = Field(
        True,
        description="free a layer's gathered weights after its forward pass and gather them again for the backward",
    )

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


class Engine(Spec):
    """The sampling side: vLLM engines."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="engines, each with the whole model")
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs that share the model of an engine")
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = Field(
        64, description="answers that one engine samples at once"
    )
    max_batched_tokens: Annotated[int, Field(ge=64, le=16_777_216)] | None = Field(
        None, description="tokens in one pass of an engine; without it vLLM's choice"
    )
    kv_cache_mib: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        None,
        alias="kvCacheMiB",
        description="key-value cache on each of an engine's devices, MiB; without it 128 on CPUs, and on GPUs what "
        "gpuMemoryShare leaves",
    )
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of a GPU's memory that an engine takes, its weights included; without it 0.9, and 0.5 where "
        "it shares its GPU with a learner rank",
    )
    prefix_caching: bool = Field(True, description="keep the key-value cache of prompts that begin alike")
    async_scheduling: bool | None = Field(
        None, description="plan an engine's next pass while one runs; without it vLLM's choice on GPUs, never on CPUs"
    )
    enforce_eager: bool | None = Field(None, description="no CUDA graphs and no compilation; CPUs always do without")
    threads: Threads | None = Field(
        None, description="CPU threads of an engine; without it chosen by the machine's cores, on GPUs Ray's default"
    )
    frame_store_mib: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        None,
        alias="frameStoreMiB",
        description="decoded frames that an engine keeps at hand, MiB; without it as many as its answers at once can "
        "show, from 256 to 2,048",
    )
    max_restarts_per_hour: Annotated[int, Field(ge=0, le=1000)] = Field(
        3, description="restarts within an hour, of a dead engine or of learner and engines; one more ends the run"
    )


class Sync(Spec):
    """How new weights reach the engines, and how far the two sides may differ."""

    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="with model.lora, what engines get. merged: whole weights with the adapters added, which rounds "
        "small changes away in bfloat16. adapter: the adapters alone, a fiftieth of the bytes, which engines add to "
        "each layer's output",
    )

    mid_episode: bool = Field(
        True, description="new weights arrive while episodes run; otherwise no episode sees two versions"
    )
    tolerance: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None,
        description="largest difference of a token's log-probability between engine and learner right after new "
        "weights, more than which ends the run; without it 1e-4 in float32, and in bfloat16 mean, 90th percentile and "
        "k3 over a thousand tokens are bounded: by three times those of the run's first proof, at most 0.1, 0.25 and "
        "0.05",
    )
    gap_alarm: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None,
        description="mean difference of log-probabilities between engine and learner on the answers to the proof's "
        "prompts, right after new weights, from which on it is reported; without it 1e-3 in float32 and 0.05 in "
        "bfloat16",
    )


class Placement(Spec):
    """Which GPUs learner ranks and engines get. A machine without GPUs pays no attention."""

    mode: Literal["apart", "colocated"] = Field(
        "apart",
        description="apart: every learner rank and every engine has GPUs of its own, and both work at once. colocated: "
        "rank k shares GPU k with an engine, and they take turns: the engine sleeps while the learner works",
    )


class PolicyDeadlines(Spec):
    """How long engines and learner may take until something is taken to be wrong with them. An 8B model fits."""

    start_seconds: Seconds = Field(
        3600.0, description="until the machines are there and the model is loaded, each, seconds"
    )
    answer_seconds: Seconds | None = Field(
        None,
        description="for an answer, the wait for its turn included, but not the time in which its engine gets new "
        "weights, seconds; without it 120 and 2 more for each token of rollout.responseTokens",
    )
    update_seconds: Seconds = Field(7200.0, description="for an update, a checkpoint or an export, seconds")
    sync_seconds: Seconds = Field(1200.0, description="until all engines have new weights, seconds")


# --- evaluation, end -------------------------------------------------------------------------------------------------


class Evaluation(Spec):
    """How success is measured: the same tasks before, in between and after, by a pinned policy version."""

    tasks: EvaluationTasks = Field(EvaluationTasks(), description="what is measured on")
    episodes: Annotated[int, Field(ge=1, le=1_000_000)] = Field(200, description="different tasks, one episode each")
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="episodes per task when sampled; greedy answers are played once"
    )
    sampled: bool = Field(True, description="measure with answers sampled at sampledTemperature")
    greedy: bool = Field(True, description="measure with the most probable answers")
    sampled_temperature: Annotated[float, Field(gt=0, le=2)] = Field(1.0, description="temperature of the sampled mode")
    judged: bool = Field(
        False,
        description="success is what the stream rewards.success says, and no environment is asked: for tasks that have "
        "a goal and no check. Baselines are judged, too",
    )
    baselines: bool = Field(True, description="also measure a random and an always-infeasible policy on the same tasks")
    every_updates: Count = Field(0, description="also measure every so many updates; 0: only before and after")
    other_templates: Count = Field(
        0,
        description="before and after, also measure so many tasks of templates that aren't practised, sampled",
    )
    seed: Seed = Field(1_000_003, description="seed of the choice of tasks; apart from spec.seed so that runs compare")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="at least one of sampled and greedy must be true",
            cel="self.sampled || self.greedy",
            holds=lambda o: o.sampled or o.greedy,
        ),
    )


class Stop(Spec):
    """When a run ends: at the first limit it reaches."""

    max_updates: Positive = Field(100, description="updates")
    max_seconds: Seconds | None = Field(None, description="time of the reinforcement phase, seconds; without it none")
    target_success: Fraction | None = Field(
        None,
        description="success rate from which the run may end: over all valid attempts of the last update, also those "
        "in groups that dynamic sampling dropped",
    )
    judge_tokens: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None,
        description="tokens that judges may use, in questions and answers; then the run suspends itself after a "
        "checkpoint until this is raised; without it none",
    )
    judge_money: Annotated[float, Field(gt=0, le=1_000_000_000)] | None = Field(
        None, description="the same, in money by the prices of the judges' models"
    )

    def spent_on_judges(self, tokens: int, money: float) -> str:
        """Which limit of judges is reached by what they have used, and the remedy, in words; empty: none."""
        if self.judge_tokens is not None and tokens >= self.judge_tokens:
            return f"judges have used {tokens:,} tokens: raise spec.stop.judgeTokens, which is {self.judge_tokens:,}"
        if self.judge_money is not None and money >= self.judge_money:
            return f"judges have cost {money:,.2f}: raise spec.stop.judgeMoney, which is {self.judge_money:,.2f}"
        return ""
