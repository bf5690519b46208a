"""Tasks from a JSONL file: one `Task` per line, `#` lines and blank lines skipped.

A line ends with a line feed, and with nothing else: a goal may hold any other character that ends a line for people.
A file is taken whole or not at all: a broken line is an error that names the file, the line and what is wrong.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tapforge_envs.protocol import Task

from .source import FixedTasks, TaskError


def read_tasks(path: Path) -> FixedTasks:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the task file {path} can't be read: {error}") from error
    found: list[Task] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            task = Task.model_validate_json(line)
        except ValidationError as error:
            raise TaskError(f"{path}:{number}: {_why(error)}; a line looks like {_EXAMPLE}") from error
        if earlier := first_line.get(task.key):
            raise TaskError(f"{path}:{number}: the same task as in line {earlier}: {task.key}")
        first_line[task.key] = number
        found.append(task)
    if not found:
        raise TaskError(f"{path} has no task: write one per line, such as {_EXAMPLE}")
    return FixedTasks(tuple(found))


_EXAMPLE = '{"suite": "quickstart", "template": "open_app", "params": {"app": "Clock"}, "seed": 7}'


def _why(error: ValidationError) -> str:
    parts = []
    for e in error.errors(include_url=False):
        place = ".".join(str(p) for p in e["loc"])
        parts.append(f"{place}: {e['msg']}" if place else e["msg"])
    return "; ".join(parts)
