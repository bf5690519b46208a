"""Tasks from a file, one per line, by what the run's phones speak. `#` lines and blank lines are skipped.

- Every protocol reads JSONL: one `Task` per line. `suite` may be left out where the protocol is not ours: it is the
  protocol's name.
- mobileworld and androidworld read lists of names too, `NAME` or `NAME,GOAL`; without a goal the server's is taken.
  What comes after the first comma is the goal, as it is; a goal that is quoted as in CSV is unquoted. With a first line
  that names columns (`Task Name`, `name`, `goal`, `question`, ...) it is a table in CSV; other columns are ignored.
- A task over adb says its goal and what judges it (`tapforge_envs/clients/adb/tasks.py`). Where a run's rewards say
  how episodes ended, it says its goal, and lists of `NAME,GOAL` are read for adb too.
- A line of JSON may say what is `about` its task (`lines.py`), which means nothing here.
- osworld and androidlab read JSONL of `{"domain": ..., "example_id": ...}` too, with `config_base_dir` or without.

Tasks of mobileworld succeed from a score of 0.99, as that benchmark counts, and take at most 50 steps, unless a line
says otherwise; their servers know names only, so parameters and seeds are refused.

A line ends with a line feed, and with nothing else: a goal may hold any other character that ends a line for people.
A file is taken whole or not at all: a broken line is an error that names the file, the line and what is wrong.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tapforge_api.pool import Protocol
from tapforge_envs.clients.adb.tasks import wrong_with
from tapforge_envs.protocol import Task

from .lines import ABOUT, DEFAULTS, MARK, split_line
from .source import FixedTasks, TaskError

_EXAMPLE: Final = '{"suite": "quickstart", "template": "open", "params": {"app": "mail"}, "seed": 7}'
#: what a line may look like, for errors
_EXAMPLES: Final[Mapping[str, str]] = {
    "mobileworld": "OpenFlightModeTask or OpenFlightModeTask,Turn on flight mode",
    "androidworld": '{"template": "ContactsAddContact", "params": {"task_idx": "0"}}',
    "osworld": '{"domain": "chrome", "example_id": "bb5e4c0d"}',
    "androidlab": '{"domain": "clock", "example_id": "clock_1"}',
    "adb": '{"template": "wifi", "goal": "Turn Wi-Fi off", "params": {"check": "settings get global wifi_on", '
    '"expect": "^0$"}}',
}
_NAMED: Final = ("mobileworld", "androidworld")
_EXAMPLED: Final = ("osworld", "androidlab")
#: heads of columns, in small letters with _ for blanks
_NAME_HEADS: Final = ("task_name", "name", "task")
_GOAL_HEADS: Final = ("task_goal", "goal", "question", "instruction")
_QUOTED: Final = re.compile(r'"(?:[^"]|"")*"', re.DOTALL)
#: characters of a name
_NAME: Final = 200

#: (number of the line from 1, the task)
Numbered = Iterator[tuple[int, Task]]


def read_tasks(path: Path, protocol: Protocol = "tapforge", *, judged: bool = False) -> FixedTasks:
    """`judged`: the environment isn't asked how episodes ended. Raises TaskError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the task file {path} can't be read: {error}") from error
    found: list[Task] = []
    first_line: dict[str, int] = {}
    for number, task in _tasks(lines, path, protocol, judged):
        if earlier := first_line.get(task.key):
            raise TaskError(f"{path}:{number}: the same task as in line {earlier}: {task.key}")
        first_line[task.key] = number
        found.append(task)
    if not found:
        raise TaskError(f"{path} has no task: write one per line, such as {_example(protocol)}")
    return FixedTasks(tuple(found))


def read_abouts(path: Path, protocol: Protocol = "tapforge") -> dict[str, dict[str, Any]]:
    """Task key -> what is about it, of the lines of JSON that say something. Raises TaskError."""
    found = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the task file {path} can't be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if MARK in line and line.lstrip().startswith("{"):
            key = _json(line, here := f"{path}:{number}", protocol, judged=True).key
            try:
                found[key] = split_line(line)[1]
            except ValueError as error:
                raise TaskError(f"{here}: {error}") from error
    return found


def read_task(line: str, protocol: Protocol, origin: str) -> Task:
    """One task as a line of a file says it; of osworld and androidlab DOMAIN/EXAMPLE_ID too. Raises TaskError, which
    names `origin`."""
    if protocol in _EXAMPLED and not line.lstrip().startswith("{"):
        return Task(suite=protocol, template=line.strip(), **DEFAULTS.get(protocol, {}))
    for _, task in _tasks([line], Path(origin), protocol):
        return task
    raise TaskError(f"{origin} names no task; it looks like {_example(protocol)}")


def _tasks(lines: Sequence[str], path: Path, protocol: Protocol, judged: bool = False) -> Numbered:
    """Raises TaskError at the first broken line."""
    full = [(number, line) for number, line in enumerate(lines, start=1) if _says_something(line)]
    named = protocol in _NAMED or (judged and protocol == "adb")
    if full and named and not full[0][1].lstrip().startswith("{"):
        number, head = full[0]
        columns = [cell.strip().casefold().replace(" ", "_") for cell in head.split(",")]
        if any(name in columns for name in _NAME_HEADS):
            yield from _table(lines, number, columns, path, protocol)
            return
        for number, line in full:
            yield number, _named(line, f"{path}:{number}", protocol)
        return
    if full and protocol == "adb" and not full[0][1].lstrip().startswith("{"):
        raise TaskError(
            f"{path}:{full[0][0]}: {full[0][1]!r:.60} is not JSON, and a list of NAME,GOAL doesn't say how success is "
            f"known: set rewards.verifier ignored and a judge, or write lines such as {_example(protocol)}"
        )
    for number, line in full:
        yield number, _json(line, f"{path}:{number}", protocol, judged)


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


# --- JSONL ------------------------------------------------------------------------------------------------------------


def _json(line: str, here: str, protocol: Protocol, judged: bool) -> Task:
    try:
        if protocol == "tapforge":
            return Task.model_validate(split_line(line)[0]) if MARK in line else Task.model_validate_json(line)
        value = json.loads(line)
        if not isinstance(value, dict):
            raise TaskError(f"{here}: {value!r:.60} is not an object; a line looks like {_example(protocol)}")
        value.pop(ABOUT, None)
        if protocol in _EXAMPLED and "domain" in value:
            value = _example_of(value, here, protocol)
        task = Task.model_validate({"suite": protocol, **DEFAULTS.get(protocol, {}), **value})
    except ValidationError as error:
        raise TaskError(f"{here}: {_why(error)}; a line looks like {_example(protocol)}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{here}: Invalid JSON: {error}; a line looks like {_example(protocol)}") from error
    if protocol != "adb" and task.suite != protocol:
        raise TaskError(f"{here}: suite is {task.suite!r}; tasks of servers that speak {protocol} have that suite")
    if protocol == "mobileworld" and (task.params or task.seed):
        raise TaskError(f"{here}: {task.key}: a MobileWorld server knows tasks by name; leave params and seed out")
    if protocol == "adb" and (
        words := wrong_with(task.params, judged=judged) or ("" if task.goal else "it has no goal")
    ):
        raise TaskError(f"{here}: {words}; a line looks like {_example(protocol)}")
    return task


def _example_of(value: Mapping[str, Any], here: str, protocol: Protocol) -> dict[str, Any]:
    """A task of ZeroGUI's files as one of ours."""
    others = sorted(set(value) - {"domain", "example_id", "config_base_dir"})
    words = {name: value.get(name) for name in ("domain", "example_id")}
    if "config_base_dir" in value:
        words["config_base_dir"] = value["config_base_dir"]
    for name, word in words.items():
        if not isinstance(word, str) or not 0 < len(word) <= _NAME or (name != "config_base_dir" and "/" in word):
            raise TaskError(f"{here}: {name} is {word!r:.60}; a line looks like {_example(protocol)}")
    if others:
        raise TaskError(f"{here}: {others[0]!r} is unknown beside domain, example_id and config_base_dir")
    folder = {"config_base_dir": words["config_base_dir"]} if "config_base_dir" in words else {}
    return {"template": f"{words['domain']}/{words['example_id']}", "params": folder}


# --- names and goals --------------------------------------------------------------------------------------------------


def _named(line: str, here: str, protocol: Protocol) -> Task:
    name, _, goal = line.partition(",")
    goal = goal.strip()
    if _QUOTED.fullmatch(goal):
        goal = goal[1:-1].replace('""', '"')
    elif goal.startswith('"') and goal.count('"') == 1:
        raise TaskError(f"{here}: the goal begins with a quotation mark that is not closed: {goal!r:.60}")
    return _task(name, goal, here, protocol)


def _table(lines: Sequence[str], head: int, columns: Sequence[str], path: Path, protocol: Protocol) -> Numbered:
    """CSV below the line `head`."""
    name_at = next(columns.index(name) for name in _NAME_HEADS if name in columns)
    goal_at = next((columns.index(name) for name in _GOAL_HEADS if name in columns), None)
    # A newline in a cell is one of its characters: the reader is given the lines with their ends.
    rows = csv.reader((line + "\n" for line in lines[head:]), strict=True)
    while True:
        number = head + rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise TaskError(f"{path}:{number}: this is not a row of a table: {error}") from error
        if not any(cell.strip() for cell in row) or row[0].lstrip().startswith("#"):
            continue
        if len(row) != len(columns):
            raise TaskError(f"{path}:{number}: {len(row)} cells, the first line names {len(columns)} columns")
        goal = "" if goal_at is None else row[goal_at].strip()
        yield number, _task(row[name_at], goal, f"{path}:{number}", protocol)


def _task(name: str, goal: str, here: str, protocol: Protocol) -> Task:
    name = name.strip()
    if not 0 < len(name) <= _NAME or any(c.isspace() or not c.isprintable() for c in name):
        raise TaskError(f"{here}: {name!r:.60} is not a name of a task; a line looks like {_example(protocol)}")
    if protocol == "adb" and not goal:
        raise TaskError(f"{here}: {name} has no goal; a line looks like wifi-off,Turn Wi-Fi off")
    return Task(suite=protocol, template=name, goal=goal, **DEFAULTS.get(protocol, {}))


def _example(protocol: Protocol) -> str:
    return _EXAMPLES.get(protocol, _EXAMPLE)


def _why(error: ValidationError) -> str:
    parts = []
    for e in error.errors(include_url=False):
        place = ".".join(str(p) for p in e["loc"])
        parts.append(f"{place}: {e['msg']}" if place else e["msg"])
    return "; ".join(parts)
