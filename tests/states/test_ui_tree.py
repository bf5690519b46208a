"""Which UI trees are the same state: clocks, carets and places change nothing, what a user reads does."""

import json

import pytest

from tapforge_envs.phone import catalog
from tapforge_envs.phone.tree import ui_tree
from tapforge_envs.protocol import OpenApp, Type
from tapforge_envs.ui_tree import ui_key

NODE = '<node class="android.widget.TextView" package="mail" text="{}" {}/>'


def android(*nodes: str) -> str:
    return f'<?xml version="1.0"?><hierarchy rotation="0"><node class="FrameLayout">{"".join(nodes)}</node></hierarchy>'


PLAIN = android(NODE.format("Inbox", ""), NODE.format("Anna", 'checked="false" bounds="[0,0][9,9]"'))
FIELD = '<node class="android.widget.EditText" text="To" {}/>'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.replace("[0,0][9,9]", "[0,40][9,49]")),
        (PLAIN, PLAIN.replace('<node class="FrameLayout">', '<node index="3" focused="true" class="FrameLayout">')),
        (
            PLAIN,
            PLAIN.replace(
                "</node></h",
                '<node package="com.android.systemui"><node text="09:41"/><node content-desc="Battery 87 percent"/>'
                '</node><node class="android.widget.TextClock" text="9:41"/><node class="android.widget.Toast" '
                'text="Sent"/></node></h',
            ),
        ),
        (
            android(NODE.format("Inbox", ""), FIELD.format('text-selection-start="1"')),
            android(NODE.format("Inbox", ""), FIELD.format('text-selection-start="2"')),
        ),
        ('[{"text": "A", "bbox": [1, 2]}, {"text": "B", "uniqueId": 7}]', '[{"text": "A"}, {"text": "B"}]'),
        (
            '{"role": {"value": "button"}, "name": {"value": "A"}, "nodeId": 1, "children": [{"name": "B"}]}',
            '{"role": {"value": "button"}, "name": {"value": "A"}, "nodeId": 9, "children": [{"name": "B"}]}',
        ),
    ],
)
def test_what_changes_by_itself_changes_no_key(one, other):
    assert one != other
    assert ui_key(one) == ui_key(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.replace("Anna", "Anne")),
        (PLAIN, PLAIN.replace('checked="false"', 'checked="true"')),
        (PLAIN, PLAIN.replace("</node></h", NODE.format("07:30", "") + "</node></h")),  # an alarm
        (PLAIN, PLAIN.replace("</node></h", '<node resource-id="mail:id/battery_saver" text="On"/></node></h')),
        (
            android(NODE.format("Inbox", ""), FIELD.format('focused="true"'), FIELD.format("")),
            android(NODE.format("Inbox", ""), FIELD.format(""), FIELD.format('focused="true"')),
        ),
        ('[{"text": "A"}, {"text": "B"}]', '[{"text": "A"}, {"text": "B", "sparkle": true}]'),
        ("Inbox\n  Anna", "Inbox\n  Anne"),
    ],
)
def test_what_a_user_can_tell_is_another_key(one, other):
    assert None is not ui_key(one) != ui_key(other) is not None


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "<hierarchy><node class='FlutterView' bounds='[0,0][9,9]'/></hierarchy>",
        android(NODE.format("one word", "")),
        "<hierarchy><node text='cut",
        '{"text": "cut',
        '<!DOCTYPE a [<!ENTITY b "bb">]><a text="&b;"><c text="&b;"/></a>',
        json.dumps(["x"] * 3_000_000),
    ],
    ids=["empty", "one view", "one word", "cut XML", "cut JSON", "entities", "too long"],
)
def test_a_tree_that_tells_no_state_has_no_key(tree):
    assert ui_key(tree) is None


def test_the_standard_phones_trees_tell_what_its_exact_keys_do():
    task = next(t for t in (catalog.tasks("standard", "train").sample(1, i) for i in range(100)) if "note" in t.goal)
    phone = catalog.phone_for("standard", 360, 800)
    phone.begin(task.seed, catalog.rules_of(task))
    phone.state["ui"]["pending"] = []

    def key() -> str:
        return ui_key(ui_tree(phone.screen(), phone.state["nav"]["app"], 360, 800))

    home = key()
    phone.act(OpenApp(name="notes"))
    notes = key()
    for _ in range(7):  # the clock goes on
        phone.act(Type(text="nobody listens"))
    assert key() == notes != home
    phone.act(OpenApp(name="shop"))
    assert key() not in (notes, home)
