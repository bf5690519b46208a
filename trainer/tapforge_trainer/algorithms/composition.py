"""From `spec.algorithm` to an estimator with options and an objective: the only place that knows both vocabularies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tapforge_api.algorithm import Algorithm, Loss

from .distillation import Distillation
from .loss_registry import loss_options
from .objective import Objective
from .registry import options_of
from .whole_step import TopEntropy


def estimator_of(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """Name and keyword options, as `registry.estimate` takes them. Raises ValueError for an estimator or an option that
    no installed package has; with one of another package, that is imported."""
    if (plugin := algorithm.advantage.plugin) is not None:
        return plugin.name, options_of(plugin.name, {one.name: one.value for one in plugin.options})
    name = algorithm.advantage.kind
    options = algorithm.advantage.value.model_dump(by_alias=False)
    if algorithm.statistics == "steps":
        options["row_statistics"] = True
    return name, options


def check_critic(algorithm: Algorithm, reads: Collection[str]) -> None:
    """`reads`: what the estimator does (`registry.reads_of`). Raises ValueError where it needs a critic and there is
    none, or the other way round."""
    name, needs = estimator_of(algorithm)[0], "value" in reads
    if needs and algorithm.critic is None:
        raise ValueError(f"{name} compares with a critic's values, and there is none: add `critic: {{}}` to algorithm")
    if not needs and algorithm.critic is not None:
        raise ValueError(
            f"{name} reads no values, so that algorithm.critic would do nothing: leave it out, or use "
            "`plugin: {name: gae}`"
        )


def objective_of(algorithm: Algorithm, response_tokens: int) -> Objective:
    """`response_tokens`: the longest answer. Raises ValueError for a loss or an option that no installed package has,
    and for values that make no sense; with a loss of another package, that is imported."""
    loss = algorithm.loss
    name, options = _loss(loss)
    return Objective(
        loss=name,
        options=options,
        aggregation=loss.aggregation,
        constant_length=loss.constant_length or response_tokens,
        anchor=loss.anchor,
        importance_cap=loss.weight_cap,
        corrections=loss.corrections.model_dump(by_alias=False, exclude_none=True),
        entropy_bonus=loss.entropy_bonus,
        top_entropy=None if loss.top_entropy is None else TopEntropy(**loss.top_entropy.model_dump(by_alias=False)),
        kl=algorithm.kl.estimator,
        kl_coefficient=algorithm.kl.in_loss,
        kl_advantage_cap=algorithm.kl.advantage_cap,
        distillation=_distillation(algorithm),
    )


def _distillation(algorithm: Algorithm) -> Distillation | None:
    given = algorithm.distillation
    if given is None:
        return None
    return Distillation(given.kind, given.weight, given.rewards == "ignored", given.top_k)


def _loss(loss: Loss) -> tuple[str, dict[str, Any]]:
    """Name and options."""
    if loss.plugin is not None:
        return loss.plugin.name, loss_options(loss.plugin.name, {one.name: one.value for one in loss.plugin.options})
    options: dict[str, Any] = {"ratio": loss.ratio, "clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.dual_clip is not None:
        options["dual_clip"] = loss.dual_clip
    return "ppo", options
