"""OSWorld behind ZeroGUI's manager and workers (`osworld/env_api_manager.py`, `env_api_wrapper.py`).

    template = DOMAIN/EXAMPLE_ID           params.config_base_dir = the worker's folder of examples, its own if missing

- Actions become PyAutoGUI programs of a closed form (`pyautogui_text.py`), in pixels of the frame that the agent saw.
- terminate(success) is DONE; failure and infeasible are FAIL, after which OSWorld gives 1 for a task that can't be done
  and 0 for every other. An episode that the agent didn't end gets DONE before it is judged.
- An answer is DONE, too: it ends the episode, and OSWorld judges the machine and never sees the text.
- Only the evaluator knows whether a task can't be done: an agent that says so is judged as any other end, unless the
  task file has a label of its own.

OSWorld has no apps by name and no phone gestures: they are refused. It doesn't say when a program fails inside the
machine; the frame does.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from tapforge_api.environment import Settle

from .. import protocol as p
from ..protocol import Task
from .http import Deadlines
from .pyautogui_text import DONE, WAIT, program_of
from .worker import Dialect, TaskFacts, WorkerClient

#: seconds that OSWorld itself waits after an action by default
PAUSE = 2.0


def osworld(url: str, session: aiohttp.ClientSession, deadlines: Deadlines, slot: str, settle: Settle) -> WorkerClient:
    return WorkerClient(url, session, deadlines, slot, DIALECT, pause_of(settle))


def pause_of(settle: Settle) -> float:
    """A worker shows a frame only with an action, so nothing can be watched: adaptive is OSWorld's own pause."""
    match settle.mode:
        case "fixed":
            return settle.fixed_seconds
        case "none":
            return 0.0
        case _:
            return PAUSE


def lookup(task: Task) -> dict[str, Any]:
    domain, slash, example = task.template.partition("/")
    others = sorted(set(task.params) - {"config_base_dir"})
    if others or not domain or not slash or not example or "/" in example:
        raise ValueError("an OSWorld task is DOMAIN/EXAMPLE_ID, with config_base_dir or no parameter")
    named = {"domain": domain, "example_id": example}
    return named | ({"config_base_dir": folder} if (folder := task.params.get("config_base_dir")) else {})


def facts(config: dict[str, Any]) -> TaskFacts:
    goal, evaluator = config.get("instruction"), config.get("evaluator")
    if not isinstance(goal, str) or not goal.strip():
        raise ValueError(f"its 'instruction' is {goal!r:.100}, no text")
    function = evaluator.get("func") if isinstance(evaluator, dict) else None
    if not isinstance(function, str | list) or not function:
        raise ValueError(f"its 'evaluator' is {evaluator!r:.200}, without a function that judges")
    return TaskFacts(goal, feasible=None)


def command(action: p.Action, width: int, height: int, pause: float) -> tuple[str, float]:
    text = program_of(action, width, height)
    # The client has waited already; OSWorld would sleep twice as long as its pause.
    return text, 0.0 if text == WAIT else pause


DIALECT = Dialect(
    start={
        "vm_name": "Ubuntu.qcow2",
        "action_space": "pyautogui",
        "screen_width": 1920,
        "screen_height": 1080,
        "headless": True,
        "require_a11y_tree": False,
        "os_type": "Ubuntu",
    },
    lookup=lookup,
    reset=lambda task, config: {"task_config": config},
    facts=facts,
    command=command,
    end=DONE,
)
