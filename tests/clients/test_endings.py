"""What ends an episode ends it: every adapter's ways of saying so, in every environment.

The environments' words are those of each client's own function; what their servers make of them is tried over real
sockets beside each client."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from families import CASES

from tapforge_envs.clients import androidlab, androidworld, mobileworld_actions, pyautogui_text
from tapforge_envs.phone import catalog
from tapforge_envs.phone.device import Rules
from tapforge_envs.phone.judge import judged
from tapforge_envs.protocol import FINAL_ACTIONS, Action, Answer, Score, Terminate
from tapforge_trainer.agents.coordinates import Plane

SUCCESS, FAILURE, INFEASIBLE = (Terminate(status=s) for s in ("success", "failure", "infeasible"))
ANSWER = Answer(text="42")


def _call(tool: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def _of_tool(tool: str, failure: str = "failure") -> dict[str, Action]:
    ends = {"success": SUCCESS, failure: FAILURE, "infeasible": INFEASIBLE}
    said = {_call(tool, action="terminate", status=status): end for status, end in ends.items()}
    return {**said, _call(tool, action="answer", text="42"): ANSWER}


TARS: dict[str, Action] = {
    "Action: finished()": SUCCESS,
    "Action: finished(content='')": SUCCESS,
    "Action: finished(content='42')": ANSWER,
    "Action: call_user()": INFEASIBLE,
    "Action: error_env()": INFEASIBLE,
}
AGUVIS: dict[str, Action] = {
    "os\nterminate(status='success')": SUCCESS,
    "os\nmobile.terminate(status='failure')": FAILURE,
    "os\ncomputer.terminate(status='infeasible')": INFEASIBLE,
    "os\nanswer(answer='42')": ANSWER,
    "os\nmobile.answer('42')": ANSWER,
    "DONE": SUCCESS,
    "FAIL": INFEASIBLE,
}
PHONE, COMPUTER = _of_tool("mobile_use"), _of_tool("computer_use")
#: what each adapter's models say, by its name
ADAPTERS: dict[str, dict[str, Action]] = {
    "qwen3-vl": PHONE,
    "qwen3-vl-computer": COMPUTER,
    "qwen2.5-vl": PHONE,
    "qwen2.5-vl-computer": COMPUTER,
    "mai-ui": _of_tool("mobile_use", "fail"),
    "gui-owl": PHONE,
    "gui-owl-computer": COMPUTER,
    "ui-tars": TARS,
    "ui-tars-computer": TARS,
    "aguvis": AGUVIS,
}


def _simulated(action: Action) -> tuple[str, str | None]:
    phone = catalog.phone_for("quickstart", 96, 160)
    phone.begin(1, Rules(lambda state, rng: None, lambda trial: Score(0.0), judged))
    phone.act(action)
    return phone.state["ended"], phone.state["answer"]


#: what each environment gets, and what it gets for success, failure, infeasible and the answer 42
ENVIRONMENTS: dict[str, tuple[Callable[[Action], Any], tuple[Any, Any, Any, Any]]] = {
    "simulated phone": (_simulated, (("success", None), ("failure", None), ("infeasible", None), ("answer", "42"))),
    "MobileWorld": (
        lambda action: mobileworld_actions.device_action(action, 1080, 2400),
        (
            {"action_type": "status", "goal_status": "complete"},
            {"action_type": "status", "goal_status": "failure"},
            {"action_type": "status", "goal_status": "infeasible"},
            {"action_type": "answer", "text": "42"},
        ),
    ),
    "AndroidWorld": (
        lambda action: androidworld.request_of(action, 1080, 2400)[0],
        (
            {"action_type": "status", "goal_status": "complete"},
            {"action_type": "status", "goal_status": "infeasible"},
            {"action_type": "status", "goal_status": "infeasible"},
            {"action_type": "answer", "text": "42"},
        ),
    ),
    "OSWorld": (lambda action: pyautogui_text.program_of(action, 1920, 1080), ("DONE", "FAIL", "FAIL", "DONE")),
    "AndroidLab": (
        lambda action: androidlab.command(action, 1080, 2400, 0.0)[0],
        ('finish(message="")', 'finish(message="")', 'finish(message="")', 'finish(message="42")'),
    ),
    # adb and pages are told nothing: the client ends the episode, and keeps the answer for its judge
    "adb and pages": (lambda action: isinstance(action, FINAL_ACTIONS), (True, True, True, True)),
}


def test_every_adapter_has_a_row() -> None:
    assert {case.dialect.name for case in CASES} == set(ADAPTERS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_ending_ends_in_every_environment(case, environment: str) -> None:
    told, words = ENVIRONMENTS[environment]
    wanted = dict(zip((SUCCESS, FAILURE, INFEASIBLE, ANSWER), words, strict=True))
    for text, end in ADAPTERS[case.dialect.name].items():
        action = case.dialect.parse(text, Plane(case.dialect.coordinates, 1080, 2400))
        assert action == end, text
        assert told(action) == wanted[end], text
