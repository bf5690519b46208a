"""The task's own check, run on the phone. There is no default verdict.

With `expect`, what `check` writes has to have a match of it; without, its exit status decides: 0 is success, 1 is
failure, as of `test` and `grep`. A higher status means that the check itself broke (2: grep has no such file; 126, 127:
no such command; 128 and more: a signal): there is no verdict. With `answer`, the agent's answer has to have a match of
it as well; a task may have that alone.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from ...protocol import Score, Task
from .device import Device, DeviceError
from .tasks import wrong_with
from .wire import short

#: bytes of a check's output, and characters that an expression is matched with
_MAX_OUTPUT: Final = 256 * 1024
_MAX_MATCHED: Final = 64 * 1024


async def judged(device: Device, task: Task, answered: str) -> Score:
    """Raises DeviceError for a task that nothing judges, and for a check that broke; AdbError."""
    if words := wrong_with(task.params):
        raise DeviceError(f"the task can't be judged: {words}")
    check, expect, answer = (task.params.get(name) for name in ("check", "expect", "answer"))
    if answer is not None and not await _found("answer", answer, answered):
        return Score(0.0, f"the answer {short(answered, 80)!r} doesn't match {short(answer, 80)!r}")
    if not check:
        return Score(1.0, "the answer matches")
    result = await device.server.shell(device.serial, check, _MAX_OUTPUT)
    if result.status > 1:
        raise DeviceError(f"the check ended with {result.status}: {result.words()}")
    if expect is None:
        return Score(1.0 if result.status == 0 else 0.0, f"the check ended with {result.status}")
    found = await _found("expect", expect, result.text)
    verb = "matches" if found else "doesn't match"
    return Score(1.0 if found else 0.0, f"the check wrote {short(result.text.strip(), 80)!r}, which {verb}")


async def _found(name: str, pattern: str, text: str) -> bool:
    if len(text) > _MAX_MATCHED:
        raise DeviceError(f"params.{name}: {len(text)} characters to look through; at most {_MAX_MATCHED}: filter them")
    return await asyncio.to_thread(lambda: re.search(pattern, text, re.MULTILINE) is not None)
