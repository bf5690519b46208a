"""What a task over adb brings in its params, and what can be wrong with it before any phone is asked. Pure.

adb has no notion of a task, so all of it is the task's own:

- `setup`: shell lines, each of which has to end with exit status 0;
- `app`: package or package/activity that a reset ends with;
- `check`: a shell line that judges, and `expect`: a regular expression to be found in what it writes;
- `answer`: a regular expression to be found in what the agent answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

PARAMS: Final = ("setup", "app", "check", "expect", "answer")
#: characters of an expression
_MAX_PATTERN: Final = 1000


def wrong_with(params: Mapping[str, str], *, judged: bool = False) -> str:
    """In words; "" for nothing. `judged`: something else than the phone says how an episode ended."""
    for name in params:
        if name not in PARAMS:
            return f"params.{name} is unknown; a task over adb has {', '.join(PARAMS)}"
    if "expect" in params and not params.get("check"):
        return "there is params.expect and no params.check whose output it could be found in"
    if not judged and not params.get("check") and "answer" not in params:
        return (
            "nothing judges it: give params.check, a shell line, or params.answer, an expression; or a judge "
            "(rewards.success, with rewards.verifier: ignored)"
        )
    for name in ("expect", "answer"):
        if (pattern := params.get(name)) is not None and (why := _wrong_pattern(pattern)):
            return f"params.{name} {why}"
    return ""


def _wrong_pattern(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN:
        return f"has {len(pattern)} characters; at most {_MAX_PATTERN}"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return ""
