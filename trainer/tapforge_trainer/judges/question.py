"""A question to a model: a prompt for an episode, with the screens that belong into it.

The question's `digest` is that of the prompt's file, what the prompt may say of the episode, and the screens. Its key,
which an answer has to repeat, is the beginning of it: no screen and no goal can hold the digest of itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..records import EpisodeRecord, StepRecord
from .answers import form
from .conventions import Kind, shown
from .prompt_file import Image, Plain, Prompt, quoted
from .verdicts import Trajectory, VerdictMissing

#: characters of a model's answer, a note or a typed text that a prompt may show
_LONGEST: Final = 2000
_PNG: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Question:
    system: str
    #: the user's message in order: text, or a PNG
    parts: tuple[str | bytes, ...]
    #: None: an answer counts without one
    key: str | None
    digest: str


def task_question(prompt: Prompt, trajectory: Trajectory, limit: int, keyed: bool) -> Question:
    """Raises VerdictMissing for a trajectory without screens, PromptError."""
    episode, screens = trajectory.episode, trajectory.screens
    if not screens or not episode.steps:
        raise VerdictMissing(f"episode {episode.id} has no screen to judge", permanent=True)
    places = {
        "all": shown(len(screens), limit),
        "last": list(range(max(0, len(episode.steps) - 1), len(screens))),
        "none": [],
    }[prompt.convention.screens]
    final = len(screens) > len(episode.steps)
    steps = [_step(step) for step in episode.steps]
    about = {
        "goal": _text(episode.task.goal),
        "screens": [
            {"number": place + 1, "image": Image(shown_at), "last": final and place == len(screens) - 1}
            for shown_at, place in enumerate(places)
        ],
        "steps": steps,
        "last": steps[-1],
        "count": len(steps),
        "end": episode.reason.value,
        "final": final,
    }
    data = {"kind": "task", **_played(episode, len(episode.steps)), **_size(screens[0])}
    images = [screens[place] for place in places]
    if prompt.convention.marks:
        actions = [step.action for step in episode.steps]
        images = [marked(image, next(iter(actions[place:]), None)) for image, place in zip(images, places, strict=True)]
    return _question(prompt, about, data, images, keyed)


def step_question(prompt: Prompt, trajectory: Trajectory, index: int, keyed: bool) -> Question:
    """Raises VerdictMissing where the screen after the step isn't known, IndexError, PromptError."""
    episode, screens = trajectory.episode, trajectory.screens
    step = episode.steps[index]
    if index + 1 >= len(screens):
        raise VerdictMissing(
            f"episode {episode.id} step {index + 1}: the recording has no screen after it, so it can't be judged",
            permanent=True,
        )
    before, after = screens[index], screens[index + 1]
    convention = prompt.convention
    if convention.marks:
        before = marked(before, step.action)
    about = {
        "goal": _text(episode.task.goal),
        "step": _step(step),
        "earlier": [_step(one) for one in episode.steps[:index]],
        "before": {"image": Image(0)},
        "after": {"image": Image(1)},
    }
    data = {"kind": "step", **_played(episode, index + 1), **_size(screens[0])}
    images = [] if convention.screens == "none" else [before, after]
    return _question(prompt, about, data, images, keyed)


def check(prompt: Prompt, kind: Kind) -> None:
    """Renders a prompt for made-up episodes. Raises PromptError."""
    step = {"number": 1, "action": {"type": "back"}, "text": "answer", "note": ""}
    said = {"goal": "goal", "form": Plain(form("0" * 8)), "data": Plain("{}")}
    if kind == "step":
        for earlier in ([], [step] * 7):
            images = {"before": {"image": Image(0)}, "after": {"image": Image(1)}}
            prompt.check({**said, **images, "step": step, "earlier": earlier}, 2)
        return
    for steps, final in ((1, False), (3, True)):
        count = steps + final
        screens = [
            {"number": place + 1, "image": Image(place), "last": final and place == steps} for place in range(count)
        ]
        about = {"screens": screens, "steps": [step] * steps, "last": step, "count": steps, "end": "done"}
        prompt.check({**said, **about, "final": final}, count)


def _question(
    prompt: Prompt, about: Mapping[str, Any], data: Mapping[str, Any], images: list[bytes], keyed: bool
) -> Question:
    frames = [hashlib.sha256(image).hexdigest() for image in images]
    if not about["goal"].strip():
        raise VerdictMissing("a task without a goal can't be judged: give it one", permanent=True)
    named = json.dumps([prompt.digest, about, data, frames, keyed], sort_keys=True)
    digest = hashlib.sha256(named.encode()).hexdigest()
    key = digest[:8] if keyed else None
    variables = {**about, "form": Plain(form(key)), "data": Plain(quoted({**data, "key": key}))}
    system, user = prompt.render(variables)
    parts = tuple(piece if isinstance(piece, str) else images[piece] for piece in user)
    return Question("".join(piece for piece in system if isinstance(piece, str)), parts, key, digest)


def _step(step: StepRecord) -> dict[str, Any]:
    action = step.action
    if action is not None and isinstance(action.get("text"), str):
        action = {**action, "text": _text(action["text"])}
    shown_action = action if action is not None else "no action: the answer could not be read"
    return {"number": step.index + 1, "action": shown_action, "text": _text(step.text), "note": _text(step.note)}


def _text(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _played(episode: EpisodeRecord, steps: int) -> dict[str, Any]:
    """What a phone needs to come to the same state: the task, and the actions that were executed in `steps` steps."""
    task, played = episode.task, episode.steps[:steps]
    return {
        "suite": task.suite,
        "template": task.template,
        "params": task.params,
        "seed": task.seed,
        "actions": [step.action for step in played if step.parse_error is None and step.action is not None],
        "executed": bool(played) and played[-1].parse_error is None and played[-1].action is not None,
        "end": episode.reason.value if steps == len(episode.steps) else "",
        "characters": sum(len(step.text) for step in played),
    }


def _size(screen: bytes) -> dict[str, int]:
    """Pixels of a PNG, from its header."""
    if screen[:8] != _PNG or len(screen) < 24:
        raise VerdictMissing(f"a screen of {len(screen)} bytes is not a PNG", permanent=True)
    width, height = struct.unpack(">II", screen[16:24])
    return {"width": width, "height": height}


def marked(screen: bytes, action: Mapping[str, Any] | None) -> bytes:
    """The screen with a red ring where an action touches it, and a blue one where a drag or swipe ends, with a line
    between them. A screen without a touch stays as it is."""
    if action is None or not isinstance(action.get("x"), int | float) or not isinstance(action.get("y"), int | float):
        return screen
    from PIL import Image as Picture
    from PIL import ImageDraw

    with Picture.open(io.BytesIO(screen)) as opened:
        picture = opened.convert("RGB")
    width, height = picture.size
    radius = max(3, width // 60)
    draw = ImageDraw.Draw(picture)

    def ring(x: float, y: float, color: str) -> tuple[float, float]:
        at = x * (width - 1), y * (height - 1)
        draw.ellipse((at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius), outline=color, width=2)
        return at

    begin = ring(action["x"], action["y"], "red")
    if isinstance(action.get("x2"), int | float) and isinstance(action.get("y2"), int | float):
        draw.line((*begin, *ring(action["x2"], action["y2"], "blue")), fill="red", width=2)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()
