"""A line of a task file: a `Task`, and what is `about` it: where it comes from, which apps it uses, how tries ended.

`about` is an object of any JSON. Runs don't read it: `tapforge tasks` and `tapforge eval --regimes` do.

A file that is written task by task may be cut off anywhere: `kept` takes away a last line that isn't whole, and
nothing that no such command wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from tapforge_envs.protocol import Task

from .source import TaskError

ABOUT: Final = "about"
#: a line that may have it
MARK: Final = f'"{ABOUT}"'
#: suite -> what its tasks have unless their line says otherwise, where that isn't `Task`'s own
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mobileworld": {"threshold": 0.99, "max_steps": 50},
    # its evaluators know, and are asked
    "osworld": {"feasible": None},
}
#: what every line of `line_of` begins with
_BEGINS: Final = b'{"suite": "'


def line_of(task: Task, about: Mapping[str, Any]) -> str:
    """Without what a task that is read from the line has by default."""
    said = task.model_dump(exclude_defaults=True, exclude={"suite", "template"})
    said |= {name: getattr(task, name) for name in DEFAULTS.get(task.suite, {})}
    return json.dumps({"suite": task.suite, "template": task.template, **said, ABOUT: dict(about)}, ensure_ascii=False)


def split_line(line: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a task is read from, what is about it). Raises ValueError."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.60} isn't an object")
    about = value.pop(ABOUT, {})
    if not isinstance(about, dict):
        raise ValueError(f"{ABOUT}: {about!r:.60} isn't an object")
    return value, about


def kept(path: Path, mark: str = "by") -> list[tuple[Task, dict[str, Any]]]:
    """What an earlier call of a command has written, after a last line that was cut off was taken away. `mark`: what
    such a command says about each task. Raises TaskError for a file that no such command wrote."""
    if not path.exists():
        return []
    found, where = [], str(path)
    try:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode().split("\n")[:-1], start=1):
            where = f"{path}:{number}"
            value, about = split_line(line)
            if mark not in about:
                raise ValueError(f"about has no {mark!r}, which this command writes")
            found.append((Task.model_validate(value), about))
        if whole != data:
            where = f"{path}:{len(found) + 1}"
            _cut_off(data[len(whole) :], mark)
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: what is in this file can't be gone on with: {error}; name another one") from error
    return found


def _cut_off(tail: bytes, mark: str) -> None:
    """Raises ValueError for a last line that isn't the beginning of one of ours."""
    if not (tail.startswith(_BEGINS) or _BEGINS.startswith(tail)):
        raise ValueError("its last line is none that this command writes")
    try:
        _, about = split_line(tail.decode())
    except ValueError:  # it was cut off, as it may be
        return
    if mark not in about:
        raise ValueError(f"about has no {mark!r}, which this command writes")


def written(file: IO[str], lines: Iterator[str] | list[str]) -> None:
    """On disk when it returns."""
    for line in lines:
        file.write(line + "\n")
    file.flush()
    os.fsync(file.fileno())
