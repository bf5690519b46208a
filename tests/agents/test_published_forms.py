"""Calls that the published prompts and agents of each family ask for, and the frames around them: all are read."""

import json

import pytest
from families import CASES

from tapforge_envs.protocol import (
    Action,
    Answer,
    AskUser,
    DoubleTap,
    Drag,
    Enter,
    Hotkey,
    LongPress,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    Type,
)
from tapforge_trainer.agents import ParseFailure, Prepared, Turn
from tapforge_trainer.agents.coordinates import Plane
from tapforge_trainer.frames.frame import FittedFrame

DIALECTS = {case.name: case.dialect for case in CASES}
SIDE = 1001


def read(family: str, text: str) -> Action | ParseFailure:
    dialect = DIALECTS[family]
    return dialect.parse(text, Plane(dialect.coordinates, SIDE, SIDE))


def call(tool: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def mobile(**arguments: object) -> str:
    return call("mobile_use", **arguments)


def computer(**arguments: object) -> str:
    return call("computer_use", **arguments)


def framed(said: str) -> str:
    return f"<thinking>\nI tap.\n</thinking>\n{said}\n<conclusion>\nTapped it.\n</conclusion>"


OLD_OWL, OLD_OWLC = "gui-owl/ImagePixels", "gui-owl-computer/ImagePixels"
OWL, OWLC = "gui-owl/Grid", "gui-owl-computer/Grid"
Q25, Q25C = "qwen2.5-vl/ImagePixels", "qwen2.5-vl-computer/ImagePixels"
OLD_TARS, TARS, TARSC = "ui-tars/Grid", "ui-tars/ImagePixels", "ui-tars-computer/ImagePixels"
AGUVIS = "aguvis/Fraction"
CENTER = 500.5 / SIDE
MIDDLE = Tap(x=CENTER, y=CENTER)
#: from the middle upwards
UP = {"x": 0.5, "y": 0.5, "x2": 0.5, "y2": 0.1}
BOXES = "start_box='<|box_start|>(500,500)<|box_end|>', end_box='<|box_start|>(500,100)<|box_end|>'"
CLICK = {"action": "click", "coordinate": [500, 500]}

FORMS: list[tuple[str, str, Action]] = [
    # UI-TARS of before, on phones
    (OLD_TARS, f"Action: scroll({BOXES})", Swipe(**UP)),
    (OLD_TARS, "Action: scroll(start_box='(500,500)', end_box='(500,100)')", Swipe(**UP)),
    (OLD_TARS, "Action: scroll(start_box='[500, 500]', end_box='[500, 100]')", Swipe(**UP)),
    (OLD_TARS, "Action: scroll(start_point='<point>500 500</point>', end_point='<point>500 100</point>')", Swipe(**UP)),
    (OLD_TARS, "Action: scroll(start_box='(500,500)', end_box='(500,100)', direction='')", Swipe(**UP)),
    (OLD_TARS, "Action: scroll(start_box='(500,500)', end_box='', direction='up')", Scroll(direction="up")),
    (OLD_TARS, "Action: scroll(start_box='', direction='Down')", Scroll(direction="down")),
    (OLD_TARS, f"Action: drag({BOXES})", Drag(**UP)),
    (OLD_TARS, "Action: long_press(start_box='(500,500)')", LongPress(x=0.5, y=0.5)),
    (OLD_TARS, "Action: long_press(start_box='(500,500)', time='')", LongPress(x=0.5, y=0.5)),
    (OLD_TARS, "Action: long_press(start_box='(500,500)', time='2.5')", LongPress(x=0.5, y=0.5, seconds=2.5)),
    (OLD_TARS, "Action: error_env()", Terminate(status="infeasible")),
    (TARS, "Action: open_app(app_name='Clock')", OpenApp(name="Clock")),
    (TARS, "Action: finished(content='xxx')", Answer(text="xxx")),
    (TARS, "Action: finished(content=' ')", Terminate(status="success")),
    (TARS, "Action: type(content='a\\n')", Type(text="a\n")),
    (TARSC, "Action: hotkey(key='ctrl c')", Hotkey(keys=("ctrl", "c"))),
    (TARSC, "Action: hotkey(hotkey='ctrl c')", Hotkey(keys=("ctrl", "c"))),
    (TARSC, "Action: press(press='enter')", Enter()),
    (TARSC, "Action: error_env()", Terminate(status="infeasible")),
    (TARSC, "Action: finished(content='It is written.')", Answer(text="It is written.")),
    # Aguvis: parts of a page, a drag in one call, the answer's name
    (AGUVIS, "os\npyautogui.scroll(page=-0.1)", Scroll(direction="down", notches=1)),
    (AGUVIS, "os\npyautogui.scroll(page=0.5)", Scroll(direction="up", notches=5)),
    (AGUVIS, "os\npyautogui.scroll(page=-1)", Scroll(direction="down", notches=10)),
    (AGUVIS, "os\npyautogui.hscroll(page=0.4)", Scroll(direction="right", notches=4)),
    (AGUVIS, "os\npyautogui.hscroll(page=-0.02)", Scroll(direction="left", notches=1)),
    (AGUVIS, "os\npyautogui.scroll(-0.3)", Scroll(direction="down", notches=3)),
    (AGUVIS, "os\npyautogui.scroll(-5)", Scroll(direction="down", notches=5)),
    (AGUVIS, "os\npyautogui.dragTo(from_coord=[0.5, 0.5], to_coord=[0.5, 0.1])", Drag(**UP)),
    (AGUVIS, "os\npyautogui.dragTo(from_coord=(0.5, 0.5), to_coord=(0.5, 0.1), button='left')", Drag(**UP)),
    (AGUVIS, "os\npyautogui.moveTo(0.5, 0.5)\npyautogui.dragTo(0.5, 0.1)", Drag(**UP)),
    (AGUVIS, "os\nanswer(answer='42')", Answer(text="42")),
    (AGUVIS, "os\nanswer(text='42')", Answer(text="42")),
    (AGUVIS, "os\nanswer('42')", Answer(text="42")),
    (AGUVIS, "os\nmobile.answer(answer='42')", Answer(text="42")),
    # GUI-Owl of before: what it thinks stands before the call and what it did after it
    (OLD_OWL, framed(mobile(**CLICK)), MIDDLE),
    (OLD_OWL, mobile(**CLICK) + "\n<conclusion>Tapped <b>it</b>.</conclusion>\n", MIDDLE),
    (OLD_OWL, f"<thinking>{mobile(action='wait', time=1)}</thinking>{mobile(**CLICK)}", MIDDLE),
    (OLD_OWLC, framed(computer(**CLICK)), MIDDLE),
    (Q25, framed(mobile(**CLICK)), MIDDLE),
    (Q25C, framed(computer(action="left_click", coordinate=[500, 500])), MIDDLE),
    # GUI-Owl's names
    (OWL, mobile(action="scroll", coordinate=[500, 500], coordinate2=[500, 100]), Swipe(**UP)),
    (OWL, mobile(action="open_app", text="Clock"), OpenApp(name="Clock")),
    (OWL, mobile(action="call_user", text="Which?"), AskUser(text="Which?")),
    (OWLC, computer(**CLICK), Tap(x=0.5, y=0.5)),
    (OWLC, computer(action="right click", coordinate=[500, 500]), RightClick(x=0.5, y=0.5)),
    (OWLC, computer(action="computer_double_click", coordinate=[500, 500]), DoubleTap(x=0.5, y=0.5)),
    (OWLC, computer(action="drag", coordinate=[500, 500], coordinate2=[500, 100]), Drag(**UP)),
    (OWLC, computer(action="left_click_drag", coordinate=[500, 500], coordinate2=[500, 100]), Drag(**UP)),
    (OWLC, computer(action="hotkey", keys=["ctrl", "c"]), Hotkey(keys=("ctrl", "c"))),
    (OWLC, computer(action="interact", text="Which?"), AskUser(text="Which?")),
    (OWLC, computer(action="calluser", text="Which?"), AskUser(text="Which?")),
    (OWLC, computer(action="type", text="a", clear=0, enter=0), Type(text="a")),
    (OWLC, computer(action="type", text="a", enter=1), Type(text="a\n")),
    (OWLC, computer(action="type", text="a\n", enter=True), Type(text="a\n")),
    (OWLC, computer(action="type", text="", enter=1), Enter()),
]

REFUSED: list[tuple[str, str, str, str]] = [
    # a drag with one point: where the pointer is, no picture shows
    ("qwen3-vl/Grid", mobile(action="swipe", coordinate=[500, 500]), "action", "coordinate2"),
    ("qwen3-vl-computer/Grid", computer(action="left_click_drag", coordinate=[500, 500]), "action", "coordinate2"),
    (Q25, mobile(action="swipe", coordinate=[500, 500]), "action", "coordinate2"),
    (Q25C, computer(action="left_click_drag", coordinate=[500, 500]), "action", "coordinate2"),
    ("mai-ui/Grid", mobile(action="drag", start_coordinate=[500, 500]), "action", "end_coordinate"),
    (OWL, mobile(action="swipe", coordinate=[500, 500]), "action", "coordinate2"),
    (OWLC, computer(action="left_click_drag", coordinate=[500, 500]), "action", "coordinate2"),
    (OLD_TARS, "Action: drag(start_box='(500,500)')", "action", "end_box"),
    (TARS, "Action: drag(start_box='(500,500)')", "action", "end_box"),
    (TARSC, "Action: drag(end_box='(500,500)')", "action", "start_box"),
    (TARSC, "Action: select(start_box='(500,500)')", "action", "end_box"),
    (AGUVIS, "os\npyautogui.dragTo(0.5, 0.1)", "action", "drag"),
    (AGUVIS, "os\nmobile.swipe(from_coord=[0.5, 0.5])", "action", "to_coord"),
    (OLD_TARS, "Action: scroll(start_box='(500,500)')", "action", "direction"),
    (OLD_TARS, "Action: scroll(end_box='(500,500)')", "action", "start_box"),
    (OLD_TARS, f"Action: scroll({BOXES}, direction='up')", "action", "direction"),
    (OLD_TARS, "Action: scroll()", "action", "direction"),
    (OLD_TARS, "Action: long_press(start_box='(500,500)', time='0')", "action", "'0'"),
    (OLD_TARS, "Action: long_press(start_box='(500,500)', time='61')", "action", "'61'"),
    (OLD_TARS, "Action: long_press(start_box='(500,500)', time='soon')", "action", "'soon'"),
    # of desktops the wheel has one place
    (TARSC, f"Action: scroll({BOXES})", "action", "direction"),
    (AGUVIS, "os\npyautogui.scroll(page=0)", "action", "nothing"),
    (AGUVIS, "os\npyautogui.scroll(-5, page=-0.5)", "action", "not both"),
    (AGUVIS, "os\npyautogui.scroll(page='half')", "action", "page"),
    (AGUVIS, "os\npyautogui.dragTo(from_coord=[0.5, 0.5])", "action", "to_coord"),
    (AGUVIS, "os\npyautogui.dragTo(to_coord=[0.5, 0.1])", "action", "from_coord"),
    (AGUVIS, "os\npyautogui.dragTo(from_coord=[0.5, 5], to_coord=[0.5, 0.1])", "action", "5"),
    (AGUVIS, "os\nanswer('42', text='42')", "action", "twice"),
    # one answer is one action
    (OLD_OWL, mobile(**CLICK) + f"<conclusion>{mobile(**CLICK)}</conclusion>", "several_tool_calls", "2"),
    (OLD_OWL, mobile(**CLICK) + "<conclusion>Tapped it.", "broken_block", "after"),
    (OLD_OWL, mobile(**CLICK) + "\nTapped it.", "broken_block", "after"),
    (OLD_OWL, f"<conclusion>Tapped it.</conclusion>{mobile(**CLICK)} ok", "broken_block", "after"),
    (OLD_OWL, f"<thinking>{mobile(**CLICK)}", "reasoning", "<thinking>"),
    (OWL, mobile(**CLICK) + "<conclusion>Tapped it.</conclusion>", "broken_block", "after"),
    (OWLC, computer(action="type", text="a", clear=1), "action", "step before"),
    (OWLC, computer(action="type", text="a", enter=2), "action", "neither 0 nor 1"),
    (OWLC, computer(action="type", text="a", enter="1"), "action", "'1'"),
    (OWLC, computer(action="drag", coordinate=[500, 500]), "action", "coordinate2"),
    (Q25C, computer(action="type", text="a", enter=1), "action", "enter"),
    (Q25C, computer(action="ask_user", text="Which?"), "action", "ask_user"),
]


@pytest.mark.parametrize(("family", "text", "action"), FORMS)
def test_a_published_form_is_read(family: str, text: str, action: Action) -> None:
    assert read(family, text) == action


@pytest.mark.parametrize(("family", "text", "kind", "part"), REFUSED)
def test_what_is_no_such_form_says_why(family: str, text: str, kind: str, part: str) -> None:
    failure = read(family, text)
    assert isinstance(failure, ParseFailure), failure
    assert failure.kind == kind and part in failure.detail, failure


def test_what_is_read_and_not_shown_stays_out_of_the_tools_schema() -> None:
    for family in (OWL, OWLC, OLD_OWLC):
        dialect = DIALECTS[family]
        assert dialect.schema is not None
        schema = json.dumps(dialect.schema(Plane(dialect.coordinates, SIDE, SIDE)))
        assert not [word for word in ("call_user", "interact", '"enter"', '"clear"') if word in schema], family


@pytest.mark.parametrize("family", [OLD_OWL, OLD_OWLC, Q25, Q25C])
def test_an_earlier_answer_without_its_screen_is_its_conclusion(family: str) -> None:
    turn = Turn(Prepared(FittedFrame("", b"", SIDE, SIDE), 1), framed(mobile(**CLICK)), MIDDLE)
    assert DIALECTS[family].line(3, turn) == "Step 3: Tapped it.\n"
