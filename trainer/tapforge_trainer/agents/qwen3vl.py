"""Qwen3-VL with the mobile_use tool: observation and history -> prompt, text -> action.

Two prompt styles. Ids are made part by part: structure from named special ids, words by `Tokens.encode`, so nothing
that a goal, a screen or an earlier answer spells can become structure.

`full`, for real models (one turn per shown screen):

    system   who you are, the tool, the answer format
    user     goal, "Step n: ..." for the earlier steps whose screens are not shown, first shown screen
    assistant/user pairs, one per earlier step whose screen is shown: its answer, the next screen

`compact`, for tiny models: "<user> goal \\n words screens", where the words are one per earlier step (" click click").
With `image_first` the screens go before the goal.

Window rules, the same for both styles:
- At most `history_images` screens, the current one included, and at most `history_steps` earlier texts or words.
- In `full` an earlier screen always comes with its answer; its step is not listed a second time.
- If prompt and answer don't fit the context, up to half of the earlier screens go at a time, oldest first, and the
  first one that is left stands at a round step number: it stays the first for several steps, so that prompts share
  their beginning and the engine's prefix cache holds. When no earlier screen is left, texts go in the same way. When
  nothing is left to drop: `ContextLimit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

from tapforge_envs.protocol import Action, Observation

from ..frames import Pixels
from ..records import FinishReason, Prompt
from .actions import format_action, short_name, tool_schema
from .agent import ContextLimit, Prepared, PromptStyle, Turn
from .parsing import ParseFailure, parse, without_reasoning
from .tokens import Tokens
from .vision import FrameFitter

#: characters of one "Step n: ..." line
_LINE_CHARACTERS = 400

_ROLE = (
    "You operate a phone for the user. At each turn you see its screen and decide on one action.\n\n"
    "# Tool\n\nThis function is yours; its signature stands between the XML tags:\n<tools>\n{tool}\n</tools>\n\n"
    "# Answer\n\nYou may first think in a sentence or two. Then call the function exactly once, as JSON between tags, "
    "and write nothing after it:\n"
    '<tool_call>\n{{"name": "mobile_use", "arguments": {{"action": ..., ...}}}}\n</tool_call>\n'
    "When the task is done, use terminate with success; when it can't be done on this phone, with infeasible."
)


class Qwen3VL:
    """See the module. Every length is in tokens after expansion."""

    def __init__(
        self,
        tokens: Tokens,
        frames: FrameFitter,
        *,
        prompt: PromptStyle,
        history_images: int,
        history_steps: int,
        context_tokens: int,
        response_tokens: int,
        image_first: bool = False,
    ):
        if prompt not in ("full", "compact"):
            raise ValueError(f"unknown prompt style {prompt!r}; known are full, compact")
        if history_images < 1:
            raise ValueError(f"history_images is {history_images}; 1 (the current screen) is the least")
        if history_steps < 0:
            raise ValueError(f"history_steps is {history_steps}; 0 (no history) is the least")
        if not 0 < response_tokens < context_tokens:
            raise ValueError(
                f"response_tokens {response_tokens} must lie between 0 and context_tokens {context_tokens}"
            )
        self._tokens, self._frames = tokens, frames
        self._history_images, self._history_steps = history_images, history_steps
        self._context, self._response = context_tokens, response_tokens
        self._image_first = image_first
        self._full = prompt == "full"
        self.allowed_ids, self.stop_ids, self.banned_ids = tokens.allowed_ids, tokens.stop_ids, tokens.banned_ids
        t, encode = tokens, tokens.encode
        newline = encode("\n")
        self._image = (t.vision_start, t.image_pad, t.vision_end)
        self._end = (t.im_end, *newline)
        self._user = (t.im_start, *encode("user\n"))
        self._assistant = (t.im_start, *encode("assistant\n"))
        role = _ROLE.format(tool=json.dumps(tool_schema(), ensure_ascii=False))
        self._system = (t.im_start, *encode("system\n"), *encode(role), *self._end) if self._full else ()
        self._newline = newline
        self._answers = lru_cache(maxsize=8192)(self._answer_ids)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        frame, pixels = self._frames.fit(observation.frame)
        seen = Prepared(
            frame,
            self._frames.grid.visual_tokens(frame.width, frame.height),
            observation.app,
            observation.state_key,
            observation.ui_tree,
            observation.window,
        )
        return seen, pixels

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt | ContextLimit:
        now = len(history)
        room = self._context - self._response
        first_image = max(0, now - self._history_images + 1)
        first_text = max(0, now - self._history_steps)
        while True:
            shown = [*(turn.seen for turn in history[first_image:]), seen]
            ids = self._compose(goal, history, first_image, first_text)
            length = len(ids) + sum(one.visual_tokens - 1 for one in shown)
            if length <= room:
                return Prompt(ids, tuple(one.frame for one in shown), length)
            if first_image < now:
                first_image = _skip_half(first_image, now)
            elif first_text < now:
                first_text = _skip_half(first_text, now)
            else:
                return ContextLimit(length, self._response, self._context)

    def _compose(self, goal: str, history: Sequence[Turn], first_image: int, first_text: int) -> tuple[int, ...]:
        compose = self._compose_full if self._full else self._compose_compact
        return tuple(chain.from_iterable(compose(goal, history, first_image, first_text)))

    def _compose_compact(
        self, goal: str, history: Sequence[Turn], first_image: int, first_text: int
    ) -> list[tuple[int, ...]]:
        encode = self._tokens.encode
        images = [self._image] * (len(history) - first_image + 1)
        words = [encode(" " + short_name(turn.action)) for turn in history[first_text:]]
        said = [encode(goal), self._newline, *words]
        body = [*images, *said] if self._image_first else [*said, *images]
        return [self._user, *body, self._end, self._assistant]

    def _compose_full(
        self, goal: str, history: Sequence[Turn], first_image: int, first_text: int
    ) -> list[tuple[int, ...]]:
        encode = self._tokens.encode
        lines = [encode(f"Task: {goal}\n")]
        if first_text < first_image:
            lines.append(encode("Your earlier steps:\n"))
            lines.extend(
                encode(_step_line(index, turn))
                for index, turn in enumerate(history[first_text:first_image], start=first_text + 1)
            )
        opening = [self._image, *lines] if self._image_first else [*lines, self._image]
        parts = [self._system, self._user, *opening, self._end, self._assistant]
        for turn in history[first_image:]:
            parts += [encode(_spoken(turn.text)), self._end, self._user, self._image, self._end, self._assistant]
        return parts

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        cell = self._frames.grid.cell
        return self._tokens.expand(prompt.ids, [(f.width // cell) * (f.height // cell) for f in prompt.frames])

    # --- answers ------------------------------------------------------------------------------------------------------

    def read(self, text: str, finish_reason: FinishReason) -> Action | ParseFailure:
        if finish_reason == "length":
            return ParseFailure("cut_off", f"cut off at {self._response} tokens")
        if finish_reason == "abort":
            return ParseFailure("aborted", "the engine gave the answer up before its end")
        return parse(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokens.decode(ids)

    def answer_ids(self, action: Action) -> tuple[int, ...]:
        return self._answers(action)

    def _answer_ids(self, action: Action) -> tuple[int, ...]:
        return (*self._tokens.encode(format_action(action)), self._tokens.im_end)


def _skip_half(first: int, end: int) -> int:
    """A later start of the range first..end, skipping at most half of it: the next multiple of the largest power of two
    up to that half. Ranges with another end, if it isn't far, get the same start."""
    chunk = 1 << max(0, ((end - first) // 2).bit_length() - 1)
    return (first // chunk + 1) * chunk


def _spoken(text: str) -> str:
    """An earlier answer without its reasoning, as chat templates show earlier turns."""
    spoken = without_reasoning(text)
    return (text if spoken is None else spoken).strip()


def _step_line(number: int, turn: Turn) -> str:
    words = " ".join(_spoken(turn.text).split())
    if len(words) > _LINE_CHARACTERS:
        words = words[:_LINE_CHARACTERS] + " ..."
    note = "" if turn.action is not None else " (could not be understood)"
    return f"Step {number}: {words}{note}\n"
