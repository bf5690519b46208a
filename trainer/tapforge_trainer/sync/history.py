"""What is known of a sync whose proof held, and what earlier proofs of a run leave to later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a round of weights whose proof held."""

    #: `agreement.py:figures`, and of the slope
    figures: Mapping[str, float]
    #: by name of the tensors that engines keep in a way that can't be read, why; the probe alone is about them
    unread: Mapping[str, str] = field(default_factory=dict)
    #: as in `ProofHistory`
    scores: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(slots=True)
class ProofHistory:
    """What earlier proofs of a run leave to later ones."""

    #: figures of the run's first proof that held; it is kept with the run's progress
    first: dict[str, float] | None = None
    #: log-probabilities of the texts that are scored: the first engine's and the learner's in the session's first proof
    scores: tuple[np.ndarray, np.ndarray] | None = None
    #: the last one that held
    last: Proof | None = None

    def note(self, proof: Proof) -> None:
        self.last = proof
        if self.first is None:
            self.first = dict(proof.figures)
        if self.scores is None:
            self.scores = proof.scores
