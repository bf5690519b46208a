"""Records as lines of JSON and back, bit for bit: `decode(encode(record)) == record`.

Written by hand, not by `dataclasses.asdict`, which copies every token. Runs of equal numbers in token lists (a frame's
placeholders, the version of each token) are written as [number, count]. Floats are written with all their digits.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from tapforge_envs.protocol import Outcome, Reason, Task

from ..records import EpisodeRecord, Generation, GroupRecord, StepRecord

#: fields of a step that recordings of earlier versions lack, and that are written where there is something
_OPTIONAL = ("window", "ui_tree", "ui_key", "frame_key")
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
            "prompt_ids": pack(g.prompt_ids),
            "ids": g.ids,
            "logprobs": g.logprobs,
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
    return StepRecord(
        episode=line["episode"],
        index=line["index"],
        frames=tuple(line["frames"]),
        state_key=line["state_key"],
        app=line["app"],
        generation=Generation(
            prompt_ids=unpack(line["prompt_ids"]),
            ids=tuple(line["ids"]),
            logprobs=tuple(line["logprobs"]),
            versions=unpack(line["versions"]),
            finish_reason=line["finish_reason"],
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
        }
    )


def decode_episode(line: dict[str, Any], steps: tuple[StepRecord, ...]) -> EpisodeRecord:
    return EpisodeRecord(
        id=line["id"],
        group=line["group"],
        task=Task.model_validate(line["task"]),
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
    return GroupRecord(line["id"], line["order"], Task.model_validate(line["task"]), line["version"], episodes)
