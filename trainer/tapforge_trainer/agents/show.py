"""One step as the model is asked it, for people who compare it with a model card. Pure but for the agent's caches."""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_envs.protocol import ACTION, Action, Observation

from ..frames.frame import FittedFrame
from ..records import Prompt
from .agent import ContextLimit, Turn
from .chat_agent import ChatAgent

#: one of each action, where there is a place in the middle of the screen
EXAMPLES: tuple[Action, ...] = tuple(
    ACTION.validate_python(value)
    for value in (
        *({"type": kind, "x": 0.5, "y": 0.5} for kind in ("tap", "double_tap", "long_press")),
        {"type": "swipe", "x": 0.5, "y": 0.8, "x2": 0.5, "y2": 0.4},
        {"type": "drag", "x": 0.5, "y": 0.8, "x2": 0.5, "y2": 0.2},
        {"type": "scroll", "direction": "down"},
        {"type": "type", "text": "hello"},
        {"type": "key", "name": "f5"},
        {"type": "open_app", "name": "Clock"},
        *({"type": kind} for kind in ("home", "back", "app_switch", "enter")),
        {"type": "wait", "seconds": 1},
        {"type": "wait", "seconds": 5},
        {"type": "answer", "text": "42"},
        {"type": "ask_user", "text": "Which one?"},
        *({"type": "terminate", "status": status} for status in ("success", "failure", "infeasible")),
        *({"type": kind, "x": 0.5, "y": 0.5} for kind in ("move", "right_click", "middle_click", "triple_click")),
        {"type": "hotkey", "keys": ["ctrl", "c"]},
    )
)


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """A step, ready to print."""

    head: dict[str, str]
    prompt: str
    tokens: dict[str, str]
    answers: list[tuple[str, str]]
    ids: tuple[int, ...]


def answers_of(agent: ChatAgent, screen: FittedFrame) -> list[tuple[str, str]]:
    """Of each action that the model has a word for: its name, and the canonical answer."""
    found: list[tuple[str, str]] = []
    for action in EXAMPLES:
        try:
            answer = agent.decode(agent.answer_ids(action, screen))
        except ValueError:
            continue
        if answer not in (known for _, known in found):
            status = f" {action.status}" if action.type == "terminate" else ""
            found.append((action.type + status, answer))
    return found


def history_of(agent: ChatAgent, observations: list[Observation], action: Action = EXAMPLES[0]) -> list[Turn]:
    """As if each of these screens had been answered with this action."""
    turns = []
    for observation in observations:
        seen, _ = agent.prepare(observation)
        answer = agent.answer_ids(action, seen.frame)
        turns.append(Turn(seen, agent.decode(answer), action, answer))
    return turns


def shown(agent: ChatAgent, goal: str, history: list[Turn], observation: Observation) -> PromptPreview:
    """Raises ValueError for a prompt that doesn't fit the context."""
    seen, _ = agent.prepare(observation)
    prompt = agent.prompt(goal, history, seen)
    if isinstance(prompt, ContextLimit):
        raise ValueError(f"{prompt}; raise contextTokens, or lower maxPixels")
    window, grid = agent.window, agent.grid
    area = grid.cell**2
    raw, fitted = observation.frame, seen.frame
    plane = agent.plane(fitted)
    head = {
        "adapter": agent.dialect.name,
        "coordinates": plane.words(),
        "template": agent.chat.template.origin,
        "image limits": f"{grid.min_tokens:,} to {grid.max_tokens:,} visual tokens of {grid.cell}x{grid.cell} pixels "
        f"({grid.min_tokens * area:,} to {grid.max_tokens * area:,} pixels)",
        "screen": f"{raw.width}x{raw.height}, seen as {fitted.width}x{fitted.height}",
        "history": f"{len(history)} earlier steps, {len(prompt.frames)} images of at most {window.history_images}",
        **({"extends": _extended(agent, goal, history, prompt)} if history else {}),
        "answer ends with": agent.chat.show(agent.stop_ids),
    }
    return PromptPreview(
        head, agent.chat.show(prompt.ids), _counts(agent, prompt), answers_of(agent, seen.frame), agent.expand(prompt)
    )


def _extended(agent: ChatAgent, goal: str, history: list[Turn], prompt: Prompt) -> str:
    """How much of the last step the prompt begins with: all of it where both can be one sequence of the learner."""
    last = history[-1]
    before = agent.prompt(goal, history[:-1], last.seen)
    if isinstance(before, ContextLimit):
        return "nothing: the step before has no prompt"
    ids = (*before.ids, *last.ids)
    differ = (at for at, (old, new) in enumerate(zip(ids, prompt.ids, strict=False)) if old != new)
    same = next(differ, len(ids))
    if same == len(ids) and prompt.frames[: len(before.frames)] == before.frames:
        return "the last step, with its answer"
    return f"the last step in its first {same:,} of {len(ids):,} ids, each image once"


def _counts(agent: ChatAgent, prompt: Prompt) -> dict[str, str]:
    window = agent.window
    visual = [agent.visual_tokens(frame) for frame in prompt.frames]
    text = prompt.expanded_length - sum(visual)
    left = window.context_tokens - prompt.expanded_length - window.response_tokens
    return {
        "text": f"{text:,}",
        "images": f"{sum(visual):,} ({' + '.join(f'{v:,}' for v in visual)})",
        "prompt": f"{prompt.expanded_length:,}",
        "answer": f"{window.response_tokens:,} at most",
        "context": f"{window.context_tokens:,}, of which {left:,} are left",
    }


def render(found: PromptPreview, *, ids: bool = False) -> str:
    lines = [f"{name:17}{value}" for name, value in found.head.items()]
    lines += ["", "--- prompt (each image once) ---", found.prompt, "--- tokens ---"]
    lines += [f"{name:17}{value}" for name, value in found.tokens.items()]
    lines += ["", "--- canonical answers ---"]
    for name, answer in found.answers:
        lines.append(f"{name}:")
        lines += [f"    {line}" for line in answer.splitlines()]
    if ids:
        lines += ["", "--- ids, with one placeholder per visual token ---", " ".join(map(str, found.ids))]
    return "\n".join(lines)
