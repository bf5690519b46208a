"""What of a rollout is recorded and what is removed again: groups whole, the oldest first, nothing that is needed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from test_recorded_frames import screen

from tapforge_api import TrainingRun
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.frames.frame import FittedFrame, FrameError
from tapforge_trainer.recording.packs import PACKS
from tapforge_trainer.recording.reader import RECORDS, Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.run.assembly import retention_of


def an_episode(group: str, member: int, *frames: FittedFrame, text: str = "") -> EpisodeRecord:
    name = f"{group}.{member}.0"
    steps = tuple(
        StepRecord(
            name,
            i,
            (f.name,),
            "k",
            None,
            Generation((1,), (2,), (-1.0,), (0,), "stop", 1),
            text,
            None,
            None,
            0,
            "",
            0,
            0,
        )
        for i, f in enumerate(frames)
    )
    task = Task(suite="s", template="t")
    return EpisodeRecord(name, group, task, 0, "p", 5, Reason.DONE, Outcome.SUCCESS, 1.0, "", steps, 1.0, 2.0)


def test_groups_are_drawn_by_seed_and_order_and_in_the_share_that_is_asked_for() -> None:
    names = [f"g1-{order:06d}" for order in range(2000)]
    drawn = [Retention("sampled", 0.25, seed=3).keeps(name) for name in names]
    assert drawn == [Retention("sampled", 0.25, seed=3).keeps(name) for name in names]
    assert 0.2 < sum(drawn) / len(drawn) < 0.3
    assert drawn == [Retention("sampled", 0.25, seed=3).keeps(name.replace("g1", "g2")) for name in names]
    assert drawn != [Retention("sampled", 0.25, seed=4).keeps(name) for name in names]
    assert all(Retention("sampled", 1.0).keeps(name) for name in names)
    assert all(Retention("all").keeps(name) for name in names)
    assert not any(Retention("none").keeps(name) for name in names)


def test_what_is_sure_to_be_recorded_until_it_is_learned_from() -> None:
    assert Retention().rereadable("g1-000001")
    lacking = (Retention("none"), Retention("sampled", 1e-9), Retention(encoding="webp"), Retention(max_bytes=1 << 30))
    assert not any(retention.rereadable("g1-000001") for retention in lacking)


def test_a_retention_is_read_as_it_was_written() -> None:
    retention = Retention("sampled", 0.5, 7, "webp", 60, 1 << 30)
    assert Retention.of_json(retention.as_json()) == retention
    assert Retention.of_json('{"frames": "none", "of a later version": 1}') == Retention("none")


@pytest.mark.parametrize(
    "retention", [Retention("none"), Retention("sampled", 0.5), Retention(encoding="webp"), Retention()]
)
def test_every_step_is_recorded_and_the_screens_of_whole_groups(tmp_path: Path, retention: Retention) -> None:
    recorder = Recorder(tmp_path, retention)
    episodes = []
    for group in range(12):
        for member in range(2):
            frames = [screen(100 * group + 10 * member + i, 8, 8) for i in range(2)]
            episodes.append(an_episode(f"g1-{group:06d}", member, *frames))
            recorder.episode(episodes[-1], {f.name: f for f in frames})
    recorder.close()
    recording = Recording(tmp_path)
    assert list(recording.episodes()) == episodes
    lossless = retention.encoding == "png"
    whole = [recording.is_complete(e) for e in episodes]
    assert whole == [lossless and retention.keeps(e.group) for e in episodes]
    for episode in episodes:
        for step in episode.steps:
            if retention.keeps(episode.group):
                assert recording.frames.get(step.frames[0])
            else:
                with pytest.raises(FrameError, match="recording.frames"):
                    recording.frames.get(step.frames[0])


def test_what_the_spec_says() -> None:
    spec = {"seed": 7, "recording": {"frames": "sampled", "share": 0.5, "encoding": "webp", "maxGiB": 1.5}}
    run = TrainingRun.model_validate({"metadata": {"name": "x"}, "spec": spec})
    assert retention_of(run) == Retention("sampled", 0.5, 7, "webp", 80, 3 << 29)
    assert retention_of(TrainingRun.model_validate({"metadata": {"name": "x"}})) == Retention()


# --- the bound --------------------------------------------------------------------------------------------------------


def play(recorder: Recorder, groups: range, text: str = "") -> list[EpisodeRecord]:
    """A batch per group of one episode with four screens of about 7 KB."""
    episodes = []
    for number in groups:
        frames = [screen(100 * number + i) for i in range(4)]
        episode = an_episode(f"g1-{number:06d}", 0, *frames, text=text)
        recorder.episode(episode, {f.name: f for f in frames})
        recorder.group(GroupRecord(episode.group, number, episode.task, 0, (episode,)))
        recorder.sync()
        episodes.append(episode)
    return episodes


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_recording_stays_within_its_bound_and_keeps_the_newest_screens(tmp_path: Path) -> None:
    bound = 500_000
    recorder = Recorder(tmp_path, Retention(max_bytes=bound))
    episodes, largest = [], 0
    for number in range(60):
        episodes += play(recorder, range(number, number + 1))
        largest = max(largest, size(tmp_path))
    recorder.close()
    assert bound * 0.7 < size(tmp_path) and largest <= bound + 1000
    recording = Recording(tmp_path)
    assert list(recording.episodes()) == episodes, "records are small: none had to go"
    whole = [recording.is_complete(episode) for episode in episodes]
    assert whole == sorted(whole) and not whole[0] and sum(whole) >= 10


def test_a_screen_that_is_shown_again_is_kept(tmp_path: Path) -> None:
    recorder, home = Recorder(tmp_path, Retention(max_bytes=500_000)), screen(1, 20, 20)
    for number in range(60):
        recorder.episode(an_episode(f"x-{number}", 0, home), {home.name: home})
        play(recorder, range(number, number + 1))
    recorder.close()
    assert PACKS.numbers(tmp_path / "frames")[0] > 1
    assert Recording(tmp_path).frames.frame(home.name) == home


def test_what_a_checkpoint_needs_is_spared(tmp_path: Path) -> None:
    needed = set[str]()
    recorder = Recorder(tmp_path, Retention(max_bytes=400_000), spared=lambda: needed, segment_bytes=2000)
    episodes = play(recorder, range(3))
    needed.update(episode.id for episode in episodes[1:])
    episodes += play(recorder, range(3, 80))
    recording = Recording(tmp_path)
    assert not recording.is_complete(episodes[0])
    assert all(recording.is_complete(episode) for episode in episodes[1:3])
    assert recording.find([e.id for e in episodes[1:3]]) == {e.id: e for e in episodes[1:3]}
    needed.clear()  # the checkpoint is gone
    play(recorder, range(80, 160))
    assert not any(Recording(tmp_path).is_complete(episode) for episode in episodes[1:3])
    recorder.close()


def test_records_go_when_there_are_no_more_screens_to_remove(tmp_path: Path) -> None:
    bound = 300_000
    recorder = Recorder(tmp_path, Retention("none", max_bytes=bound))
    episodes = play(recorder, range(60), text="long " * 500)
    recorder.close()
    assert size(tmp_path) < bound + 1000
    recording = Recording(tmp_path)
    left = list(recording.episodes())
    assert left == episodes[-len(left) :] and 5 < len(left) < 60
    assert [group.episodes[0] for group in recording.groups()] == left
    assert RECORDS.numbers(tmp_path)[0] > 1 and recording.pruned


def test_a_group_whose_episodes_are_removed_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, segment_bytes=1)
    first, second = an_episode("g1-000001", 0), an_episode("g1-000001", 1)
    other = replace(an_episode("g1-000002", 0), id="other")
    for episode in (first, second, other):
        recorder.episode(episode, {})
    recorder.group(GroupRecord("g1-000001", 1, first.task, 0, (first, second)))
    recorder.group(GroupRecord("g1-000002", 2, first.task, 0, (other,)))
    recorder.close()
    RECORDS.drop(tmp_path, 1)
    recording = Recording(tmp_path)
    assert [group.id for group in recording.groups()] == ["g1-000002"]
    assert list(recording.episodes()) == [second, other]


def test_a_bound_that_can_not_be_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path)
    episodes = play(recorder, range(1))
    recorder.close()
    recorder = Recorder(tmp_path, Retention(max_bytes=20_000), spared=lambda: [episodes[0].id])
    with caplog.at_level(logging.WARNING):
        play(recorder, range(1, 4))
        play(recorder, range(4, 6))
    assert caplog.text.count("more than recording.maxGiB allows") == 1
    assert Recording(tmp_path).is_complete(episodes[0])
    recorder.close()
