"""What a path means that a person wrote, in a file or on the command line: one reading for all of them.

- `~` and `~USER` at the beginning are home folders; `$NAME` and `${NAME}` are environment variables, `$$` is a dollar
  sign. A shell leaves all of them as they are behind an `=`, in quotes, and in a file.
- A relative path is one below the working directory, wherever it was written.
- Nothing is guessed: a variable that isn't set, an unknown user and an empty path are errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_VARIABLE: Final = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))", re.ASCII
)


class PathError(ValueError):
    """The text is not a path. The message says why, and what to write."""


def expanded(text: str, environment: Mapping[str, str] | None = None, *, elsewhere: bool = False) -> str:
    """The path with its home folder and variables put in. `elsewhere`: it may be meant for another machine, and a
    variable that isn't set here stays as it is. Raises PathError."""
    values = os.environ if environment is None else environment

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["braced"] or match["bare"]
        if not (found := values.get(name)):
            if elsewhere:
                return match[0]
            state = "is empty" if name in values else "is not set"
            raise PathError(
                f"the environment variable {name} of {text!r} {state}; set it, or write the path out (a dollar sign is "
                "$$)"
            )
        return found

    if not text.strip():
        raise PathError("the path is empty (a shell variable that isn't set?); . is the working directory")
    return _VARIABLE.sub(value, with_home(text))


def with_home(text: str) -> str:
    """The path with its home folder put in, and nothing else. Raises PathError."""
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise PathError(f"there is no home folder for {text!r}; write the path out") from error


def local_path(text: str) -> Path:
    """Raises PathError."""
    return Path(expanded(text))
