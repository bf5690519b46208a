"""MiniWoB++'s pages in a real browser: what is seen, what actions do, and what they score."""

from __future__ import annotations

import re

import pytest
from tests.web.conftest import middle, node, nodes, tap, task

from tapforge_envs import protocol as p
from tapforge_envs.ui_tree import ui_key
from tapforge_envs.web import catalog
from tapforge_envs.web.environment import PageOptions, WebEnvironment, score_of
from tapforge_envs.web.keys import CTRL, ENTER, MAX_ENTERS, SHIFT, combination, named, writing
from tapforge_envs.web.pages import Pages

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def play(page: WebEnvironment, seen: p.Observation, *actions: p.Action) -> tuple[p.StepResult, p.Score]:
    result = p.StepResult(seen)
    for index, action in enumerate(actions):
        result = await page.step(action, index)
    return result, await page.evaluate()


async def test_an_episode_begins_with_a_goal_a_frame_and_a_tree(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-test-2", 3))
    assert seen.goal == "Click button ONE."
    assert (seen.frame.width, seen.frame.height, seen.frame.media_type) == (160, 210, "image/png")
    assert node(seen, tag="button", id="subbtn")["text"] == "ONE"
    assert seen.app == "click-test-2"
    assert seen.state_key is None
    assert ui_key(seen.ui_tree or "") is not None
    assert await page.evaluate() == p.Score(0.0, "the page has not ended the episode")


@pytest.mark.parametrize(
    "template",
    ["click-dialog", "email-inbox", "social-media", "choose-date", "stock-market", "use-colorwheel", "terminal"],
)
async def test_the_same_seed_gives_the_same_page_whatever_came_before(page: WebEnvironment, template: str) -> None:
    first = await page.reset(task(template, 7))
    await page.step(p.Tap(x=0.5, y=0.5), 0)
    await page.step(p.Type(text="x"), 1)
    again = await page.reset(task(template, 7))
    assert (again.goal, again.ui_tree, again.frame.sha256) == (first.goal, first.ui_tree, first.frame.sha256)
    assert (await page.reset(task(template, 8))).ui_tree != first.ui_tree


@pytest.mark.parametrize("seed", range(3))
async def test_the_right_button_scores_one_and_the_wrong_one_nothing(page: WebEnvironment, seed: int) -> None:
    seen = await page.reset(task("click-test-2", seed))
    result, score = await play(page, seen, tap(seen, id="subbtn"))
    assert result.done
    assert score == p.Score(1.0, "raw reward 1")
    seen = await page.reset(task("click-test-2", seed))
    result, score = await play(page, seen, tap(seen, id="subbtn2"))
    assert result.done
    assert score == p.Score(0.0, "raw reward -1")


async def test_a_tap_beside_everything_ends_nothing(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-test", 1))
    result, score = await play(page, seen, p.Tap(x=1.0, y=1.0))
    assert not result.done
    assert score.value == 0


async def test_a_step_after_the_end_changes_nothing(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-test", 1))
    ended, _ = await play(page, seen, tap(seen, id="subbtn"))
    late = await page.step(p.Tap(x=0.5, y=0.1), 1)
    assert late.done
    assert late.note == "the episode had ended"
    assert late.observation.ui_tree == ended.observation.ui_tree
    assert (await page.evaluate()).value == 1


async def test_a_declared_end_is_judged_by_what_was_done(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-test", 1))
    result, score = await play(page, seen, p.Terminate(status="success"))
    assert result.done
    assert score.value == 0


async def test_typed_text_arrives(page: WebEnvironment) -> None:
    seen = await page.reset(task("enter-text", 5))
    wanted = re.findall(r'"([^"]+)"', seen.goal or "")[0]
    _, score = await play(page, seen, tap(seen, tag="input"), p.Type(text=wanted), tap(seen, tag="button"))
    assert score.value == 1


@pytest.mark.parametrize("text", ["aB1 !?@#'\"\\~", "grüße", "日本語", "a" * 600, "😀"])
async def test_text_of_any_script_is_typed_as_it_is(page: WebEnvironment, text: str) -> None:
    seen = await page.reset(task("enter-text", 5))
    result, _ = await play(page, seen, tap(seen, tag="input"), p.Type(text=text))
    assert node(result.observation, tag="input")["value"] == text


async def test_the_list_of_a_select_is_in_the_picture_and_can_be_tapped(page: WebEnvironment) -> None:
    seen = await page.reset(task("choose-list", 2))
    wanted = seen.goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
    opened = await page.step(tap(seen, tag="select"), 0)
    assert opened.observation.frame.sha256 != seen.frame.sha256
    option = node(opened.observation, tag="option", text=wanted)
    index = 1
    while option["top"] + option["height"] > 205:  # further down in the list
        scrolled = await page.step(p.Scroll(direction="down", x=0.2, y=0.8), index)
        option, index = node(scrolled.observation, tag="option", text=wanted), index + 1
        assert index < 20
    x, y = middle(option)
    chosen = await page.step(p.Tap(x=x, y=y), index)
    assert node(chosen.observation, tag="select")["value"] == wanted
    await page.step(tap(chosen.observation, tag="button"), index + 1)
    assert (await page.evaluate()).value == 1


async def test_checkboxes_are_ticked(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-checkboxes", 4))
    wanted = seen.goal.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
    labels = [n for n in nodes(seen) if n.get("tag") == "label" and n.get("text") in wanted]
    places = [middle(label["children"][0]) for label in labels]
    taps = [p.Tap(x=x, y=y) for x, y in places]
    result, score = await play(page, seen, *taps, tap(seen, tag="button"))
    assert result.done
    assert score.value == 1


async def test_a_drag_moves_what_it_takes(page: WebEnvironment) -> None:
    seen = await page.reset(task("drag-box", 3))
    (x, y), (x2, y2) = middle(node(seen, id="draggableSmall")), middle(node(seen, id="draggableLarge"))
    moved = await page.step(p.Drag(x=x, y=y, x2=x2, y2=y2), 0)
    await page.step(tap(moved.observation, tag="button"), 1)
    assert (await page.evaluate()).value == 1


async def test_a_drag_marks_text(page: WebEnvironment) -> None:
    seen = await page.reset(task("highlight-text", 3))
    box = node(seen, id="randomText")
    left, right = (box["left"] + 1) / 160, min(159, box["left"] + box["width"]) / 160
    top, bottom = (box["top"] + 4) / 210, (box["top"] + box["height"] - 3) / 210
    _, score = await play(page, seen, p.Drag(x=left, y=top, x2=right, y2=bottom), tap(seen, tag="button"))
    assert score.value == 1


async def test_a_wheel_scrolls(page: WebEnvironment) -> None:
    seen = await page.reset(task("scroll-text-2", 3))
    way = "down" if "bottom" in seen.goal else "up"
    x, y = middle(node(seen, tag="textarea"))
    actions: list[p.Action] = [p.Scroll(direction=way, x=x, y=y)] * 12  # type: ignore[arg-type]
    _, score = await play(page, seen, *actions, tap(seen, tag="button"))
    assert score.value == 1


@pytest.mark.parametrize("name", ["ctrl", "Control"])
async def test_text_is_copied_and_pasted(page: WebEnvironment, name: str) -> None:
    seen = await page.reset(task("copy-paste", 3))
    keys = [p.Hotkey(keys=(name, key)) for key in "acv"]
    actions = [tap(seen, tag="textarea"), *keys[:2], tap(seen, tag="input"), keys[2], tap(seen, tag="button")]
    _, score = await play(page, seen, *actions)
    assert score.value == 1


async def test_keys_and_double_clicks_edit_a_field(page: WebEnvironment) -> None:
    seen = await page.reset(task("enter-text", 5))
    field = tap(seen, tag="input")
    actions = [field, p.Type(text="one two"), p.Key(name="DEL"), p.Key(name="MOVE_HOME"), p.Key(name="FORWARD_DEL")]
    result, _ = await play(page, seen, *actions)
    assert node(result.observation, tag="input")["value"] == "ne tw"
    x = (node(seen, tag="input")["left"] + 8) / 160
    result, _ = await play(page, seen, p.DoubleTap(x=x, y=field.y), p.Type(text="X"))
    assert node(result.observation, tag="input")["value"] == "X tw"
    result, _ = await play(page, seen, p.Hotkey(keys=("ctrl", "a")), p.Hotkey(keys=("ctrl", "x")))
    assert node(result.observation, tag="input")["value"] == ""


@pytest.mark.parametrize(
    "action",
    [p.Home(), p.Back(), p.AppSwitch(), p.OpenApp(name="Clock"), p.AskUser(text="?"), p.Key(name="VOLUME_UP"),
     p.Key(name="f5"), p.Hotkey(keys=("ctrl", "hyper")), p.Hotkey(keys=("alt", "f4")), p.Hotkey(keys=("ctrl", "t")),
     p.Type(text="\n" * (MAX_ENTERS + 1))],
)  # fmt: skip
async def test_an_action_that_a_page_does_not_have_is_refused_and_does_nothing(
    page: WebEnvironment, action: p.Action
) -> None:
    seen = await page.reset(task("click-test", 1))
    with pytest.raises(p.UnsupportedAction, match="has no (action|key)|line ends"):
        await page.step(action, 0)
    _, score = await play(page, seen, tap(seen, id="subbtn"))
    assert score.value == 1


async def test_the_clock_stands_still_between_steps(page: WebEnvironment) -> None:
    await page.reset(task("chase-circle", 1))
    shown = await page._evaluate("[Date.now(), performance.now(), new Date().getFullYear()]")
    assert await page._evaluate("new Promise(r => requestIdleCallback(() => r(Date.now())))") == shown[0]
    await page.step(p.Wait(seconds=2), 0)
    assert await page._evaluate("Date.now()") == shown[0] + 2500


async def test_the_clock_goes_by_half_a_second_a_step_and_as_long_as_is_waited(page: WebEnvironment) -> None:
    seen = await page.reset(task("button-delay", 1))
    (seconds,) = re.findall(r"wait (\d) seconds", seen.goal)
    wait = p.Wait(seconds=int(seconds) - 1)
    _, score = await play(page, seen, tap(seen, id="subbtn"), wait, tap(seen, id="subbtn2"))
    assert score.value == 1


async def test_a_slow_agent_runs_out_of_no_time(page: WebEnvironment) -> None:
    seen = await page.reset(task("click-test", 1))
    _, score = await play(page, seen, p.Wait(seconds=60), tap(seen, id="subbtn"))
    assert score.value == 1


async def test_dialogs_are_accepted_and_noted(page: WebEnvironment) -> None:
    await page.reset(task("click-test", 1))
    await page._evaluate("document.getElementById('subbtn').addEventListener('mousedown', () => alert('careful'))")
    seen = await page.step(p.Wait(seconds=0), 0)
    result = await page.step(tap(seen.observation, id="subbtn"), 1)
    assert "'careful'" in result.note
    assert (await page.evaluate()).value == 1


@pytest.mark.parametrize("where", ["file:///etc/hostname", "http://example.com/", "data:text/html,hello"])
async def test_a_page_stays_where_it_is(page: WebEnvironment, where: str) -> None:
    seen = await page.reset(task("click-test", 1))
    await page._evaluate(f"addEventListener('mousemove', () => {{ location.href = '{where}'; }}, {{once: true}})")
    result, _ = await play(page, seen, p.Move(x=0.5, y=0.9))
    assert node(result.observation, id="subbtn")
    _, score = await play(page, seen, tap(seen, id="subbtn"))
    assert score.value == 1


async def test_nothing_comes_from_a_network(page: WebEnvironment) -> None:
    await page.reset(task("click-test", 1))
    words = await page._evaluate("fetch('http://localhost:1/').then(() => 'it came', (error) => String(error))")
    assert "Failed to fetch" in words


async def test_each_page_has_a_clipboard_of_its_own(page: WebEnvironment, pages: Pages) -> None:
    other = WebEnvironment("web-1", pages)
    seen = await page.reset(task("copy-paste", 3))
    await play(page, seen, tap(seen, tag="textarea"), p.Hotkey(keys=("ctrl", "a")), p.Hotkey(keys=("ctrl", "c")))
    there = await other.reset(task("copy-paste", 3))
    result, _ = await play(other, there, tap(there, tag="input"), p.Hotkey(keys=("ctrl", "v")))
    assert node(result.observation, tag="input")["value"] == ""
    await other.shut()


async def test_nothing_of_the_browser_itself_opens(page: WebEnvironment) -> None:
    """Its menus and drags are in no screenshot and hold up what comes after."""
    seen = await page.reset(task("social-media", 3))
    x, y = middle(node(seen, tag="span", **{"class": "reply"}))
    watch = "addEventListener(name, (event) => prevented.push(event.defaultPrevented))"
    names = "['contextmenu', 'dragstart', 'auxclick']"
    await page._evaluate(f"window.prevented = []; for (const name of {names}) {watch}")
    actions = [p.RightClick(x=x, y=y), p.MiddleClick(x=x, y=y), p.Drag(x=x, y=y, x2=0.5, y2=0.9), p.Type(text="😀")]
    await play(page, seen, *actions)
    assert await page._evaluate("prevented.includes(true)")


async def test_frames_may_be_larger_than_pages(pages: Pages) -> None:
    page = WebEnvironment("web-2", pages, PageOptions(scale=2))
    seen = await page.reset(task("click-test-2", 3))
    assert (seen.frame.width, seen.frame.height) == (320, 420)
    _, score = await play(page, seen, tap(seen, id="subbtn"))
    assert score.value == 1
    await page.shut()


async def test_a_call_without_a_task_is_a_fault(pages: Pages) -> None:
    page = WebEnvironment("web-3", pages)
    with pytest.raises(p.EnvironmentFault, match=r"web-3: step 0: no task"):
        await page.step(p.Enter(), 0)
    with pytest.raises(p.EnvironmentFault, match=r"web-3: evaluate: no task"):
        await page.evaluate()


async def test_an_unknown_page_is_named(page: WebEnvironment) -> None:
    with pytest.raises(catalog.UnknownTask, match=r"'click-tset'; did you mean 'click-test'"):
        await page.reset(task("click-tset"))


@pytest.mark.parametrize("raw", [float("nan"), float("inf"), 2, -1.5, None, "1", True])
async def test_a_reward_that_no_page_gives_is_no_verdict(raw: object) -> None:
    with pytest.raises(p.EnvironmentFault, match="raw reward is"):
        score_of({"done": True, "raw": raw, "reason": ""})


@pytest.mark.parametrize("raw,value", [(-1, 0), (-0.5, 0), (0, 0), (0.25, 0.25), (1, 1), (1.0000000002, 1)])
async def test_the_score_is_the_raw_reward_above_nothing(raw: float, value: float) -> None:
    assert score_of({"done": True, "raw": raw, "reason": ""}).value == value


async def test_modifiers_are_known_by_every_name_in_use() -> None:
    for name in ("ctrl", "ctrlleft", "Control_L", "ctrlright", "CTRL_RIGHT", "ControlLeft"):
        found = combination([name, "a"])
        assert found is not None and found[2] == CTRL, name
    for name in ("shift", "shiftleft", "Shift_R", "shiftright"):
        found = combination([name, "ArrowDown"])
        assert found is not None and found[2] == SHIFT, name
    assert combination(["altleft", "f4"]) is None and combination(["cmd", "a"]) is None
    for name, key in (("page_down", "PageDown"), ("arrow_left", "ArrowLeft"), ("kp_enter", "Enter"), ("ins", "Insert")):
        assert (press := named(name)) is not None and press.key == key


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_a_line_end_is_enter_also_where_a_long_text_is_inserted(end: str) -> None:
    assert writing(f"a{end}天{end}") == [*writing("a"), (ENTER, 0), "天", (ENTER, 0)]
    long = "b" * 2000
    written = writing(f"{long}{end}{long}{end}")
    assert written[-3:] == [(ENTER, 0), long, (ENTER, 0)]
    assert len(writing("b" * 400)) == 400
