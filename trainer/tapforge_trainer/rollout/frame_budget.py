"""How much memory the frames of unused episodes may take, and whether the next update's fit into it. Pure.

A fitted frame takes about `BYTES_PER_PIXEL` of its pixels; an episode has at most one frame more than its task has
steps. Photographs and games take more: admission goes by what is seen (`rollout/held_frames.py`), this is the estimate
before anything is.
"""

from __future__ import annotations

from pathlib import Path

from tapforge_api import TrainingRun

from ..agents.vision import VisionGrid, tokens_per_frame
from ..tasks.source import TaskSet
from .held_frames import FrameBudget

#: of a screen, packed (`frames/frame.py`)
BYTES_PER_PIXEL = 0.1
#: of Ray's object stores; the rest is for batches, weights and what is being fetched
STORE_SHARE = 0.6
#: pixels on a side of a visual token, of the models that have the most
_CELL = 32
_TOKEN_PIXELS = _CELL**2
#: width and height of the largest phones, pixels
_LARGE_SCREEN = 1440, 3200
#: tasks that are looked at for the longest one
_LOOKED_AT = 64


def frame_pixels(run: TrainingRun, cell: int = _CELL) -> int:
    """Of the largest frame that the model sees."""
    spec = run.spec
    model, screen = spec.model, spec.environment.screen
    bound = (
        model.max_pixels
        or model.adapter.max_pixels
        or cell**2 * tokens_per_frame(model.context_tokens, spec.rollout.response_tokens, model.adapter.images)
    )
    # Other phones than those of this machine have the screens that they have.
    shown = max(screen.width * screen.height, model.min_pixels or 0)
    return min(bound, shown) if spec.environment.source.processes is not None else bound


def largest_frame(run: TrainingRun, folder: Path) -> tuple[int, int]:
    """Width and height, pixels, that the run's largest screen has for the model in `folder`. Raises ValueError for
    limits that the model's image processor does not keep."""
    spec = run.spec
    model, screen = spec.model, spec.environment.screen
    grid = VisionGrid.load(folder).bounded(
        model.min_pixels,
        model.max_pixels or model.adapter.max_pixels,
        otherwise=tokens_per_frame(model.context_tokens, spec.rollout.response_tokens, model.adapter.images),
    )
    own = spec.environment.source.processes is not None
    return grid.fit(screen.width, screen.height) if own else grid.fit(*_LARGE_SCREEN)


def screens_shown(run: TrainingRun, cell: int | None = None) -> str:
    """How many screens a prompt shows, and how large they are at most, for people. `cell`: pixels on a side of a visual
    token; None: not known."""
    cell = cell or _CELL
    pixels, images = frame_pixels(run, cell), run.spec.model.adapter.images
    shown = "1 screen" if images == 1 else f"{images} screens"
    return f"{shown} per prompt, of at most {pixels:,} pixels ({pixels // cell**2:,} visual tokens of {cell}x{cell})"


def episode_bytes(run: TrainingRun, steps: int) -> int:
    """Of the frames of an episode of so many steps."""
    pixels = frame_pixels(run)
    if run.spec.recording.screens == "device":
        pixels += device_pixels(run)
    return int((steps + 1) * pixels * BYTES_PER_PIXEL)


def longest_episode(run: TrainingRun, tasks: TaskSet) -> int:
    """Steps, of the first tasks."""
    return max(tasks.sample(run.spec.seed, number).max_steps for number in range(_LOOKED_AT))


def device_pixels(run: TrainingRun) -> int:
    """Of the largest screen that a phone may have."""
    screen, own = run.spec.environment.screen, run.spec.environment.source.processes is not None
    width, height = (screen.width, screen.height) if own else _LARGE_SCREEN
    return width * height


def judged_tokens(run: TrainingRun) -> int:
    """Visual tokens of the largest screen that a judge is shown, to models that have the fewest of it."""
    drawn = device_pixels(run)
    shown = drawn if run.spec.recording.screens == "device" else min(drawn, frame_pixels(run))
    return shown // _TOKEN_PIXELS


def frame_budget(run: TrainingRun, tasks: TaskSet, store_bytes: int | None) -> FrameBudget:
    """`store_bytes`: of Ray's object stores; None: the driver's process plays, which holds no frames that are
    recorded."""
    given = run.spec.rollout.frames_gib
    if given is not None:
        most: int | None = int(given * 2**30)
    else:
        most = None if store_bytes is None else int(store_bytes * STORE_SHARE)
    return FrameBudget(most, episode_bytes(run, longest_episode(run, tasks)))


def budget_error(run: TrainingRun, budget: FrameBudget) -> str | None:
    """Why the frames of one update's episodes don't fit; None: they do, or nothing bounds them."""
    rollout = run.spec.rollout
    needed = rollout.groups_per_update * rollout.group_size * budget.first_guess
    if budget.max_bytes is None or needed <= budget.max_bytes:
        return None
    return (
        f"rollout.framesGiB: the frames of an update's {rollout.groups_per_update} x {rollout.group_size} episodes may "
        f"take {needed / 2**30:.1f} GiB, and {budget.max_bytes / 2**30:.1f} GiB may be held: give more, fewer groups "
        "per update, or smaller frames (model.maxPixels)"
    )


def engine_frames_mib(run: TrainingRun) -> int:
    """Of an engine's decoded frames: room for what the answers at once can show. No frame has more visual tokens than
    the context."""
    spec = run.spec
    frame = 3 * _TOKEN_PIXELS * spec.model.context_tokens / 2**20
    return int(min(2048, max(256, frame * spec.engine.max_concurrent_sequences * spec.model.adapter.images)))
