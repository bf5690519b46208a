"""Answers that each family's models are known to give: which are read, as what, and what the others are called."""

import json
import re

import pytest
from families import CASES

from tapforge_envs.protocol import (
    Action,
    Answer,
    AskUser,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Hotkey,
    Key,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)
from tapforge_trainer.agents import ParseFailure, guiowl
from tapforge_trainer.agents.coordinates import Grid, Plane
from tapforge_trainer.agents.dialect import Dialect
from tapforge_trainer.agents.parsing import FailureKind

DIALECTS = {case.name: case.dialect for case in CASES}
WIDTH, HEIGHT = 1092, 2408


def read(name: str, text: str) -> Action | ParseFailure:
    dialect: Dialect = DIALECTS[name]
    return dialect.parse(text, Plane(dialect.coordinates, WIDTH, HEIGHT))


def mobile(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'mobile_use', 'arguments': arguments})}\n</tool_call>"


def computer(**arguments: object) -> str:
    return mobile(**arguments).replace("mobile_use", "computer_use")


PIXEL = Tap(x=500.5 / WIDTH, y=700.5 / HEIGHT)
Q25, Q25C, Q3C = "qwen2.5-vl/ImagePixels", "qwen2.5-vl-computer/ImagePixels", "qwen3-vl-computer/Grid"
MAI, OWL, OLD_OWL = "mai-ui/Grid", "gui-owl/Grid", "gui-owl/ImagePixels"
TARS, OLD_TARS, TARSC = "ui-tars/ImagePixels", "ui-tars/Grid", "ui-tars-computer/ImagePixels"
AGUVIS = "aguvis/Fraction"


@pytest.mark.parametrize(
    ("family", "text", "action"),
    [
        (Q25, mobile(action="click", coordinate=[500, 700]), PIXEL),
        (Q25, mobile(action="click", coordinate=[500.7, 700.2]), PIXEL),
        (Q25, mobile(action="click", coordinate=[1091, 0]), Tap(x=1091.5 / WIDTH, y=0.5 / HEIGHT)),
        (Q25C, computer(action="key", keys=["ctrl", "c"]), Hotkey(keys=("ctrl", "c"))),
        (Q25C, computer(action="key", keys=["Return"]), Enter()),
        (Q25C, computer(action="key", keys=["cmd"]), Key(name="win")),
        (Q25C, computer(action="scroll", pixels=-500), Scroll(direction="down", notches=100)),
        (Q3C, computer(action="scroll", pixels=3), Scroll(direction="up", notches=3)),
        (Q3C, computer(action="hscroll", pixels=-2), Scroll(direction="left", notches=2)),
        # MAI-UI: boxes, other names, small buttons, both ends of reasoning
        (MAI, "<thinking>hm</thinking>\n" + mobile(action="click", coordinate=[0, 999]), Tap(x=0, y=1)),
        (MAI, "I look.</think>\n" + mobile(action="click", coordinate=[0, 999]), Tap(x=0, y=1)),
        (MAI, mobile(action="click", coordinate=[0, 0, 999, 999]), Tap(x=0.5, y=0.5)),
        (MAI, mobile(action="swipe", direction="up"), Swipe(x=0.5, y=0.5, x2=0.5, y2=0.5 - 0.4)),
        (MAI, mobile(action="AWAKE", text="微信"), OpenApp(name="微信")),
        (MAI, mobile(action="INFO", text="Who?"), AskUser(text="Who?")),
        (MAI, mobile(action="double_tap", coordinate=[0, 0]), DoubleTap(x=0, y=0)),
        (MAI, mobile(action="system_button", button="back"), Back()),
        (MAI, mobile(action="terminate", status="fail"), Terminate(status="failure")),
        (MAI, mobile(action="wait"), Wait()),
        # GUI-Owl: a line before the call; 1000 is the last pixel
        (OWL, "Action: Tap it.\n" + mobile(action="click", coordinate=[1000, 0]), Tap(x=1, y=0)),
        (OWL, mobile(action="tap", coordinate=[500, 500]), Tap(x=0.5, y=0.5)),
        (OWL, mobile(action="interact", text="Which?"), AskUser(text="Which?")),
        (OLD_OWL, mobile(action="click", coordinate=[500, 700]), PIXEL),
        # UI-TARS: every way that it writes a place
        (TARS, "Thought: a\nAction: click(start_box='<|box_start|>(500,700)<|box_end|>')", PIXEL),
        (TARS, "Thought: a\nAction: click(start_box='(500,700)')", PIXEL),
        (TARS, "Action: click(start_box='(500, 700)')", PIXEL),
        (TARS, "Action: click(start_box='[500, 700]')", PIXEL),
        (TARS, "Action: click(start_box=(500,700))", PIXEL),
        (TARS, 'Action: click(start_box="(500,700)")', PIXEL),
        (TARS, "Action: click(point='<point>500 700</point>')", PIXEL),
        (TARS, "Action: click(start_box='<bbox>500 700 500 700</bbox>')", PIXEL),
        (TARS, "Action: click(start_box='(500,700,500,700)')", PIXEL),
        (TARS, "Action: click(start_box='500,700')", PIXEL),
        (TARS, "  Thought: a Action: click(start_box='(500,700)')  ", PIXEL),
        (TARS, "<think>b\nAction: wait()</think>\nThought: a\nAction: click(start_box='(500,700)')\n", PIXEL),
        (TARS, "Thought: Action: is what I need\nAction: press_back()", Back()),
        (TARS, "Action: type(content='it's \\'fine\\'\\n')", Type(text="it's 'fine'\n")),
        (TARS, "Action: type(content='f(x)\\n\\ng(y)')", Type(text="f(x)\n\ng(y)")),
        (TARS, "Action: type(content='')", Type(text="")),
        (TARS, "Action: type(content='f(x)\ng(y)')", Type(text="f(x)\ng(y)")),
        (TARS, "Action: type(content='say('a') now')", Type(text="say('a') now")),
        (TARS, "Action: type(content='a\\')\nclick(b')", Type(text="a')\nclick(b")),
        (TARS, 'Action: type(content="a\')\nclick(b")', Type(text="a')\nclick(b")),
        (TARS, "Action: type(content='f(x='a', y='b')')", Type(text="f(x='a', y='b')")),
        (TARS, "Action: type(content='C:\\\\new')", Type(text="C:\\new")),
        (TARS, "Action: open_app(app_name='Clock')", OpenApp(name="Clock")),
        (TARS, "Action: finished()", Terminate(status="success")),
        (TARS, "Action: finished(content='')", Terminate(status="success")),
        (TARS, "Action: finished(content='42')", Answer(text="42")),
        (TARS, "Action: call_user()", Terminate(status="infeasible")),
        (TARS, "Action: wait()", Wait(seconds=5)),
        (TARS, "Action: scroll(direction='down')", Scroll(direction="down")),
        (OLD_TARS, "Action: click(start_box='(1000,0)')", Tap(x=1, y=0)),
        (TARSC, "Action: hotkey(key='ctrl c')", Hotkey(keys=("ctrl", "c"))),
        (TARSC, "Action: hotkey(key='ctrl+c')", Hotkey(keys=("ctrl", "c"))),
        (TARSC, "Action: hotkey(key='ctrl +')", Hotkey(keys=("ctrl", "+"))),
        (TARSC, "Action: hotkey(key='arrowdown')", Key(name="down")),
        (TARSC, "Action: press(key='enter')", Enter()),
        (TARSC, "Action: right_single(point='<point>0 0</point>')", RightClick(x=0.5 / WIDTH, y=0.5 / HEIGHT)),
        (
            TARSC,
            "Action: drag(start_point='<point>0 0</point>', end_point='<point>1 1</point>')",
            Drag(x=0.5 / WIDTH, y=0.5 / HEIGHT, x2=1.5 / WIDTH, y2=1.5 / HEIGHT),
        ),
        # Aguvis: with and without the marks of its recipients
        (AGUVIS, "os\npyautogui.click(x=0.5, y=0.25)", Tap(x=0.5, y=0.25)),
        (AGUVIS, "pyautogui.click(0.5, 0.25)", Tap(x=0.5, y=0.25)),
        (AGUVIS, "all\nThought: a\nAction: b\nassistantos\npyautogui.click(x=0.5, y=0.25)", Tap(x=0.5, y=0.25)),
        (
            AGUVIS,
            "all\nAction: b<|im_end|>\n<|im_start|>assistant<|recipient|>os\npyautogui.click(x=0.5, y=0.25)\n",
            Tap(x=0.5, y=0.25),
        ),
        (AGUVIS, "os\nimport pyautogui\npyautogui.click(x=0.5, y=0.25)", Tap(x=0.5, y=0.25)),
        (AGUVIS, "os\npyautogui.write(text='hi')", Type(text="hi")),
        (AGUVIS, "os\npyautogui.press(key='enter')", Enter()),
        (AGUVIS, "os\nmobile.swipe(from_coord=[0.5, 0.8], to_coord=[0.5, 0.2])", Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2)),
        (AGUVIS, "os\nmobile.swipe((0.5, 0.8), (0.5, 0.2))", Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2)),
        (AGUVIS, "os\nmobile.terminate(status='success')", Terminate(status="success")),
        (AGUVIS, "os\nterminate('infeasible')", Terminate(status="infeasible")),
        (AGUVIS, "os\nmobile.wait(seconds=3)", Wait(seconds=3)),
        (AGUVIS, "DONE", Terminate(status="success")),
        (AGUVIS, "os\nfail", Terminate(status="infeasible")),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_a_family_writes_is_read(family: str, text: str, action: Action) -> None:
    assert read(family, text) == action


@pytest.mark.parametrize(
    ("family", "text", "kind", "part"),
    [
        (Q25, mobile(action="click", coordinate=[1092, 700]), "action", "1092"),
        (Q25, mobile(action="click", coordinate=[500, 2408]), "action", "side of 2408"),
        (Q25, mobile(action="left_click", coordinate=[1, 2]), "action", "left_click"),
        (Q25, mobile(action="wait", time=1).replace("}}", "}}}"), "json", "Extra data"),
        (Q25, '{"name": "mobile_use", "arguments": {"action": "wait", "time": 1}}', "no_tool_call", ""),
        (Q25, '```json\n{"action": "click", "coordinate": [1, 2]}\n```', "no_tool_call", ""),
        (Q25, '[{"bbox_2d": [1, 2, 3, 4], "label": "OK"}]', "no_tool_call", ""),
        (Q25C, computer(action="click", coordinate=[1, 2]), "action", "click"),
        (Q25C, computer(action="key", text="ctrl+c"), "action", "lacks keys"),
        (Q25C, computer(action="key", keys="ctrl+c"), "action", "keys"),
        (Q25C, computer(action="key", keys=["hyper"]), "action", "hyper"),
        (Q25C, computer(action="key", keys=[]), "action", "1 to 8"),
        (Q25C, computer(action="scroll", pixels=0), "action", "nothing"),
        (Q25C, computer(action="left_click_drag", coordinate=[1, 2]), "action", "coordinate2"),
        (Q25C, mobile(action="wait", time=1), "shape", "mobile_use"),
        (MAI, "<thinking>" + mobile(action="wait"), "reasoning", "never closed"),
        (MAI, mobile(action="click", coordinate=[1, 2, 3]), "action", "[1, 2, 3]"),
        (MAI, mobile(action="click", coordinate=[0, 0, 0, 1000]), "action", "1000"),
        (MAI, mobile(action="swipe", direction="north"), "action", "north"),
        (MAI, mobile(action="terminate", status="failure"), "action", "failure"),
        (MAI, mobile(action="mcp_call", name="x"), "action", "mcp_call"),
        (OWL, mobile(action="click", coordinate=[1001, 0]), "action", "1001"),
        (OWL, "Action: Tap it.", "no_tool_call", ""),
        (TARS, "", "no_action", "Action:"),
        (TARS, "Thought: I click.", "no_action", "Action:"),
        (TARS, "click(start_box='(1,2)')", "no_action", "Action:"),
        (TARS, "<think>Action: wait()", "reasoning", "never closed"),
        (TARS, "Action: click(start_box='(1,2)'", "shape", "click"),
        (TARS, "Action: click(start_box='(1,2)') and then wait", "shape", "not a call"),
        (TARS, "Action: click", "shape", "not a call"),
        (TARS, "Action: click()", "action", "lacks start_box"),
        (TARS, "Action: click(start_box='')", "action", "not a place"),
        (TARS, "Action: click(start_box='(1)')", "action", "not a place"),
        (TARS, "Action: click(start_box='(1,2,3)')", "action", "not a place"),
        (TARS, "Action: click(start_box='(1;2)')", "action", "not a place"),
        (TARS, "Action: click(start_box='the button')", "action", "not a place"),
        (TARS, "Action: click(start_box='(1092,0)')", "action", "1092"),
        (TARS, "Action: click(start_box='(-1,0)')", "action", "-1"),
        (TARS, "Action: click(start_box='(1,2)', start_box='(1,2)')", "action", "twice"),
        (TARS, "Action: click(start_box='(1,2)', times='2')", "action", "times"),
        (TARS, "Action: click(500, 700)", "action", "parameters"),
        (TARS, "Action: __import__('os').system('ls')", "action", "__import__"),
        (TARS, "Action: eval(content='1')", "action", "eval"),
        (TARS, "Action: left_double(start_box='(1,2)')", "action", "left_double"),
        (TARS, "Action: scroll(start_box='(1,2)', direction='north')", "action", "north"),
        (TARS, "Action: press_back()\n\npress_home()", "several_actions", "one"),
        (TARS, "Action: click(start_box='(1,2)')\n\nclick(start_box='(3,4)')", "several_actions", "one"),
        (TARS, "Action: type(content='abc')\nclick(start_box='(1,2)')", "several_actions", "one"),
        (TARS, "Action: type(content='abc'); click(start_box='(1,2)')", "several_actions", "one"),
        (TARS, "Action: type(content='a\\\\') \n\n press_back()", "several_actions", "one"),
        (TARS, "Action: open_app(app_name='Clock')\nwait()", "several_actions", "one"),
        (TARS, "Action: type(content='x', start_box='(1,2)')", "action", "no parameter start_box"),
        (TARS, "Action: finished(content='x', direction='up')", "action", "no parameter direction"),
        (TARS, "Action: type(content='\ufffd')", "broken_block", "UTF-8"),
        (TARS, "Action: type(content='\\ud800')", "action", ""),
        (TARS, f"Action: type(content='{'x' * 10_001}')", "action", ""),
        (OLD_TARS, "Action: click(start_box='(1001,0)')", "action", "1001"),
        (TARSC, "Action: press_home()", "action", "press_home"),
        (TARSC, "Action: hotkey(key='')", "action", "1 to 8"),
        (TARSC, "Action: hotkey(key='hyper x')", "action", "hyper"),
        (TARSC, "Action: keydown(key='shift')", "action", "keydown"),
        (AGUVIS, "", "no_action", "code"),
        (AGUVIS, "all\nThought: I click.\nAction: Click OK.", "no_action", "code"),
        (AGUVIS, "os\npyautogui.click(x=500, y=700)", "action", "500"),
        (AGUVIS, "os\npyautogui.click(x=1.01, y=0)", "action", "1.01"),
        (AGUVIS, "os\npyautogui.click(x=a, y=0)", "action", "literal"),
        (AGUVIS, "os\npyautogui.click(x=0.1, y=0.1)\npyautogui.write('x')", "several_actions", "2"),
        (AGUVIS, "os\nmobile.swipe(from_coord=[0.5, 0.8])", "action", "to_coord"),
        (AGUVIS, "os\nmobile.swipe(from_coord=[0.5, 8], to_coord=[0, 0])", "action", "8"),
        (AGUVIS, "os\nmobile.back(1)", "action", "parameters"),
        (AGUVIS, "os\nmobile.wait(seconds='3')", "action", "3"),
        (AGUVIS, "os\nmobile.wait(seconds=600)", "action", "600"),
        (AGUVIS, "os\nterminate(status='done')", "action", "done"),
        (AGUVIS, "os\nbrowser.select_option(x=0.1, y=0.2, value='a')", "action", "browser"),
        (AGUVIS, "os\n__import__('os').system('ls')", "action", ""),
        (AGUVIS, "os\nwhile True: pass", "action", "While"),
        (AGUVIS, "os\npyautogui.click(x=0.1, y=0.1", "action", "program"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_everything_else_is_a_failure_that_says_why(family: str, text: str, kind: FailureKind, part: str) -> None:
    failure = read(family, text)
    assert isinstance(failure, ParseFailure), failure
    assert failure.kind == kind, failure
    assert part in failure.detail, failure
    assert len(failure.detail) < 1000


def test_a_model_of_an_unknown_base_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("config.json says 'llama'")):
        guiowl.of_model("gui-owl", "llama")
    assert guiowl.of_model("gui-owl", "qwen3_vl_moe").coordinates == Grid(1000)


#: of parsers that go back for each character, such an answer takes minutes
LONG = [
    "os" + "\n" * 200_000 + "x",
    "assistantos" + "\n" * 200_000 + "x",
    "Action: click()" + "\n" * 49_000 + "x)",
    "Action: type(content='" + "\\" * 49_000 + "x)",
    "Action: type(content='a'" + " " * 49_000 + "x')",
    "Action: click(start_box='(1" + " " * 49_000 + "x)')",
    "Action: click(start_box='1" + " ," * 24_000 + "x')",
    "Action:" + " " * 200_000 + "x",
    "\n " * 100_000 + "Action:",
    "<tool_call>" + " " * 200_000 + "{",
    "<think>" * 30_000 + "</thinking>" * 30_000,
]


@pytest.mark.parametrize("family", DIALECTS)
def test_long_answers_are_read_in_one_go(family: str) -> None:
    for text in LONG:
        assert isinstance(read(family, text), ParseFailure)
