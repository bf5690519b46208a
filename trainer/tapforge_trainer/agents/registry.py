"""Adapters by name. Other packages add theirs through the entry-point group "tapforge.agents".

An entry point names a function with the signature of `make_agent` less the name.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from .agent import Agent, PromptStyle

ENTRY_POINTS = "tapforge.agents"


def make_agent(
    name: str,
    model_folder: Path,
    *,
    prompt: PromptStyle,
    history_images: int,
    history_steps: int,
    context_tokens: int,
    response_tokens: int,
    image_first: bool = False,
    max_pixels: int | None = None,
) -> Agent:
    """The adapter `name` for the model in this folder. `max_pixels` bounds a frame as the model sees it; None: the
    adapter chooses. Raises ValueError for an unknown name, with the nearest one, and for bounds that no frame keeps,
    and FileNotFoundError for a folder that lacks what the adapter reads."""
    return _factory(name)(
        Path(model_folder),
        prompt=prompt,
        history_images=history_images,
        history_steps=history_steps,
        context_tokens=context_tokens,
        response_tokens=response_tokens,
        image_first=image_first,
        max_pixels=max_pixels,
    )


def agent_names() -> tuple[str, ...]:
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def _factory(name: str) -> Callable[..., Agent]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return point.load()
    known = agent_names()
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown agent {name!r}{hint} (known: {', '.join(known)})")


def _qwen3vl(
    model_folder: Path,
    *,
    prompt: PromptStyle,
    history_images: int,
    history_steps: int,
    context_tokens: int,
    response_tokens: int,
    image_first: bool = False,
    max_pixels: int | None = None,
) -> Agent:
    from .qwen3vl import Qwen3VL  # Pillow and tokenizers are for those who have a model
    from .tokens import Tokens
    from .vision import FrameFitter, VisionGrid, tokens_per_frame

    if not model_folder.is_dir():
        raise FileNotFoundError(f"model folder {model_folder} does not exist")
    grid = VisionGrid.load(model_folder)
    if max_pixels is not None:
        grid = grid.at_most(max_pixels)
    else:
        grid = grid.within(tokens_per_frame(context_tokens, response_tokens, history_images))
    return Qwen3VL(
        Tokens.load(model_folder),
        FrameFitter(grid),
        prompt=prompt,
        history_images=history_images,
        history_steps=history_steps,
        context_tokens=context_tokens,
        response_tokens=response_tokens,
        image_first=image_first,
    )


_BUILT_IN: dict[str, Callable[..., Agent]] = {"qwen3-vl": _qwen3vl}
