"""From `spec.algorithm` to an estimator with options and an objective: the only place that knows both vocabularies."""

from __future__ import annotations

from typing import Any

from tapforge_api.algorithm import Algorithm

from .objective import Objective
from .registry import options_of


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


def objective_of(algorithm: Algorithm) -> Objective:
    loss = algorithm.loss
    options = {"ratio": loss.ratio, "clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.dual_clip is not None:
        options["dual_clip"] = loss.dual_clip
    return Objective(
        options=options,
        aggregation=loss.aggregation,
        importance_cap=loss.importance_cap,
        kl=algorithm.kl.estimator,
        kl_coefficient=algorithm.kl.coefficient,
        kl_advantage_cap=algorithm.kl.advantage_cap,
    )
