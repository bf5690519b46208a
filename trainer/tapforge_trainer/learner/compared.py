"""What an update's tokens are compared with, beside their sampler: the KL term's reference and a distillation's
teacher, each by a pass without gradients, before the first optimizer step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tapforge_trainer.algorithms.objective import Objective

from ..placement.settings import LearnerSettings
from . import lora
from .frame_store import PixelFormat
from .likely import Likely
from .sharding import load_policy, reshard

if TYPE_CHECKING:
    from .packed import PackedPolicy


class Reference:
    """What the KL term of a rank pulls towards: a policy of its own, once it is loaded; with LoRA other adapters in the
    same policy, at first those that it begins with."""

    def __init__(self, settings: LearnerSettings, form: PixelFormat, mesh: Any, learned: PackedPolicy):
        """`learned`: the rank's policy."""
        self._settings, self._form, self._mesh, self._learned = settings, form, mesh, learned
        self.policy: PackedPolicy | None = None
        self._adapters: dict[str, Tensor] = {}
        if settings.reference and settings.lora is not None:
            self._adapters = lora.values(learned.model)

    def load(self, folder: str) -> None:
        """From here on the KL term pulls towards the weights in `folder`, with LoRA the adapter in it."""
        if self._settings.lora is not None:
            self._adapters = lora.read(Path(folder), self._learned.model)
            return
        if self.policy is not None:  # its memory is free before the new one needs it: models hold cycles
            self.policy = None
            gc.collect()
            if self._settings.device == "cuda":
                torch.cuda.empty_cache()
        settings = replace(self._settings, model=folder)
        shared = self._learned if self._learned.freeze_vision else None
        self.policy, _ = load_policy(settings, self._form, self._mesh, frozen=True, tower_of=shared)

    @contextmanager
    def entered(self) -> Iterator[PackedPolicy]:
        """Raises ValueError where the learner was started without one."""
        if self.policy is not None:
            yield self.policy
        elif self._adapters:
            reshard(self._learned)
            with lora.exchanged(self._learned.model, self._adapters):
                yield self._learned
        else:
            raise ValueError("the objective has a KL term, but the learner was started without a reference")


class Compared(NamedTuple):
    """As far as the objective has a use for them."""

    #: log-probabilities [response tokens]
    reference: np.ndarray | None
    teacher: np.ndarray | None
    #: what the teacher finds likely there
    likely: Likely | None


def compared_with(
    objective: Objective,
    reference: Callable[[], AbstractContextManager[Any]],
    teacher: Any,
    read: Callable[..., np.ndarray],
    places: int,
) -> Compared:
    """`reference` and `teacher` are policies, the first for as long as it is entered; `read` a pass of one: [figures,
    response tokens], log-probabilities first, that fills in a `likely`; `places`: response tokens. Raises ValueError
    where the learner was started without one."""
    referred, taught, likely = None, None, None
    if objective.kl_coefficient > 0:
        with reference() as policy:
            referred = read(policy)[0]
    if objective.distillation is not None:
        if teacher is None:
            raise ValueError("the objective has a distillation, but the learner was started without a teacher")
        if k := objective.distillation.likely:
            # A tiny vocabulary may have fewer. Of what may not be said, the teacher has rows that the policy lacks.
            likely = Likely(places, min(k, int(teacher.allowed.sum())))
        taught = read(teacher, likely=likely)[0]
    return Compared(referred, taught, likely)
