"""Seconds that an update takes on GPUs, from counted operations and a share of the peak that they reach. Pure.

- Learner: operations of all passes over an update's samples (`learner/flops.py`), with what is computed a second time,
  over what its GPUs reach.
- Rollout: a closed loop of as many episodes as play at once. A step takes the phone's time, the passes over its prompt
  and its screens, and the answer's tokens one after the other, each of which reads the weights once for all answers
  under way, and each answer's cache. While an engine passes over prompts its answers stand still: one that does so for
  a share b of the time answers at 1 - b of its rate. How many answers are under way follows from how long they take
  (Little's law), so that both are found together.
- With a history in blocks the learner has a sequence for each window, and an engine passes over what a step adds: its
  screen and the answer before it, or after the window has moved all but the text. Where steps don't extend each other
  each is a sequence of its own, and engines are as with a window that slides.
- Answers to one recorded step have its prompt, which the learner computes once for as many as a micro-batch has. Of
  episodes that are played the first prompt of a group is shared too; that isn't counted.
- With `maxStaleness` 0 the two take turns, and where they share GPUs; else the longer one decides.

Neither boots, measurements and checkpoints are counted, nor what a network takes between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..learner.flops import Costs
from ..learner.planning import answers_at_once
from .cards import CardSpeed

#: for the tower, of what matrices of the language model reach: its heads are narrow
_TOWER: Final = 0.625
#: for passes over prompts, of what the learner reaches: nothing is kept for a backward pass
_PREFILL: Final = 1.375
#: of the memory's rate that reading weights and caches reaches
_READING: Final = 0.9
#: of a pass that samples one token for each answer, beside reading: launches, sampling; seconds
_PASS: Final = 0.003
#: of a step, around its answer: fitting the screen, calls, waiting for the next pass; seconds
_AROUND: Final = 0.25
#: most of an engine's time that passes over prompts may take for the model to hold
_BUSIEST: Final = 0.97
_ROUNDS: Final = 400

Bound = Literal["learner", "rollout"]


@dataclass(frozen=True, slots=True)
class Assumed:
    """What no file says. Seconds and tokens; `shares`: of the peak that the learner's matrices reach, from the low end
    to the high one."""

    #: of an episode
    steps: int
    answer_tokens: int
    #: of a prompt beside its screens
    text_tokens: int
    #: from an action to the next screen
    phone_seconds: float
    #: of a prompt's tokens that an engine still has in its cache
    cached: float = 0.27
    #: a weight sync with its proof
    sync_seconds: float = 8.0
    shares: tuple[float, float] = (0.3, 0.5)


@dataclass(frozen=True, slots=True)
class Work:
    """What an update is, in numbers. Sizes are tokens and patches; `weight_bytes` and `cache_bytes` (of a token) are an
    engine's."""

    costs: Costs
    episodes: int
    #: of a prompt
    screens: int
    #: of a history in blocks, those that are left when its window moves; None: the window slides
    keep: int | None
    #: in blocks, steps extend each other: the learner joins them, and engines have them in their caches
    joined: bool
    screen_tokens: int
    screen_patches: int
    context_tokens: int
    weight_bytes: float
    cache_bytes: float
    #: the language model's weights are trained, and not only adapters; the tower is
    weights: bool
    tower: bool
    #: forward passes of a sample beside the first one: what checkpointing computes again, a reference, what is read of
    #: answers before they have advantages, old log-probabilities of all mini-batches but the first
    more_forwards: float
    ranks: int
    engines: int
    tensor_parallel: int
    #: episodes that play at once
    players: int
    in_turns: bool
    #: tokens of a micro-batch
    token_budget: int
    #: episodes that have one prompt: a group's answers to a recorded step
    sharing: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks + self.engines * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an update and of its two sides, at one share of the peak."""

    learner: float
    rollout: float
    update: float
    #: of a step, from one screen to the next
    step: float
    #: share of an engine's time in passes over prompts
    prompts: float
    episodes_per_hour: float

    @property
    def bound(self) -> Bound:
        return "learner" if self.learner >= self.rollout else "rollout"


def speed(work: Work, assumed: Assumed, card: CardSpeed, share: float) -> Speed:
    """`share`: of the peak that the learner's matrices reach."""
    learner = learner_operations(work, assumed, tower=1 / _TOWER) / (card.peak * work.ranks * share)
    rollout, step, prompts = _rollout(work, assumed, card, share)
    learning = learner + assumed.sync_seconds
    update = learning + rollout if work.in_turns else max(learning, rollout)
    return Speed(learner, rollout, update, step, prompts, 3600 * work.episodes / update)


def prompt_tokens(work: Work, assumed: Assumed) -> int:
    """Of a step; in blocks the mean of an episode."""
    shown = work.screens * work.screen_tokens + assumed.text_tokens
    if work.keep is not None:
        screens = sum(map(sum, _windows(work, assumed))) / assumed.steps
        shown = round(screens * work.screen_tokens + (screens - 1) * assumed.answer_tokens) + assumed.text_tokens
    return max(1, min(shown, work.context_tokens - assumed.answer_tokens))


def _windows(work: Work, assumed: Assumed) -> list[list[int]]:
    """Screens that an episode's steps show, by window in blocks."""
    keep, found = work.keep or work.screens, [[1]]
    for _ in range(assumed.steps - 1):
        if (last := found[-1][-1]) < work.screens:
            found[-1].append(last + 1)
        else:
            found.append([keep])
    return found


def _sequences(work: Work, assumed: Assumed) -> list[tuple[int, int, int]]:
    """(tokens, answers, screens) of an episode's sequences for the learner."""
    if work.keep is None:
        length = prompt_tokens(work, assumed) + assumed.answer_tokens
        return [(length, 1, work.screens)] * assumed.steps
    turn = work.screen_tokens + assumed.answer_tokens
    windows = _windows(work, assumed)
    if not work.joined:
        windows = [[shown] for window in windows for shown in window]
    whole = [(window[-1] * turn + assumed.text_tokens, len(window), window[-1]) for window in windows]
    return [(min(length, work.context_tokens), answers, screens) for length, answers, screens in whole]


def _new_tokens(work: Work, assumed: Assumed) -> float:
    """Of a step's prompt, that an engine has not in its cache."""
    prompt = prompt_tokens(work, assumed)
    if work.keep is None or not work.joined:
        return (1 - assumed.cached) * prompt
    turn, windows = work.screen_tokens + assumed.answer_tokens, _windows(work, assumed)
    moved = sum(window[0] * turn for window in windows[1:])
    added = windows[0][0] * work.screen_tokens + assumed.text_tokens + sum(len(one) - 1 for one in windows) * turn
    return min(prompt, (moved + added) / assumed.steps)


def _new_screens(work: Work, assumed: Assumed) -> float:
    """Of a step's prompt, that an engine passes over."""
    if work.keep is None:
        return work.screens
    return 1.0 if work.joined else sum(map(sum, _windows(work, assumed))) / assumed.steps


def learner_operations(work: Work, assumed: Assumed, tower: float = 1.0) -> float:
    """Of an update, on all ranks together. Every sequence's screens are counted: features are kept for some of them
    only. `tower`: what an operation of the vision tower counts."""
    total = 0.0
    for length, answers, screens in _sequences(work, assumed):
        said = answers * assumed.answer_tokens
        forward = work.costs.text([length], said)
        backward = work.costs.backward([length], said, (), weights=work.weights, tower=False)
        frames = work.costs.vision([work.screen_patches] * screens) * (3 + work.more_forwards if work.tower else 1)
        at_once = answers_at_once(length, length - said, work.token_budget)
        share = -(-work.sharing // at_once) / work.sharing  # of their prompts that is computed
        prompt, spared = [length - said], 1 - share
        forward -= spared * work.costs.text(prompt, 0)
        backward -= spared * work.costs.backward(prompt, 0, (), weights=work.weights, tower=False)
        total += (1 + work.more_forwards) * forward + backward + tower * frames * share
    return work.episodes * total


def _rollout(work: Work, assumed: Assumed, card: CardSpeed, share: float) -> tuple[float, float, float]:
    """(seconds of an update's episodes, seconds of a step, share of an engine's time in passes over prompts)."""
    prompt = prompt_tokens(work, assumed)
    new = _new_tokens(work, assumed)
    text = new * work.costs.token + work.costs.square * (prompt**2 - (prompt - new) ** 2)
    seen = work.costs.vision([work.screen_patches]) * _new_screens(work, assumed)
    reach = card.peak * work.tensor_parallel * min(1.0, share * _PREFILL)
    passing = text / reach + seen * _PREFILL / _TOWER / reach
    rate = card.bandwidth * _READING * work.tensor_parallel
    players = work.players / work.engines
    step = assumed.phone_seconds + _AROUND + passing
    for _ in range(_ROUNDS):  # to where steps per second and answers under way agree
        busy = min(_BUSIEST, players / step * passing)
        answering = min(players, max(1.0, players * (step - assumed.phone_seconds - _AROUND - passing) / step))
        token = (work.weight_bytes + answering * prompt * work.cache_bytes) / rate + _PASS
        found = assumed.phone_seconds + _AROUND + passing + assumed.answer_tokens * token / (1 - busy)
        step += 0.1 * (found - step)
    # No faster than an engine passes over prompts, however many play.
    step = max(step, players * passing)
    return work.episodes * assumed.steps * step / work.players, step, min(1.0, players / step * passing)
