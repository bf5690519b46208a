"""Samples of the shape that the quickstart makes: a prompt with one 96x160 screen, a short answer. From a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.records import Prompt, ResponseSpan, Sample

WIDTH, HEIGHT = 96, 160


def screen(seed: int) -> FittedFrame:
    """Flat areas like a screen's, so that it compresses like one."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (5, 3, 3), dtype=np.uint8)).resize(
        (WIDTH, HEIGHT), Image.Resampling.NEAREST
    )
    return FittedFrame.of(np.asarray(image))


def prompt(tokens: Tokens, form: PixelFormat, frame: FittedFrame, seed: int) -> Prompt:
    rng = np.random.default_rng((1, seed))
    words = rng.choice(tokens.allowed_ids, int(rng.integers(18, 34))).tolist()
    ids = (tokens.im_start, *words[:9], tokens.vision_start, tokens.image_pad, tokens.vision_end, *words[9:])
    rows, columns = form.grid(frame.width, frame.height)
    return Prompt(ids, (frame,), len(ids) - 1 + rows * columns)


def samples(folder: Path, count: int, group: int = 40) -> tuple[list[Sample], dict[str, FittedFrame]]:
    """Every sample with a screen of its own."""
    tokens, form = Tokens.load(folder), PixelFormat.of_folder(folder)
    made, frames = [], {}
    for k in range(count):
        rng = np.random.default_rng((2, k))
        frame = screen(k)
        frames[frame.name] = frame
        asked = prompt(tokens, form, frame, k)
        ids = asked.ids
        said = rng.choice(tokens.allowed_ids, int(rng.choice([2, 6]))).tolist()
        length = asked.expanded_length + len(said)
        span = ResponseSpan(
            step=k % 8,
            start=len(ids),
            end=len(ids) + len(said),
            logprobs=tuple(rng.uniform(-6, 0, len(said)).tolist()),
            versions=(0,) * len(said),
            advantage=float(rng.normal()),
        )
        ids, names = (*ids, *said), (frame.name,)
        made.append(Sample(f"episode-{k // 5}", f"group-{k // group}", ids, length, names, (span,)))
    return made, frames
