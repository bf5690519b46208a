"""Tasks that are made by playing forward: differences, sentences, and what a server of phones says of such a task."""

import copy
import json
import urllib.error
import urllib.request
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapforge_envs.phone import catalog
from tapforge_envs.phone.device import Trial, fresh_state
from tapforge_envs.phone.difference import apply, canonical, changes, read, written
from tapforge_envs.phone.own_check import CHECK, content_of, judge
from tapforge_envs.phone.walks.operations import apps, operations
from tapforge_envs.phone.walks.trials import Rollouts, try_walk
from tapforge_envs.phone.walks.walk import WalkError, begun, ended, played, walk
from tapforge_envs.phone.walks.words import sentence
from tapforge_envs.protocol import Task, Terminate

SUITES = pytest.mark.parametrize("suite", ["quickstart", "standard"])
VALUES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=1), inner, max_size=3),
    max_leaves=8,
)
CONTENT = st.dictionaries(st.text("klm", min_size=1, max_size=1), VALUES, min_size=1, max_size=3)


@given(CONTENT, CONTENT)
@example({"k": False, "l": []}, {"k": 0, "l": []})
@settings(deadline=None)
def test_what_changed_makes_the_one_content_into_the_other(before, after):
    made = list(changes(before, after))
    if made:
        again = copy.deepcopy(before)
        apply(again, read(written(made)))
        assert canonical(again) == canonical(after)
    assert bool(made) == (canonical(before) != canonical(after))


@SUITES
def test_every_operation_changes_something_that_has_words_of_its_own_and_can_be_taken_back(suite):
    said = {}
    state = fresh_state(catalog.suite(suite).image, 11)
    kinds = set()
    for one in operations(suite, state):
        if (one.kind in kinds) and suite == "standard" and Random(one.about).random() < 0.8:
            continue
        kinds.add(one.kind)
        phone = begun_fresh(suite, 11)
        before = copy.deepcopy(content_of(phone.state))
        list(played(phone, one.steps))
        made = tuple(changes(before, content_of(phone.state)))
        assert said.setdefault(sentence(suite, made), made) == made
        if one.undo:
            list(played(phone, one.undo))
            assert canonical(content_of(phone.state)) == canonical(before), one
    assert {one.app for one in operations(suite, state)} <= set(apps(suite))


def begun_fresh(suite, seed):
    phone = catalog.phone_for(suite, 128, 224)
    phone.state = fresh_state(phone.image, seed)
    return phone


@SUITES
def test_walks_are_judged_rightly_wherever_they_are_looked_at(suite):
    rollouts, taken, probes = Rollouts(suite, 8), 0, 0
    for number in range(6 if suite == "standard" else 18):
        rng = Random(number)
        found = walk(suite, number // 6, rng, most=3)
        tried = try_walk(found, rollouts.of(number // 6), rng)
        assert tried.solved and not tried.wrong, found.task.goal
        taken += not tried.lucky
        probes += tried.probes
    assert taken >= 5 and probes > 100


def test_a_check_that_is_wrong_is_found():
    """A task whose check lacks a part is solved by the walk without it, so that it isn't taken."""
    found = next(
        one for one in (walk("quickstart", 3, Random(n), most=3) for n in range(50)) if len(one.operations) == 3
    )
    lacking = written(read(found.task.params[CHECK])[1:])
    wrong = found.task.model_copy(update={"params": {CHECK: lacking}})
    tried = try_walk(type(found)(wrong, found.operations, found.actions, found.final), (), Random(0))
    assert tried.wrong and not tried.solved


def test_drafts_are_no_content():
    before = {"apps": {"clock": {"stored": {"wifi": False}, "draft": {"wifi": False}}}}
    change = read('[{"at": ["clock", "stored", "wifi"], "is": true}]')
    after = {"apps": {"clock": {"stored": {"wifi": True}, "draft": {"wifi": False}}}}
    assert judge(change, Trial(before, after, None, "success")).value == 1
    assert judge(change, Trial(before, after, None, "failure")).value == 0


@pytest.mark.parametrize(
    "params, words",
    [
        ({}, "has the parameter check"),
        ({CHECK: "[]"}, "at least 1"),
        ({CHECK: "score: 1"}, "Invalid JSON"),
        ({CHECK: '[{"at": ["clock", "stored", "wifi"]}]'}, "says neither"),
        ({CHECK: '[{"at": ["nowhere", "stored", "wifi"], "is": 1}]'}, "none keeps nowhere.stored"),
        ({CHECK: '[{"at": ["nowhere"], "is": 1}]'}, "none keeps nowhere"),
        ({CHECK: '[{"at": ["clock"], "is": 1}]'}, "none keeps clock"),
        ({CHECK: '[{"at": ["clock", "draft"], "is": {}}]'}, "none keeps clock.draft"),
        ({CHECK: '[{"at": ["clock", "stored", "wifi", "x"], "is": 1}]'}, "there is no clock.stored.wifi.x"),
        ({CHECK: '[{"at": ["clock", "shown"], "minus": ["walls"]}]'}, 'has no "walls"'),
    ],
)
def test_a_check_that_means_nothing_is_an_unknown_task(params, words):
    with pytest.raises(catalog.UnknownTask, match=words.replace("[", r"\[")):
        begun(Task(suite="quickstart", template="walk-switch", params=params))


def test_a_server_plays_and_judges_such_a_task_as_any_other(server):
    found = walk("quickstart", 8, Random(4), most=2)

    def post(call, **body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url(6)}/{call}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    for actions, value in ((found.actions, 1), (found.actions[:-1], 0)):
        episode = f"walk-{value}"
        post("reset", episode=episode, task=found.task.model_dump())
        for index, action in enumerate((*actions, Terminate(status="success"))):
            post("step", episode=episode, index=index, action=action.model_dump())
        assert json.loads(post("evaluate", episode=episode))["value"] == value
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("reset", episode="none", task=found.task.model_copy(update={"params": {CHECK: "[]"}}).model_dump())
    assert refused.value.code == 404


def test_a_walk_of_an_app_that_is_not_there_makes_no_task():
    with pytest.raises(WalkError, match="none of the apps"):
        walk("quickstart", 0, Random(0), most=1, apps=("nothing",))
    found = walk("quickstart", 0, Random(0), most=1, apps=("clock", "camera", "settings"))
    assert ended(begun(found.task)) == 0
