"""What an environment is: the words that phones, rollouts and trainers share.

Promises, in order of weight:
1. Coordinates are relative: 0.0 is the first pixel of a side, 1.0 the last; `pixel()` is the only conversion.
2. Steps are idempotent: a step carries its index, and an index that was answered before is answered again with the
   stored result, never executed twice.
3. An environment that can't do what it was asked raises `EnvironmentFault`; it never returns a made-up observation.
4. `outcome_of` is the only place where the end of an episode becomes success, failure or invalid.

Nothing here imports torch, ray or vllm, so a phone pod stays small.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, Protocol
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Relative = Annotated[float, Field(ge=0.0, le=1.0)]


def pixel(relative: float, size: int) -> int:
    """The pixel of a relative coordinate on a side of `size` pixels: floor(x * size), and 1.0 is the last pixel."""
    return min(int(relative * size), size - 1)


# --- tasks ------------------------------------------------------------------------------------------------------------


class Task(BaseModel):
    """One thing an agent is asked to do. (suite, template, params, seed) decide everything else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str
    template: str
    params: dict[str, str] = Field(default_factory=dict)
    seed: int = Field(0, description="seed of the layout, the wallpaper and the content that the task does not name")
    goal: str = Field("", description="the instruction to the agent")
    max_steps: int = Field(16, ge=1, description="model answers after which the episode ends as step_limit")
    feasible: bool | None = Field(True, description="whether it can be done; None: not known, and left to the judge")
    threshold: float = Field(1.0, description="score from which the episode counts as a success")

    @property
    def key(self) -> str:
        """Equal for equal tasks: two episodes may be compared in a group exactly when their keys are equal."""
        params = "&".join(f"{quote(k)}={quote(v)}" for k, v in sorted(self.params.items()))
        return f"{self.suite}/{self.template}?{params}#{self.seed}"


# --- observations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded screen image. `sha256` is the hex digest of `data` and its name in every store."""

    data: bytes
    sha256: str
    width: int
    height: int
    media_type: str = "image/png"

    @staticmethod
    def of(data: bytes, width: int, height: int, media_type: str = "image/png") -> Frame:
        return Frame(data, hashlib.sha256(data).hexdigest(), width, height, media_type)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees, and what the trainer may know about it."""

    frame: Frame
    #: the app in front; what is in another app is another state
    app: str | None = None
    #: exact: equal keys mean that the same behaviour has the same future; None when the environment has none to offer
    state_key: str | None = None
    #: an accessibility or UI tree of what is visible, as the environment writes it: XML, JSON or lines
    ui_tree: str | None = None
    #: the activity, page or window in front, finer than `app`, without counters or names of documents
    window: str | None = None
    #: of a reset: what the environment says the task asks for, and whether it can be done; "" and None where the task
    #: itself is all there is to know
    goal: str = ""
    feasible: bool | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    observation: Observation
    #: the environment itself ended the episode (a terminate or answer action does that)
    done: bool = False
    #: step reward besides the final score; almost always 0
    reward: float = 0.0
    #: what the environment says about the action: "no effect", "unknown app", ...
    note: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The judge's word. `value` in [0, 1]; `side_effects` names what was changed and should not have been."""

    value: float
    reason: str = ""
    side_effects: tuple[str, ...] = field(default=())


# --- actions ----------------------------------------------------------------------------------------------------------


class _Action(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tap(_Action):
    type: Literal["tap"] = "tap"
    x: Relative
    y: Relative


class LongPress(_Action):
    type: Literal["long_press"] = "long_press"
    x: Relative
    y: Relative
    seconds: float = Field(1.0, gt=0, le=60)


class DoubleTap(_Action):
    type: Literal["double_tap"] = "double_tap"
    x: Relative
    y: Relative


class Swipe(_Action):
    """A quick stroke that lets go while it moves (pages, lists)."""

    type: Literal["swipe"] = "swipe"
    x: Relative
    y: Relative
    x2: Relative
    y2: Relative


class Drag(_Action):
    """A slow stroke that lets go at rest (sliders, moving an icon)."""

    type: Literal["drag"] = "drag"
    x: Relative
    y: Relative
    x2: Relative
    y2: Relative


class Scroll(_Action):
    """Moves the content so that what lies in `direction` comes into view."""

    type: Literal["scroll"] = "scroll"
    direction: Literal["up", "down", "left", "right"]
    x: Relative = 0.5
    y: Relative = 0.5
    #: of a mouse wheel, desktops only; None: as far as the environment goes by itself
    notches: int | None = Field(None, ge=1, le=100)


class Type(_Action):
    """Enters text where the focus is. A line end in it (`\\n`, `\\r\\n` or `\\r`) is the Enter key, pressed at that
    place: at the end of a text it submits a search field, in a field of several lines it begins the next one.
    `keystrokes` splits a text accordingly."""

    type: Literal["type"] = "type"
    text: str = Field(max_length=10_000)


class Key(_Action):
    """A hardware or keyboard key: on a phone by its Android name without KEYCODE_ (VOLUME_UP, DEL, ...), on a desktop
    as PyAutoGUI calls it (esc, f5, pagedown, ...)."""

    type: Literal["key"] = "key"
    name: str = Field(max_length=64)


class OpenApp(_Action):
    type: Literal["open_app"] = "open_app"
    name: str = Field(max_length=200)


class Home(_Action):
    type: Literal["home"] = "home"


class Back(_Action):
    type: Literal["back"] = "back"


class AppSwitch(_Action):
    type: Literal["app_switch"] = "app_switch"


class Enter(_Action):
    type: Literal["enter"] = "enter"


class Wait(_Action):
    type: Literal["wait"] = "wait"
    seconds: float = Field(1.0, ge=0, le=60)


class Answer(_Action):
    """Says the answer to a question and ends the episode."""

    type: Literal["answer"] = "answer"
    text: str = Field(max_length=10_000)


class AskUser(_Action):
    type: Literal["ask_user"] = "ask_user"
    text: str = Field(max_length=10_000)


class Terminate(_Action):
    type: Literal["terminate"] = "terminate"
    status: Literal["success", "failure", "infeasible"]


class Move(_Action):
    """Desktops only."""

    type: Literal["move"] = "move"
    x: Relative
    y: Relative


class RightClick(_Action):
    """Desktops only."""

    type: Literal["right_click"] = "right_click"
    x: Relative
    y: Relative


class MiddleClick(_Action):
    """Desktops only."""

    type: Literal["middle_click"] = "middle_click"
    x: Relative
    y: Relative


class TripleClick(_Action):
    """Desktops only: selects a line or a paragraph."""

    type: Literal["triple_click"] = "triple_click"
    x: Relative
    y: Relative


class Hotkey(_Action):
    """Desktops only: keys pressed together, in this order, each as PyAutoGUI calls it (ctrl, shift, t, ...)."""

    type: Literal["hotkey"] = "hotkey"
    keys: tuple[str, ...] = Field(min_length=1, max_length=8)


Action = (
    Tap
    | LongPress
    | DoubleTap
    | Swipe
    | Drag
    | Scroll
    | Type
    | Key
    | OpenApp
    | Home
    | Back
    | AppSwitch
    | Enter
    | Wait
    | Answer
    | AskUser
    | Terminate
    | Move
    | RightClick
    | MiddleClick
    | TripleClick
    | Hotkey
)


def keystrokes(text: str) -> list[Type | Enter]:
    """What a `Type` of this text means, in order: pieces of text without line ends, and an Enter for each line end."""
    found: list[Type | Enter] = []
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")):
        if number:
            found.append(Enter())
        if line:
            found.append(Type(text=line))
    return found


#: reads and writes an action at a border: `.validate_python(dict)`, `.dump_python(action)`
ACTION: TypeAdapter[Action] = TypeAdapter(Annotated[Action, Field(discriminator="type")])

#: actions after which the episode is judged
FINAL_ACTIONS = (Answer, Terminate)


# --- the end of an episode --------------------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why an episode ended. A closed list: `outcome_of` covers each."""

    DONE = "done"
    DECLARED_INFEASIBLE = "declared_infeasible"
    STEP_LIMIT = "step_limit"
    PARSE_FAILURES = "parse_failures"
    CONTEXT_LIMIT = "context_limit"
    ENV_ERROR = "env_error"
    DEADLINE = "deadline"
    JUDGE_ERROR = "judge_error"
    VERDICT_MISSING = "verdict_missing"
    LEASE_LOST = "lease_lost"
    RECLAIMED = "reclaimed"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    INVALID = "invalid"


#: reasons that are the agent's own doing and end in failure whatever the judge would say
_AGENT_FAILED = {Reason.STEP_LIMIT, Reason.PARSE_FAILURES, Reason.CONTEXT_LIMIT}
#: reasons that say nothing about the agent
_INVALID = {Reason.ENV_ERROR, Reason.DEADLINE, Reason.JUDGE_ERROR, Reason.VERDICT_MISSING, Reason.LEASE_LOST}


def needs_score(reason: Reason, feasible: bool | None) -> bool:
    """Whether the judge is asked at all: also whether a task can't be done, where that isn't known."""
    return reason is Reason.DONE or (reason is Reason.DECLARED_INFEASIBLE and feasible is None)


def outcome_of(
    reason: Reason, *, feasible: bool | None, threshold: float, score: float | None = None
) -> Outcome | None:
    """The outcome table. None: we stopped the episode ourselves; it is not counted and is queued again.

    Raises ValueError when a reason that is judged comes without a score: there is no default verdict.
    """
    if needs_score(reason, feasible):
        if score is None:
            raise ValueError(f"an episode that ended as {reason.value!r} needs a score; without one it's a judge_error")
        return Outcome.SUCCESS if score >= threshold else Outcome.FAILURE
    if reason is Reason.DECLARED_INFEASIBLE:
        return Outcome.FAILURE if feasible else Outcome.SUCCESS
    if reason in _AGENT_FAILED:
        return Outcome.FAILURE
    if reason in _INVALID:
        return Outcome.INVALID
    return None


# --- environments -----------------------------------------------------------------------------------------------------


class EnvironmentFault(Exception):
    """The environment (not the agent) failed. `reason` is env_error, deadline or lease_lost; the message names the
    slot, the call and what was seen."""

    def __init__(self, message: str, reason: Reason = Reason.ENV_ERROR):
        super().__init__(message)
        self.reason = reason


class UnknownTask(EnvironmentFault):
    """The environment has no such task: it isn't sick, and every other one of its kind would say the same."""


class UnsupportedAction(Exception):
    """The environment has no such action, or refuses this value of it. Nothing was executed, and the index of the step
    is not used up. It is the agent's doing, a malformed answer; the message names the action and the value."""


class Environment(Protocol):
    """One phone. Calls come one after another; every call ends within the client's deadline or raises
    EnvironmentFault. A step may raise UnsupportedAction instead."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: Action, index: int) -> StepResult: ...

    async def evaluate(self) -> Score: ...

    async def close(self) -> None: ...
