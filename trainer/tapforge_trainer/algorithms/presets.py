"""Published learning rules by name: values that `--preset` puts wherever a file says nothing, each with its source.

- A preset is plain data: fields of a file, in the file's own words. What a file or `--set` says wins.
- It holds what decides about gradients and sampling, as far as those fields are there; `left_out` names what is
  published beside it and is not. Learning rates, group sizes and lengths are the file's.
- There is no field for it: the API server fills defaults into stored objects, so a preset's values could not be told
  apart from the file's. `tapforge preset NAME` prints the fields for a file that goes to a cluster.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class UnknownPreset(ValueError):
    """A name that no preset has; the message says the nearest."""


@dataclass(frozen=True, slots=True)
class Value:
    """`path` is below `spec`, `value` YAML in one line."""

    path: str
    value: str
    source: str

    @property
    def override(self) -> str:
        """As `--set` takes it: unless it is set already."""
        return f"spec.{self.path}?={self.value}"


@dataclass(frozen=True, slots=True)
class Preset:
    about: str
    values: tuple[Value, ...]
    #: what is published with it and can't be said, or is the file's
    left_out: tuple[str, ...] = ()


def preset(name: str) -> Preset:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownPreset(f"no preset is called {name!r}{hint} Known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


_PLAIN: Final = "published advantages know no outcomes"


def _grpo(source: str) -> tuple[Value, ...]:
    return (
        Value("algorithm.advantage.grpo.normalization", "mean_std", source),
        Value("algorithm.advantage.grpo.minDeviation", "0", source),
        Value("algorithm.signal", "reward", _PLAIN),
    )


def _advantage(name: str, source: str, **options: str) -> tuple[Value, ...]:
    return (
        Value("algorithm.advantage.plugin", _plugin(name, options), source),
        Value("algorithm.signal", "reward", _PLAIN),
    )


def _loss(name: str, source: str, **options: str) -> Value:
    return Value("algorithm.loss.plugin", _plugin(name, options), source)


def _plugin(name: str, options: Mapping[str, str]) -> str:
    given = ", ".join(f'{{name: {key}, value: "{value}"}}' for key, value in options.items())
    return f"{{name: {name}, options: [{given}]}}" if given else f"{{name: {name}}}"


def _clips(low: str, high: str, source: str) -> tuple[Value, ...]:
    return Value("algorithm.loss.clipLow", low, source), Value("algorithm.loss.clipHigh", high, source)


def _mean(over: str, source: str) -> Value:
    return Value("algorithm.loss.aggregation", over, source)


def _kl(coefficient: str, estimator: str, source: str) -> tuple[Value, ...]:
    return Value("algorithm.kl.coefficient", coefficient, source), Value("algorithm.kl.estimator", estimator, source)


def _no_kl(source: str) -> Value:
    return Value("algorithm.kl.coefficient", "0", source)


_GIGPO: Final = "arXiv:2505.10978, its ALFWorld script"
_CLAWGUI: Final = "ClawGUI-RL, gigpo_dynamic/mobileworld"
_ZEROGUI: Final = "ZeroGUI, train_osworld_test-time"
_VERL: Final = "verl's GUI agent example, Qwen3-VL-8B"

PRESETS: Final[Mapping[str, Preset]] = {
    "grpo": Preset(
        "GRPO as in DeepSeekMath: token ratios, means over answers, KL to the start",
        (
            *_grpo("arXiv:2402.03300"),
            *_clips("0.2", "0.2", "verl's and TRL's default; the paper names none"),
            _mean("seq_mean_token_mean", "arXiv:2402.03300, eq. 3"),
            *_kl("0.04", "k3", "arXiv:2402.03300, eq. 4 and section 4.2"),
        ),
        ("a reference that is renewed between iterations",),
    ),
    "dr_grpo": Preset(
        "GRPO without the two biases: no deviation, and a constant in the place of an answer's length",
        (
            *_advantage("dr_grpo", "arXiv:2503.20783"),
            *_clips("0.2", "0.2", "arXiv:2503.20783"),
            _mean("constant", "arXiv:2503.20783"),
            _no_kl("arXiv:2503.20783"),
        ),
    ),
    "dapo": Preset(
        "GRPO with clip-higher, a mean over tokens, no KL, and groups that are replaced when they teach nothing",
        (
            *_grpo("arXiv:2503.14476"),
            *_clips("0.2", "0.28", "arXiv:2503.14476, section 3.1"),
            _mean("token_mean", "arXiv:2503.14476, section 3.3"),
            _no_kl("arXiv:2503.14476, section 2.3"),
            Value("rollout.dynamicSampling.enabled", "true", "arXiv:2503.14476, section 3.2"),
        ),
        ("the reward's penalty on long answers", "16 optimizer steps per batch"),
    ),
    "gspo": Preset(
        "GRPO with a ratio per answer and narrow clips, in four steps per batch",
        (
            *_grpo("arXiv:2507.18071"),
            _loss("gspo", "arXiv:2507.18071", clip_low="3e-4", clip_high="4e-4"),
            _mean("seq_mean_token_mean", "arXiv:2507.18071, eq. 5"),
            Value("algorithm.loss.anchor", "old", "clips as narrow as these don't stand an engine's rounding"),
            Value("learner.miniBatches", "4", "arXiv:2507.18071, section 5.1"),
            _no_kl("verl's example of GSPO"),
        ),
    ),
    "cispo": Preset(
        "REINFORCE with clipped weights: what is clipped keeps its gradient",
        (
            *_grpo("arXiv:2506.13585"),
            _loss("cispo", "TRL: no lower bound, cap 5", clip_low="1", clip_high="4"),
            _mean("token_mean", "arXiv:2506.13585"),
            _no_kl("arXiv:2506.13585"),
        ),
    ),
    "clip_cov": Preset(
        "GRPO without the gradient of a few tokens that move most along with the advantage",
        (
            *_grpo("arXiv:2505.22617"),
            _loss("clip_cov", "arXiv:2505.22617, drawn over a whole step", share="2e-4", low="1", high="5"),
            _mean("token_mean", "verl's recipe entropy"),
            _no_kl("verl's recipe entropy"),
        ),
        ("several optimizer steps per batch, without which no ratio is clipped",),
    ),
    "kl_cov": Preset(
        "GRPO with a pull on the few tokens that move most along with the advantage, and no clip",
        (
            *_grpo("arXiv:2505.22617"),
            _loss("kl_cov", "arXiv:2505.22617, selected over a whole step", share="2e-4", coefficient="1"),
            _mean("token_mean", "verl's recipe entropy"),
            _no_kl("verl's recipe entropy"),
        ),
        ("several optimizer steps per batch, without which nothing is pulled",),
    ),
    "m2po": Preset(
        "GRPO on stale data: the tokens whose squared log-ratios are largest are masked, nothing is clipped else",
        (
            *_grpo("arXiv:2510.01161"),
            Value("algorithm.loss.corrections.secondMoment.threshold", "0.04", "arXiv:2510.01161"),
            _mean("token_mean", "AReaL's default"),
            _no_kl("arXiv:2510.01161"),
        ),
        ("clips: those of the file",),
    ),
    "gigpo": Preset(
        "GRPO's advantage plus one among steps that saw the same state",
        (
            Value("algorithm.advantage.gigpo.normalization", "mean_std", _GIGPO),
            Value("algorithm.advantage.gigpo.minDeviation", "0", _GIGPO),
            Value("algorithm.advantage.gigpo.gamma", "0.95", _GIGPO),
            Value("algorithm.advantage.gigpo.weight", "1", _GIGPO),
            Value("algorithm.statistics", "steps", "verl-agent's default"),
            Value("algorithm.signal", "reward", _PLAIN),
            *_kl("0.01", "k3_held", _GIGPO),
            *_clips("0.2", "0.2", "verl's default"),
            Value("algorithm.loss.dualClip", "3", "verl's default"),
            _mean("token_mean", "verl's default"),
            Value("algorithm.invalidAnswerPenalty", "0.1", _GIGPO),
        ),
    ),
    "hgpo": Preset(
        "states by how an episode came there, two steps back",
        _advantage(
            "hgpo", "arXiv:2602.22817, the authors' code", history="2", alpha="1", form="code", drop_zeros="true"
        ),
        ("loss and KL: those of the file",),
    ),
    "graphgpo": Preset(
        "distance to the goal in the graph that a group walked; with the published omega nothing beyond ten steps",
        _advantage("graphgpo", "arXiv:2605.26684, the authors' code", form="code", omega="0.1", row_statistics="true"),
        ("loss and KL: those of the file",),
    ),
    "zerogui": Preset(
        "online RL of ZeroGUI: on-policy, one step per batch, a KL term that never outweighs the advantage",
        (
            *_advantage("grpo", _ZEROGUI, epsilon="1e-8"),
            *_clips("0.2", "0.2", _ZEROGUI),
            _mean("seq_mean_token_mean", _ZEROGUI),
            *_kl("0.1", "k2", _ZEROGUI),
            Value("algorithm.kl.advantageCap", "true", _ZEROGUI),
            Value("rollout.maxStaleness", "0", _ZEROGUI),
            Value("rollout.dynamicSampling.enabled", "true", _ZEROGUI),
            Value("rollout.dynamicSampling.maxRounds", "64", "ZeroGUI has no limit; the largest there is"),
            Value("rollout.temperature", "0.5", _ZEROGUI),
        ),
        ("top_p 0.9", "64 episodes a task, learning rate 2e-6"),
    ),
    "clawgui": Preset(
        "GiGPO of ClawGUI-RL with its dynamic sampling",
        (
            Value("algorithm.advantage.gigpo.normalization", "mean_std", _CLAWGUI),
            Value("algorithm.advantage.gigpo.minDeviation", "0", _CLAWGUI),
            Value("algorithm.advantage.gigpo.gamma", "0.95", _CLAWGUI),
            Value("algorithm.advantage.gigpo.weight", "1", _CLAWGUI),
            Value("algorithm.statistics", "steps", _CLAWGUI),
            Value("algorithm.signal", "reward", _PLAIN),
            *_clips("0.2", "0.28", _CLAWGUI),
            Value("algorithm.loss.dualClip", "3", _CLAWGUI),
            Value("algorithm.loss.entropyBonus", "0.001", _CLAWGUI),
            _mean("token_mean", _CLAWGUI),
            *_kl("0.01", "k3_held", _CLAWGUI),
            Value("algorithm.invalidAnswerPenalty", "0.1", _CLAWGUI),
            Value("rollout.dynamicSampling.enabled", "true", _CLAWGUI),
            Value("rollout.dynamicSampling.maxRounds", "10", _CLAWGUI),
            Value("rollout.temperature", "0.7", _CLAWGUI),
        ),
        (
            "optimizer steps of 16 answers each",
            "the step judge",
            "its state key, which is what adb printed",
        ),
    ),
    "verl": Preset(
        "GRPO of verl's GUI agent example",
        (
            *_grpo(_VERL),
            *_clips("0.2", "0.2", _VERL),
            Value("algorithm.loss.dualClip", "3", "verl's default"),
            _mean("token_mean", _VERL),
            *_kl("0.01", "k3_held", _VERL),
            Value("learner.miniBatches", "8", f"{_VERL}: 64 of 512 tasks"),
            Value("rollout.temperature", "0.7", _VERL),
        ),
        ("top_p 0.9",),
    ),
    "dppo": Preset(
        "a trust region by total variation against the policy that sampled, without ratios that clip",
        (
            *_grpo("arXiv:2602.04879"),
            _loss("dppo_tv", "arXiv:2602.04879, as in SkyRL"),
            Value("algorithm.loss.anchor", "behavior", "arXiv:2602.04879, as in SkyRL"),
            _mean("token_mean", "verl's default"),
            _no_kl("verl's default"),
        ),
    ),
    "maxrl": Preset(
        "the return's distance from the group's mean, divided by that mean",
        _advantage("maxrl", "arXiv:2602.02710, prime-rl"),
        ("loss and KL: those of the file",),
    ),
    "ppo": Preset(
        "PPO: advantages of each step against a critic's values, a clipped loss and a clipped value loss",
        (
            *_advantage("gae", "arXiv:1506.02438; gamma and lambda as in verl", whiten="tokens"),
            Value("algorithm.critic.coefficient", "1", "verl: half a squared error"),
            Value("algorithm.critic.clip", "0.5", "verl's default"),
            *_clips("0.2", "0.2", "arXiv:1707.06347"),
            _mean("token_mean", "verl's default"),
            _no_kl("verl's default"),
        ),
        ("a critic that is a model of its own, with a rate of its own", "values of tokens: here they are of steps"),
    ),
    "prime_rl": Preset(
        "prime-rl's default: no deviation, DPPO's mask against the engine, a small square on log-ratios",
        (
            *_advantage("dr_grpo", "prime-rl"),
            _loss("prime_rl", "prime-rl"),
            Value("algorithm.loss.anchor", "behavior", "prime-rl"),
            _mean("token_mean", "prime-rl"),
            _no_kl("prime-rl"),
        ),
    ),
    "reinforce_plus_plus": Preset(
        "discounted returns, whitened over the batch, without groups",
        _advantage("reinforce_plus_plus", "arXiv:2501.03262"),
        ("loss and KL: those of the file",),
    ),
}
