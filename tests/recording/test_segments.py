"""Segments and their index: whatever a crash left, the same entries, and no more bytes read than needed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_recorder import a_frame, a_group, an_episode, record

from tapforge_trainer.recording.frames import FrameStore
from tapforge_trainer.recording.lines import encode_episode, encode_group, encode_step
from tapforge_trainer.recording.reader import RECORDS, Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.segments import open_for_appending
from tapforge_trainer.records import EpisodeRecord, GroupRecord


def small(folder: Path, groups: int = 6) -> list[GroupRecord]:
    """A recording of several segments."""
    recorder = Recorder(folder, segment_bytes=2000)
    written = []
    for number in range(groups):
        members = [an_episode(number, m) for m in range(2)]
        for episode, frames in members:
            recorder.episode(episode, frames, {f"tree {number}": "<a/>", "same": "<b/>"})
        written.append(a_group(number, *(e for e, _ in members)))
        recorder.group(written[-1])
    recorder.close()
    return written


def names(groups: list[GroupRecord]) -> list[str]:
    return [e.id for g in groups for e in g.episodes]


def test_a_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    written = small(tmp_path)
    assert len(RECORDS.numbers(tmp_path)) >= 3
    recording = Recording(tmp_path)
    assert list(recording.groups()) == written
    assert [e.id for e in recording.episodes()] == names(written)
    assert recording.dropped is None


def test_going_on_appends_to_the_newest_segment(tmp_path: Path) -> None:
    written = small(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("rollout-*.jsonl")}
    recorder = Recorder(tmp_path)
    more, frames = an_episode(9, 0)
    recorder.episode(more, frames)
    recorder.close()
    changed = [path for path, data in before.items() if path.read_bytes() != data]
    assert changed == [RECORDS.path(tmp_path, RECORDS.numbers(tmp_path)[-1])]
    assert changed[0].read_bytes().startswith(before[changed[0]])
    assert [e.id for e in Recording(tmp_path).episodes()] == [*names(written), more.id]


def test_each_segment_has_the_ui_trees_that_its_steps_name(tmp_path: Path) -> None:
    small(tmp_path)
    for number in RECORDS.numbers(tmp_path):
        kinds = [json.loads(line) for line in RECORDS.path(tmp_path, number).read_bytes().splitlines()]
        trees = [line["sha256"] for line in kinds if line["kind"] == "ui_tree"]
        assert len(trees) == len(set(trees))
        assert "same" in trees or not any(line["kind"] == "step" for line in kinds)
    assert len(list(Recording(tmp_path).ui_trees())) == 7


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of a segment."""
    seen, real = list[int](), os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        data = real(file, size, offset)
        seen.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", pread)
    return seen


def test_an_episode_is_found_by_its_bytes_alone(tmp_path: Path, reads: list[int]) -> None:
    written = small(tmp_path)
    by_name = {e.id: e for g in written for e in g.episodes}
    wanted = ["g0.1.0", "g5.0.0", "of another run"]
    entries = [e for n in RECORDS.numbers(tmp_path) for e in RECORDS.entries(tmp_path, n) if e.name in wanted]
    reads.clear()
    assert Recording(tmp_path).find(wanted) == {name: by_name[name] for name in wanted[:2]}
    assert sorted(reads) == sorted(entry.length for entry in entries)
    assert len(reads) == 2


def test_the_newest_segments_are_looked_through_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = small(tmp_path)
    last = written[-1].episodes[-1]
    (tmp_path / "rollout-000001.index").unlink()
    RECORDS.path(tmp_path, 1).write_bytes(b"broken\n")
    assert Recording(tmp_path).find([last.id]) == {last.id: last}
    with pytest.raises(RecordingError, match="rollout-000001.jsonl: broken record"):
        Recording(tmp_path).find(["g0.0.0"])


def _states(index: bytes) -> dict[str, bytes | None]:
    lines = index.splitlines(keepends=True)
    other = lines[0].replace(b'"offset":0', b'"offset":7')
    return {
        "missing": None,
        "empty": b"",
        "behind": b"".join(lines[:-2]),
        "torn": index[:-5],
        "of zeros": b"".join(lines[:-1]) + bytes(len(lines[-1])),
        "not JSON": b"".join(lines[:-1]) + b"{broken\n",
        "not an entry": b"".join(lines[:-1]) + b"[1]\n",
        "with a gap": b"".join([lines[0], *lines[2:]]),
        "shifted": b"".join([other, *lines[1:]]),
        "ahead": index + b'{"kind":"episode","name":"x","offset":%d,"length":99}\n' % json_end(lines[-1]),
        "of another segment": index.replace(b'"name":"g', b'"name":"h'),
    }


def json_end(line: bytes) -> int:
    entry = json.loads(line)
    return entry["offset"] + entry["length"]


STATES = list(_states(b'{"offset":0,"length":1}\n' * 3))


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("state", STATES)
def test_whatever_became_of_the_index_the_same_is_found(tmp_path: Path, state: str, which: int) -> None:
    written = small(tmp_path)
    by_name = {e.id: e for g in written for e in g.episodes}
    number = RECORDS.numbers(tmp_path)[which]
    index = RECORDS.index(tmp_path, number)
    whole, entries = index.read_bytes(), RECORDS.entries(tmp_path, number)
    broken = _states(whole)[state]
    index.unlink() if broken is None else index.write_bytes(broken)
    if state != "of another segment":  # in which nobody would look for these
        assert Recording(tmp_path).find(by_name) == by_name
        recorder = Recorder(tmp_path)
        more, frames = an_episode(9, 0)
        recorder.episode(more, frames)
        recorder.close()
        assert RECORDS.entries(tmp_path, number)[: len(entries)] == entries
        found = Recording(tmp_path).find([*by_name, more.id])
        assert found == {**by_name, more.id: more}
    else:
        assert Recording(tmp_path).find(["h0.0.0", *by_name]).items() <= by_name.items()


def test_an_index_that_names_other_bytes_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = record(tmp_path)
    index = RECORDS.index(tmp_path, 1)
    swapped = {"g0.0.0": "g0.1.0", "g0.1.0": "g0.0.0"}
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    text = [json.dumps({**line, "name": swapped.get(line["name"], line["name"])}) for line in lines]
    index.write_text("".join(f"{line}\n" for line in text))
    assert Recording(tmp_path).find(["g0.0.0"]) == {"g0.0.0": written[0].episodes[0]}
    assert "rollout-000001.jsonl" in caplog.text


def test_a_crash_at_any_byte_of_the_newest_segment(tmp_path: Path) -> None:
    """Its index may be ahead of what is left of it."""
    written = small(tmp_path / "whole", groups=3)
    number = RECORDS.numbers(tmp_path / "whole")[-1]
    data, index = RECORDS.path(tmp_path / "whole", number).read_bytes(), RECORDS.index(tmp_path / "whole", number)
    before = [e for n in range(1, number) for e in RECORDS.entries(tmp_path / "whole", n)]
    own = RECORDS.entries(tmp_path / "whole", number)
    for cut in sorted({*range(0, len(data), 61), *(e.end + d for e in own for d in (-1, 0)), len(data)}):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        for path in (tmp_path / "whole").glob("rollout-*"):
            (folder / path.name).write_bytes(path.read_bytes())
        RECORDS.path(folder, number).write_bytes(data[:cut])
        (folder / index.name).write_bytes(index.read_bytes())
        left = [e.name for e in (*before, *(e for e in own if e.end <= cut)) if e.kind == "episode"]
        assert list(Recording(folder).find(names(written))) == list(dict.fromkeys(reversed_by_segment(folder, left)))
        recorder = Recorder(folder)
        more, frames = an_episode(9, 0)
        recorder.episode(more, frames)
        recorder.close()
        recording = Recording(folder)
        assert [e.id for e in recording.episodes()] == [*left, more.id]
        assert recording.dropped is None
        assert set(recording.find([*names(written), more.id])) == {*left, more.id}


def reversed_by_segment(folder: Path, left: list[str]) -> list[str]:
    """In the order in which `find` looks."""
    return [
        entry.name
        for number in reversed(RECORDS.numbers(folder))
        for entry in RECORDS.entries(folder, number)
        if entry.name in left
    ]


def test_pages_that_never_reached_the_disk_are_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a power failure a file may have its length and, in what was not flushed, zeros."""
    written = record(tmp_path, groups=1)
    path = tmp_path / "rollout-000001.jsonl"
    path.write_bytes(
        path.read_bytes() + bytes(4096) + b'"x"}\n' + encode_group(a_group(7, written[0].episodes[0]), None)
    )
    recording = Recording(tmp_path)
    assert list(recording.groups()) == written
    assert "the last line was cut off" in (recording.dropped or "")
    Recorder(tmp_path).close()
    assert "dropped" in caplog.text
    assert list(Recording(tmp_path).groups()) == written and b"\0" not in path.read_bytes()


# --- when it is on disk -----------------------------------------------------------------------------------------------


def test_a_batch_takes_one_fsync_of_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    synced, real = list[str](), os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    for number in range(5):
        episode, _ = an_episode(number, 0)
        recorder.episode(episode, {})
        recorder.group(a_group(number, episode))
    assert synced == []
    assert not RECORDS.index(tmp_path, 1).exists(), "the index names only what is on disk"
    recorder.sync()
    assert synced == [str(tmp_path / "rollout-000001.jsonl"), str(tmp_path)]
    assert len(RECORDS.index(tmp_path, 1).read_bytes().splitlines()) == 10
    synced.clear()
    recorder.sync()
    assert synced == []
    recorder.close()


def test_a_segment_is_on_disk_before_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = dict[str, int](), os.fsync

    def fsync(file: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    recorder = Recorder(tmp_path, segment_bytes=1)
    for number in range(3):
        episode, _ = an_episode(number, 0)
        recorder.episode(episode, {})
        closed = [str(RECORDS.path(tmp_path, n)) for n in RECORDS.numbers(tmp_path)[:-1]]
        assert {path: synced.get(path) for path in closed} == {path: os.stat(path).st_size for path in closed}
    recorder.close()


# --- recordings of earlier versions -----------------------------------------------------------------------------------


def of_an_earlier_version(folder: Path) -> list[EpisodeRecord]:
    """One file without an index, a file per frame."""
    folder.mkdir(exist_ok=True)
    episodes = []
    with (folder / "rollout.jsonl").open("wb") as file:
        for number in range(2):
            episode, _ = an_episode(number, 0)
            file.writelines([*map(encode_step, episode.steps), encode_episode(episode)])
            file.write(encode_group(a_group(number, episode), None))
            episodes.append(episode)
    for number in (0, 1, 2, 10, 11, 12):
        frame = a_frame(number)
        place = folder / "frames" / frame.name[:2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{frame.name}.png").write_bytes(frame.data)
    return episodes


def test_a_recording_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    episodes = of_an_earlier_version(tmp_path)
    recording = Recording(tmp_path)
    assert recording.exists and not Recording(tmp_path / "nowhere").exists
    assert list(recording.episodes()) == episodes
    assert [g.episodes for g in recording.groups()] == [(e,) for e in episodes]
    assert recording.find(["g1.0.0"]) == {"g1.0.0": episodes[1]}
    assert FrameStore(tmp_path / "frames").get(a_frame(11).name) == a_frame(11).data


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_a_run_of_an_earlier_version_is_gone_on_with(tmp_path: Path, segment_bytes: int) -> None:
    episodes = of_an_earlier_version(tmp_path)
    with (tmp_path / "rollout.jsonl").open("ab") as file:
        file.write(encode_step(episodes[0].steps[0]) + b'{"kind"')
    recorder = Recorder(tmp_path, segment_bytes=segment_bytes)
    more, frames = an_episode(7, 0)
    recorder.episode(more, frames)
    recorder.close()
    recording = Recording(tmp_path)
    assert list(recording.episodes()) == [*episodes, more]
    assert recording.find([more.id, "g0.0.0"]) == {more.id: more, "g0.0.0": episodes[0]}
    assert RECORDS.numbers(tmp_path) == ([0, 1] if segment_bytes == 1 else [0])


def test_which_files_a_writer_may_hold_open() -> None:
    names = ["rollout-000009.jsonl", "rollout-000010.jsonl", "rollout.jsonl", "rollout-000009.index", "events.jsonl"]
    assert open_for_appending(names) == {"rollout-000010.jsonl", "rollout-000009.index", "events.jsonl"}
