"""Programs for OSWorld, and what a model's program means."""

import ast
import random
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_envs import protocol as p
from tapforge_envs.clients.pyautogui_text import KEYS, Scale, actions_of, key_name, program_of
from tapforge_envs.protocol import UnsupportedAction

SIZE = (1920, 1080)
PIXELS = Scale(SIZE)


def middle(x: int, y: int) -> dict[str, float]:
    return {"x": (x + 0.5) / SIZE[0], "y": (y + 0.5) / SIZE[1]}


places = st.builds(middle, st.integers(0, 1919), st.integers(0, 1079))
ends = places.map(lambda at: {"x2": at["x"], "y2": at["y"]})
typable = st.text(st.sampled_from([chr(c) for c in range(32, 127) if c != ord("<")] + ["\n", "\t"]), min_size=1)
keys = st.sampled_from([*sorted(KEYS - {"enter"}), "a", "7", ",", ">"])
actions = st.one_of(
    places.map(lambda at: p.Tap(**at)),
    places.map(lambda at: p.DoubleTap(**at)),
    places.map(lambda at: p.TripleClick(**at)),
    places.map(lambda at: p.RightClick(**at)),
    places.map(lambda at: p.MiddleClick(**at)),
    places.map(lambda at: p.Move(**at)),
    st.builds(lambda a, b: p.Drag(**a, **b), places, ends),
    st.builds(
        lambda at, way, n: p.Scroll(direction=way, notches=n, **at),
        places,
        st.sampled_from(["up", "down", "left", "right"]),
        st.integers(1, 100),
    ),
    typable.map(lambda text: p.Type(text=text)),
    keys.map(lambda name: p.Key(name=name)),
    st.lists(keys, min_size=1, max_size=8).map(lambda names: p.Hotkey(keys=tuple(names))),
    st.just(p.Enter()),
    st.just(p.Wait()),
    st.just(p.Terminate(status="success")),
    st.just(p.Terminate(status="infeasible")),
)


@given(actions)
def test_what_is_written_is_read_back(action):
    assert actions_of(program_of(action, *SIZE), PIXELS) == [action]


def test_every_pixel_survives():
    for x in range(SIZE[0]):
        program = program_of(p.Tap(**middle(x, 0)), *SIZE)
        assert program == f"pyautogui.click({x}, 0)"
        assert actions_of(program, PIXELS) == [p.Tap(**middle(x, 0))]


@given(st.text(min_size=1))
def test_any_text_is_typed_by_a_program_that_holds_it_as_a_literal(text):
    try:
        program = program_of(p.Type(text=text), *SIZE)
    except UnsupportedAction:
        assert "\0" in text
        return
    assert program.isascii() and "\n" not in program
    tree = ast.parse(f"import pyautogui; import time; pyautogui.FAILSAFE = False; {program}")
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    assert whole in literals or all(s.text in literals for s in p.keystrokes(text) if isinstance(s, p.Type))


def test_a_line_end_is_enter_whether_its_line_is_typed_or_pasted():
    assert program_of(p.Type(text="rain\n"), *SIZE) == "pyautogui.write('rain\\n', interval=0.02)"
    for text in ("天气\n", "天气\r\n", "天气\r"):
        assert program_of(p.Type(text=text), *SIZE).endswith("paste('\\u5929\\u6c14'); pyautogui.press('enter')")
    mixed = program_of(p.Type(text="a\n\nö\n"), *SIZE).partition("; pyautogui.write(")[2]
    assert mixed == "'a', interval=0.02); pyautogui.press('enter', presses=2); paste('\\xf6'); pyautogui.press('enter')"
    with pytest.raises(UnsupportedAction, match="101 lines to paste"):
        program_of(p.Type(text="ö\n" * 101), *SIZE)


def test_what_a_keyboard_cannot_type_goes_through_the_clipboard(tmp_path):
    for text in ("größe", "a < b", "漢字", "x" * 1001):
        program = program_of(p.Type(text=text), *SIZE)
        assert "pyautogui.write" not in program and program.endswith(f"; paste({text!a})")
    # the program as a machine executes it, with its xclip and PyAutoGUI replaced
    (tmp_path / "xclip").write_text(f"#!/bin/sh\nexec cat > {tmp_path}/clipboard\n")
    (tmp_path / "xclip").chmod(0o755)
    (tmp_path / "pyautogui.py").write_text("def hotkey(*keys): print(keys)\n")
    text = "größe <\\'\""
    program = "import pyautogui; import time; pyautogui.FAILSAFE = False; " + program_of(p.Type(text=text), 9, 9)
    answer = subprocess.run(
        ["python3", "-c", program],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout == "('ctrl', 'v')\n"
    assert (tmp_path / "clipboard").read_text() == text


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (p.Type(text=""), "nothing to type"),
        (p.Type(text="a\0"), "NUL"),
        (p.Key(name="VOLUME_UP"), "no key 'VOLUME_UP'"),
        (p.Key(name="'); import os; ('"), "no key"),
        (p.Hotkey(keys=("ctrl", "<")), "shift"),
        (p.LongPress(x=0, y=0), "no long_press"),
        (p.Swipe(x=0, y=0, x2=1, y2=1), "no swipe"),
        (p.AppSwitch(), "no app_switch"),
        (p.AskUser(text="?"), "no ask_user"),
    ],
)
def test_what_has_no_program(action, words):
    with pytest.raises(UnsupportedAction, match=words):
        program_of(action, *SIZE)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("WAIT", [p.Wait()]),
        (" done\n", [p.Terminate(status="success")]),
        ("FAIL", [p.Terminate(status="infeasible")]),
        ("time.sleep(2.5)", [p.Wait(seconds=2.5)]),
        ("pyautogui.rightClick(x=0, y=0)", [p.RightClick(**middle(0, 0))]),
        ("pyautogui.click(10, 20, clicks=2)", [p.DoubleTap(**middle(10, 20))]),
        ("pyautogui.click((10, 20))", [p.Tap(**middle(10, 20))]),
        ("pyautogui.click(x=10.6, y=20.2, button='left', duration=0.5)", [p.Tap(**middle(10, 20))]),
        ("pyautogui.moveTo(3, 4)\npyautogui.click()", [p.Tap(**middle(3, 4))]),
        ("pyautogui.moveTo(3, 4)\npyautogui.scroll(-500)", [
            p.Move(**middle(3, 4)), p.Scroll(direction="down", notches=100, **middle(3, 4))
        ]),
        ("pyautogui.hscroll(3)", [p.Scroll(direction="right", notches=3)]),
        ("pyautogui.typewrite(['a', 'b'])", [p.Type(text="ab")]),
        ("pyautogui.write(text='größe')", [p.Type(text="größe")]),
        ("pyautogui.press('Return')", [p.Enter()]),
        ("pyautogui.press('pgdn', presses=2)", [p.Key(name="pagedown")] * 2),
        ("pyautogui.hotkey('ctrl+c')", [p.Hotkey(keys=("ctrl", "c"))]),
        ("pyautogui.hotkey(['Control', 'ArrowLeft'])", [p.Hotkey(keys=("ctrl", "left"))]),
        ("pyautogui.hotkey('ctrl', '+')", [p.Hotkey(keys=("ctrl", "+"))]),
        ("import pyautogui\nimport time\n'''I think so.'''\npyautogui.press('esc')", [p.Key(name="esc")]),
    ],
)  # fmt: skip
def test_what_a_models_program_means(text, meaning):
    assert actions_of(text, PIXELS) == meaning


def test_numbers_from_0_to_1():
    assert actions_of("pyautogui.click(x=0.25, y=1)", Scale()) == [p.Tap(x=0.25, y=1.0)]
    with pytest.raises(ValueError, match="1.5 is not between 0 and 1"):
        actions_of("pyautogui.click(x=1.5, y=0)", Scale())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "import os",
        "import pyautogui as time",
        "__import__('os').system('id')",
        "eval('1')",
        "pyautogui.click(eval('1'), 2)",
        "pyautogui.click(*[1, 2])",
        "pyautogui.click(**{'x': 1})",
        "pyautogui.click(1)",
        "pyautogui.click()",
        "pyautogui.click(-1, 5)",
        "pyautogui.click(1920, 5)",
        "pyautogui.click(1e999, 5)",
        "pyautogui.click(float('nan'), 5)",
        "pyautogui.click('1', 5)",
        "pyautogui.click(True, 5)",
        "pyautogui.click(1, 2, clicks=4)",
        "pyautogui.click(1, 2, x=3)",
        "pyautogui.click(1, 2, speed=3)",
        "pyautogui.dragTo(3, 4)",
        "pyautogui.dragRel(3, 4)",
        "pyautogui.mouseDown()",
        "pyautogui.screenshot('/etc/passwd')",
        "pyautogui.press('launch missiles')",
        "pyautogui.press('a', presses=1000000)",
        "pyautogui.hotkey()",
        "pyautogui.scroll(0)",
        "pyautogui.write(1)",
        "pyautogui.write('x' * 10 ** 9)",
        "time.sleep(-1)",
        "time.sleep(1e8)",
        "x = pyautogui.click(1, 2)",
        "for i in range(3): pyautogui.click(1, 2)",
        "pyautogui.click(1, 2) if 1 else 2",
        "lambda: pyautogui.click(1, 2)",
        "pyautogui.FAILSAFE = False",
        "pyautogui.click(1, 2)(3)",
        "(" * 5000,
        "-" * 15000 + "1",
        "pyautogui.click(" + "9" * 5000 + ", 1)",
        "pyautogui.write('" + "x" * 10_001 + "')",
        "pyautogui.click(1, 2)\n" * 2000,
        "pyautogui.click(1, 2",
        "\0",
        "\ud800",
        "pyautogui.write('\\ud800')",
    ],
    ids=lambda text: ascii(text)[:30],
)
def test_what_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match=r".") as caught:
        actions_of(text, PIXELS)
    assert len(str(caught.value)) < 300


def fuzzed(seed: int, count: int) -> int:
    """Programs put together at random from pieces of programs; returns how many meant something."""
    rng, meant = random.Random(seed), 0
    pieces = (
        "pyautogui", ".", "click", "moveTo", "dragTo", "write", "press", "hotkey", "scroll", "(", ")", "(", ")", ",",
        ", ",
        "x=", "y=", "1", "2.5", "-3", "1e400", "'ctrl'", '"a"', "'''", "\n", ";", "[", "]", "None", "time.sleep",
        "import os",
        "__import__('os')", "lambda:", "\\", "#", "é", "\0", "pyautogui.click(1, 2)", "clicks=", "button='right'",
        "DONE",
    )  # fmt: skip
    whole = ("pyautogui.click(1, 2)", "pyautogui.press('a')", "pyautogui.moveTo(1, 2); pyautogui.dragTo(5, 6)")
    for _ in range(count):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 25)))
        if rng.random() < 0.5:
            text = rng.choice(whole)
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(pieces) + text[at + rng.randrange(3) :]
        try:
            found = actions_of(text, PIXELS)
        except ValueError as error:
            assert len(str(error)) < 400
        else:
            meant += 1
            for action in found:
                p.ACTION.validate_python(p.ACTION.dump_python(action))
                program_of(action, *SIZE)
    return meant


def test_random_programs_mean_actions_or_nothing():
    assert fuzzed(seed=1, count=3000) > 10


@pytest.mark.parametrize(
    ("name", "known"),
    [("CTRL", "ctrl"), ("Escape", "esc"), ("A", "a"), (" ", "space"), ("F24", "f24"), ("F25", None), ("", None)],
)
def test_names_of_keys(name, known):
    assert key_name(name) == known
