"""An answer is one action or a named failure."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tapforge_envs.protocol import Back, LongPress, Tap, Type, Wait
from tapforge_trainer.agents import ParseFailure, parse
from tapforge_trainer.agents.parsing import FailureKind

CLICK = '{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [10, 20]}}'
TAP = Tap(x=10 / 999, y=20 / 999)


def block(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


def call(**arguments) -> str:
    return block(json.dumps({"name": "mobile_use", "arguments": arguments}))


@pytest.mark.parametrize(
    "text",
    [
        block(CLICK),
        f"<tool_call>{CLICK}</tool_call>",
        f"  I tap it.\n{block(CLICK)}\n \n",
        f"<think>Should I swipe?</think>\n{block(CLICK)}",
        f"It was {block('{}')} before</think>{block(CLICK)}",
        f"<think>{call(action='wait', time=1)}</think>{block(CLICK)}",
        block(CLICK.replace("[10, 20]", "[10.0, 20.0]")),
        block(CLICK.replace("click", "\\u0063lick")),
    ],
)
def test_the_one_call_after_the_reasoning_counts(text: str) -> None:
    assert parse(text) == TAP


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        ("", "no_tool_call", "<tool_call>"),
        ("click at 300, 400", "no_tool_call", "<tool_call>"),
        (CLICK, "no_tool_call", "<tool_call>"),
        (f"<think>{block(CLICK)}</think>", "no_tool_call", "<tool_call>"),
        (f"<think>{block(CLICK)}", "reasoning", "never closed"),
        (f"<think>a</think><think>b {block(CLICK)}", "reasoning", "never closed"),
        (block(CLICK) * 2, "several_tool_calls", "2"),
        (f"<tool_call><tool_call>{CLICK}</tool_call>", "several_tool_calls", "2"),
        (f"{block(CLICK)}</tool_call>", "several_tool_calls", "2"),
        (f"<tool_call>{CLICK}", "broken_block", "missing"),
        (f"</tool_call>{CLICK}<tool_call>", "broken_block", "before"),
        (f"{block(CLICK)} and then I swipe", "broken_block", "after"),
        (call(action="type", text="x").replace("x", "\ufffd"), "broken_block", "UTF-8"),
        (block(""), "json", ""),
        (block("click(10, 20)"), "json", ""),
        (block(CLICK[:-1]), "json", ""),
        (block(CLICK + " please"), "json", "Extra data"),
        (block(CLICK + CLICK), "json", "Extra data"),
        (block(CLICK.replace("[10, 20]", "[NaN, 20]")), "json", "NaN"),
        (block(CLICK.replace("[10, 20]", "[10, Infinity]")), "json", "Infinity"),
        (block(CLICK.replace("[10, 20]", "[10, -Infinity]")), "json", "Infinity"),
        (block(CLICK.replace('"action"', '"action": "wait", "action"')), "json", "'action' occurs twice"),
        (block(CLICK.replace('"name"', '"name": "mobile_use", "name"')), "json", "'name' occurs twice"),
        (block("[" * 100_000), "json", ""),
        (block("9" * 10_000), "json", ""),
        (block(f"[{CLICK}]"), "shape", "object"),
        (block('"click"'), "shape", "object"),
        (block('{"action": "click", "coordinate": [10, 20]}'), "shape", "object"),
        (block('{"name": "mobile_use", "arguments": {}, "id": 1}'), "shape", "object"),
        (block(CLICK.replace("mobile_use", "computer_use")), "shape", "computer_use"),
        (block('{"name": ["mobile_use"], "arguments": {}}'), "shape", "name"),
        (block(json.dumps({"name": "mobile_use", "arguments": '{"action": "wait", "time": 1}'})), "shape", "str"),
        (call(), "action", "None"),
        (call(action=["click"]), "action", "unknown"),
        (call(action="Click", coordinate=[1, 2]), "action", "Click"),
        (call(action="tap", coordinate=[1, 2]), "action", "tap"),
        (call(action="click"), "action", "lacks coordinate"),
        (call(action="swipe", coordinate=[1, 2]), "action", "coordinate2"),
        (call(action="long_press", coordinate=[1, 2]), "action", "time"),
        (call(action="click", coordinate=[1, 2], text="x"), "action", "text"),
        (call(action="click", coordinate=[1, 2], time=None), "action", "time"),
        (call(action="click", coordinate=[1]), "action", "[1]"),
        (call(action="click", coordinate=[1, 2, 3]), "action", "[1, 2, 3]"),
        (call(action="click", coordinate=[[1, 2]]), "action", "coordinate"),
        (call(action="click", coordinate={"x": 1, "y": 2}), "action", "coordinate"),
        (call(action="click", coordinate="1, 2"), "action", "coordinate"),
        (call(action="click", coordinate=["1", 2]), "action", "'1'"),
        (call(action="click", coordinate=[True, 2]), "action", "True"),
        (call(action="click", coordinate=[None, 2]), "action", "None"),
        (call(action="click", coordinate=[-1, 2]), "action", "-1"),
        (call(action="click", coordinate=[1, 1000]), "action", "1000"),
        (call(action="click", coordinate=[1, 999.001]), "action", "999.001"),
        (call(action="click", coordinate=[1, 10**400]), "action", "very large"),
        (call(action="click", coordinate=[1, 2]).replace("[1,", "[1e999,"), "action", "inf"),
        (call(action="wait", time=-1), "action", "-1"),
        (call(action="wait", time=61), "action", "61"),
        (call(action="wait", time=10**400), "action", "very large"),
        (call(action="wait", time="1"), "action", "'1'"),
        (call(action="wait", time=True), "action", "True"),
        (call(action="long_press", coordinate=[1, 2], time=0), "action", "seconds"),
        (call(action="type", text=5), "action", "5"),
        (call(action="type", text="x" * 10_001), "action", "text"),
        (call(action="type", text="x").replace("x", "\\ud800"), "action", "text"),
        (call(action="system_button", button="Power"), "action", "Power"),
        (call(action="system_button", button="back"), "action", "back"),
        (call(action="system_button", button=["Back"]), "action", "Back"),
        (call(action="terminate", status="done"), "action", "done"),
        (call(action="terminate", status=True), "action", "True"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)
def test_everything_else_is_a_failure_that_says_why(text: str, kind: FailureKind, part: str) -> None:
    failure = parse(text)
    assert isinstance(failure, ParseFailure)
    assert failure.kind == kind
    assert part in failure.detail
    assert len(failure.detail) < 400


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_deep_nesting_never_escapes_as_an_exception(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    assert isinstance(parse(block(nested)), ParseFailure)
    assert isinstance(parse(block(CLICK.replace("[10, 20]", nested))), ParseFailure)
    assert isinstance(parse(block(CLICK.replace('"click"', nested))), ParseFailure)
    assert isinstance(parse(block(CLICK.replace('"mobile_use"', nested))), ParseFailure)


def test_boundary_values_are_actions() -> None:
    assert parse(call(action="click", coordinate=[0, 999])) == Tap(x=0, y=1)
    assert parse(call(action="wait", time=0)) == Wait(seconds=0)
    assert parse(call(action="long_press", coordinate=[0, 0], time=60)) == LongPress(x=0, y=0, seconds=60)
    assert parse(call(action="type", text="")) == Type(text="")
    assert parse(call(action="system_button", button="Back")) == Back()


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", CLICK, "{", "}", '"', "\n", "\ufffd", "\ud800", "\x00"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=10), max_size=12).map("".join))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    result = parse(text)
    # the only action that these pieces can make is the one that stands whole in one block
    assert isinstance(result, ParseFailure) or (result == TAP and CLICK in text)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_parser_raise(data: bytes) -> None:
    assert isinstance(parse(block(data.decode("utf-8", errors="replace"))), ParseFailure)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["coordinate", "coordinate2", "text", "time", "button", "status", "action", "x"])


#: what the word of an action can become
MEANT = {
    "click": {"tap"},
    "long_press": {"long_press"},
    "double_tap": {"double_tap"},
    "swipe": {"swipe"},
    "type": {"type"},
    "key": {"key"},
    "open": {"open_app"},
    "system_button": {"back", "home", "app_switch", "enter"},
    "wait": {"wait"},
    "answer": {"answer"},
    "ask_user": {"ask_user"},
    "terminate": {"terminate"},
}


@given(st.sampled_from(sorted(MEANT)), st.dictionaries(fields, json_values))
@example("click", {"action": "key", "text": "DEL"})
@example("system_button", {"button": "Home"})
def test_arbitrary_arguments_never_make_the_parser_raise(action: str, arguments: dict) -> None:
    """Nor another action than the one that is named."""
    said = {"action": action, **arguments}
    result = parse(block(json.dumps({"name": "mobile_use", "arguments": said})))
    assert isinstance(result, ParseFailure) or result.type in MEANT[said["action"]]


@given(st.sampled_from(["[10, 20]", '"click"', '"mobile_use"', '"arguments"']), st.text(max_size=6))
def test_a_damaged_call_is_never_another_action(part: str, damage: str) -> None:
    text = block(CLICK.replace(part, part + damage, 1))
    result = parse(text)
    assert isinstance(result, ParseFailure) or result == TAP
