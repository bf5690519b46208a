"""Loggers by name: which a run asks for, whether their libraries are there, and how one is made.

Names of others' loggers are strict: an unknown one is an error that names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from tapforge_api.installing import install_extra
from tapforge_api.loggers import Logging

from .. import plugins
from .logger import Logger
from .mlflow import MLflowLogger
from .swanlab import SwanLabLogger
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

ENTRY_POINTS: Final = "tapforge.loggers"

#: by field of `spec.logging`, which is also the name of the extra and of the library's module
_BUILT_IN: Final[Mapping[str, Callable[..., Logger]]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "swanlab": SwanLabLogger,
    "mlflow": MLflowLogger,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A logger that a run asks for, as plain data. `plugin`: of another package."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plugin: bool = False


def chosen(logging: Logging) -> list[Chosen]:
    found = [
        Chosen(name, given.model_dump(mode="json"))
        for name in _BUILT_IN
        if (given := getattr(logging, name)) is not None
    ]
    plugins = [Chosen(one.name, {o.name: o.value for o in one.options}, plugin=True) for one in logging.plugins]
    return found + plugins


def missing(loggers: list[Chosen]) -> list[str]:
    """What is not installed, with the remedy; imports none of it."""
    wrong = []
    offered = plugins.names(ENTRY_POINTS)
    for one in loggers:
        field = f"spec.logging.{'plugins' if one.plugin else one.name}"
        if one.plugin and one.name not in offered:
            near = difflib.get_close_matches(one.name, offered, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(offered) or "none"
            wrong.append(f"{field}: no installed package offers the logger {one.name}{hint} (offered: {known})")
        elif one.plugin:
            wrong += _twice(field, one.name)
        elif find_spec(one.name) is None:
            wrong.append(f"{field}: {one.name} is not installed here: {install_extra(one.name)}")
    return wrong


def _twice(field: str, name: str) -> list[str]:
    try:
        plugins.find(ENTRY_POINTS, name)
    except ValueError as error:
        return [f"{field}: {error}"]
    return []


def make(one: Chosen) -> Logger:
    if not one.plugin:
        return _BUILT_IN[one.name](**one.options)
    point = plugins.find(ENTRY_POINTS, one.name)
    if point is None:
        raise LookupError(f"no installed package offers the logger {one.name}; it did when the run began")
    return point.load()(one.options)
