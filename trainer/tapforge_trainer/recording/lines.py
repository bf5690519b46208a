"""Records as lines of JSON and back, bit for bit: `decode(encode(record)) == record`.

Written by hand, not by `dataclasses.asdict`, which copies every token. Runs of equal numbers (the version of each
token) are written as [number, count]. Floats are written with all their digits.

Recordings of earlier versions have no `prompt_length`: their prompts hold one placeholder per visual token, in runs.
They are read as if they had been written today.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tapforge_api.reading import read_record
from tapforge_envs.protocol import Outcome, Reason, Task

from ..records import EpisodeRecord, EpisodeRewards, Generation, GroupRecord, StepRecord

#: fields of a step that recordings of earlier versions lack, and that are written where there is something
_OPTIONAL = ("window", "ui_tree", "ui_key", "frame_key", "screen")
#: shorter runs are written out
_RUN = 4


def pack(numbers: Sequence[int]) -> list[int | list[int]]:
    """Runs of at least four equal numbers become [number, count]."""
    packed: list[int | list[int]] = []
    at, end = 0, len(numbers)
    while at < end:
        value, run = numbers[at], 1
        while at + run < end and numbers[at + run] == value:
            run += 1
        if run >= _RUN:
            packed.append([value, run])
        else:
            packed.extend([value] * run)
        at += run
    return packed


def unpack(packed: Sequence[int | list[int]]) -> tuple[int, ...]:
    numbers: list[int] = []
    for item in packed:
        if isinstance(item, list):
            numbers.extend([item[0]] * item[1])
        else:
            numbers.append(item)
    return tuple(numbers)


def collapse(expanded: Sequence[int], frames: int) -> tuple[int, ...]:
    """An expanded prompt with one placeholder per frame. The line doesn't say which id that is: it is the one of which
    there are as many runs as frames, always between the same two neighbours, and of those the one with most tokens.
    Raises ValueError if there is none."""
    if not frames:
        return tuple(expanded)
    runs = [(number, len(list(run))) for number, run in groupby(expanded)]
    counts: dict[int, list[int]] = {}
    around: dict[int, set[tuple[int, int]]] = {}
    for (before, _), (number, count), (after, _) in zip([(-1, 0), *runs], runs, [*runs[1:], (-1, 0)], strict=False):
        counts.setdefault(number, []).append(count)
        around.setdefault(number, set()).add((before, after))
    found = [number for number in counts if len(counts[number]) == frames and len(around[number]) == 1]
    if not found:
        raise ValueError(f"no token stands for {frames} frames in a prompt of {len(expanded)} tokens")
    image = max(found, key=lambda number: sum(counts[number]))
    return tuple(token for number, count in runs for token in [number] * (1 if number == image else count))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), check_circular=False).encode() + b"\n"


def encode_step(step: StepRecord) -> bytes:
    g = step.generation
    return _line(
        {
            "kind": "step",
            "episode": step.episode,
            "index": step.index,
            "frames": step.frames,
            "state_key": step.state_key,
            "app": step.app,
            "prompt_ids": list(g.prompt_ids),
            "prompt_length": g.prompt_length,
            "ids": list(g.ids),
            "logprobs": list(g.logprobs),
            "versions": pack(g.versions),
            "finish_reason": g.finish_reason,
            "text": step.text,
            "action": step.action,
            "parse_error": step.parse_error,
            "reward": step.reward,
            "note": step.note,
            "seconds_model": step.seconds_model,
            "seconds_environment": step.seconds_environment,
            **{name: value for name in _OPTIONAL if (value := getattr(step, name)) is not None},
        }
    )


def decode_step(line: dict[str, Any]) -> StepRecord:
    prompt_ids, length = line["prompt_ids"], line.get("prompt_length")
    if length is None:
        expanded = unpack(prompt_ids)
        prompt_ids, length = collapse(expanded, len(line["frames"])), len(expanded)
    return StepRecord(
        episode=line["episode"],
        index=line["index"],
        frames=tuple(line["frames"]),
        state_key=line["state_key"],
        app=line["app"],
        generation=Generation(
            prompt_ids=prompt_ids,
            ids=line["ids"],
            logprobs=line["logprobs"],
            versions=unpack(line["versions"]),
            finish_reason=line["finish_reason"],
            prompt_length=length,
        ),
        text=line["text"],
        action=line["action"],
        parse_error=line["parse_error"],
        reward=line["reward"],
        note=line["note"],
        seconds_model=line["seconds_model"],
        seconds_environment=line["seconds_environment"],
        **{name: line.get(name) for name in _OPTIONAL},
    )


def encode_ui_tree(name: str, tree: str) -> bytes:
    """Trees are long and say much the same again and again: a tenth is left of them."""
    packed = base64.b64encode(zlib.compress(tree.encode(), 6)).decode()
    return _line({"kind": "ui_tree", "sha256": name, "zlib": packed})


def decode_ui_tree(line: dict[str, Any]) -> tuple[str, str]:
    """(name, tree)"""
    return line["sha256"], zlib.decompress(base64.b64decode(line["zlib"])).decode()


def encode_episode(episode: EpisodeRecord) -> bytes:
    """The line of the episode itself. Its steps are lines of their own, written before it."""
    return _line(
        {
            "kind": "episode",
            "id": episode.id,
            "group": episode.group,
            "task": episode.task.model_dump(),
            "attempt": episode.attempt,
            "slot": episode.slot,
            "seed": episode.seed,
            "reason": episode.reason.value,
            "outcome": episode.outcome.value if episode.outcome else None,
            "score": episode.score,
            "message": episode.message,
            "steps": len(episode.steps),
            "started": episode.started,
            "ended": episode.ended,
            **({} if episode.last_frame is None else {"last_frame": episode.last_frame}),
            **({} if episode.last_screen is None else {"last_screen": episode.last_screen}),
            **({"awaits_rewards": True} if episode.awaits_rewards else {}),
            **({} if episode.rewards is None else {"rewards": _rewards(episode.rewards)}),
        }
    )


def decode_episode(line: dict[str, Any], steps: tuple[StepRecord, ...]) -> EpisodeRecord:
    return EpisodeRecord(
        id=line["id"],
        group=line["group"],
        task=read_record(Task, line["task"]),
        attempt=line["attempt"],
        slot=line["slot"],
        seed=line["seed"],
        reason=Reason(line["reason"]),
        outcome=Outcome(line["outcome"]) if line["outcome"] else None,
        score=line["score"],
        message=line["message"],
        steps=steps,
        started=line["started"],
        ended=line["ended"],
        last_frame=line.get("last_frame"),
        last_screen=line.get("last_screen"),
        awaits_rewards=line.get("awaits_rewards", False),
        rewards=_rewards_of(line["rewards"]) if "rewards" in line else None,
    )


def encode_rewards(episode: str, rewards: EpisodeRewards) -> bytes:
    """Of an episode whose line came before, without them."""
    return _line({"kind": "rewards", "id": episode, "rewards": _rewards(rewards)})


def decode_rewards(line: dict[str, Any]) -> EpisodeRewards:
    return _rewards_of(line["rewards"])


def _rewards(rewards: EpisodeRewards) -> dict[str, Any]:
    return {
        "streams": dict(rewards.streams),
        "outcome": rewards.outcome.value,
        "reason": rewards.reason.value,
        "verified": rewards.verified.value if rewards.verified else None,
        "words": dict(rewards.words),
        "message": rewards.message,
        "usage": dict(rewards.usage),
    }


def _rewards_of(found: dict[str, Any]) -> EpisodeRewards:
    return EpisodeRewards(
        streams={name: tuple(values) for name, values in found["streams"].items()},
        outcome=Outcome(found["outcome"]),
        reason=Reason(found["reason"]),
        verified=Outcome(found["verified"]) if found["verified"] else None,
        words={name: tuple(words) for name, words in found["words"].items()},
        message=found["message"],
        usage=dict(found["usage"]),
    )


def encode_group(group: GroupRecord, dropped: str | None) -> bytes:
    """Names its episodes, which were written before it."""
    return _line(
        {
            "kind": "group",
            "id": group.id,
            "order": group.order,
            "task": group.task.model_dump(),
            "version": group.version,
            "episodes": [e.id for e in group.episodes],
            "dropped": dropped,
        }
    )


def decode_group(line: dict[str, Any], episodes: tuple[EpisodeRecord, ...]) -> GroupRecord:
    return GroupRecord(line["id"], line["order"], read_record(Task, line["task"]), line["version"], episodes)
