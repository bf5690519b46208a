"""Options of algorithms by name: checked against what a function or a class takes, and read from texts.

An option is a keyword-only parameter, and is read as its default is: true and false, a whole number, a number, a text.
Names are strict: an unknown one is an error that names the nearest.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class UnknownName(ValueError):
    """An unknown name or option; the message lists the known ones and the nearest."""


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    known = sorted(known)
    same = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), same, n=1)
    hint = f"; did you mean {same[near[0]]!r}?" if near else "."
    return UnknownName(f"unknown {what} {name!r}{hint} Known: {', '.join(known) or 'none'}")


def check_options(name: str, function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises UnknownName for an option that `function`, called `name`, doesn't have."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    mine = [key for key, parameter in known.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in mine:
            raise unknown(f"option of {name}", option, mine)


def read_options(name: str, function: Callable[..., Any], given: Mapping[str, str], *inputs: None) -> dict[str, Any]:
    """Options as they are written in a file. `inputs` stand for the arguments that come before them. Raises
    UnknownName, and ValueError for a value that can't be read and an option that is missing."""
    check_options(name, function, given)
    signature = inspect.signature(function)
    found: dict[str, Any] = {}
    for option, text in given.items():
        parameter = signature.parameters.get(option)
        try:
            found[option] = _read(text, None if parameter is None else parameter.default)
        except ValueError as error:
            raise ValueError(f"option {option} of {name}: {error}") from error
    try:
        signature.bind(*inputs, **found)
    except TypeError as error:
        raise ValueError(f"options of {name}: {error}") from error
    return found


def _read(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"should be true or false, not {text!r}")
        return text.lower() == "true"
    if isinstance(default, int | float):
        try:
            if (number := type(default)(text)) == number:  # nan is none
                return number
            raise ValueError
        except ValueError:
            what = "a whole number" if isinstance(default, int) else "a number"
            raise ValueError(f"should be {what}, not {text!r}") from None
    return text
