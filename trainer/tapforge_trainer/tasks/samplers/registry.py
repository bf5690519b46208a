"""Samplers by name: ours, and those that installed packages offer.

A sampler is a class whose options are keyword-only (a frozen dataclass, say) and whose instances say how likely a task
is taken (`sampler.py`). Wrong values of options are a ValueError when it is made. Others offer one by an entry point in
the group `tapforge.samplers`:

    [project.entry-points."tapforge.samplers"]
    my_sampler = "my_package.module:MySampler"

Names are strict: an unknown one is an error that names the nearest, as is an option that a sampler does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from ... import plugins
from ...algorithms.options import read_options, unknown
from .band import Band
from .near_half import NearHalf
from .sampler import Sampler
from .stages import Stages
from .uniform import Uniform

ENTRY_POINTS = "tapforge.samplers"

BUILT_IN: Mapping[str, Callable[..., Sampler]] = {
    "band": Band,
    "near_half": NearHalf,
    "stages": Stages,
    "uniform": Uniform,
}


def names() -> list[str]:
    """All samplers that can be asked for, sorted. Loads no entry point."""
    return sorted({*BUILT_IN, *plugins.names(ENTRY_POINTS)})


def make_sampler(name: str, given: Mapping[str, str]) -> Sampler:
    """With options as they are written in a file. Raises UnknownName, ValueError for a value that can't be read or
    makes no sense, and TypeError for what is not a sampler."""
    kind = _kind(name)
    options = read_options(name, kind, given)
    try:
        made = kind(**options)
    except ValueError as error:
        raise ValueError(f"sampler {name}: {error}") from error
    if not callable(made):
        raise TypeError(f"the sampler {name} made {made!r}, which can't be called with a task and a memory")
    return made


def _kind(name: str) -> Callable[..., Sampler]:
    point = plugins.find(ENTRY_POINTS, name, BUILT_IN)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if point is None:
        raise unknown("sampler", name, names())
    found = point.load()
    if not callable(found):
        raise TypeError(f"the entry point {point.value!r} of the sampler {name!r} is not a class: {found!r}")
    return found


def described(name: str, given: Mapping[str, str]) -> str:
    """Name and options, defaults included, for a person; also of a sampler that a run is refused for."""
    options: dict[str, object] = {}
    if name in BUILT_IN:
        parameters = inspect.signature(BUILT_IN[name]).parameters.values()
        options = {one.name: one.default for one in parameters if one.default is not one.empty}
    said = ", ".join(f"{option} {value}" for option, value in {**options, **given}.items())
    where = "" if name in BUILT_IN else " of another package"
    return f"{name}{where}" + (f" ({said})" if said else "")
