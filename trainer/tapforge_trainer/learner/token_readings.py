"""What ranks compute of each response token in the pass that trains on it, and whose token it is. No torch.

The numbers are of the policy before the optimizer step that trains on the token: the forward pass of that step gives
them, and no other pass is made. With one mini-batch this is the policy before the update; in later mini-batches it has
taken the steps of the earlier ones. Each token has them from one rank and one micro-batch; micro-batches of padding
give none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapforge_trainer.recording.learner_tokens import LearnerTokens
from tapforge_trainer.records import Sample

#: gets what an update computed of its tokens
KeepTokens = Callable[[list[LearnerTokens]], None]


@dataclass(slots=True)
class TokenReadings:
    """Of a rank, micro-batch by micro-batch."""

    #: [tokens]: which of the token batch's response tokens these are; [2, tokens]: log-probabilities and entropies
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def keep(self, chosen: np.ndarray, found: np.ndarray) -> None:
        self.parts.append((chosen, found))


def by_episode(samples: Sequence[Sample], of_ranks: Sequence[TokenReadings]) -> list[LearnerTokens]:
    """Of the samples of an update, in their order: response tokens are numbered through, sample by sample and span by
    span (`token_batch`)."""
    spans = [(sample.episode, span) for sample in samples for span in sample.spans]
    behavior = np.concatenate([np.zeros(0), *(np.asarray(span.logprobs, np.float64) for _, span in spans)])
    found = np.full((2, len(behavior)), np.nan)
    for rank in of_ranks:
        for chosen, values in rank.parts:
            found[:, chosen] = values
    gaps, entropies = behavior - found[0], found[1]
    places: dict[str, list[tuple[int, int, int]]] = {}
    end = 0
    for episode, span in spans:
        start, end = end, end + len(span.logprobs)
        places.setdefault(episode, []).append((span.step, start, end))
    return [
        LearnerTokens(
            episode,
            tuple((step, end - start) for step, start, end in own),
            np.concatenate([gaps[start:end] for _, start, end in own]),
            np.concatenate([entropies[start:end] for _, start, end in own]),
        )
        for episode, own in places.items()
    ]


def merged(of_ranks: Sequence[Any]) -> Any:
    """What each rank has of all tokens, nan where another one has it. None: it was not asked for."""
    found = of_ranks[0]
    for other in of_ranks[1:]:
        found = None if found is None else np.where(np.isnan(found), other, found)
    return found
