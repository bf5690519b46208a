"""From steps with credit to what the learner gets: samples, and sequences of several steps where prompts allow it.

- A step's prompt often begins with all of the last step's prompt and answer. Then both are one sequence with two
  response spans, and what they share is computed once. A policy whose attention looks back alone gives a token the same
  log-probability in either.
- Whether they do is seen in what was recorded: ids, and the names of frames, for equal ids are not equal screens. No
  setting promises it.
- Samples of several episodes whose first prompts are equal stay apart here: the learner computes these once
  (`learner/prompts.py`).
- Each span keeps its advantage, weight, versions and log-probabilities. No token is in two spans, and none is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .records import EpisodeRecord, ResponseSpan, Sample, StepRecord


def sample_of(episode: EpisodeRecord, step: StepRecord, *, advantage: float = 0.0, **further: Any) -> Sample:
    """`further`: what else its span says. Raises ValueError for a step whose record is damaged."""
    answer = step.generation
    if not len(answer.ids) == len(answer.logprobs) == len(answer.versions):
        raise ValueError(
            f"step {step.index} of episode {episode.id} has {len(answer.ids)} tokens, {len(answer.logprobs)} "
            f"log-probabilities and {len(answer.versions)} versions; the recording is damaged"
        )
    start = len(answer.prompt_ids)
    span = ResponseSpan(
        step=step.index,
        start=start,
        end=start + len(answer.ids),
        logprobs=answer.logprobs,
        versions=answer.versions,
        advantage=advantage,
        **further,
    )
    ids = array("i", answer.prompt_ids)
    ids.extend(answer.ids)
    length = answer.prompt_length
    return Sample(episode.id, episode.group, ids, length + len(answer.ids), step.frames, (span,), length)


def sequences(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """The samples, those of one episode in order of time, with each joined to the one before that it extends."""
    found: list[Sample] = []
    for sample in samples:
        if found and _extends(sample, found[-1]):
            last = found[-1]
            found[-1] = replace(sample, spans=(*last.spans, *sample.spans), prompt_length=last.prompt_length)
        else:
            found.append(sample)
    return tuple(found)


def _extends(later: Sample, earlier: Sample) -> bool:
    end = len(earlier.ids)
    return (
        (later.episode, later.group) == (earlier.episode, earlier.group)
        and bool(earlier.spans and later.spans)
        and later.spans[0].start > end
        and later.frames[: len(earlier.frames)] == earlier.frames
        and array("i", later.ids[:end]) == array("i", earlier.ids)
    )
