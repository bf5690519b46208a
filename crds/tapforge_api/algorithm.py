"""How episodes become gradients: what is compared, how the loss is made of it, what holds the policy near its start.

Defaults are those of the published GUI-agent runs, but for what decides whether a comparison teaches: there it is the
outcome, and no deviation near 0 is divided by.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import Fraction, OneOf, Positive, Rule, Spec, Word
from .corrections import Corrections, Over
from .model import HuggingFaceModel, ModelFolder, ObjectStorageModel
from .plugin import OPTIONS, PluginOptions

Normalization = Literal["mean", "mean_std"]
Signal = Literal["outcome", "reward"]
StateKey = Literal["screen", "actions"]


class Grpo(Spec):
    """Group-relative advantage of whole episodes."""

    normalization: Normalization = Field(
        "mean_std", description="mean: return minus the group's mean; mean_std: divided by its standard deviation too"
    )
    min_deviation: Annotated[float, Field(ge=0, le=100)] = Field(
        0.1,
        description="smallest standard deviation that mean_std divides by, in units of reward (an episode's outcome is "
        "worth 1): what differs by less is not blown up; 0: as published",
    )


class Gigpo(Spec):
    """Group-in-group advantage: GRPO's, plus one among steps of the same state."""

    normalization: Normalization = Field(
        "mean_std", description="mean: return minus the group's mean; mean_std: divided by its standard deviation too"
    )
    min_deviation: Annotated[float, Field(ge=0, le=100)] = Field(
        0.1,
        description="smallest standard deviation that mean_std divides by, in units of reward (an episode's outcome is "
        "worth 1): what differs by less is not blown up; 0: as published",
    )
    gamma: Fraction = Field(0.95, description="discount per step of the returns that same-state steps are compared by")
    weight: Annotated[float, Field(ge=0, le=100)] = Field(
        1.0, description="weight of the step advantage beside the episode advantage"
    )


class Rloo(Spec):
    """Return minus the mean of the group's other members."""


class EstimatorPlugin(Spec):
    """An estimator by name: one of tapforge's, or an entry point of an installed package."""

    name: Word = Field(description="name: docs/algorithms.md lists ours; or an entry point of tapforge.algorithms")
    options: PluginOptions = OPTIONS


class Advantage(OneOf):
    """The advantage estimator."""

    grpo: Grpo | None = Field(None, description="group-relative")
    gigpo: Gigpo | None = Field(None, description="group-in-group")
    rloo: Rloo | None = Field(None, description="leave one out; write `rloo: {}`")
    plugin: EstimatorPlugin | None = Field(None, description="an estimator by name, of ours or of an installed package")


class LossPlugin(Spec):
    """A policy loss by name, in place of the clipped one."""

    name: Word = Field(
        description="cispo, clip_cov, dppo_kl, dppo_tv, dro, gmpo, gspo, ipo, kl_cov, ppo, prime_rl, reinforce, "
        "rollout_is, sapo, topr, vespo, or an entry point of the group tapforge.losses"
    )
    options: PluginOptions = OPTIONS


class TopEntropy(Spec):
    """Only the tokens with the largest entropies have a policy loss; the others still count in means."""

    share: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="share of the tokens that are kept")
    over: Over = "step"


class Loss(Spec):
    """The policy loss: PPO's clipped one, or `plugin`."""

    plugin: LossPlugin | None = Field(
        None, description="another loss, by name; without it the clipped one, whose options are the fields below"
    )
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="what is clipped. token: each token's own ratio, as PPO; sequence: the geometric mean over an "
        "answer's tokens, as GSPO, whose clips are some hundred times narrower",
    )
    clip_low: Annotated[float, Field(ge=0, le=1)] = Field(0.2, description="the ratio is clipped below 1 - clipLow")
    clip_high: Annotated[float, Field(ge=0, le=10)] = Field(0.28, description="the ratio is clipped above 1 + clipHigh")
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = Field(
        None, description="a negative advantage costs a token at most dualClip x its size; without it unbounded"
    )
    anchor: Literal["behavior", "old"] = Field(
        "old",
        description="what the ratio is against. behavior: the engine's log-probabilities, of each token's own version "
        "of the weights; old: those of the weights before the update, which are the learner's own unless maxStaleness "
        "is 0, miniBatches is 1 and there are no corrections",
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = Field(
        "token_mean",
        description="how token losses become one number; always over the whole batch of all ranks. constant: the mean "
        "over answers of their sum over constantLength, as Dr. GRPO",
    )
    constant_length: Positive | None = Field(
        None, description="tokens that an answer's sum is divided by; without it rollout.responseTokens"
    )
    importance_cap: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None,
        description="truncation of the weight between the learner's old and the engine's log-probabilities; without it "
        "2, or with anchor behavior, corrections.truncate, normalised or icepop no such weight",
    )
    entropy_bonus: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="times the mean entropy of tokens is subtracted from the loss, against a narrowing policy"
    )
    top_entropy: TopEntropy | None = Field(
        None, description="only the tokens with the largest entropies have a policy loss; without it all"
    )
    corrections: Corrections = Field(
        Corrections(), description="further weights and masks by the distance between engine and learner"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="ratio, clipLow, clipHigh and dualClip must be left out with plugin, whose own options they are",
            cel="!has(self.plugin) || (self.ratio == 'token' && self.clipLow == 0.2 && self.clipHigh == 0.28 && "
            "!has(self.dualClip))",
            holds=lambda o: (
                o.plugin is None or (o.ratio, o.clip_low, o.clip_high, o.dual_clip) == ("token", 0.2, 0.28, None)
            ),
        ),
        Rule(
            message="importanceCap, corrections.truncate, corrections.normalised and corrections.icepop must be left "
            "out with anchor behavior: the ratio already is that weight, which would be squared; masks may stay",
            cel="self.anchor == 'old' || (!has(self.importanceCap) && !has(self.corrections.truncate) && "
            "!has(self.corrections.normalised) && !has(self.corrections.icepop))",
            holds=lambda o: o.anchor == "old" or (o.importance_cap is None and not o.corrections.weighing),
        ),
        Rule(
            message="importanceCap must be left out with corrections.truncate, corrections.normalised and "
            "corrections.icepop: it is such a weight too",
            cel="!has(self.importanceCap) || (!has(self.corrections.truncate) && !has(self.corrections.normalised) && "
            "!has(self.corrections.icepop))",
            holds=lambda o: o.importance_cap is None or not o.corrections.weighing,
        ),
        Rule(
            message="corrections.opsm.against must be behavior with anchor behavior, where no old log-probabilities "
            "are computed",
            cel="self.anchor == 'old' || !has(self.corrections.opsm) || self.corrections.opsm.against == 'behavior'",
            holds=lambda o: o.anchor == "old" or o.corrections.opsm is None or o.corrections.opsm.against == "behavior",
        ),
        Rule(
            message="constantLength must be left out unless aggregation is constant",
            cel="!has(self.constantLength) || self.aggregation == 'constant'",
            holds=lambda o: o.constant_length is None or o.aggregation == "constant",
        ),
    )

    @property
    def weight_cap(self) -> float | None:
        """`importance_cap`, written out: 2 where neither a file nor another weight says otherwise; None: no weight."""
        if self.importance_cap is not None or self.anchor == "behavior" or self.corrections.weighing:
            return self.importance_cap
        return 2.0


class Kl(Spec):
    """Pull towards the initial policy. A coefficient of 0 loads no reference model."""

    coefficient: Annotated[float, Field(ge=0, le=100)] = Field(0.0, description="weight of the KL term; 0: none")
    estimator: Literal["k1", "k2", "k3", "k3+", "k3_held", "k3_ratio", "abs"] = Field(
        "k2",
        description="estimator of the divergence per token. k2 has the gradient of KL(policy, initial), k3 "
        "that of KL(initial, policy); k3+: the value of k3 with the gradient of k2; k3_held: k3, at most 10; k3_ratio: "
        "k3 times the policy ratio, as DeepSeek-V3.2; abs: the difference's size",
    )
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: a term of the loss, with its gradient; reward: k1 of the divergence, added up over an "
        "answer's tokens, is subtracted from the reward of its step before advantages are made, which takes a pass of "
        "the policy and one of the reference over every update",
    )
    advantage_cap: bool = Field(
        False,
        description="true: the gradient of a token's KL term is at most as large as that of its advantage, as in "
        "ZeroGUI; for k2 only",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="advantageCap must be left out unless estimator is k2, whose gradient it bounds",
            cel="!self.advantageCap || self.estimator == 'k2'",
            holds=lambda o: not o.advantage_cap or o.estimator == "k2",
        ),
        Rule(
            message="estimator must not be k1: the KL term is part of the loss, and there the expected gradient of k1 "
            "is 0 on the policy's own samples, so that it pulls nowhere (it is an estimator for rewards, with place "
            "reward); use k2 or k3",
            cel="self.estimator != 'k1' || self.place == 'reward'",
            holds=lambda o: o.estimator != "k1" or o.place == "reward",
        ),
        Rule(
            message="estimator must be k1 with place reward: others are for the loss's gradient",
            cel="self.place == 'loss' || self.estimator == 'k1'",
            holds=lambda o: o.place == "loss" or o.estimator == "k1",
        ),
    )

    @property
    def in_loss(self) -> float:
        """The coefficient of the loss's term."""
        return self.coefficient if self.place == "loss" else 0.0

    @property
    def in_reward(self) -> float:
        return self.coefficient if self.place == "reward" else 0.0


class Teacher(OneOf):
    """A model of the policy's family, of any size."""

    path: ModelFolder | None = Field(None, description="a folder: on a cluster one that every node mounts")
    hugging_face: HuggingFaceModel | None = Field(None, description="a repository of Hugging Face")
    object_storage: ObjectStorageModel | None = Field(None, description="a folder in object storage")


class Distillation(Spec):
    """Pull towards a teacher, by its log-probabilities at the policy's own tokens."""

    teacher: Teacher = Field(
        description="a frozen model beside the policy on each learner rank; its tokens, special tokens, image "
        "patches and prompts have to be the policy's; exactly one member"
    )
    kind: Literal["forward_kl", "k1", "k2", "k3"] = Field(
        "forward_kl",
        description="forward_kl: KL(teacher, policy) over the teacher's topK likeliest tokens at each place is a term "
        "of the loss. k1 to k3: of the reverse KL, KL(policy, teacher), by the sampled token alone. k1: what the "
        "teacher's log-probability is above the policy's is added to the token's advantage; k2: half its square is a "
        "term of the loss; k3: exp(-d) + d - 1, at most 10, is",
    )
    top_k: Annotated[int, Field(ge=1, le=1024)] = Field(
        64, description="of forward_kl: how many of the teacher's tokens are compared at each place"
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="what it is multiplied by")
    rewards: Literal["kept", "ignored"] = Field(
        "kept", description="ignored: advantages of rewards are 0, and the teacher is all that is learned from"
    )


class Critic(Spec):
    """Values of states, for advantages that compare with what was to be expected (gae): a linear layer on the policy's
    backbone."""

    coefficient: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0, description="weight of the value loss, half a squared error per step, beside the policy's"
    )
    clip: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None,
        description="a value counts as moved at most so far from what it was before the update, in units of reward; "
        "without it as far as it did",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        0.05, description="of the layer alone: about how far one optimizer step moves a value, in units of reward"
    )
    backbone: Literal["shared", "held"] = Field(
        "shared",
        description="shared: the value loss moves the policy's weights as well; held: the layer alone learns from it",
    )


class Truncated(Spec):
    """What a limit cut off: whether that is a failure, or says nothing."""

    episodes: Literal["failed", "masked"] = Field(
        "failed",
        description="episodes that had not succeeded at their step limit. failed: compared as failures; masked: "
        "left out of the comparison and of learning",
    )
    answers: Literal["failed", "masked"] = Field(
        "failed",
        description="answers that had no end at rollout.responseTokens. failed: learned from as others; masked: not "
        "learned from, while their episode is compared all the same",
    )


class Algorithm(Spec):
    """How episodes become gradients."""

    advantage: Advantage = Field(Advantage(gigpo=Gigpo()), description="advantage estimator; exactly one member")
    statistics: Literal["trajectories", "steps"] = Field(
        "trajectories",
        description="whether a group's mean and deviation count every episode once, or every one of its steps",
    )
    signal: Signal = Field(
        "outcome",
        description="what has to differ for a comparison to teach. outcome: success and failure; penalties, discounts "
        "and rewards of steps refine it. reward: any of them is enough, as published",
    )
    states: StateKey = Field(
        "screen",
        description="which steps of a group count as the same state, for advantages that compare states. screen: they "
        "saw the same (docs/states.md); actions: their episodes had executed the same actions before",
    )
    loss: Loss = Field(Loss(), description="policy loss")
    kl: Kl = Field(Kl(), description="pull towards the initial policy")
    distillation: Distillation | None = Field(
        None, description="pull towards a teacher's answers; without it none, and no teacher is loaded"
    )
    critic: Critic | None = Field(
        None, description="learns values of states, for advantages that read them: plugin gae; without it none"
    )
    truncated: Truncated = Field(Truncated(), description="episodes and answers that a limit cut off")
    invalid_answer_penalty: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="subtracted from the reward of a step whose answer could not be parsed"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="critic must be left out unless advantage.plugin reads values, as gae does: grpo, gigpo and rloo "
            "compare episodes",
            cel="!has(self.critic) || has(self.advantage.plugin)",
            holds=lambda o: o.critic is None or o.advantage.plugin is not None,
        ),
        Rule(
            message="statistics must be trajectories with advantage.rloo, which compares whole episodes; or use grpo "
            "or gigpo",
            cel="!(has(self.advantage.rloo) && self.statistics == 'steps')",
            holds=lambda o: not (o.advantage.rloo is not None and o.statistics == "steps"),
        ),
        Rule(
            message="statistics must be trajectories with advantage.plugin: what its groups are compared by is an "
            "option of the estimator",
            cel="!(has(self.advantage.plugin) && self.statistics == 'steps')",
            holds=lambda o: not (o.advantage.plugin is not None and o.statistics == "steps"),
        ),
    )
