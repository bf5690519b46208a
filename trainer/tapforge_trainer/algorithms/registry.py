"""Advantage estimators by name: ours, and those that installed packages offer. A file asks for both alike.

An estimator is a function of `Steps` and keyword options that returns `Advantages`. Others offer one by an entry point
in the group `tapforge.algorithms`:

    [project.entry-points."tapforge.algorithms"]
    my_estimator = "my_package.module:function"

Names are strict: an unknown one is an error that names the nearest, as is an option that an estimator does not have. A
name that is offered twice is an error, too (`plugins.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from .. import plugins
from .discounted_grpo import discounted_grpo
from .gae import gae
from .gdpo import gdpo
from .gigpo import gigpo
from .gpg import gpg
from .graphgpo import graphgpo
from .grpo import dr_grpo, grpo
from .grpo_length_penalty import grpo_length_penalty
from .grpo_passk import grpo_passk
from .hgpo import hgpo
from .maxrl import maxrl
from .opo import opo
from .options import check_options, read_options, unknown
from .otb import otb
from .reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from .rloo import rloo
from .steps import Advantages, Steps

ENTRY_POINTS = "tapforge.algorithms"

Estimator = Callable[..., Advantages]

_BUILT_IN: dict[str, Estimator] = {
    "discounted_grpo": discounted_grpo,
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gdpo": gdpo,
    "gigpo": gigpo,
    "gpg": gpg,
    "graphgpo": graphgpo,
    "grpo": grpo,
    "grpo_length_penalty": grpo_length_penalty,
    "grpo_passk": grpo_passk,
    "hgpo": hgpo,
    "maxrl": maxrl,
    "opo": opo,
    "otb": otb,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
}


def built_in() -> list[str]:
    """Ours, sorted."""
    return sorted(_BUILT_IN)


def names() -> list[str]:
    """All estimators that can be asked for, sorted. Loads no entry point."""
    return sorted({*_BUILT_IN, *plugins.names(ENTRY_POINTS)})


def estimator(name: str) -> Estimator:
    point = plugins.find(ENTRY_POINTS, name, _BUILT_IN)
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if point is None:
        raise unknown("estimator", name, names())
    found = point.load()
    if not callable(found):
        raise TypeError(f"the entry point {point.value!r} of the estimator {name!r} is not a function: {found!r}")
    return found


def reads_of(name: str) -> frozenset[str]:
    """What the learner has to say of a batch's answers before the estimator can compare them: an estimator's own
    attribute `reads`, names of `records.py:AnswerFacts`."""
    return frozenset(getattr(estimator(name), "reads", ()))


def defaults_of(name: str) -> dict[str, Any]:
    """The options that the named estimator has a default for, and that."""
    parameters = inspect.signature(estimator(name)).parameters
    return {key: one.default for key, one in parameters.items() if one.default is not one.empty}


def options_of(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Options as they are written in a file (`options.py`). Raises UnknownName, and ValueError for a value that can't
    be read."""
    return read_options(name, estimator(name), given, None)


def estimate(name: str, steps: Steps, /, **options: Any) -> Advantages:
    """Runs the named estimator and checks what it returns, which becomes arrays. Raises ValueError for anything but
    `Advantages` with one entry per step, and NotFinite for one that is not a finite number."""
    function = estimator(name)
    check_options(name, function, options)
    result = function(steps, **options)
    parts = [one.name for one in fields(Advantages)]
    due = [part for part in parts if part != "target" or getattr(result, part, None) is not None]
    if not all(hasattr(result, name) for name in due):
        raise ValueError(f"{name} returned {result!r:.80}; Advantages are due (tapforge_trainer.algorithms.steps)")
    given = {part: _numbers(name, part, getattr(result, part)) for part in due}
    if len(given["total"]) != len(steps):
        raise ValueError(
            f"{name} returned {len(given['total'])} advantages for {len(steps)} steps; one per step is due"
        )
    for part, numbers in given.items():
        if numbers.shape != (len(steps),):
            raise ValueError(
                f"{name} returned {part} of shape {numbers.shape} for {len(steps)} steps; one number per step is due"
            )
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            raise NotFinite(name, part, float(numbers[wrong[0]]), int(wrong[0]), steps)
    return Advantages(**given)


class NotFinite(ValueError):
    """An estimator gave a step something that is not a finite number."""

    def __init__(self, name: str, part: str, value: float, step: int, steps: Steps):
        what = "" if part == "total" else f" as {part}"
        where = f"step {step} of {len(steps)}, of group {steps.group[step]}"
        super().__init__(f"{name} returned {value}{what} for {where}; a step that can't be compared has 0")
        #: which of the batch's
        self.step = step


def _numbers(name: str, part: str, values: Any) -> Any:
    """A vector, also of a single number."""
    kind = np.int64 if part == "state_group_size" else np.float64
    try:
        return np.atleast_1d(np.asarray(values, dtype=kind))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} returned {part} that isn't one number per step: {error}") from error
