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
        raise TypeError(f"the entry point {point.value!r} of the estimator {name!r} is no function: {found!r}")
    return found


def defaults_of(name: str) -> dict[str, Any]:
    """The options that the named estimator has a default for, and that."""
    parameters = inspect.signature(estimator(name)).parameters
    return {key: one.default for key, one in parameters.items() if one.default is not one.empty}


def options_of(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Options as they are written in a file (`options.py`). Raises UnknownName, and ValueError for a value that can't
    be read."""
    return read_options(name, estimator(name), given, None)


def estimate(name: str, steps: Steps, /, **options: Any) -> Advantages:
    """Runs the named estimator and checks what it returns. Raises ValueError for a wrong number of advantages, and for
    some that are no numbers."""
    function = estimator(name)
    check_options(name, function, options)
    result = function(steps, **options)
    if len(result.total) != len(steps):
        raise ValueError(f"{name} returned {len(result.total)} advantages for {len(steps)} steps; one per step is due")
    wrong = np.flatnonzero(~np.isfinite(result.total))
    if len(wrong):
        at = int(wrong[0])
        where = f"step {at} of {len(steps)}, of group {steps.group[at]}"
        raise ValueError(f"{name} returned {result.total[at]} for {where}; a step that can't be compared has 0")
    return result
