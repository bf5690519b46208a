"""The index: all episodes, each read once, whatever is written meanwhile; and its questions, against the recording."""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from load.made_run import Shape, made_group, make_run, screens

from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.batch import build_batch
from tapforge_trainer.dashboard import index as index_module
from tapforge_trainer.dashboard import query
from tapforge_trainer.dashboard.credits import Rules
from tapforge_trainer.dashboard.opened import OpenRun
from tapforge_trainer.dashboard.query import BadQuery
from tapforge_trainer.dashboard.stored import NotThere
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRewards

SMALL = Shape(64, steps=3, screens=6, groups=2, prompt=8, answer=4, measured=0)


def opened(folder: Path) -> OpenRun:
    """With all that the folder has read."""
    run = OpenRun(folder)
    run.facets()
    worked(run)
    return run


def worked(run: OpenRun) -> None:
    while run.work():
        pass
    assert run.trouble == ""


@pytest.fixture(scope="module")
def big(made: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TAPFORGE_CACHE", str(tmp_path_factory.mktemp("big")))
        run = opened(made)
        yield run
        run.close()


@pytest.fixture(scope="module")
def records(made: Path) -> dict:
    recordings = [made / "rollout", *sorted((made / "evaluation").iterdir())]
    return {episode.id: episode for folder in recordings for episode in Recording(folder).episodes()}


def names(run: OpenRun, **words: str) -> list[str]:
    return [row["name"] for row in run.episodes([("limit", "500"), *words.items()])["episodes"]]


def test_pages_hold_every_episode_once(big, records):
    found = []
    while page := big.episodes([("offset", str(len(found))), ("limit", "300"), ("sort", "started")])["episodes"]:
        found += page
    assert len(found) == len(records) == 5080
    assert {row["name"] for row in found} == records.keys()
    assert [row["started"] for row in found] == sorted(row["started"] for row in found)
    for row in found[::97]:
        record = records[row["name"]]
        assert (row["goal"], row["outcome"], row["reason"]) == (record.task.goal, record.outcome, record.reason)
        assert row["steps"] == len(record.steps) and row["phone"] == record.slot
        assert row["tokens"] == sum(len(step.generation.ids) for step in record.steps)
        assert row["parse_errors"] == sum(step.parse_error is not None for step in record.steps)


@pytest.mark.parametrize(
    "words, holds",
    [
        ({"outcome": "failure", "template": "switch"},
         lambda e: e.outcome == "failure" and e.task.template == "switch"),
        ({"reason": "step_limit", "steps": "5.."}, lambda e: e.reason == "step_limit" and len(e.steps) >= 5),
        ({"parse_errors": "1..2", "steps": "2..4"},
         lambda e: 1 <= sum(s.parse_error is not None for s in e.steps) <= 2 and 2 <= len(e.steps) <= 4),
        ({"phone": "phone-7"}, lambda e: e.slot == "phone-7"),
        ({"score": "1", "version": "..3"},
         lambda e: e.score == 1 and max(v for s in e.steps for v in s.generation.versions) <= 3),
        ({"q": "dentist"}, lambda e: "dentist" in e.task.goal or any("dentist" in s.text for s in e.steps)),
        ({"q": "GRANDM two_panels"},
         lambda e: e.task.template == "two_panels"
         and any("grandmother" in text for text in (e.task.goal, *(s.text for s in e.steps)))),
        ({"recording": "evaluation/after-sampled"}, lambda e: e.id.startswith("after-")),
        ({"q": "phone answer did not"}, lambda e: e.outcome == "invalid"),
    ],
)  # fmt: skip
def test_filters_find_what_the_recording_holds(big, records, words, holds):
    expected = {name for name, record in records.items() if holds(record)}
    answer = big.episodes([("limit", "500"), *words.items()])
    assert answer["total"] == len(expected) > 0
    assert {row["name"] for row in answer["episodes"]} == expected or len(expected) > 500


def test_advantages_and_updates_are_those_of_the_run(big, made):
    """The fourth update, as the trainer's own functions have it."""
    rules, per_update = Rules.of(big.run).first, big.run.spec.rollout.groups_per_update
    groups = Recording(made / "rollout").settled()[3 * per_update : 4 * per_update]
    credits = build_batch(groups, rules).credits
    rows = big.episodes([("update", "4"), ("limit", "500")])["episodes"]
    assert {row["name"] for row in rows} == {episode.id for group in groups for episode in group.episodes}
    by_episode: dict[str, list] = {}
    for credit in credits:
        by_episode.setdefault(credit.episode, []).append(credit)
    for row in rows:
        own = by_episode.get(row["name"])
        if own is None:
            assert row["advantage"] is None
        else:
            assert row["advantage"] == pytest.approx(sum(one.advantage for one in own) / len(own))
            assert row["reward"] == pytest.approx(sum(one.reward for one in own))
    assert {row["staleness"] for row in rows} == {0, 1}
    name = credits[0].episode
    shown = big.episode("rollout", name)["steps"]
    for step, credit in zip(shown, by_episode[name], strict=True):
        assert step["credit"] == pytest.approx({key: getattr(credit, key) for key in step["credit"]})
    ranked = big.episodes([("sort", "-advantage"), ("recording", "rollout"), ("limit", "50")])["episodes"]
    values = [row["advantage"] for row in ranked]
    assert values == sorted(values, reverse=True) and values[0] > 0


def test_a_group_shows_the_states_that_its_members_share(big):
    found = big.group("rollout", "g1-000003")
    first = [episode["steps"][0] for episode in found["episodes"]]
    assert {step["letter"] for step in first} == {"A"} and len(found["episodes"]) == 8
    wins = [episode["outcome"] for episode in found["episodes"]]
    assert wins == sorted(wins, key=["success", "failure", "invalid"].index)


def test_what_is_written_meanwhile_is_read_once(tmp_path, monkeypatch):
    whole = make_run(tmp_path / "whole", SMALL)
    folder = tmp_path / "live"
    shutil.copytree(whole, folder)
    data = (whole / "rollout" / "rollout-000001.jsonl").read_bytes()
    (folder / "rollout" / "rollout-000001.index").unlink()
    live = folder / "rollout" / "rollout-000001.jsonl"
    half = data.index(b'{"kind":"group"') + 50  # in the middle of a line
    live.write_bytes(data[:half])
    starts: list[int] = []
    read = index_module.rows
    monkeypatch.setattr(index_module, "rows", lambda path, start: (starts.append(start), read(path, start))[1])
    run = opened(folder)
    before = run.episodes([])["total"]
    assert before == 8 and run.episodes([("update", "1")])["total"] == 0
    with live.open("ab") as file:
        file.write(data[half:])
    worked(run)
    assert run.episodes([])["total"] == 64 and run.episodes([("update", "1..4")])["total"] == 64
    assert list(dict.fromkeys(starts)) == [0, data.index(b'{"kind":"group"')]
    run.close()
    again = opened(folder)  # of another process, later: the index is in the cache
    assert again.episodes([])["total"] == 64 and max(starts) < len(data)
    again.close()


def test_another_run_in_the_same_folder_begins_a_new_index(tmp_path):
    folder = make_run(tmp_path / "run", SMALL)
    run = opened(folder)
    first = names(run)
    run.close()
    shutil.rmtree(folder)
    make_run(folder, replace(SMALL, episodes=32), seed=5)
    run = opened(folder)
    assert len(names(run)) == 32 < len(first)
    run.close()


def test_two_servers_of_one_run_and_a_damaged_index(tmp_path):
    folder = make_run(tmp_path / "run", SMALL)
    one, other = opened(folder), opened(folder)
    assert names(one) == names(other)
    path = one._opened()._database.path
    one.close()
    other.close()
    path.write_bytes(b"no database" * 100)
    third = opened(folder)
    assert len(names(third)) == 64
    third.close()


def recorded(folder: Path, *lines) -> Path:
    """A run whose recording holds these episodes, groups and rewards, in this order."""
    make_run(folder, replace(SMALL, episodes=16))
    shutil.rmtree(folder / "rollout")
    frames = screens(SMALL.screens, SMALL.width, SMALL.height, 0)
    recorder = Recorder(folder / "rollout")
    for line in lines:
        if isinstance(line, tuple):
            recorder.rewards(*line)
        elif hasattr(line, "episodes"):
            recorder.group(line)
        else:
            recorder.episode(line, {name: frames[name] for name in line.frames})
    recorder.close()
    return folder


def test_judged_rewards_come_after_their_episode(tmp_path):
    group = made_group(Random(3), SMALL, 1, 0, screens(6, 96, 160, 0), count=2)
    one, other = group.episodes
    one = replace(one, awaits_rewards=True, outcome=None, reason=Reason.DONE)
    streams = {"judge": tuple(0.5 for _ in one.steps), "hints": tuple(None for _ in one.steps)}
    words = {"judge": tuple(f"verdict {n}: 点击 设置按钮" for n in range(len(one.steps)))}
    rewards = EpisodeRewards(streams, Outcome.SUCCESS, Reason.DONE, Outcome.FAILURE, words)
    run = opened(recorded(tmp_path / "first", one, other))
    assert names(run, outcome="waiting") == [one.id]
    run.close()
    run = opened(recorded(tmp_path / "judged", one, other, (one.id, rewards)))
    half = f"{0.5 * len(one.steps)}"
    assert names(run, **{"stream.judge": f"{half}.."}) == [one.id] == names(run, q="verdict 设置")
    assert names(run, **{"stream.judge": "100.."}) == []
    found = run.episode("rollout", one.id)
    assert (found["outcome"], found["verified"], found["streams"]) == ("success", "failure", {"judge": float(half)})
    assert found["steps"][0]["verdicts"][0] == {"stream": "judge", "value": 0.5, "words": "verdict 0: 点击 设置按钮"}
    assert run.facets()["streams"] == ["judge"]
    run.close()


def test_a_run_that_went_back_counts_what_was_settled_last(tmp_path):
    """After a crash a place in the order is settled again: by another group, or by one that was dropped."""
    frames = screens(6, 96, 160, 0)
    groups = [made_group(Random(n), SMALL, 1, n, frames, count=2) for n in range(2)]
    again = replace(made_group(Random(9), SMALL, 1, 1, frames, count=2), id="g2-000001")
    again = replace(again, episodes=tuple(replace(e, id=f"again-{e.id}", group=again.id) for e in again.episodes))
    lines = [line for group in (*groups, again) for line in (*group.episodes, group)]
    run = opened(recorded(tmp_path / "run", *lines))
    assert set(names(run, update="1")) == {e.id for group in (groups[0], again) for e in group.episodes}
    run.close()


def test_a_broken_line_is_said_and_breaks_nothing(tmp_path):
    folder = make_run(tmp_path / "run", SMALL)
    path = folder / "rollout" / "rollout-000001.jsonl"
    data = path.read_bytes().splitlines(keepends=True)
    data.insert(len(data) // 2, b'{"kind":"epis\n')
    path.write_bytes(b"".join(data))
    run = OpenRun(folder)
    run.facets()
    run.work()
    assert "broken record" in run.trouble and "broken record" in run.episodes([])["trouble"]
    run.close()


@pytest.mark.parametrize(
    "words, message",
    [
        ({"stepz": "1"}, "no field 'stepz'"),
        ({"steps": "many"}, "neither a number nor a range"),
        ({"steps": ".."}, "neither a number nor a range"),
        ({"steps": "nan"}, "not finite"),
        ({"sort": "e.id; drop table episodes"}, "episodes are sorted by"),
        ({"stream.a\"b": "1"}, "not a name of a reward stream"),
        ({"offset": "-1"}, "not a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said(words, message):
    with pytest.raises(BadQuery, match=message):
        query.read(words.items())


def test_any_words_are_searched(big):
    rng = Random(0)
    for text in [
        '"',
        "*",
        "AND OR NOT",
        "a" * 5000,
        "'; --",
        "点",
        *(rng.randbytes(12).decode("latin1") for _ in range(40)),
    ]:
        big.episodes([("q", text), ("template", text), ("recording", text)])


def test_what_is_not_there(big):
    with pytest.raises(NotThere, match="no episode 'x'"):
        big.episode("rollout", "x")
    with pytest.raises(NotThere, match="no group"):
        big.group("rollout", "x")
    with pytest.raises(NotThere, match="no step 99; it has"):
        big.step("rollout", "g1-000000.0.0", 99)
    with pytest.raises(NotThere, match="no recording"):
        big.frame("../../etc", "x")
    with pytest.raises(NotThere, match="is not in"):
        big.frame("rollout", "ab" * 32)
    assert issubclass(RecordingError, Exception)
