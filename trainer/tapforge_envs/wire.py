"""tapforge's own environment protocol over HTTP, in one place for servers and clients.

    GET  /health    -> 200 {"status": "ok", "protocol": "tapforge/1", "instance": ID, "slot": UID or null,
                            "fence": n or null}; 503 when it can't serve
    GET  /tasks     ?suite=&split=&limit=  -> {"tasks": [Task, ...]}
    POST /reset     {"episode": ID, "task": Task}                -> observation
    POST /step      {"episode": ID, "index": n, "action": {...}} -> observation; index counts from 0
    POST /evaluate  {"episode": ID}                              -> {"value", "reason", "side_effects"}
    POST /close     {"episode": ID}                              -> {}

- An observation travels as one line of JSON (`ObservationHead`), a newline, and the bytes of the frame: no base64.
  `app`, `window`, `state_key` and `ui_tree` tell states apart (docs/states.md); each may be missing. That of a reset
  may say `goal` and `feasible`, where the server knows more of the task than the request says.
- `episode` fences: a reset starts a new episode and ends the one before; a call with another episode's id gets 409.
- An index that was answered is answered again with the stored bytes; an index from the future gets 409.
- A request that can't be read gets 400, an unknown suite or template 404, each with {"error": "..."} that names the
  value and the remedy. 5xx means that the phone is sick; with reason `deadline` that it didn't answer in time (the
  server may be a bridge in front of it), with `lease_lost` that another client uses it, with `judge_error` that there
  is no verdict.
- An action that the environment doesn't have, or whose value it refuses, gets 422 with reason `unsupported_action`:
  nothing was executed, and the next step has the same index.
- An answer with status 200 to reset, step or evaluate may say which call it answers, in the header `Tapforge-Answers`:
  EPISODE/reset, EPISODE/step/n or EPISODE/evaluate, with the episode percent-encoded. Answers get mixed up (by a proxy
  that caches, by a phone that repeats its last screen), and their bodies look right: a client refuses another call's.
- `instance` changes when the server process does: a client that sees another one has lost its episode.

A server that has a token answers 401 but to `/health` without `Authorization: Bearer TOKEN`; clients read theirs from
the environment variable TAPFORGE_PHONE_TOKEN.

The holder of a claim says so with every request: `Tapforge-Slot` is the UID of the slot that was claimed,
`Tapforge-Fence` the fence of the claim. A claim names an address, addresses are reused, and a holder may be late: so
the phone checks both before it does anything (any client may ask `/health`, which checks nothing):

- A fence smaller than the largest one seen for that slot gets 409 with reason `stale_fence`: the phone has a newer
  holder. What was seen is kept by the process; the Pod of a slot is never restarted in place.
- A phone that is a slot's Pod knows its UID (environment `TAPFORGE_SLOT`, which the operator sets; `slot` in /health).
  Another UID gets 409 with reason `wrong_slot`. A request without the headers (curl, an older client) is taken until
  the first fence was seen, then it gets 409 with reason `no_fence`.
- Any other phone (a laptop's, a device outside the cluster, which several pools may name) counts fences for each UID by
  itself, and takes requests without the headers: it does not know which slot it is.
- One header without the other, or a fence that is not a number from 0 to 2^63 - 1, gets 400.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from .protocol import EnvironmentFault, Frame, Observation, StepResult

PROTOCOL = "tapforge/1"
CONTENT_TYPE = "application/x-tapforge-observation"
#: bytes; a frame of 1080x2400 as PNG stays well below
MAX_OBSERVATION = 32 * 1024 * 1024

SLOT_HEADER: Final = "Tapforge-Slot"
FENCE_HEADER: Final = "Tapforge-Fence"
ANSWERS_HEADER: Final = "Tapforge-Answers"
#: environment variable with the token that clients send to servers of this protocol, and to no other
TOKEN_VARIABLE: Final = "TAPFORGE_PHONE_TOKEN"
#: words for programs in the body of a 409, as "reason": the client has no claim of this phone (any more)
STALE_FENCE: Final = "stale_fence"
WRONG_SLOT: Final = "wrong_slot"
NO_FENCE: Final = "no_fence"
#: in the body of a 422
UNSUPPORTED_ACTION: Final = "unsupported_action"
_MAX_FENCE: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fence:
    """By which claim a request is made."""

    #: UID of the slot
    slot: str
    #: larger than that of every earlier claim of the slot
    number: int

    def headers(self) -> dict[str, str]:
        return {SLOT_HEADER: self.slot, FENCE_HEADER: str(self.number)}

    @staticmethod
    def of(headers: Mapping[str, str]) -> Fence | None:
        """None for a request without a claim. Raises ValueError when the headers can't be read."""
        slot, number = headers.get(SLOT_HEADER, ""), headers.get(FENCE_HEADER, "")
        if not slot and not number:
            return None
        if not slot or not number:
            raise ValueError(f"{SLOT_HEADER} is {slot!r} and {FENCE_HEADER} {number!r}: send both, or neither")
        if not (number.isascii() and number.isdecimal() and len(number) <= 19 and int(number) <= _MAX_FENCE):
            raise ValueError(f"{FENCE_HEADER} is {number[:40]!r}, must be a number from 0 to {_MAX_FENCE}")
        return Fence(slot, int(number))


def answers(call: str, episode: str, index: int | None = None) -> dict[str, str]:
    """The header that says which call an answer is to."""
    return {ANSWERS_HEADER: "/".join((quote(episode, safe=""), call, *([] if index is None else [str(index)])))}


class ObservationHead(BaseModel):
    """The line of JSON before the frame."""

    model_config = ConfigDict(extra="ignore")

    sha256: str
    width: int = Field(ge=1)
    height: int = Field(ge=1)
    media_type: str = "image/png"
    app: str | None = None
    state_key: str | None = None
    ui_tree: str | None = None
    window: str | None = None
    done: bool = False
    reward: float = Field(0.0, ge=-1e6, le=1e6, allow_inf_nan=False)
    note: str = ""
    instance: str = ""
    goal: str = ""
    feasible: bool | None = None


def encode_step(result: StepResult, instance: str = "") -> bytes:
    o = result.observation
    head = ObservationHead(
        sha256=o.frame.sha256,
        width=o.frame.width,
        height=o.frame.height,
        media_type=o.frame.media_type,
        app=o.app,
        state_key=o.state_key,
        ui_tree=o.ui_tree,
        window=o.window,
        done=result.done,
        reward=result.reward,
        note=result.note,
        instance=instance,
        goal=o.goal,
        feasible=o.feasible,
    )
    return head.model_dump_json(exclude_defaults=True).encode() + b"\n" + o.frame.data


def decode_step(body: bytes) -> tuple[StepResult, str]:
    """(result, instance). Raises EnvironmentFault when the body is not an observation or the frame is not the one that
    its hash names (cut off, corrupted)."""
    line, newline, data = body.partition(b"\n")
    if not newline:
        raise EnvironmentFault(
            f"answer of {len(body)} bytes is not an observation: it has no line of JSON before the frame"
        )
    try:
        head = ObservationHead.model_validate_json(line)
    except ValueError as error:
        raise EnvironmentFault(f"the line before the frame can't be read: {error}") from error
    seen = hashlib.sha256(data).hexdigest()
    if seen != head.sha256:
        raise EnvironmentFault(
            f"frame of {len(data)} bytes has hash {seen[:12]}, announced was {head.sha256[:12]}: cut off or corrupted"
        )
    frame = Frame(data, seen, head.width, head.height, head.media_type)
    observation = Observation(
        frame, head.app, head.state_key, head.ui_tree, head.window, goal=head.goal, feasible=head.feasible
    )
    return StepResult(observation, done=head.done, reward=head.reward, note=head.note), head.instance
