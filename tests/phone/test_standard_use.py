"""Using the standard phone: typing, scrolling, dialogs, back, interruptions, sums, answers."""

import pytest

from tapforge_envs.phone.apps.calculator import work_out
from tapforge_envs.phone.device import Phone, Rules
from tapforge_envs.phone.judge import judged, wrong_in
from tapforge_envs.phone.screen import center
from tapforge_envs.phone.standard import IMAGE
from tapforge_envs.phone.view import wrapped
from tapforge_envs.protocol import (
    ACTION,
    AppSwitch,
    Back,
    Enter,
    Home,
    Hotkey,
    Key,
    LongPress,
    OpenApp,
    Score,
    Scroll,
    Swipe,
    Tap,
    Type,
)

RULES = Rules(lambda state, rng: None, lambda trial: Score(0.0), judged)


@pytest.fixture
def phone() -> Phone:
    fresh = Phone(IMAGE, 128, 224)
    fresh.begin(5, RULES)
    return fresh


def tap(phone: Phone, *ids: str) -> str:
    note = ""
    for id in ids:
        widget = phone.screen().find(id)
        assert widget is not None, (id, [w.id for w in phone.screen().widgets])
        x, y = center(widget.box)
        note = phone.act(Tap(x=x, y=y))
    return note


def text_of(phone: Phone, id: str) -> str:
    widget = phone.screen().find(id)
    assert widget is not None, id
    return widget.text


def start(phone: Phone, app: str) -> None:
    assert phone.act(OpenApp(name=app)) == ""


def test_keys_and_typing_write_into_the_field_with_the_focus(phone):
    start(phone, "contacts")
    assert phone.act(Type(text="nobody")) == "type had no effect"
    tap(phone, "add", "field:name")
    tap(phone, "key:shift", "key:A", "key:n", "key:n", "key:a", "key:space", "key:mode", "key:7", "key:del")
    phone.act(Type(text="Berg"))
    phone.act(Key(name="DEL"))
    assert text_of(phone, "field:name") == "Anna Ber"
    phone.act(Enter())  # on to the next field
    phone.act(Type(text="0151"))
    assert text_of(phone, "field:phone") == "0151"
    tap(phone, "clear:phone")
    assert text_of(phone, "field:phone") == ""
    tap(phone, "save")
    assert phone.state["apps"]["contacts"]["people"][-1]["name"] == "Anna Ber"


def test_back_closes_the_nearest_thing_first(phone):
    start(phone, "contacts")
    tap(phone, "add", "field:city")
    assert phone.screen().find("keyboard")
    phone.act(Back())
    assert not phone.screen().find("keyboard") and text_of(phone, "bar") == "New contact"
    phone.act(Back())
    assert text_of(phone, "bar") == "Contacts"
    phone.act(Back())
    assert phone.state["nav"]["app"] == "home"
    assert phone.act(Back()) == "back had no effect"


def test_the_buttons_at_the_bottom_do_what_the_keys_do(phone):
    start(phone, "settings")
    tap(phone, "page:sound", "nav:back")
    assert text_of(phone, "bar") == "Settings"
    tap(phone, "nav:home")
    assert phone.state["nav"]["app"] == "home"
    tap(phone, "nav:recents", "recent:settings")
    assert phone.state["nav"]["app"] == "settings"


def test_recent_apps_come_latest_first(phone):
    for name in ("mail", "shop", "mail", "Clock"):
        start(phone, name)
    phone.act(AppSwitch())
    shown = [w.id for w in phone.screen().widgets if w.id.startswith("recent:")]
    assert shown == ["recent:clock", "recent:mail", "recent:shop"]


@pytest.mark.parametrize("down, up", [
    (Scroll(direction="down"), Scroll(direction="up")),
    (Swipe(x=0.5, y=0.8, x2=0.5, y2=0.3), Swipe(x=0.5, y=0.3, x2=0.5, y2=0.8)),
])  # fmt: skip
def test_lists_scroll_to_both_ends_and_stop_there(phone, down, up):
    start(phone, "shop")
    first = phone.screen().identity()
    assert phone.act(up) != ""
    moves = 0
    while phone.act(down) == "":
        moves += 1
        assert moves < 20
    assert phone.screen().find("product:Sketchbook") is not None
    while phone.act(up) == "":
        moves -= 1
        assert moves > -20
    assert phone.screen().identity() == first


def test_the_launcher_has_two_pages_and_every_app(phone):
    first = {w.id for w in phone.screen().widgets if w.id.startswith("app:")}
    assert phone.act(Swipe(x=0.8, y=0.5, x2=0.2, y2=0.5)) == ""
    second = {w.id for w in phone.screen().widgets if w.id.startswith("app:")}
    assert {f"app:{name}" for name, app in IMAGE.apps.items() if app.glyph} == first | second
    assert phone.act(Scroll(direction="right")) != ""
    phone.act(Home())
    assert {w.id for w in phone.screen().widgets if w.id.startswith("app:")} == first


def test_a_dialog_takes_every_tap_until_it_is_answered(phone):
    start(phone, "notes")
    row = next(w.id for w in phone.screen().widgets if w.id.startswith("note:"))
    tap(phone, row, "delete")
    before = len(phone.state["apps"]["notes"]["notes"])
    assert phone.act(Scroll(direction="down")) != ""
    tap(phone, "dialog:cancel", "delete")
    phone.act(Tap(x=0.5, y=0.12))  # beside it
    assert len(phone.state["apps"]["notes"]["notes"]) == before and not phone.screen().find("dialog:box")
    tap(phone, "delete", "dialog:yes")
    assert len(phone.state["apps"]["notes"]["notes"]) == before - 1
    assert text_of(phone, "toast") == "Note deleted"
    phone.act(Home())
    assert not phone.screen().find("toast")


def test_a_long_press_is_no_tap(phone):
    start(phone, "todo")
    row = next(w for w in phone.screen().widgets if w.id.startswith("item:"))
    x, y = center(row.box)
    before = [dict(item) for item in phone.state["apps"]["todo"]["items"]]
    phone.act(LongPress(x=x, y=y))
    assert phone.screen().find("dialog:yes") and phone.state["apps"]["todo"]["items"] == before


def test_two_rows_that_read_the_same_are_two(phone):
    start(phone, "todo")
    for _ in range(2):
        tap(phone, "field:new")
        phone.act(Type(text="Again"))
        tap(phone, "add")
    phone.act(Back())
    while phone.screen().find("item:Again#2") is None:
        assert phone.act(Scroll(direction="down")) == ""
    tap(phone, "item:Again#2")
    again = [item["done"] for item in phone.state["apps"]["todo"]["items"] if item["text"] == "Again"]
    assert again == [False, True]


BANNER = {"when": "notes", "kind": "banner", "app": "messages", "title": "Anna", "text": "Hello"}
QUESTION = {"when": "notes", "kind": "question", "title": "Update", "text": "Now?", "yes": "Install", "no": "Later",
            "effect": ["settings", "update_scheduled", True]}  # fmt: skip


def test_a_banner_can_be_opened_dismissed_swiped_away_or_waited_for(phone):
    for close in ("open", "dismiss", "swipe", "wait", "back"):
        phone.begin(5, RULES)
        phone.state["ui"]["pending"] = [dict(BANNER)]
        start(phone, "mail")
        assert not phone.screen().find("interrupt:open")
        start(phone, "notes")
        box = phone.screen().find("interrupt:open").box
        if close in ("open", "dismiss"):
            tap(phone, f"interrupt:{close}")
        elif close == "swipe":
            x, y = center(box)
            phone.act(Swipe(x=x, y=y, x2=x, y2=0))
        elif close == "back":
            phone.act(Back())
        else:
            for _ in range(4):
                phone.act(Scroll(direction="left"))
        assert phone.state["ui"]["interrupt"] is None, close
        assert phone.state["nav"]["app"] == ("messages" if close == "open" else "notes")


def test_a_question_of_the_system_has_to_be_answered_and_yes_is_a_side_effect(phone):
    phone.state["ui"]["pending"] = [dict(QUESTION)]
    start(phone, "notes")
    assert phone.act(Tap(x=0.5, y=0.2)) != ""
    tap(phone, "interrupt:dismiss")
    assert not phone.state["apps"]["settings"]["update_scheduled"]
    phone.begin(5, RULES)
    phone.state["ui"]["pending"] = [dict(QUESTION)]
    start(phone, "notes")
    tap(phone, "interrupt:accept")
    assert phone.state["apps"]["settings"]["update_scheduled"]


def test_what_was_typed_is_gone_with_its_page(phone):
    start(phone, "messages")
    tap(phone, next(w.id for w in phone.screen().widgets if w.id.startswith("thread:")), "field:text")
    phone.act(Type(text="half a"))
    phone.act(Home())
    start(phone, "messages")
    tap(phone, next(w.id for w in phone.screen().widgets if w.id.startswith("thread:")))
    assert text_of(phone, "field:text") == ""


@pytest.mark.parametrize("app, ids, field, bad, words", [
    ("clock", ("add",), "time", "25:00", "Write the time as 07:30"),
    ("calendar", ("add",), "title", "", "An event needs a title"),
    ("mail", ("write",), "to", "anna", "Not a mail address"),
    ("contacts", ("add",), "name", " ", "A contact needs a name"),
])  # fmt: skip
def test_a_form_says_what_is_wrong_and_saves_nothing(phone, app, ids, field, bad, words):
    start(phone, app)
    before = str(phone.state["apps"][app])
    tap(phone, *ids, f"field:{field}")
    if bad:
        phone.act(Type(text=bad))
    tap(phone, "send" if app == "mail" else "save")
    assert text_of(phone, "toast") == words
    assert str(phone.state["apps"][app]) == before


SUMS = [("1+2*3", "7"), ("(1+2)*3", "9"), ("8/3", "2.666667"), ("-4-2", "-6"), ("1/0", "Error"), ("2+", "Error"),
        ("(2", "Error"), ("1.5*2", "3"), ("1..2", "Error"), ("((((", "Error"), ("5)", "Error")]  # fmt: skip


@pytest.mark.parametrize("text, value", SUMS)
def test_sums(text, value):
    assert work_out(text) == value


ANSWERS = [
    ("It is 0151 2040.", ["0151 2040"], [], True),
    ("01512040", ["0151 2040"], [], True),
    ("0151 2041", ["0151 2040"], [], False),
    ("9:30", ["09:30"], [], True),
    ("19:30", ["9:30"], [], False),
    ("The 14th of MARCH", ["March"], [], True),
    ("1,200 euros", ["1200"], [], True),
    ("124", ["24"], [], False),
    ("Anna or Ben", ["Anna"], ["Ben"], False),
    ("Anna", ["Anna"], ["Ben"], True),
    ("budget.xlsx", ["budget.xlsx"], ["plan.xlsx"], True),
    ("1 2 3 4 5 6 7", ["3"], [], False),
    ("", ["3"], [], False),
    ("3 " + "x" * 300, ["3"], [], False),
]


@pytest.mark.parametrize("answer, wanted, others, right", ANSWERS)
def test_answers(answer, wanted, others, right):
    assert (wrong_in(answer, wanted, others) == "") is right


@pytest.mark.parametrize("text", ["", "a b", "word " * 30, "x" * 100, "one\n\ntwo"])
def test_wrapped_lines_fit_and_lose_nothing(text):
    lines = wrapped(text, 20)
    assert all(len(line) <= 20 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")


@pytest.mark.parametrize("kind", ["move", "right_click", "middle_click", "triple_click"])
def test_what_only_a_desktop_has_leaves_a_phone_as_it_is(phone, kind):
    before = phone.screen()
    assert phone.act(ACTION.validate_python({"type": kind, "x": 0.5, "y": 0.5})) == f"{kind} had no effect"
    assert phone.act(Hotkey(keys=("ctrl", "c"))) == "hotkey had no effect"
    assert phone.screen() == before


def test_a_line_end_in_a_text_is_enter_and_what_an_input_method_writes_is_none() -> None:
    def searched(*actions: Type | Enter, written: str = "") -> str:
        phone = Phone(IMAGE, 360, 800)
        phone.begin(5, RULES)
        phone.act(OpenApp(name="browser"))
        field = next(w for w in phone.screen().widgets if w.id.startswith("field:"))
        x, y = center(field.box)
        phone.act(Tap(x=x, y=y))
        for action in actions:
            phone.act(action)
        if written:
            phone.insert(written)
        return str(phone.screen().identity())

    submitted = searched(Type(text="fern.news"), Enter())
    for end in ("\n", "\r\n", "\r"):
        assert searched(Type(text=f"fern.news{end}")) == submitted
    assert searched(Type(text="fern.news")) != submitted
    assert searched(written="fern.news\n") != submitted
