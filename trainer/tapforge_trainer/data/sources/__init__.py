"""Where data comes from, by name: a file each, and those of installed packages (`tapforge.datasets`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tapforge_trainer import plugins
from tapforge_trainer.algorithms.options import read_options

from ..convert import Bad, Row, Source
from ..episodes import DataError
from .aguvis import aguvis
from .android_control import android_control
from .gui_odyssey import gui_odyssey
from .recording import recording
from .rico import rico
from .screenspot import screenspot
from .verl import verl

GROUP: Final = "tapforge.datasets"

_SOURCES: Final[dict[str, Source]] = {
    "aguvis": aguvis,
    "android-control": android_control,
    "gui-odyssey": gui_odyssey,
    "recording": recording,
    "rico": rico,
    "screenspot": screenspot,
    "verl": verl,
}


def names() -> list[str]:
    return sorted({*_SOURCES, *plugins.names(GROUP)})


def read(name: str, path: Path, options: Mapping[str, str]) -> Iterator[Row | Bad]:
    """Rows of what lies at `path`; options are as they are written. Raises DataError."""
    found = source(name)
    try:
        return found(path, **read_options(name, found, options, None))
    except ValueError as error:
        raise DataError(str(error)) from error


def source(name: str) -> Source:
    """Raises DataError for a name that isn't known, or a package's that can't be loaded."""
    try:
        point = plugins.find(GROUP, name, _SOURCES)
    except ValueError as error:
        raise DataError(str(error)) from error
    if point is not None:
        try:
            found: Source = point.load()
        except Exception as error:  # a package's import may raise anything
            raise DataError(f"the data set {name} of {point.value} can't be loaded: {error!r}") from error
        return found
    if name not in _SOURCES:
        raise DataError(f"unknown data set {name!r}; known are {', '.join(names())}")
    return _SOURCES[name]
