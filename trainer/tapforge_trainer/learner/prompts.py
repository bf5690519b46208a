"""Samples that begin with the same prompt share what is computed of it: answers to one recorded step, or the first
answers of a group's episodes. A prefix tree of depth one. Pure numpy.

- Two prompts are the same where ids and names of frames are: equal ids are not equal screens.
- A token of a prompt doesn't see what comes after it, so its keys and values are the same for all that follows, and its
  gradient is the sum of theirs.
- Of a sample of several steps its first prompt alone is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapforge_trainer.records import Sample


@dataclass(frozen=True, slots=True)
class FirstPrompts:
    """Of each sample the prompt of its first span, each [samples]."""

    #: equal ones are shared
    number: np.ndarray
    #: with a placeholder for each frame; those; after expansion, 0 where nothing is shared
    ids: np.ndarray
    frames: np.ndarray
    tokens: np.ndarray

    def leads(self, samples: np.ndarray) -> np.ndarray:
        """Of each of these samples the place, among them, of the first one that has its prompt."""
        _, first, inverse = np.unique(self.number[samples], return_index=True, return_inverse=True)
        return first[inverse]


def first_prompts(samples: Sequence[Sample], image: int, *, share: bool) -> FirstPrompts:
    """`image`: the placeholder; `share`: else no two prompts are the same."""
    count = len(samples)
    ids, frames, tokens = (np.zeros(count, np.int64) for _ in range(3))
    keys: list[object] = []
    for k, sample in enumerate(samples):
        ids[k] = sample.spans[0].start if sample.spans else len(sample.ids)
        prompt = np.asarray(sample.ids[: ids[k]], np.int32)
        frames[k] = np.count_nonzero(prompt == image)
        tokens[k] = _tokens(sample, int(ids[k]), int(frames[k])) if share and sample.spans else 0
        keys.append((prompt.tobytes(), sample.frames[: frames[k]]) if tokens[k] else k)
    numbers: dict[object, int] = {}
    number = np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    alone = np.bincount(number, minlength=count)[number] == 1 if count else np.zeros(0, bool)
    return FirstPrompts(number, ids, frames, np.where(alone, 0, tokens))


def _tokens(sample: Sample, ids: int, frames: int) -> int:
    """0 where the sample doesn't say."""
    if sample.prompt_length is not None:
        return sample.prompt_length
    return sample.length - (len(sample.ids) - ids) if frames == len(sample.frames) else 0
