"""An episode, its group and a step as JSON for the page. Pure: frames' sizes, credits and texts come as functions.

Gestures are drawn in pixels of the recorded frame (`viewer/gesture.py`). Steps of a group that saw the same state have
the same letter, as the run's own comparison has it (`states/keys.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tapforge_envs.protocol import Outcome

from ..recording.learner_tokens import LearnerTokens
from ..records import EpisodeRecord, StepRecord
from ..viewer.gesture import gesture_of
from .credits import StepCredit

#: width and height of a recorded frame; None: it isn't there
SizeOf = Callable[[str], tuple[int, int] | None]
#: by episode and step
Credits = Mapping[tuple[str, int], StepCredit]
#: by episode and step: letter of a state, and how many steps of the group saw it
Letters = Mapping[tuple[str, int], tuple[str, int]]


def episode_json(
    episode: EpisodeRecord, size: SizeOf, credits: Credits, letters: Letters, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """`facts`: what the index knows of it: update, staleness, sums."""
    return {
        **facts,
        "id": episode.id,
        "group": episode.group,
        "task": episode.task.model_dump(mode="json"),
        "outcome": "waiting" if episode.awaits_rewards else episode.outcome.value if episode.outcome else "stopped",
        "verified": episode.verified.value if episode.verified else None,
        "reason": episode.reason.value,
        "score": episode.score,
        "message": episode.message,
        "attempt": episode.attempt,
        "phone": episode.slot,
        "seed": str(episode.seed),
        "started": episode.started,
        "ended": episode.ended,
        "last_frame": episode.last_frame,
        "usage": dict(episode.rewards.usage) if episode.rewards else {},
        "steps": [
            step_json(episode, place, size, credits.get((episode.id, step.index)), letters)
            for place, step in enumerate(episode.steps)
        ],
    }


def step_json(
    episode: EpisodeRecord, place: int, size: SizeOf, credit: StepCredit | None, letters: Letters
) -> dict[str, Any]:
    step = episode.steps[place]
    frame = step.frames[-1] if step.frames else None
    shown = size(frame) if frame else None
    letter, alike = letters.get((episode.id, step.index), ("", 1))
    numbers = list(step.generation.logprobs)
    return {
        "index": step.index,
        "frame": frame,
        "size": shown,
        "gesture": gesture_json(step, shown),
        "action": step.action,
        "text": step.text,
        "parse_error": step.parse_error,
        "note": step.note,
        "app": step.app,
        "reward": step.reward,
        "tokens": len(step.generation.ids),
        "logprob": sum(numbers) if numbers else None,
        "finish": step.generation.finish_reason,
        "seconds_model": step.seconds_model,
        "seconds_environment": step.seconds_environment,
        "credit": None if credit is None else asdict(credit),
        "letter": letter,
        "alike": alike,
        "verdicts": verdicts(episode, place),
    }


def gesture_json(step: StepRecord, size: tuple[int, int] | None) -> dict[str, Any] | None:
    if step.action is None:
        return None
    if size is None:  # nothing to draw on
        return {"words": str(step.action.get("type", "?")).replace("_", " "), "label": "", "shapes": []}
    found = gesture_of(step.action, *size)
    shapes = [{"kind": s.kind, "points": s.points, "radius": s.radius} for s in found.shapes]
    return {"words": found.words, "label": found.label, "shapes": shapes}


def verdicts(episode: EpisodeRecord, place: int) -> list[dict[str, Any]]:
    """What each reward stream says of the step at this place; `value` None: its verdict is missing."""
    if episode.rewards is None:
        return []
    words = episode.rewards.words
    return [
        {"stream": name, "value": values[place], "words": words[name][place] if name in words else ""}
        for name, values in episode.rewards.streams.items()
    ]


def answer_json(
    step: StepRecord,
    texts: Callable[[Sequence[int]], list[str] | None],
    learner: tuple[int, LearnerTokens] | None = None,
) -> dict[str, Any]:
    """The tokens of an answer with what was recorded of each. `texts`: of ids, one by one; None: no tokenizer.
    `learner`: the update that trained on the episode, and what the learner computed in it."""
    g = step.generation
    found = texts(list(g.ids))
    tokens: list[dict[str, Any]] = [
        {"id": id, "text": found[n] if found else None, "logprob": g.logprobs[n], "version": g.versions[n]}
        for n, id in enumerate(g.ids)
    ]
    update, numbers = (learner[0], learner[1].of_step(step.index)) if learner else (None, None)
    if numbers is None or len(numbers[0]) != len(tokens):
        return {"tokens": tokens, "finish": g.finish_reason, "learned": None}
    for token, gap, entropy in zip(tokens, *numbers, strict=True):
        token |= {"gap": gap, "learner_logprob": token["logprob"] - gap, "entropy": entropy}
    return {"tokens": tokens, "finish": g.finish_reason, "learned": update}


def in_order(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Of a group: successes, failures, then the others."""
    rank = {Outcome.SUCCESS: 0, Outcome.FAILURE: 1, Outcome.INVALID: 2, None: 3}
    return sorted(episodes, key=lambda one: (rank[one.outcome], len(one.steps), one.id))
