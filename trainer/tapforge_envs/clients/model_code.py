"""A model's code as syntax: nothing of it is executed, and nothing of it is printed.

Python warns of code that it only reads, such as `'\\d'` or `1if x`. Those warnings are about an answer, not about this
program: they are ignored by the name that answers have as a file. The filter is added where it is missing, and no other
is touched: `warnings.catch_warnings` would replace the filters of all threads.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

_FILE: Final = "<answer of a model>"
#: as `warnings.filterwarnings` keeps it
_FILTER: Final = ("ignore", None, Warning, re.compile(re.escape(_FILE)), 0)


def statements(text: str) -> list[ast.stmt]:
    """Of a program. Raises ValueError."""
    try:
        _ignore_warnings()
        return ast.parse(text, _FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not a program: {error!s:.100}") from error


def expression(text: str) -> ast.expr:
    """Raises ValueError."""
    try:
        _ignore_warnings()
        return ast.parse(text, _FILE, "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not an expression: {error!s:.100}") from error


def _ignore_warnings() -> None:
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=_FILTER[3].pattern)
