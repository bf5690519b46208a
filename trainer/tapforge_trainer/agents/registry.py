"""Adapters by name. Other packages add theirs through the entry-point group "tapforge.agents".

An entry point names a function with the signature of `make_agent` less the name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from .. import plugins
from .agent import Agent, PromptStyle

if TYPE_CHECKING:
    from .chat import ChatTemplate
    from .chat_agent import ChatAgent
    from .coordinates import Coordinates
    from .dialect import Dialect

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
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    prompt_file: Path | None = None,
    context: str | None = None,
    keep: int | None = None,
) -> Agent:
    """The adapter `name` for the model in this folder. `min_pixels` and `max_pixels` bound a frame as the model sees
    it; None: the image processor's bound, and for the most what leaves room for texts. `prompt_file`: a prompt instead
    of the adapter's own; `context`: an entry point that adds to each prompt; `keep`: the window moves in blocks
    (`chat_agent.py`). Raises ValueError for an unknown name, with the nearest one, for bounds that no frame keeps, for
    a prompt file or a context that can't be used, for blocks where another package's adapter knows none, and
    FileNotFoundError for a folder that lacks what the adapter reads."""
    factory = _factory(name)
    if keep is not None and not _takes(factory, "keep"):
        raise ValueError("it is another package's, and shows no history in blocks: leave out adapter.history")
    return factory(
        Path(model_folder),
        prompt=prompt,
        history_images=history_images,
        history_steps=history_steps,
        context_tokens=context_tokens,
        response_tokens=response_tokens,
        image_first=image_first,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        prompt_file=None if prompt_file is None else Path(prompt_file),
        context=context,
        **({} if keep is None else {"keep": keep}),  # adapters of other packages may not know it
    )


def _takes(function: Callable[..., object], name: str) -> bool:
    parameters = signature(function).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


#: tokens; the endpoint has a bound of its own
_ENDLESS = 1_000_000


def conversation_agent(
    name: str,
    model_folder: Path,
    *,
    history_images: int,
    history_steps: int,
    response_tokens: int,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    prompt_file: Path | None = None,
    context: str | None = None,
    keep: int | None = None,
    coordinates: Coordinates | None = None,
) -> ChatAgent:
    """The built-in adapter `name` for a model behind an endpoint (`ChatAgent.conversation`): its prompt says the tool
    in words, whatever the folder's chat template does. The folder has the image processor. `coordinates`: instead of
    the family's own. Raises as `make_agent`, and ValueError for an adapter of another package."""
    from .chat import CHATML

    if name not in _BUILT_IN:
        raise ValueError(f"the adapter {name!r} says no conversation; use one of {', '.join(_BUILT_IN)}")
    dialect = _BUILT_IN[name]

    def chosen(folder: Path) -> Dialect:
        found = dialect(folder)
        return found if coordinates is None else replace(found, coordinates=coordinates)

    return _chat_agent(
        chosen,
        model_folder,
        prompt="full",
        history_images=history_images,
        history_steps=history_steps,
        context_tokens=_ENDLESS,
        response_tokens=response_tokens,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        prompt_file=prompt_file,
        context=context,
        keep=keep,
        template=CHATML,
    )


def agent_names() -> tuple[str, ...]:
    return tuple(sorted({*_BUILT_IN, *plugins.names(ENTRY_POINTS)}))


def is_built_in(name: str) -> bool:
    return name in _BUILT_IN


def dialect_of(name: str, model_folder: Path | None) -> Dialect | None:
    """What a built-in adapter says of its family, for a model in this folder; None: a package's own adapter, or one
    that only the model's folder decides. Raises ValueError for a name that there is none of, and for a model of another
    family."""
    found = _BUILT_IN.get(name)
    if found is None:
        _factory(name)
        return None
    return None if model_folder is None else found(model_folder)


def _factory(name: str) -> Callable[..., Agent]:
    point = plugins.find(ENTRY_POINTS, name, _BUILT_IN)
    if name in _BUILT_IN:
        dialect = _BUILT_IN[name]
        return lambda folder, **options: _chat_agent(dialect, folder, **options)
    if point is not None:
        return point.load()
    known = agent_names()
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown agent {name!r}{hint} (known: {', '.join(known)})")


def _chat_agent(
    dialect_for: Callable[[Path], Dialect],
    model_folder: Path,
    *,
    prompt: PromptStyle,
    history_images: int,
    history_steps: int,
    context_tokens: int,
    response_tokens: int,
    image_first: bool = False,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    prompt_file: Path | None = None,
    context: str | None = None,
    keep: int | None = None,
    template: ChatTemplate | None = None,
) -> ChatAgent:
    """`template`: instead of the folder's."""
    from .chat import ChatTemplate  # Pillow and tokenizers are for those who have a model
    from .chat_agent import ChatAgent, Own, Window
    from .context import context_of
    from .prompt_file import PromptFile
    from .tokens import Tokens
    from .vision import FrameFitter, VisionGrid, tokens_per_frame

    if not model_folder.is_dir():
        raise FileNotFoundError(f"model folder {model_folder} does not exist")
    window = Window(prompt, history_images, history_steps, context_tokens, response_tokens, image_first, keep)
    dialect = dialect_for(model_folder)
    if prompt_file is not None and prompt != "full":
        raise ValueError(f"the prompt file {prompt_file} needs the prompt style full, not {prompt}")
    own = Own(
        None if prompt_file is None else PromptFile(prompt_file, image_allowed=dialect.history != "all"),
        None if context is None else (context, context_of(context)),
    )
    grid = VisionGrid.load(model_folder).bounded(
        min_pixels, max_pixels, otherwise=tokens_per_frame(context_tokens, response_tokens, history_images)
    )
    tokens = Tokens.load(model_folder, sayable=(*dialect.markup, *dialect.sayable), stop=dialect.stop)
    chat = template or ChatTemplate.of_folder(model_folder)
    return ChatAgent(dialect, tokens, FrameFitter(grid), chat, window, own)


def model_type(model_folder: Path) -> str:
    """Of config.json; "" without one. Raises ValueError for one that is broken."""
    path = model_folder / "config.json"
    if not path.is_file():
        return ""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("model_type", ""))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _qwen3vl(folder: Path) -> Dialect:
    from .qwen3vl import MOBILE

    return MOBILE


def _qwen3vl_computer(folder: Path) -> Dialect:
    from .qwen3vl import COMPUTER

    return COMPUTER


def _qwen25vl(folder: Path) -> Dialect:
    from .qwen25vl import MOBILE

    return MOBILE


def _qwen25vl_computer(folder: Path) -> Dialect:
    from .qwen25vl import COMPUTER

    return COMPUTER


def _mai_ui(folder: Path) -> Dialect:
    from .maiui import DIALECT

    return DIALECT


def _gui_owl(name: str, folder: Path) -> Dialect:
    from .guiowl import of_model

    return of_model(name, model_type(folder))


def _ui_tars(name: str, folder: Path) -> Dialect:
    from .uitars import of_model

    return of_model(name, model_type(folder))


def _aguvis(folder: Path) -> Dialect:
    from .aguvis import DIALECT

    return DIALECT


_BUILT_IN: dict[str, Callable[[Path], Dialect]] = {
    "qwen3-vl": _qwen3vl,
    "qwen3-vl-computer": _qwen3vl_computer,
    "qwen2.5-vl": _qwen25vl,
    "qwen2.5-vl-computer": _qwen25vl_computer,
    "mai-ui": _mai_ui,
    "gui-owl": partial(_gui_owl, "gui-owl"),
    "gui-owl-computer": partial(_gui_owl, "gui-owl-computer"),
    "ui-tars": partial(_ui_tars, "ui-tars"),
    "ui-tars-computer": partial(_ui_tars, "ui-tars-computer"),
    "aguvis": _aguvis,
}
