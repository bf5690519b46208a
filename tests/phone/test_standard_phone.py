"""The standard phone as a machine: deterministic, forkable, robust, the same at every resolution."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.screen import center
from tapforge_envs.phone.standard import IMAGE
from tapforge_envs.protocol import (
    ACTION,
    Action,
    AppSwitch,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Home,
    Key,
    LongPress,
    OpenApp,
    Scroll,
    Swipe,
    Tap,
    Type,
    Wait,
    pixel,
)

SUITES = ("quickstart", "standard")
APPS = [name for name, app in IMAGE.apps.items() if app.glyph]


def started(suite="standard", index=0, width=128, height=224) -> Phone:
    task = catalog.tasks(suite, "train").sample(1, index)
    phone = Phone(catalog.suite(suite).image, width, height)
    phone.begin(task.seed, catalog.rules_of(task))
    return phone


def quiet(index=0) -> Phone:
    """A phone that nothing will interrupt."""
    phone = started(index=index)
    phone.state["ui"]["pending"] = []
    return phone


def tap(phone: Phone, id: str) -> str:
    widget = phone.screen().find(id)
    assert widget is not None, (id, [w.id for w in phone.screen().widgets])
    x, y = center(widget.box)
    return phone.act(Tap(x=x, y=y))


# --- any action -------------------------------------------------------------------------------------------------------

part = st.floats(0, 1)
texts = st.text(max_size=12)
gestures = st.one_of(
    st.builds(Tap, x=part, y=part),
    st.builds(Tap, x=part, y=part),
    st.builds(Tap, x=part, y=part),
    st.builds(LongPress, x=part, y=part),
    st.builds(DoubleTap, x=part, y=part),
    st.builds(Swipe, x=part, y=part, x2=part, y2=part),
    st.builds(Drag, x=part, y=part, x2=part, y2=part),
    st.builds(Scroll, direction=st.sampled_from(["up", "down", "left", "right"])),
    st.builds(Type, text=texts),
    st.builds(Key, name=st.sampled_from(["DEL", "ENTER", "SPACE", "VOLUME_UP", "VOLUME_DOWN", "APP_SWITCH", "F1"])),
    st.builds(OpenApp, name=st.sampled_from([*APPS, "Mail", "home", "recents", "nothing"])),
    st.sampled_from([Home(), Back(), AppSwitch(), Enter(), Wait()]),
)
#: a tap on whatever can be tapped gets deeper than a tap anywhere
choices = st.one_of(gestures, gestures, st.integers(0, 10_000), st.integers(0, 10_000))


def act_on(phone: Phone, choice: Action | int) -> None:
    if isinstance(choice, int):
        hittable = [w for w in phone.screen().widgets if w.tap]
        if not hittable:
            return
        x, y = center(hittable[choice % len(hittable)].box)
        phone.act(Tap(x=min(x, 1.0), y=min(y, 1.0)))
    else:
        phone.act(choice)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(SUITES), st.integers(0, 200), st.lists(choices, max_size=60))
def test_no_action_breaks_it_and_the_state_stays_json(suite, index, actions):
    phone = started(suite, index)
    for choice in actions:
        act_on(phone, choice)
        assert json.loads(json.dumps(phone.state)) == phone.state
        ids = [w.id for w in phone.screen().widgets if w.tap]
        assert len(ids) == len(set(ids)), "two things on the screen have one name"
    assert phone.observe().frame.width == 128
    assert 0 <= phone.evaluate().value <= 1


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@example(32, 32, 0, [OpenApp(name="shop")])
@given(st.integers(32, 300), st.integers(32, 400), st.integers(0, 50), st.lists(choices, max_size=12))
def test_every_size_can_be_drawn(width, height, index, actions):
    phone = started("standard", index, width, height)
    for choice in actions:
        act_on(phone, choice)
        frame = phone.observe().frame
        assert (frame.width, frame.height) == (width, height)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 200), st.lists(choices, max_size=20), st.lists(choices, max_size=8))
def test_a_fork_goes_its_own_way_and_the_same_way(index, before, after):
    phone = started("standard", index)
    for choice in before:
        act_on(phone, choice)
    saved = phone.snapshot()
    fork = phone.fork()
    for choice in after:
        act_on(fork, choice)
    assert phone.snapshot() == saved
    for choice in after:
        act_on(phone, choice)
    assert phone.snapshot() == fork.snapshot()
    assert phone.observe() == fork.observe()
    phone.restore(saved)
    assert phone.snapshot() == saved


def test_a_snapshot_of_another_image_is_refused():
    with pytest.raises(ValueError, match="of image 'quickstart'"):
        started().restore(started("quickstart").snapshot())


# --- the same everywhere ----------------------------------------------------------------------------------------------

_TELL = """
import hashlib
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
seen = hashlib.sha256()
for suite in ("quickstart", "standard"):
    for index in range(5):
        task = catalog.tasks(suite, "test").sample(3, index)
        phone = catalog.phone_for(suite, 128, 224)
        results = [phone.reset(task.seed, catalog.rules_of(task))]
        for action in demonstration(phone, catalog.template_of(task), task.params):
            results.append(phone.step(action).observation)
        for result in results:
            seen.update(result.frame.data + result.state_key.encode())
print(seen.hexdigest())
"""


def test_another_process_shows_the_same_bytes_and_keys():
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _TELL]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("size", [(96, 160), (128, 224), (360, 800), (720, 1280), (1080, 2400)])
def test_what_is_seen_is_what_is_hit(size):
    """The centre of everything that lies on top is hit, whatever the number of pixels."""
    width, height = size
    for index in range(12):
        task = catalog.tasks("standard", "train").sample(2, index)
        phone = Phone(IMAGE, width, height)
        phone.begin(task.seed, catalog.rules_of(task))
        for action in demonstration(phone, catalog.template_of(task), task.params):
            screen = phone.screen()
            for widget in screen.widgets:
                x, y = center(widget.box)
                top = screen.at(x, y)
                if widget.tap and top is not None and top.id == widget.id and y < 1:
                    at = ((pixel(x, width) + 0.5) / width, (pixel(y, height) + 0.5) / height)
                    assert screen.at(*at).id == widget.id, (widget.id, size)
            phone.act(action)


# --- state keys -------------------------------------------------------------------------------------------------------


def test_the_same_situation_has_the_same_key_though_the_clock_went_on():
    phone = quiet()
    first, start = phone.state_key(), phone.observe().frame.data
    for _ in range(3):
        phone.act(OpenApp(name="notes"))
        phone.act(Home())
    assert phone.state_key() == first
    assert phone.observe().frame.data != start  # the clock on the wall is another


def test_what_changes_the_future_changes_the_key():
    phone = quiet()
    keys = [phone.state_key()]

    def then(action: Action) -> None:
        phone.act(action)
        keys.append(phone.state_key())

    then(OpenApp(name="shop"))
    then(Scroll(direction="down"))
    then(OpenApp(name="contacts"))
    tap(phone, "add")
    keys.append(phone.state_key())
    tap(phone, "field:name")
    keys.append(phone.state_key())
    then(Type(text="A"))
    assert len(set(keys)) == len(keys)


def test_a_change_that_is_not_on_the_screen_changes_the_key():
    one, two = quiet(), quiet()
    two.state["apps"]["notes"]["notes"].pop()
    assert one.state_key() != two.state_key()


def test_what_reading_leaves_behind_does_not_count():
    phone = quiet()
    first = phone.state_key()
    phone.act(OpenApp(name="mail"))
    tap(phone, next(w.id for w in phone.screen().widgets if w.id.startswith("mail:")))
    assert phone.state["traces"]["mail"]
    phone.act(Home())
    assert phone.state_key() == first


def test_actions_survive_the_wire():
    for action in (Tap(x=0, y=1), Type(text="é\n"), Key(name="DEL")):
        assert ACTION.validate_json(action.model_dump_json()) == action
