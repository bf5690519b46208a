"""Observation and history -> prompt, text -> action, for every adapter: the family's part is its `Dialect`.

Three prompt styles. Ids are made by `chat.py`: structure from the model's chat template, words as plain text, so that
nothing that a goal, a screen or an earlier answer spells can become structure.

`full`, for real models:

    system   who you are, the tool, the answer format
    user     what a context adds, goal, "Step n: ..." for the earlier steps that are no turns of their own, first screen
    assistant/user pairs, one per earlier step that is one (`Dialect.history`): its answer, the next screen

`compact`, for tiny models: "<user> goal \\n words screens", where the words are one per earlier step (" click click").
With `image_first` the screens go before the goal.

`turns`: begins as `compact` does, with the words of the steps whose screens are not shown; each shown one is a turn,
its answer the ids that were sampled.

Window rules, the same for all styles:
- At most `history_images` images, the current screen and a context's included, and at most `history_steps` earlier
  texts or words.
- An earlier screen always comes with its answer; its step is not listed a second time.
- In blocks the window begins at step 0, and moves at once to the newest `keep` screens when there would be one too
  many; earlier texts move with it, so that there may be as many more as it has grown. Until then a prompt extends the
  last one, token by token: earlier answers are the ids that were sampled.
- If prompt and answer don't fit the context, up to half of the earlier screens go at a time, oldest first, and the
  first one that is left stands at a round step number: it stays the first for several steps, so that prompts share
  their beginning and the engine's prefix cache holds. When no earlier screen is left, texts go in the same way. When
  nothing is left to drop: `ContextLimit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from tapforge_envs.protocol import Action, EnvironmentFault, Observation

from ..frames.frame import FittedFrame, Pixels
from ..records import FinishReason, Prompt
from .agent import ContextLimit, Prepared, PromptStyle, Turn
from .chat import IMAGE, Chat, ChatTemplate, Markup, Message, Part, Said
from .context import Added, Context, ContextError, added_by
from .coordinates import Plane
from .dialect import Dialect
from .parsing import ParseFailure
from .prompt_file import PromptFile, PromptVariables
from .tokens import Tokens
from .tools import short_name
from .vision import FrameFitter

_NOTHING = Added()


@dataclass(frozen=True, slots=True)
class Window:
    """How much a prompt may hold; lengths in tokens after expansion."""

    prompt: PromptStyle
    history_images: int
    history_steps: int
    context_tokens: int
    response_tokens: int
    image_first: bool = False
    #: in blocks: the screens that are left when the window moves; None: it slides
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.prompt not in get_args(PromptStyle):
            raise ValueError(f"unknown prompt style {self.prompt!r}; known are {', '.join(get_args(PromptStyle))}")
        if self.history_images < 1:
            raise ValueError(f"history_images is {self.history_images}; 1 (the current screen) is the least")
        if self.keep is not None and not (0 < self.keep < self.history_images and self.prompt != "compact"):
            raise ValueError(
                f"keep is {self.keep} of {self.history_images} screens in a {self.prompt} prompt; blocks leave 1 or "
                "more and less than all of them, in a prompt with turns"
            )
        if self.history_steps < 0:
            raise ValueError(f"history_steps is {self.history_steps}; 0 (no history) is the least")
        if not 0 < self.response_tokens < self.context_tokens:
            raise ValueError(
                f"response_tokens {self.response_tokens} must lie between 0 and context_tokens {self.context_tokens}"
            )

    def begins(self, now: int, images: int) -> tuple[int, int]:
        """The first step with a screen, and the first one with a text, of a prompt after `now` steps. `images`: of a
        context."""
        shown = self.history_images - images
        if self.keep is None:
            return max(0, now - shown + 1), max(0, now - self.history_steps)
        moved = max(1, shown - self.keep + 1)
        first = max(0, -(-(now + 1 - shown) // moved)) * moved
        return first, max(0, first + min(self.keep, shown) - 1 - self.history_steps)


@dataclass(frozen=True, slots=True)
class Own:
    """What a user gives besides the model: a prompt of one's own, and a context by its name."""

    prompt_file: PromptFile | None = None
    context: tuple[str, Context] | None = None


class ChatAgent:
    """See the module. Every length is in tokens after expansion."""

    def __init__(
        self,
        dialect: Dialect,
        tokens: Tokens,
        frames: FrameFitter,
        template: ChatTemplate,
        window: Window,
        own: Own | None = None,
    ):
        self.dialect = dialect
        self.window, self.grid = window, frames.grid
        self._tokens, self._frames = tokens, frames
        self._own = own or Own()
        self._full = window.prompt == "full"
        # A prompt of one's own says all there is to say of tools.
        tool = dialect.tool if self._own.prompt_file is None else None
        self.chat = Chat(tokens, template, tool=tool, markup=dialect.markup, opening=self._opening(tokens))
        self.allowed_ids, self.stop_ids, self.banned_ids = tokens.allowed_ids, tokens.stop_ids, tokens.banned_ids
        t, encode = tokens, tokens.encode
        self._image = (t.vision_start, t.image_pad, t.vision_end)
        self._newline = encode("\n")
        self._user = (t.im_start, *encode("user\n"))
        self._answering = (t.im_end, *self._newline, t.im_start, *encode("assistant\n"))
        self._answers = lru_cache(maxsize=8192)(self._answer_ids)
        self._system = lru_cache(maxsize=64)(lambda plane: dialect.system(plane, self.chat.writes_tools))
        if self._full:  # what the chat template can't render is found now
            seen = Prepared(FittedFrame("probe", b"", 28, 28), 1)
            for steps in (0, 3):
                history = [Turn(seen, "answer", None)] * steps
                self.chat.ids(self.messages("goal", history, max(0, steps - 1), 0, seen, _NOTHING, 0))

    def _opening(self, tokens: Tokens) -> str:
        """A family's own, where the vocabulary has its tokens."""
        found = tokens.split(self.dialect.opening)
        named = [one for one in found if isinstance(one, int)]
        return self.dialect.opening if self.dialect.opening.count("<|") == len(named) else ""

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prepare(self, observation: Observation) -> tuple[Prepared, Callable[[], Pixels]]:
        frame, pixels = self._frames.fit(observation.frame)
        return self._prepared(observation, frame), pixels

    def outline(self, observation: Observation) -> Prepared:
        if self._own.context is not None:  # it may look at any frame
            return self.prepare(observation)[0]
        return self._prepared(observation, self._frames.outline(observation.frame))

    def _prepared(self, observation: Observation, frame: FittedFrame) -> Prepared:
        facts = observation.app, observation.state_key, observation.ui_tree, observation.window
        return Prepared(frame, self.visual_tokens(frame), *facts)

    def prompt(self, goal: str, history: Sequence[Turn], seen: Prepared) -> Prompt | ContextLimit:
        window = self.window
        added, images = self._added(goal, history, seen)
        if added.history is not None:
            history = added.history
        now = len(history)
        room = window.context_tokens - window.response_tokens
        first_image, first_text = window.begins(now, len(images))
        while True:
            frames = (*images, *(turn.seen.frame for turn in history[first_image:]), seen.frame)
            visual = [self.visual_tokens(frame) for frame in images]
            visual += [turn.seen.visual_tokens for turn in history[first_image:]] + [seen.visual_tokens]
            ids = self._compose(goal, history, first_image, first_text, seen, added, len(images))
            length = len(ids) + sum(visual) - len(visual)
            if length <= room:
                return Prompt(ids, frames, length)
            if first_image < now:
                first_image = _skip_half(first_image, now)
            elif first_text < now:
                first_text = _skip_half(first_text, now)
            else:
                return ContextLimit(length, window.response_tokens, window.context_tokens)

    def conversation(
        self, goal: str, history: Sequence[Turn], seen: Prepared
    ) -> tuple[list[Message], tuple[FittedFrame, ...]]:
        """The messages of a full prompt and its frames in order, for an endpoint that renders them itself: images and
        texts as the window says, and no bound in tokens, which are the endpoint's own."""
        added, images = self._added(goal, history, seen)
        if added.history is not None:
            history = added.history
        now = len(history)
        first_image, first_text = self.window.begins(now, len(images))
        frames = (*images, *(turn.seen.frame for turn in history[first_image:]), seen.frame)
        return self.messages(goal, history, first_image, first_text, seen, added, len(images)), frames

    def _added(self, goal: str, history: Sequence[Turn], seen: Prepared) -> tuple[Added, tuple[FittedFrame, ...]]:
        if self._own.context is None:
            return _NOTHING, ()
        name, context = self._own.context
        added = added_by(name, context, goal, history, seen, self.window.history_images - 1)
        fitted = []
        for image in added.images:
            if isinstance(image, FittedFrame):
                fitted.append(image)
                continue
            try:
                fitted.append(self._frames.fit(image)[0])
            except EnvironmentFault as error:
                raise ContextError(f"the context {name!r} adds an image that is none: {error}") from error
        return added, tuple(fitted)

    def _compose(
        self,
        goal: str,
        history: Sequence[Turn],
        first_image: int,
        first_text: int,
        seen: Prepared,
        added: Added,
        images: int,
    ) -> tuple[int, ...]:
        if self._full:
            return self.chat.ids(self.messages(goal, history, first_image, first_text, seen, added, images))
        turns = history[first_image:] if self.window.prompt == "turns" else ()
        named = history[first_text : len(history) - len(turns)]
        screens = images + 1 if turns else images + len(history) - first_image + 1
        return self._compose_short(goal, named, screens, turns, added)

    def _compose_short(
        self, goal: str, named: Sequence[Turn], screens: int, turns: Sequence[Turn], added: Added
    ) -> tuple[int, ...]:
        """`named`: earlier steps that are a word each; `screens`: of the first message."""
        encode = self._tokens.encode
        shown = self._image * screens
        words = [one for turn in named for one in encode(" " + short_name(turn.action))]
        said = (*encode(goal), *self._newline, *words, *(encode(added.text) if added.text else ()))
        ids = [*self._user, *((*shown, *said) if self.window.image_first else (*said, *shown)), *self._answering]
        for turn in turns:
            ids += (*self._said(turn), self._tokens.im_end, *self._newline, *self._user, *self._image)
            ids += self._answering
        return tuple(ids)

    def _said(self, turn: Turn) -> Sequence[int]:
        """An earlier answer without its end mark."""
        if not turn.ids:
            return self._tokens.encode_with(self.dialect.spoken(turn.text), self.dialect.markup)
        return turn.ids[:-1] if turn.ids[-1] in self.stop_ids else turn.ids

    def messages(
        self,
        goal: str,
        history: Sequence[Turn],
        first_image: int,
        first_text: int,
        seen: Prepared,
        added: Added,
        images: int,
    ) -> list[Message]:
        """The conversation of a full prompt."""
        dialect, file = self.dialect, self._own.prompt_file
        plane = self.plane(seen.frame)
        every = dialect.history == "all"
        first_turn = min(first_text, first_image) if every else first_image
        tools = () if file is None or dialect.schema is None else (dialect.schema(plane),)
        about = PromptVariables(goal, history, first_turn, first_text, plane, tools, seen.app, added.text)
        system: tuple[Part, ...] = (
            file.system(about) if file is not None and file.has_system else (Markup(self._system(plane)),)
        )
        if file is not None and file.has_user:
            task = file.user(about)
            if added.text and "added" not in file.used:
                task = (*task, added.text)
        else:
            lines = "".join(
                dialect.line(number, turn)
                for number, turn in enumerate(history[first_text:first_turn], start=first_text + 1)
            )
            said = dialect.task(goal, lines) + added.text
            task = (Markup(dialect.preface), said) if dialect.preface else (said,)
        opening: list[Part] = [IMAGE] * images
        screens: list[bool] = [index >= first_image for index in range(first_turn, len(history))] + [True]
        if every or IMAGE in task:
            opening += task
        elif self.window.image_first:
            opening += [IMAGE, *task]
        else:
            opening += [*task, IMAGE]
        has_system = any(part if isinstance(part, str) else part is not None and part.text for part in system)
        messages = [Message("system", system)] if has_system else []
        messages.append(Message("user", tuple(opening)))
        for number, screen in enumerate(screens):
            if screen and (every or number):
                messages.append(Message("user", (IMAGE,)))
            if number < len(screens) - 1:
                messages.append(Message("assistant", (self._spoken(history[first_turn + number]),)))
        return messages

    def _spoken(self, turn: Turn) -> Markup | Said:
        said = self.dialect.spoken(turn.text)
        if self.window.keep is None or not turn.ids or said.strip() != turn.text.strip():
            return Markup(said)
        return Said(said, self._said(turn))

    def plane(self, screen: FittedFrame) -> Plane:
        """What coordinates mean on this screen."""
        return Plane(self.dialect.coordinates, screen.width, screen.height)

    def expand(self, prompt: Prompt) -> tuple[int, ...]:
        return self._tokens.expand(prompt.ids, [self.visual_tokens(frame) for frame in prompt.frames])

    def visual_tokens(self, frame: FittedFrame) -> int:
        cell = self.grid.cell
        return (frame.width // cell) * (frame.height // cell)

    # --- answers ------------------------------------------------------------------------------------------------------

    def read(self, text: str, finish_reason: FinishReason, screen: FittedFrame) -> Action | ParseFailure:
        if finish_reason == "length":
            return ParseFailure("cut_off", f"cut off at {self.window.response_tokens} tokens")
        if finish_reason == "abort":
            return ParseFailure("aborted", "the engine gave the answer up before its end")
        opened = self.chat.opened if self._full else ""
        return self.dialect.parse(opened + text, self.plane(screen))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokens.decode(ids)

    def answer_ids(self, action: Action, screen: FittedFrame) -> tuple[int, ...]:
        return self._answers(action, screen.width, screen.height)

    def _answer_ids(self, action: Action, width: int, height: int) -> tuple[int, ...]:
        text = self.dialect.write(action, Plane(self.dialect.coordinates, width, height))
        return (*self._tokens.encode_with(text, (*self.dialect.markup, *self.dialect.sayable)), self._tokens.stop)


def _skip_half(first: int, end: int) -> int:
    """A later start of the range first..end, skipping at most half of it: the next multiple of the largest power of two
    up to that half. Ranges with another end, if it isn't far, get the same start."""
    chunk = 1 << max(0, ((end - first) // 2).bit_length() - 1)
    return (first // chunk + 1) * chunk
