"""The base learns to find things, and nothing that is held out for measuring."""

from random import Random

import pytest

from tapforge_envs.phone.quickstart import APPS, COUNTERS, SWITCHES, TEMPLATES
from tapforge_envs.protocol import Tap, Terminate
from tapforge_trainer.tiny.grounding import ICONS, example

EXAMPLES = [example(Random(f"test:{number}")) for number in range(3000)]


def test_a_tap_hits_an_icon_that_the_sentence_names():
    taps = [e for e in EXAMPLES if isinstance(e.action, Tap)]
    assert len(taps) > 2500
    for e in taps:
        hit = e.screen.at(e.action.x, e.action.y)
        assert hit is not None
        assert hit.glyph in e.goal.split() or (hit.glyph, e.goal.split()[0]) in {("add", "add"), ("save", "save")}


def test_infeasible_is_said_only_where_the_named_switch_is_missing():
    missing = [e for e in EXAMPLES if isinstance(e.action, Terminate)]
    assert missing
    for e in missing:
        assert e.action.status == "infeasible"
        shown = {w.glyph for w in e.screen.widgets if w.tap}
        assert not shown & (set(e.goal.split()) & set(SWITCHES))


def test_held_out_sentences_are_not_learned_from():
    held_out = {t.goal(c) for t in TEMPLATES for split in ("validation", "test") for c in t.split(split)}
    assert held_out
    assert not held_out & {e.goal for e in EXAMPLES}


def test_every_template_has_combinations_in_each_split_and_none_in_two():
    for template in TEMPLATES:
        parts = [{template.goal(c) for c in template.split(split)} for split in ("train", "validation", "test")]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts))


def test_templates_with_the_same_words_hold_out_the_same():
    """Else the words alone would tell an infeasible task from a feasible one."""
    train = {t.goal(c) for t in TEMPLATES for c in t.split("train")}
    test = {t.goal(c) for t in TEMPLATES for c in t.split("test")}
    assert not train & test


@pytest.mark.parametrize("icons", ICONS)
def test_the_number_of_icons_is_a_bound(icons):
    for seed in range(100):
        tiles = [w for w in example(Random(seed), icons).screen.widgets if w.id != "title"]
        assert 1 <= len(tiles) <= icons


def test_after_home_the_second_app_is_meant():
    seen = 0
    for e in EXAMPLES:
        words = e.goal.split()
        if (
            isinstance(e.action, Tap)
            and words[0] == "open"
            and "then" in words
            and set(words) <= {*APPS, "open", "then"}
        ):
            went_home = bool(e.history) and e.history[-1].type == "home"
            assert e.screen.at(e.action.x, e.action.y).glyph == (words[3] if went_home else words[1])
            seen += 1
    assert seen > 50


def test_counters_show_where_to_add():
    adds = [e for e in EXAMPLES if e.goal.startswith("add ") and e.screen.widgets[0].id == "title"]
    assert adds
    assert {e.screen.at(e.action.x, e.action.y).glyph for e in adds} == {"add"}
    assert {e.screen.widgets[0].glyph for e in adds} <= set(COUNTERS)
