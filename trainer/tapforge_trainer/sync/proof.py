"""The prompts by which a weight sync is proved: the same every time for a model, a context and a run's screens.

Three prompts: one with a small frame, one with two, and one with the largest frame that the run can produce, which is
longer than 128 tokens; each is answered with `PROBE_TOKENS`. An engine that encodes or places far patches in another
way than the learner shows at that frame alone. In a short context the texts shrink, the longest first; a large frame
becomes as large as there is room, and a second one that has no room is left out. What has to fit is one small frame and
an answer: `least_context`.

What two correct sides may differ by depends on the number format. In fp32 every token has to be within 1e-4. In bf16
and fp16 single tokens may be far off (their noise has heavy tails: a maximum over the probe's tokens refuses correct
syncs), so the median of each prompt's tokens is judged: noise leaves it small, and weights, caches or places that are
wrong move most tokens of a prompt. `sync.tolerance` is a bound for every token instead, in any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapforge_trainer.frames.frame import FittedFrame

from ..learner.frame_store import PixelFormat

#: tokens that each of the probe's prompts is answered with
PROBE_TOKENS = 16
#: largest difference of any token's log-probability in a correct sync
_MOST = {"float32": 1e-4}
#: largest median of the differences over a prompt's tokens in a correct sync. With the noise that was measured between
#: a trainer and vLLM in bf16 (root mean square 0.0227), however it is spread over tokens, none of 20 million prompts
#: made up had more than 0.048 (tests/policy/sync/test_proof.py repeats that on a smaller number)
_MEDIAN = {"bfloat16": 0.1, "float16": 0.02}
#: nats that a token's difference counts as in k3 at most, which grows like its exponential
_K3_RANGE = 20.0
#: tokens before and after a frame
_ENCLOSED = 2
#: tokens of the prompts' texts, around and between their frames
_TEXTS = ((8, 24), (8, 24, 8), (150, 8))


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompts with one placeholder per frame."""

    prompts: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    frames: dict[str, FittedFrame]
    image_id: int
    form: PixelFormat

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


def figures(gaps: Sequence[np.ndarray]) -> dict[str, float]:
    """How far engine and learner are apart on the answers to a probe. `gaps`: of each answer [tokens], the engine's
    log-probability less the learner's, nats. `gap_mean`, `gap_p90` and `gap_max` are absolute; `gap_kl` is the mean of
    k3 = exp(-gap) - 1 + gap, an estimate of the divergence of the learner's policy from the engine's (Schulman,
    "Approximating KL Divergence")."""
    gap = np.concatenate(gaps).astype(np.float64)
    apart, bounded = np.abs(gap), np.clip(gap, -_K3_RANGE, _K3_RANGE)
    return {
        "gap_tokens": float(len(gap)),
        "gap_mean": float(apart.mean()),
        "gap_p90": float(np.quantile(apart, 0.9)),
        "gap_max": float(apart.max()),
        "gap_kl": float((np.exp(-bounded) - 1 + bounded).mean()),
    }


def disagreement(gaps: np.ndarray, dtype: str, tolerance: float | None = None) -> str:
    """Why two sides that differ like this can't have the same weights; "" where they can. `gaps`: of the
    log-probabilities of one prompt's tokens, [tokens], nats, absolute; `tolerance`: of any token, in place of what the
    format allows."""
    most, median = (_MOST.get(dtype), _MEDIAN.get(dtype)) if tolerance is None else (tolerance, None)
    if not np.all(np.isfinite(gaps)):
        return "not a number"
    if most is not None and gaps.max() > most:
        return f"tolerance {most:g}"
    if median is not None and np.median(gaps) > median:
        return f"the median of its prompt is {np.median(gaps):.3g}, which may be {median:g} in {dtype}"
    return ""


def least_context(form: PixelFormat) -> int:
    """Tokens of the shortest context that a sync can be proved in."""
    return PROBE_TOKENS + _visible(form, [_size(form, 1)])


def make_probe(
    form: PixelFormat,
    allowed_ids: tuple[int, ...],
    image_id: int,
    vision_start: int,
    vision_end: int,
    context_tokens: int,
    largest: tuple[int, int] | None = None,
) -> Probe:
    """`largest`: width and height of a fitted frame, pixels; None: all frames are small, that is as small as the
    model's image processor leaves them alone. The context has `least_context`."""
    if context_tokens < least_context(form):
        raise ValueError(
            f"a context of {context_tokens} tokens is too short for a probe: {least_context(form)} at least"
        )
    sizes = [_size(form, 0), _size(form, 1), _shrunk(form, largest, context_tokens - PROBE_TOKENS)]
    frames = [_pattern(*size, k) for k, size in enumerate(sizes)]
    marked = (vision_start, image_id, vision_end)
    words = np.asarray(allowed_ids, np.int64)
    prompts = []
    for wanted, shown in zip(_TEXTS, ((0,), (0, 1), (2,)), strict=True):
        room = context_tokens - PROBE_TOKENS - _visible(form, [sizes[k] for k in shown])
        if room < 0:
            continue
        first, *others = [
            tuple(words[(np.arange(count) * 7 + count) % len(words)].tolist()) for count in shrunk(wanted, room)
        ]
        ids = first + tuple(token for text in others for token in marked + text)
        prompts.append((ids, tuple(frames[k].name for k in shown)))
    return Probe(tuple(prompts), {frame.name: frame for frame in frames}, image_id, form)


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
