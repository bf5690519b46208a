"""The recording: equal records back, nothing lost by a crash at any byte, a full disk said by name."""

import errno
import hashlib
import itertools
import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.recording.frames import FrameWriter
from tapforge_trainer.recording.lines import (
    collapse,
    decode_episode,
    decode_step,
    encode_episode,
    encode_step,
    pack,
    unpack,
)
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRecord, EpisodeRewards, Generation, GroupRecord, StepRecord

FILE = "rollout-000001.jsonl"

EXPANDED = Path(__file__).parent / "recorded" / "expanded_prompts"
tokens = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1)), max_size=30).map(tuple)
floats = st.floats(allow_nan=False, width=64)
#: what engines give: 32 bits
logprobs = st.floats(max_value=0, allow_nan=False, width=32)
jsons = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), floats, st.integers()), max_size=3)
texts = st.text(max_size=20)


@st.composite
def steps(draw):
    ids = draw(tokens)
    return StepRecord(
        episode=draw(texts),
        index=draw(st.integers(0, 100)),
        frames=tuple(draw(st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=3))),
        state_key=draw(st.none() | texts),
        app=draw(st.none() | texts),
        generation=Generation(
            draw(tokens),
            ids,
            tuple(draw(logprobs) for _ in ids),
            tuple(draw(st.integers(0, 3)) for _ in ids),
            draw(st.sampled_from(["stop", "length", "abort"])),
            draw(st.integers(0, 10_000)),
        ),
        text=draw(texts),
        action=draw(st.none() | jsons),
        parse_error=draw(st.none() | texts),
        reward=draw(floats),
        note=draw(texts),
        seconds_model=draw(floats),
        seconds_environment=draw(floats),
        window=draw(st.none() | texts),
        ui_tree=draw(st.none() | texts),
        ui_key=draw(st.none() | texts),
        frame_key=draw(st.none() | texts),
    )


def bits(step: StepRecord) -> list[bytes]:
    return [struct.pack("<d", x) for x in (*step.generation.logprobs, step.reward, step.seconds_model)]


@settings(max_examples=150, deadline=None)
@given(steps())
def test_a_step_survives_bit_for_bit(step):
    line = encode_step(step)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    back = decode_step(json.loads(line))
    assert back == step
    assert bits(back) == bits(step)


@given(tokens)
def test_runs_of_tokens_are_packed_and_unpacked(ids):
    packed = pack(ids)
    assert unpack(packed) == ids
    assert len(packed) <= len(ids)
    assert len(pack((7,) * 1000)) == 1


@settings(deadline=None)
@given(st.builds(Task, suite=texts, template=texts, params=st.dictionaries(texts, texts, max_size=2)), floats, floats)
def test_an_episode_survives(task, score, started):
    episode = EpisodeRecord(
        "e", "g", task, 1, "slot", 2**62, Reason.DONE, Outcome.SUCCESS, score, "märz", (), started, math.inf
    )
    line = json.loads(encode_episode(episode))
    assert decode_episode(line, ()) == episode
    assert decode_episode({**line, "later": 1, "task": {**line["task"], "later": 1}}, ()) == episode


# --- whole recordings -------------------------------------------------------------------------------------------------


def a_frame(number: int) -> FittedFrame:
    return FittedFrame.of(np.full((2, 3, 3), divmod(number, 256)[1], np.uint8) + np.uint8(number // 256))


def an_episode(group: int, member: int, length: int = 3) -> tuple[EpisodeRecord, dict[str, FittedFrame]]:
    name = f"g{group}.{member}.0"
    frames = [a_frame(10 * group + i) for i in range(length)]
    own = tuple(
        StepRecord(
            name,
            i,
            (frames[i].name,),
            "key",
            None,
            Generation((1, 2, 2, 2, 2, 2), (3, 4), (-0.1, -1e-30), (0, 0), "stop", 9),
            "text",
            {"type": "home"},
            None,
            0.0,
            "",
            0.1,
            0.2,
        )
        for i in range(length)
    )
    task = Task(suite="s", template="t", seed=group)
    record = EpisodeRecord(name, f"g{group}", task, 0, "slot", 5, Reason.DONE, Outcome.SUCCESS, 1.0, "", own, 1.0, 2.0)
    return record, {f.name: f for f in frames}


def a_group(group: int, *episodes: EpisodeRecord) -> GroupRecord:
    return GroupRecord(f"g{group}", group, episodes[0].task, 0, episodes)


def steps_of(*groups: GroupRecord) -> list[StepRecord]:
    return [step for group in groups for episode in group.episodes for step in episode.steps]


def record(folder, groups: int = 2) -> list[GroupRecord]:
    recorder = Recorder(folder)
    written = []
    for number in range(groups):
        members = [an_episode(number, m) for m in range(2)]
        for episode, frames in members:
            recorder.episode(episode, frames)
        written.append(a_group(number, *(e for e, _ in members)))
        recorder.group(written[-1])
    recorder.close()
    return written


def test_lines_of_earlier_versions_are_read():
    record, _ = an_episode(0, 0)
    line = json.loads(encode_step(record.steps[0]))
    assert not line.keys() & {"window", "ui_tree", "ui_key", "frame_key"}  # what they didn't know
    assert decode_step(line) == record.steps[0]


def test_prompts_of_earlier_versions_are_read_with_one_placeholder_per_frame():
    """Their recording (written by that version) holds one per visual token, among other runs of equal tokens."""
    recording = Recording(EXPANDED)
    lines = [line for line in map(json.loads, (EXPANDED / "rollout.jsonl").open()) if line["kind"] == "step"]
    image, sizes = 369, {}
    for line, step in zip(lines, (s for e in recording.episodes() for s in e.steps), strict=True):
        expanded, found = unpack(line["prompt_ids"]), step.generation
        assert found.prompt_length == len(expanded) > len(found.prompt_ids)
        assert found.prompt_ids.count(image) == len(step.frames)
        counts = [len(list(run)) for token, run in itertools.groupby(expanded) if token == image]
        assert all(sizes.setdefault(name, count) == count for name, count in zip(step.frames, counts, strict=True))
        repeats = iter(counts)
        again = [t for token in found.prompt_ids for t in [token] * (next(repeats) if token == image else 1)]
        assert tuple(again) == expanded
        assert decode_step(json.loads(encode_step(step))) == step
        assert tuple(found.logprobs) == tuple(line["logprobs"])
    assert sizes and len(lines) == 6
    (group,) = recording.groups()
    samples = build_batch([group], BatchRules(estimator="grpo")).samples
    assert [s.length for s in samples] == [len(unpack(line["prompt_ids"])) + len(line["ids"]) for line in lines]


def test_a_prompt_in_which_nothing_can_stand_for_its_frames_is_a_broken_record():
    with pytest.raises(ValueError, match="no token stands for 3 frames"):
        collapse((1, 2, 2, 2, 3), 3)
    assert collapse((1, 2, 2, 2, 3), 0) == (1, 2, 2, 2, 3)


def test_ui_trees_are_written_once_and_before_the_steps_that_name_them(tmp_path):
    tree = "<hierarchy>" + "<node text='Märchen'/>" * 1000 + "</hierarchy>"
    name = hashlib.sha256(tree.encode()).hexdigest()
    recorder = Recorder(tmp_path)
    written = []
    for member in range(2):
        episode, frames = an_episode(0, member)
        episode = replace(episode, steps=tuple(replace(s, ui_tree=name) for s in episode.steps))
        recorder.episode(episode, frames, {name: tree})
        written.append(episode)
    recorder.close()
    recording = Recording(tmp_path)
    assert list(recording.ui_trees()) == [(name, tree)]
    assert list(recording.episodes()) == written
    assert (tmp_path / FILE).stat().st_size < len(tree)


def test_a_cut_takes_ui_trees_with_their_steps(tmp_path):
    record(tmp_path, groups=1)
    path = tmp_path / FILE
    whole = path.read_bytes()
    episode, frames = an_episode(1, 0)
    recorder = Recorder(tmp_path)
    recorder.episode(episode, frames, {"a": "tree", "b": "another"})
    recorder.close()
    added = path.read_bytes()[len(whole) :]
    assert added.startswith(b'{"kind":"ui_tree"')
    for end in range(len(added)):
        path.write_bytes(whole + added[:end])
        Recorder(tmp_path).close()
        assert path.read_bytes() == whole
        assert list(Recording(tmp_path).ui_trees()) == []


def test_what_was_written_is_read(tmp_path):
    written = record(tmp_path)
    recording = Recording(tmp_path)
    assert list(recording.groups()) == written
    assert list(recording.episodes()) == [e for g in written for e in g.episodes]
    assert recording.dropped is None
    assert recording.frames.get(a_frame(11).name) == a_frame(11).data


def test_a_group_that_was_written_twice_is_read_once(tmp_path):
    written = record(tmp_path)
    recorder = Recorder(tmp_path)
    recorder.group(written[0])
    other = a_group(0, written[0].episodes[0])
    recorder.group(other)
    recorder.close()
    assert list(Recording(tmp_path).groups()) == [*written, other]


def test_dropped_groups_are_kept_apart(tmp_path):
    recorder = Recorder(tmp_path)
    episode, frames = an_episode(0, 0)
    recorder.episode(episode, frames)
    recorder.group(a_group(0, episode), "too_few_valid")
    recorder.close()
    assert list(Recording(tmp_path).groups()) == []
    assert len(list(Recording(tmp_path).groups(dropped=True))) == 1
    assert list(Recording(tmp_path).episodes()) == [episode]


def test_updates_took_what_was_settled_last_at_each_place_in_the_order(tmp_path):
    """Three groups; a run that was resumed plays the second again under another name, and the third is dropped."""
    first, second, third = record(tmp_path, groups=3)
    recorder = Recorder(tmp_path)
    episode, frames = an_episode(7, 0)
    again = replace(a_group(7, episode), order=second.order)
    recorder.episode(episode, frames)
    recorder.group(again)
    recorder.group(third, "uniform")
    recorder.close()
    assert Recording(tmp_path).settled() == [first, again]
    bare = steps_of(*Recording(tmp_path).settled(prompts=False))
    assert bare == [replace(s, generation=replace(s.generation, prompt_ids=())) for s in steps_of(first, again)]
    assert [group.id for group in Recording(tmp_path).groups()] == [first.id, second.id, third.id, again.id]


def test_a_crash_at_any_byte_loses_only_what_was_unfinished(tmp_path):
    written = record(tmp_path / "whole", groups=2)
    data = (tmp_path / "whole" / FILE).read_bytes()
    episodes = [e for g in written for e in g.episodes]
    line_ends = [i + d for i, byte in enumerate(data) if byte == 10 for d in (0, 1, 2)]
    for cut in sorted({*range(0, len(data), 97), *line_ends}):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / FILE).write_bytes(data[:cut])
        finished = sum(b'"kind":"episode"' in line for line in data[: data[:cut].rfind(b"\n") + 1].splitlines())
        recording = Recording(folder)
        kept = list(recording.episodes())
        assert kept == episodes[:finished]
        # Going on writing: the unfinished end is gone, and what follows can be read.
        recorder = Recorder(folder)
        more, frames = an_episode(9, 0)
        recorder.episode(more, frames)
        recorder.close()
        after = Recording(folder)
        assert list(after.episodes()) == [*kept, more]
        assert after.dropped is None


def test_what_was_cut_off_is_said(tmp_path, caplog):
    record(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-9])
    recording = Recording(tmp_path)
    assert len(list(recording.groups())) == 1
    assert "the last line was cut off" in recording.dropped
    caplog.clear()
    Recorder(tmp_path).close()
    assert str(path) in caplog.text and "dropped" in caplog.text


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    record(tmp_path)
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[2:]]))
    with pytest.raises(RecordingError, match=f"{FILE}:3: not JSON"):
        list(Recording(tmp_path).episodes())
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(RecordingError, match=f"{FILE}:3: broken record: .*2 steps, its line says 3"):
        list(Recording(tmp_path).episodes())
    with pytest.raises(RecordingError, match="can't be read"):
        list(Recording(tmp_path / "nowhere").episodes())


def test_a_full_disk_names_the_path_and_loses_nothing(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    kept, frames = an_episode(0, 0)
    recorder.episode(kept, frames)
    real, room = os.pwrite, 100

    def pwrite(file, data, offset):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, bytes(data[:room]), offset)
        room -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(
        RecordingError, match="no space left for .*rollout-000001.jsonl.*nothing recorded so far is lost"
    ):
        recorder.episode(*an_episode(0, 1))
    monkeypatch.undo()
    recorder.close()
    recording = Recording(tmp_path)
    assert list(recording.episodes()) == [kept] and recording.dropped is None


def test_a_disk_that_is_full_at_a_frame(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    kept, frames = an_episode(0, 0)
    recorder.episode(kept, frames)
    monkeypatch.setattr(FrameWriter, "put", lambda *_: (_ for _ in ()).throw(OSError(errno.EDQUOT, "quota")))
    with pytest.raises(RecordingError, match="no space left for .*/frames"):
        recorder.episode(*an_episode(1, 0))
    monkeypatch.undo()
    recorder.close()
    assert list(Recording(tmp_path).episodes()) == [kept]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(RecordingError, match="rollout-000001.jsonl"):
        recorder = Recorder(tmp_path)
        recorder.episode(*an_episode(0, 0))


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="can't be written"):
        Recorder(tmp_path / "file" / "folder")


# --- rewards that come later ------------------------------------------------------------------------------------------


def awaiting(group: int, member: int) -> tuple[EpisodeRecord, dict[str, FittedFrame]]:
    episode, frames = an_episode(group, member)
    last = a_frame(700 + group)
    return replace(episode, last_frame=last.name, awaits_rewards=True, outcome=None), {**frames, last.name: last}


REWARDS = EpisodeRewards(
    {"judge": (0.0, None, 0.1 + 0.2)},
    Outcome.FAILURE,
    Reason.DONE,
    Outcome.SUCCESS,
    {"judge": ("", "", "the clock is not open")},
    "",
    {"prompt_tokens": 12},
)


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20], ids=["in a later segment", "in the same segment"])
def test_rewards_that_were_written_later_are_read_with_their_episode(tmp_path, segment_bytes):
    recorder = Recorder(tmp_path, segment_bytes=segment_bytes)
    (first, frames), (second, more) = awaiting(0, 0), awaiting(0, 1)
    recorder.episode(first, frames)
    recorder.episode(second, more)
    recorder.rewards(first.id, REWARDS)
    judged = first.rewarded(REWARDS)
    recorder.group(a_group(0, judged))
    recorder.close()

    read = Recording(tmp_path)
    assert list(read.episodes()) == [judged, second]
    assert next(read.groups()).episodes == (judged,)
    assert read.find([first.id, second.id]) == {first.id: judged, second.id: second}
    assert read.is_complete(judged) and judged.last_frame in judged.frames
    assert (judged.valid, second.valid) == (True, False)


def test_a_lost_index_is_made_again_with_rewards(tmp_path):
    recorder = Recorder(tmp_path)
    episode, frames = awaiting(0, 0)
    recorder.episode(episode, frames)
    recorder.rewards(episode.id, REWARDS)
    recorder.close()
    for index in tmp_path.glob("*.index"):
        index.unlink()
    assert Recording(tmp_path).find([episode.id]) == {episode.id: episode.rewarded(REWARDS)}


def test_an_episode_of_an_earlier_version_awaits_nothing(tmp_path):
    episode, _ = an_episode(0, 0)
    line = json.loads(encode_episode(episode))
    assert not {"last_frame", "awaits_rewards", "rewards"} & line.keys()
    assert decode_episode(line, episode.steps).valid
