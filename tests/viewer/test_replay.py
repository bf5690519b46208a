"""The replay page: what is on it, that it loads nothing, that hostile text stays text, that no picture is made up."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.frames.frame import FittedFrame, FrameError
from tapforge_trainer.recording.frames import NotRecorded
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, EpisodeRewards, Generation, GroupRecord, StepRecord
from tapforge_trainer.run.report import _before_and_after
from tapforge_trainer.viewer.recorded import replay_of
from tapforge_trainer.viewer.replay import LARGEST, Replay, replay_html

RULES = BatchRules(options={"normalization": "mean"})
GENERATION = Generation((1, 2, 3), (7, 8), (-0.5, -0.25), (4, 4), "stop", 3)
REASONS = {Outcome.SUCCESS: Reason.DONE, Outcome.FAILURE: Reason.STEP_LIMIT, Outcome.INVALID: Reason.ENV_ERROR}
EVIL = """</pre></style></script><script>alert("x")</script><img src=http://a.example/x onerror='alert(1)'>{{ 7*7 }}"""


def screen(color: str, width: int = 12, height: int = 20) -> FittedFrame:
    return FittedFrame.of(np.asarray(Image.new("RGB", (width, height), color)))


FRAMES = {color: screen(color) for color in ("red", "green", "blue")}
STORE = {frame.name: frame.data for frame in FRAMES.values()}


def get(sha256: str) -> bytes:
    if sha256 not in STORE:
        raise FrameError(f"frame {sha256} was <b>lost</b>")
    return STORE[sha256]


def step(name: str, index: int, color: str, **other) -> StepRecord:
    record = StepRecord(
        name,
        index,
        (FRAMES[color].name,),
        color,
        "home",
        GENERATION,
        "I tap",
        {"type": "tap", "x": 0.5, "y": 0.5},
        None,
        0.0,
        "",
        0.1,
        0.1,
    )
    return replace(record, **other)


def episode(
    name: str, outcome: Outcome | None, colors: str = "red green", group: str = "g", app: str = "clock", **other
):
    steps = tuple(step(name, i, color) for i, color in enumerate(colors.split()))
    task = Task(suite="quickstart", template="open", params={"app": app}, goal=f"open the {app}")
    reason = REASONS[outcome] if outcome else Reason.CANCELLED
    return replace(EpisodeRecord(name, group, task, 0, "s1", 0, reason, outcome, None, "", steps, 0.0, 1.0), **other)


def group(*episodes: EpisodeRecord, order: int = 0) -> GroupRecord:
    return GroupRecord(episodes[0].group, order, episodes[0].task, 3, episodes)


class Page(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


GROUP = group(
    episode("won", Outcome.SUCCESS, "red green"),
    episode("lost", Outcome.FAILURE, "red blue"),
    episode("sick", Outcome.INVALID, "red", message="POST /step: timed out"),
    episode("stopped", None, "red"),
)


def test_a_group_with_its_credits():
    credits = build_batch([GROUP], RULES).credits
    page = Page(replay_html(Replay("a run", get, groups=[GROUP], credits=credits)))
    assert [e["data-outcome"] for e in page.of_class("episode")] == ["success", "failure", "invalid", "stopped"]
    steps = page.of_class("step")
    # red was seen twice by episodes that count; those of others belong to no state group
    assert [s.get("data-state") for s in steps] == ["A", None, "A", None, None, None]
    assert "A ×2" in page.text
    assert "adv +0.97" in page.text  # 0.5 of the episode, 0.475 of the step
    assert "return +1.00" in page.text
    assert "1 of 2 succeeded" in page.text


@pytest.mark.parametrize("states", ["screen", "actions"])
def test_letters_are_of_states_whatever_the_estimator_compares(states):
    rules = BatchRules("grpo", states=states)
    replay = Replay("a run", get, groups=[GROUP], credits=build_batch([GROUP], rules).credits, states=states)
    page = Page(replay_html(replay))
    letters = [s.get("data-state") for s in page.of_class("step")]
    assert letters[:4] == ["A", None if states == "screen" else "B", "A", None if states == "screen" else "B"]
    assert "A ×2" in page.text
    assert "POST /step: timed out" in page.text


def test_each_frame_is_in_the_file_once_and_byte_for_byte():
    html = replay_html(Replay("a run", get, groups=[GROUP]))
    uris = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", html)
    assert sorted(base64.b64decode(uri) for uri in uris) == sorted(STORE.values())


def test_large_frames_are_scaled_down():
    big = screen("red", 1080, 2400)
    record = group(
        *(
            replace(e, steps=tuple(replace(s, frames=(big.name,)) for s in e.steps))
            for e in (GROUP.episodes[0], GROUP.episodes[1])
        )
    )
    html = replay_html(Replay("a run", lambda sha256: big.data, groups=[record]))
    (uri,) = re.findall(r"data:image/jpeg;base64,([A-Za-z0-9+/=]+)", html)
    assert Image.open(io.BytesIO(base64.b64decode(uri))).size == (324, LARGEST)


def test_the_mark_is_where_the_phone_was_touched():
    touched = step("won", 0, "red", action={"type": "tap", "x": 1.0, "y": 0.25})
    html = replay_html(Replay("a run", get, groups=[group(replace(GROUP.episodes[0], steps=(touched,)))]))
    page = Page(html)
    (svg,) = [a for tag, a in page.elements if tag == "svg"]
    assert svg["viewbox"] == "0 0 12 20"
    assert {(a["cx"], a["cy"]) for tag, a in page.elements if tag == "circle"} == {("11.5", "5.5")}


def test_nothing_is_loaded_and_hostile_text_stays_text():
    task = Task(suite=EVIL, template=EVIL, params={EVIL: EVIL}, goal=EVIL)
    actions = [
        {"type": "type", "text": EVIL},
        {"type": EVIL},
        {"type": "open_app", "name": EVIL},
        {"type": "terminate", "status": EVIL},
        {"type": "scroll", "direction": EVIL, "x": 0.5, "y": 0.5},
        None,
    ]
    steps = tuple(
        step("e", i, "red", text=EVIL, note=EVIL, app=EVIL, state_key=EVIL, parse_error=EVIL, action=action)
        for i, action in enumerate(actions)
    )
    evil = episode("e", Outcome.SUCCESS, steps=steps, task=task, slot=EVIL, message=EVIL, id=EVIL)
    replay = Replay(EVIL, get, {EVIL: EVIL}, [evil], [evil], [GroupRecord(EVIL, 0, task, 1, (evil,))])
    html = replay_html(replay)
    page = Page(html)
    harmless = Page(replay_html(Replay("t", get, {"a": "b"}, [episode("e", Outcome.SUCCESS)])))
    assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object", "link", "base"}
    assert sum(tag == "script" for tag, _ in page.elements) == 1 == sum(tag == "script" for tag, _ in harmless.elements)
    assert not [a for _, a in page.elements if {"src", "href", "onerror", "onclick"} & a.keys()]
    assert EVIL in page.text
    assert "{{ 7*7 }}" in page.text
    assert not re.search(r"url\((?![\"']data:image/)", html)


def test_what_tasks_came_to_is_a_table():
    row = {"success": 0.5, "interval": [0.25, 0.75], "attempts": 8, "recent": None, "age": 3}
    practised = {"templates": {"open": row}, "tasks": {EVIL: row | {"pauses_until": 9}}, "tasks_known": 2}
    page = Page(replay_html(Replay("a run", get, practised=practised)))
    for words in (
        "What was practised",
        "open",
        "50 %",
        "25-75",
        "pauses until update 9",
        EVIL,
        "1 task, those with most",
    ):
        assert words in page.text
    assert "What was practised" not in Page(replay_html(Replay("a run", get))).text


def test_the_policy_allows_the_pages_own_script_only():
    html = replay_html(Replay("a run", get, groups=[GROUP]))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (policy,) = [a["content"] for tag, a in Page(html).elements if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_a_missing_or_broken_frame_is_named_and_nothing_is_drawn():
    lost = step("won", 0, "red", frames=("f" * 64,))
    page = Page(replay_html(Replay("a run", get, groups=[group(replace(GROUP.episodes[0], steps=(lost,)))])))
    assert "frame ffffffffffff can't be shown" in page.text
    assert "was <b>lost</b>" in page.text
    assert len(page.of_class("missing")) == 1
    assert not [tag for tag, _ in page.elements if tag == "svg"]
    assert "tap (" not in page.text
    assert "1 frame of this page" in page.text
    half = Page(replay_html(Replay("a run", lambda sha256: b"\x89PNG", groups=[GROUP])))
    assert len(half.of_class("missing")) == len(half.of_class("step"))


def test_before_and_after_are_paired_by_task():
    before = [episode("b1", Outcome.FAILURE, app="clock"), episode("b2", Outcome.SUCCESS, app="mail")]
    after = [episode("a2", Outcome.SUCCESS, app="mail"), episode("a1", Outcome.SUCCESS, app="clock")]
    page = Page(replay_html(Replay("a run", get, before=before, after=[*after, episode("a3", None, app="maps")])))
    assert [e["data-outcome"] for e in page.of_class("episode")] == ["failure", "success", "success", "success"]
    assert "In all:\n1 learned, 1 kept." in page.text


def test_an_empty_run_says_so():
    assert "There is nothing to show" in replay_html(Replay("a run", get))


@pytest.fixture
def run_folder(tmp_path):
    for name, members in (("train", GROUP.episodes), ("before", GROUP.episodes[1:2]), ("after", GROUP.episodes[:1])):
        recorder = Recorder(tmp_path / name)
        for record in members:
            recorder.episode(record, {f.name: f for f in FRAMES.values()})
        if name == "train":
            recorder.group(GROUP)
        recorder.close()
    return tmp_path


def test_from_recordings_on_disk(run_folder):
    replay = replay_of(
        title="a run",
        rules=RULES,
        training=run_folder / "train",
        before=run_folder / "before",
        after=run_folder / "after",
        facts={"updates": "1"},
    )
    html = replay_html(replay)
    expected = Replay(
        "a run",
        get,
        {"updates": "1"},
        GROUP.episodes[1:2],
        GROUP.episodes[:1],
        [GROUP],
        credits=build_batch([GROUP], RULES).credits,
    )
    assert html == replay_html(expected)
    assert "1 learned." in html


def test_credits_are_those_of_the_update_where_an_estimator_compares_its_whole_batch(tmp_path):
    recorder, groups = Recorder(tmp_path), []
    for number in range(6):
        name = f"g1-{number:06d}"
        members = []
        for member in range(3):
            won = member == 0 or (member == 1 and number % 2 == 0)
            one = episode(f"{name}.{member}.0", Outcome.SUCCESS if won else Outcome.FAILURE)
            steps = tuple(replace(step, episode=one.id) for step in one.steps)
            members.append(replace(one, group=name, steps=steps))
            recorder.episode(members[-1], {f.name: f for f in FRAMES.values()})
        groups.append(GroupRecord(name, number, members[0].task, 0, tuple(members)))
    for group in [*groups[1:], groups[0]]:  # as they were settled
        recorder.group(group)
    recorder.close()
    rules = BatchRules("gpg", signal="outcome")
    replay = replay_of(title="a run", rules=rules, training=tmp_path, per_update=2, max_groups=1)
    (shown,) = replay.groups
    first = shown.order // 2 * 2
    update = build_batch(groups[first : first + 2], rules).credits
    assert list(replay.credits) == list(update)
    alone = build_batch([shown], rules).credits
    assert {(c.episode, c.step): c.advantage for c in update if c.episode.startswith(shown.id)} != {
        (c.episode, c.step): c.advantage for c in alone
    }
    unread = replay_of(title="a run", rules=BatchRules("otb"), training=tmp_path, per_update=2)
    assert not unread.credits and not replay.lacks
    assert "tapforge relearn --gradients" in replay_html(unread), "the page says why it shows none"


# --- what the recording has not ---------------------------------------------------------------------------------------


def recorded(folder, retention, groups=6):
    """Groups of an episode each, every one with a screen of its own."""
    recorder = Recorder(folder, retention)
    for number in range(groups):
        frame = FittedFrame.of(np.full((16, 12, 3), 10 * number, np.uint8))
        name = f"g1-{number:06d}"
        first = episode(f"{name}.0.0", Outcome.SUCCESS)
        steps = tuple(replace(step, episode=f"{name}.0.0", frames=(frame.name,)) for step in first.steps)
        record = replace(first, id=f"{name}.0.0", group=name, steps=steps)
        recorder.episode(record, {frame.name: frame})
        recorder.group(GroupRecord(name, number, record.task, 0, (record,)))
    recorder.close()
    return Page(replay_html(replay_of(title="a run", rules=RULES, training=folder, max_groups=3)))


def test_without_screens_the_words_are_shown_and_nothing_is_an_error(tmp_path):
    page = recorded(tmp_path, Retention("none"))
    assert len(page.of_class("absent")) == len(page.of_class("step")) > 0
    assert page.of_class("missing") == [] and page.of_class("error") == []
    assert "No screens were recorded (recording.frames: none)." in page.text
    assert "0 of 6 groups have all their screens" in page.text


def test_of_a_sampled_recording_the_groups_with_screens_are_shown(tmp_path):
    retention = Retention("sampled", 0.5, seed=1)
    kept = sum(retention.keeps(f"g1-{number:06d}") for number in range(6))
    assert 0 < kept < 6
    page = recorded(tmp_path, retention)
    assert len(page.of_class("group")) == min(3, kept) and page.of_class("absent") == []
    assert (
        f"{kept} of 6 groups have all their screens: only the screens of 50% of the groups were recorded" in page.text
    )


def test_lossy_screens_are_shown_and_called_so(tmp_path):
    page = recorded(tmp_path, Retention(encoding="webp"))
    assert page.of_class("absent") == [] and page.of_class("missing") == []
    assert "Screens are recorded lossily (webp); the model saw them unchanged" in page.text


def test_a_screen_that_was_removed_is_said_and_a_damaged_one_is_still_an_error(tmp_path):
    def frame(name):
        if name == FRAMES["green"].name:
            raise FrameError("pack-000003.tar: damaged")
        if name == FRAMES["blue"].name:
            raise NotRecorded("The oldest screens were removed.")
        return STORE[name]

    page = Page(replay_html(Replay("a run", frame, groups=[GROUP])))
    assert len(page.of_class("error")) == 1
    assert "The oldest screens were removed." in page.text and "damaged" in page.text


def test_captions_count_in_pixels_of_the_recorded_frame():
    large = FittedFrame.of(np.zeros((2400, 1080, 3), np.uint8))
    tapped = replace(step("a", 0, "red"), frames=(large.name,), action={"type": "tap", "x": 0.859, "y": 0.66})
    page = replay_html(Replay("t", lambda _: large.data, groups=[group(replace(GROUP.episodes[0], steps=(tapped,)))]))
    assert "tap (927, 1584)" in page


def test_the_page_of_an_episode_that_was_played_by_hand_speaks_of_no_training():
    page = replay_html(Replay("t", get, groups=[GROUP], played=True))
    assert "The episode" in page and "Screens are those of the phone" in page
    assert "raining" not in page and "update" not in page


@pytest.mark.parametrize(
    ("there", "mode"),
    [
        (("before-sampled", "after-sampled", "before-greedy", "after-greedy"), "sampled"),
        (("before-greedy", "after-greedy"), "greedy"),
        (("before-sampled", "before-greedy", "after-greedy"), "greedy"),
        (("before-sampled",), None),
        ((), None),
    ],
)
def test_before_and_after_are_of_one_mode(tmp_path, there, mode):
    for name in there:
        (tmp_path / name).mkdir()
    wanted = (None, None) if mode is None else (tmp_path / f"before-{mode}", tmp_path / f"after-{mode}")
    assert _before_and_after(tmp_path) == wanted


def test_judges_words_are_shown_and_where_the_verifier_says_otherwise():
    one = episode("judged", Outcome.FAILURE)
    values = (*(0.0,) * (len(one.steps) - 1), 1.0)
    said = ("",) * (len(one.steps) - 1) + ("<b>it is open</b>",)
    rewards = EpisodeRewards(
        {"judge": values, "steps": (None, *values[1:])}, Outcome.SUCCESS, Reason.DONE, Outcome.FAILURE, {"judge": said}
    )
    html = replay_html(Replay("a run", get, groups=[group(replace(one, awaits_rewards=True).rewarded(rewards))]))
    assert "&lt;b&gt;it is open&lt;/b&gt;" in html and "<b>it is open" not in html
    assert "judge +1.00" in html and "steps missing" in html and "verifier: failure" in html
    assert "verifier:" not in replay_html(Replay("a run", get, groups=[group(one)]))
