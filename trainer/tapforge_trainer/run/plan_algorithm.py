"""What a plan says of the algorithm: advantages, loss and KL with all their options in one line, and what of them does
nothing or is risky where the file has it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Loss, LossPlugin
from tapforge_api.training_run import TrainingRunSpec

from ..algorithms.composition import objective_of
from ..algorithms.loss_registry import BUILT_IN, loss_options
from ..algorithms.loss_registry import loss as registered
from ..algorithms.objective import old_known, recomputed
from ..algorithms.token_losses.gspo import Gspo
from ..algorithms.token_losses.ppo import Ppo
from ..algorithms.whole_step import passes

#: nearer to 1 no whole answer's ratio stays between engine and learner in bfloat16
_NARROW = 0.01
#: of our estimators, those that compare states
_COMPARE_STATES = {"gigpo", "graphgpo", "hgpo"}


def algorithm_line(run: TrainingRun) -> str:
    algorithm = run.spec.algorithm
    parts = {name: getattr(algorithm.advantage.value, name, None) for name in ("normalization", "gamma", "weight")}
    inside = ", ".join(f"{k} {v}" for k, v in parts.items() if v is not None)
    capped = ", capped by the advantage" if algorithm.kl.advantage_cap else ""
    kl = f"KL {algorithm.kl.coefficient:g} ({algorithm.kl.estimator}{capped})"
    kl = f"KL {algorithm.kl.coefficient:g} (k1) in the reward" if algorithm.kl.in_reward else kl
    kl = kl if algorithm.kl.coefficient else "no KL term"
    name = algorithm.advantage.kind + (f" ({inside})" if inside else "")
    if (plugin := algorithm.advantage.plugin) is not None:
        from ..algorithms.registry import built_in, defaults_of  # pays for numpy

        ours = plugin.name in built_in()
        options = defaults_of(plugin.name) if ours else {}
        options = {key: str(one).lower() if isinstance(one, bool) else one for key, one in options.items()}
        options |= {one.name: one.value for one in plugin.options}
        given = ", ".join(f"{key} {value}" for key, value in options.items() if value != "")
        name = plugin.name + ("" if ours else " of another package") + (f" ({given})" if given else "")
    if (critic := algorithm.critic) is not None:
        clip = "" if critic.clip is None else f", clip {critic.clip:g}"
        where = "backbone held" if critic.backbone == "held" else "shared backbone"
        name += f", critic ({where}, coefficient {critic.coefficient:g}{clip}, rate {critic.learning_rate:g})"
    if algorithm.states == "actions":
        name += ", states by executed actions"
    for what, fate in algorithm.truncated.model_dump().items():
        name += f", {what} at their limit masked" if fate == "masked" else ""
    return f"{name}, {_loss(run)}, {kl}{_distilled(run)}"


def _distilled(run: TrainingRun) -> str:
    taught = run.spec.algorithm.distillation
    if taught is None:
        return ""
    where = "added to advantages" if taught.kind == "k1" else "in the loss"
    alone = ", rewards ignored" if taught.rewards == "ignored" else ""
    kind = f"forward_kl over {taught.top_k} tokens" if taught.kind == "forward_kl" else taught.kind
    return f", distillation {taught.weight:g} ({kind}) {where}{alone}"


def _loss(run: TrainingRun) -> str:
    spec, loss = run.spec, run.spec.algorithm.loss
    parts = [f"clip {loss.clip_low:g}/{loss.clip_high:g} by {loss.ratio}"]
    if loss.dual_clip is not None:
        parts.append(f"dual clip {loss.dual_clip:g}")
    if loss.plugin is not None:
        made = _named_loss(loss.plugin)
        options = {one.name: one.value for one in loss.plugin.options} if made is None else asdict(made)
        given = ", ".join(f"{name} {value}" for name, value in options.items())
        parts = [f"loss {loss.plugin.name}" + (f" ({given})" if given else "")]
    length = loss.constant_length or spec.rollout.response_tokens
    parts.append(f"constant {length:,}" if loss.aggregation == "constant" else loss.aggregation)
    parts.append(f"anchor {loss.anchor}")
    if loss.top_entropy is not None:
        parts.append(f"top entropy (share {loss.top_entropy.share:g}, over {loss.top_entropy.over})")
    if loss.entropy_bonus:
        parts.append(f"entropy bonus {loss.entropy_bonus:g}")
    # Where the engine's log-probabilities stand for the old ones, the ratio is the weight.
    if loss.weight_cap is not None and old_logprobs_recomputed(spec):
        parts.append(f"importance weight at most {loss.weight_cap:g}")
    for name, correction in loss.corrections.model_dump(exclude_none=True).items():
        given = ", ".join(f"{key} {value}" for key, value in correction.items())
        parts.append(f"{name} ({given})")
    return ", ".join(parts)


def _named_loss(plugin: LossPlugin) -> Any:
    """One of ours with all its options; None: another package's, or one that a run is refused for."""
    try:
        options = {one.name: one.value for one in plugin.options}
        return registered(plugin.name, loss_options(plugin.name, options)) if plugin.name in BUILT_IN else None
    except ValueError:
        return None


def statistics_line(spec: TrainingRunSpec) -> str:
    """What decides over whole optimizer steps or reads answers before they have advantages, and the passes that this
    takes; "": nothing does."""
    return "; ".join(part for part in (reads_line(spec), _whole_steps(spec)) if part)


def reads_line(spec: TrainingRunSpec) -> str:
    """What reads answers before they have advantages; "": nothing does."""
    from ..algorithms.registry import reads_of  # pays for numpy

    plugin, kl = spec.algorithm.advantage.plugin, spec.algorithm.kl.in_reward
    try:
        read = plugin is not None and reads_of(plugin.name)
    except ValueError:  # a run is refused for it
        return ""
    names = [*([plugin.name] if plugin is not None and read else []), *(["kl in the reward"] if kl else [])]
    passes = "a forward pass of the policy" + (" and one of the reference" if kl else "")
    return f"{', '.join(names)} before advantages: {passes}, without gradients, over every update" if names else ""


def _whole_steps(spec: TrainingRunSpec) -> str:
    try:
        whole = objective_of(spec.algorithm, spec.rollout.response_tokens).whole_step()
    except ValueError:  # a run is refused for it
        return ""
    whole = {name: part for name, part in whole.items() if part.over == "step"}
    own, steps = old_logprobs_recomputed(spec), spec.learner.mini_batches
    plugin = spec.algorithm.loss.plugin
    names = ", ".join(plugin.name if name == "loss" and plugin is not None else name for name in whole)
    known = (old_known(spec.algorithm.loss.anchor, own=own, first=number == 0) for number in range(min(steps, 2)))
    takes = [passes(whole, known=one) for one in known]
    if not whole:
        return ""
    if not any(takes):
        return f"{names} over each optimizer step, without a pass of its own"
    when = "before the first optimizer step of an update" if not all(takes) else "before each optimizer step"
    return f"{names} over each optimizer step: a forward pass without gradients {when}, a third of a step's work"


def old_logprobs_recomputed(spec: TrainingRunSpec) -> bool:
    return recomputed(
        spec.algorithm.loss.anchor,
        off_policy=spec.rollout.max_staleness > 0,
        steps=spec.learner.mini_batches,
        corrected=bool(spec.algorithm.loss.corrections.model_dump(exclude_none=True)),
    )


def notes_on_algorithm(spec: TrainingRunSpec) -> list[str]:
    return [*_notes_on_the_ratio(spec), *_notes_on_advantages(spec)]


def _notes_on_advantages(spec: TrainingRunSpec) -> list[str]:
    algorithm, notes = spec.algorithm, []
    plugin = algorithm.advantage.plugin
    name = algorithm.advantage.kind if plugin is None else plugin.name
    if spec.rollout.dynamic_sampling.enabled:
        why = ""
        if name == "reinforce_plus_plus":
            why = "reinforce_plus_plus compares them with the whole batch"
        elif algorithm.critic is not None:
            why = "steps are compared with a critic's values"
        elif algorithm.signal == "reward":
            why = "algorithm.signal is reward"
        elif algorithm.distillation is not None:
            why = "the teacher teaches in each"
        if why:
            notes.append(f"rollout.dynamicSampling replaces groups that ended alike, but here they may teach: {why}")
    if algorithm.states == "actions":
        from ..algorithms.registry import built_in  # pays for numpy

        if name in set(built_in()) - _COMPARE_STATES:
            notes.append(f"algorithm.states changes nothing: {name} compares no states")
    taught = algorithm.distillation
    if (
        taught is not None
        and taught.kind != "forward_kl"
        and taught.top_k != type(taught).model_fields["top_k"].default
    ):
        notes.append(f"algorithm.distillation.topK changes nothing: {taught.kind} compares the sampled token alone")
    return notes


def _notes_on_the_ratio(spec: TrainingRunSpec) -> list[str]:
    loss, one = spec.algorithm.loss, spec.learner.mini_batches == 1
    named = loss.ratio == "sequence" or loss.plugin is not None
    rounded = spec.model.dtype != "float32" and not (spec.model.dtype is None and spec.device == "cpu")
    notes = []
    if old_logprobs_recomputed(spec) and one and named:
        notes.append(
            "the ratio is 1 at the only optimizer step of an update: what the loss does with ratios does nothing. Set "
            "loss.anchor to behavior, or learner.miniBatches to 2 or more"
        )
    elif not old_logprobs_recomputed(spec) and rounded and _narrow(loss):
        notes.append(
            "the ratio is of whole answers and against the engine: in bfloat16 rounding alone takes many of them out "
            "of so narrow a clip. Look at clip_fraction_* of the first update, or use loss.anchor: old with "
            "learner.miniBatches of 2 or more"
        )
    mask = loss.corrections.opsm
    if mask is not None and mask.against == "old" and one:
        notes.append(
            "corrections.opsm against old masks nothing at the only optimizer step of an update: it compares the "
            "policy with itself. Leave against out, or set learner.miniBatches to 2 or more"
        )
    return notes


def _narrow(loss: Loss) -> bool:
    """Whether answers are clipped as a whole, and as narrowly as GSPO's are published."""
    made = Ppo(ratio=loss.ratio, clip_low=loss.clip_low, clip_high=loss.clip_high)
    if loss.plugin is not None:
        made = _named_loss(loss.plugin)
    whole = isinstance(made, Gspo) or (isinstance(made, Ppo) and made.ratio == "sequence")
    return whole and min(made.clip_low, made.clip_high) < _NARROW
