"""The prompts by which a weight sync is proved: the same every time for a model, a context and a run's screens.

Three prompts: one with a small frame, one with two, and one with the largest frame that the run can produce, which is
longer than 128 tokens. An engine that encodes or places far patches in another way than the learner shows at that
frame alone. In a short context the texts shrink, the longest first; a large frame becomes as large as there is room,
and a second one that has no room is left out. What has to fit is one small frame and an answer: `least_context`.
Beside them are steps of an episode, as the run's adapter prompts for them: its marks, its texts and the frames of its
history. Before a run has played they are of a made-up one (`agents/made_up.py`), from then on they are prompts that the
run itself has recorded, those with the most visual tokens, for ever the same (`run/proof_prompts.py`).

The number format decides how many tokens a proof needs:

- In fp32 each token decides (`agreement.py`): each prompt is answered with `PROBE_TOKENS`. The steps of a made-up
  episode are in a session's first proof alone, of recorded ones `_FEW` are in every one: more would find nothing more,
  and each sync of a small run would wait for them.
- In bf16 and fp16 statistics decide: there are `STATISTICS` tokens at least, in answers of up to 64 to the recorded
  prompts, before there are any to the three, which come again with other words, and to the made-up episode on top. Both
  sides score as many tokens of given texts as well, the same ones in every proof: of these it is known how both have
  changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.records import Prompt

from ..learner.families import ModelConfig
from ..learner.frame_store import PixelFormat
from ..placement.settings import EngineSettings

#: tokens that each of the probe's prompts is answered with where each of them decides
PROBE_TOKENS = 16
#: that a proof by statistics is made of, at least, where the context has room
STATISTICS = 1024
#: of an answer then, at most
_ANSWER = 64
#: of a text that is scored, at most: an engine has logits of a whole prompt at once, for which it has set no memory
#: apart. With a small frame that are some 200 tokens, 120 MiB at a vocabulary of 152,000
_SCORED = 128
#: recorded prompts of a proof where each token decides
_FEW = 2
#: tokens before and after a frame
_ENCLOSED = 2
#: tokens of the prompts' texts, around and between their frames
_TEXTS = ((8, 24), (8, 24, 8), (150, 8))


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompts: ids with one placeholder per frame, and the frames' names."""

    prompts: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    frames: dict[str, FittedFrame]
    image_id: int
    form: PixelFormat
    #: tokens of each answer
    answer: int = PROBE_TOKENS
    #: steps of a made-up episode
    episode: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    #: the episode's steps are in every proof, and not in the first one alone
    statistical: bool = False
    #: texts whose last `scored_tokens` are scored and not sampled
    scored: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    scored_tokens: int = 0

    def expand(self, ids: tuple[int, ...], frames: tuple[str, ...]) -> tuple[int, ...]:
        shown = iter(frames)
        expanded: list[int] = []
        for token in ids:
            count = 1
            if token == self.image_id:
                frame = self.frames[next(shown)]
                rows, columns = self.form.grid(frame.width, frame.height)
                count = rows * columns
            expanded.extend([token] * count)
        return tuple(expanded)


def least_context(form: PixelFormat) -> int:
    """Tokens of the shortest context that a sync can be proved in."""
    return PROBE_TOKENS + _visible(form, [_size(form, 1)])


def answer_tokens(form: PixelFormat, context_tokens: int, *, statistical: bool) -> int:
    """Of each answer of a proof."""
    room = context_tokens - _visible(form, [_size(form, 1)])
    return max(PROBE_TOKENS, min(_ANSWER, context_tokens // 16, room)) if statistical else PROBE_TOKENS


def longest_prompt(engine: EngineSettings, form: PixelFormat) -> int:
    """Tokens of a prompt that leaves room for a proof's answer."""
    return engine.context_tokens - answer_tokens(form, engine.context_tokens, statistical=_statistical(engine))


def _statistical(engine: EngineSettings) -> bool:
    return engine.dtype != "float32"


def probe_of(
    engine: EngineSettings, form: PixelFormat, episode: Sequence[Prompt] = (), recorded: Sequence[Prompt] = ()
) -> Probe:
    """The probe of a run's engines."""
    config = ModelConfig.of_folder(Path(engine.model))
    return make_probe(
        form,
        engine.allowed_ids,
        config.image_token,
        config.vision_start,
        config.vision_end,
        engine.context_tokens,
        engine.largest_frame,
        statistical=_statistical(engine),
        episode=episode,
        recorded=recorded,
    )


def make_probe(
    form: PixelFormat,
    allowed_ids: tuple[int, ...],
    image_id: int,
    vision_start: int,
    vision_end: int,
    context_tokens: int,
    largest: tuple[int, int] | None = None,
    *,
    statistical: bool = False,
    episode: Sequence[Prompt] = (),
    recorded: Sequence[Prompt] = (),
) -> Probe:
    """`largest`: width and height of a fitted frame, pixels; None: all frames are small, that is as small as the
    model's image processor leaves them alone. The context has `least_context`. `statistical`: the number format is
    narrower than fp32. `episode`: prompts of a made-up one; `recorded`: of the run, in their place. Those that leave no
    room for an answer are left out."""
    if context_tokens < least_context(form):
        raise ValueError(
            f"a context of {context_tokens} tokens is too short for a probe: {least_context(form)} at least"
        )
    answer = answer_tokens(form, context_tokens, statistical=statistical)
    sizes = [_size(form, 0), _size(form, 1), _shrunk(form, largest, context_tokens - answer)]
    frames = [_pattern(*size, k) for k, size in enumerate(sizes)]
    marked = (vision_start, image_id, vision_end)
    words = np.asarray(allowed_ids, np.int64)

    def text(count: int, repeat: int) -> tuple[int, ...]:
        return tuple(words[(np.arange(count) * 7 + count + 13 * repeat) % len(words)].tolist())

    prompts: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    repeat = 0
    steps = [one for one in recorded or episode if one.expanded_length + answer <= context_tokens]
    asked = bool(recorded and steps)
    while not prompts or (statistical and not asked and len(prompts) * answer < STATISTICS):
        for wanted, shown in zip(_TEXTS, ((0,), (0, 1), (2,)), strict=True):
            room = context_tokens - answer - _visible(form, [sizes[k] for k in shown])
            if room < 0:
                continue
            first, *others = [text(count, repeat) for count in shrunk(wanted, room)]
            ids = first + tuple(token for words in others for token in marked + words)
            prompts.append((ids, tuple(frames[k].name for k in shown)))
        repeat += 1
    # One token before the frame, and one that the engine samples.
    scored = min(_SCORED, context_tokens - _visible(form, sizes[:1]) - 2) if statistical else 0
    texts = (
        [(text(1, k) + marked + text(scored, k), (frames[0].name,)) for k in range(-(-STATISTICS // scored))]
        if scored >= PROBE_TOKENS
        else []
    )
    as_asked = [(tuple(one.ids), tuple(frame.name for frame in one.frames)) for one in steps]
    if asked:
        prompts += islice(cycle(as_asked), -(-STATISTICS // answer) if statistical else min(_FEW, len(steps)))
    return Probe(
        tuple(prompts),
        {frame.name: frame for frame in (*frames, *(frame for one in steps for frame in one.frames))},
        image_id,
        form,
        answer,
        () if asked else tuple(as_asked),
        statistical,
        tuple(texts),
        scored if texts else 0,
    )


def shrunk(lengths: Sequence[int], room: int) -> tuple[int, ...]:
    """Lengths that together are at most `room`; the longest gives way first."""
    least, most = 0, max(lengths)
    while least < most:  # the largest cap that fits
        cap = (least + most + 1) // 2
        least, most = (cap, most) if sum(min(n, cap) for n in lengths) <= room else (least, cap - 1)
    return tuple(min(n, least) for n in lengths)


def _size(form: PixelFormat, k: int) -> tuple[int, int]:
    """Width and height of frame `k`, pixels."""
    side = max(2, int(np.ceil(np.sqrt(form.least_tokens))))
    return side * form.cell, (side + k) * form.cell


def _shrunk(form: PixelFormat, largest: tuple[int, int] | None, room: int) -> tuple[int, int]:
    """Width and height of the large frame, of the same shape where it needs more than `room` tokens."""
    if largest is None:
        return _size(form, 1)
    rows, columns = form.grid(*largest)
    if rows * columns > room - _ENCLOSED:
        columns = max(1, int(columns * np.sqrt((room - _ENCLOSED) / (rows * columns))))
        rows = min(rows, (room - _ENCLOSED) // columns)
    return (columns * form.cell, rows * form.cell) if rows * columns >= form.least_tokens else _size(form, 1)


def _visible(form: PixelFormat, sizes: Sequence[tuple[int, int]]) -> int:
    """Tokens of frames of these sizes, with those that enclose them."""
    grids = [form.grid(*size) for size in sizes]
    return sum(rows * columns + _ENCLOSED for rows, columns in grids)


def _pattern(width: int, height: int, phase: int) -> FittedFrame:
    """A picture with structure at every scale; the same for ever."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [(x * 3 + y * 5 + 40 * phase) % 256, (x * y // 7 + 90 * phase) % 256, ((x // 16 + y // 16) % 2) * 200]
    return FittedFrame.of(np.stack(planes, -1).astype(np.uint8))
