"""What an update's tokens are compared with, beside their sampler: the KL term's reference and a distillation's
teacher, each by a pass without gradients, before the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tapforge_trainer.algorithms.objective import Objective


def compared_with(
    objective: Objective,
    referred: Callable[[], AbstractContextManager[Any]],
    teacher: Any,
    read: Callable[[Any], np.ndarray],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Log-probabilities [response tokens] of the reference and of the teacher, as far as the objective has a use for
    them. `referred` and `teacher` are policies, the first for as long as it is entered; `read` a pass of one: [figures,
    response tokens], log-probabilities first. Raises ValueError where the learner was started without one."""
    reference, taught = None, None
    if objective.kl_coefficient > 0:
        with referred() as policy:
            reference = read(policy)[0]
    if objective.distillation is not None:
        if teacher is None:
            raise ValueError("the objective has a distillation, but the learner was started without a teacher")
        taught = read(teacher)[0]
    return reference, taught
