"""From `spec.algorithm` to an estimator with options and an objective: the only place that knows both vocabularies."""

from __future__ import annotations

from typing import Any

from tapforge_api.algorithm import Algorithm

from .objective import Objective


def estimator_of(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """Name and keyword options, as `registry.estimate` takes them."""
    name = algorithm.advantage.kind
    options = algorithm.advantage.value.model_dump(by_alias=False)
    if algorithm.statistics == "steps":
        options["row_statistics"] = True
    return name, options


def objective_of(algorithm: Algorithm) -> Objective:
    loss = algorithm.loss
    return Objective(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        aggregation=loss.aggregation,
        importance_cap=loss.importance_cap,
        kl=algorithm.kl.estimator,
        kl_coefficient=algorithm.kl.coefficient,
    )
