"""Frames in packs: what is read is what was recorded, one fsync for many, and what is bounded stays bounded."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_recorder import a_frame

from tapforge_trainer.frames.frame import FittedFrame, FrameError
from tapforge_trainer.recording import packs
from tapforge_trainer.recording.frames import FrameStore, FrameWriter, NotRecorded
from tapforge_trainer.recording.packs import PACKS, PackReader, PackWriter
from tapforge_trainer.recording.retention import Retention


def screen(number: int, width: int = 40, height: int = 60) -> FittedFrame:
    """A frame that doesn't compress away."""
    return FittedFrame.of(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def write(folder: Path, *frames: FittedFrame, retention: Retention | None = None, pack_bytes: int = 1 << 20) -> None:
    writer = FrameWriter(folder, retention or Retention(), pack_bytes)
    for frame in frames:
        writer.put(frame)
    writer.sync()
    writer.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    frames = [screen(n) for n in range(5)]
    write(tmp_path, *frames)
    store = FrameStore(tmp_path)
    for frame in frames:
        assert store.frame(frame.name) == frame
        assert store.get(frame.name) == frame.data
        assert store.has(frame.name)
    with pytest.raises(FrameError, match="is not in"):
        store.get("0" * 64)
    assert not store.has("0" * 64)


def test_a_pack_is_a_tar_archive(tmp_path: Path) -> None:
    frames = [screen(n) for n in range(3)]
    write(tmp_path, *frames)
    with tarfile.open(tmp_path / "pack-000001.tar") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert members == {f"{frame.name}.png": frame.data for frame in frames}


def test_a_frame_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, screen(1), screen(2), screen(1))
    write(tmp_path, screen(2), screen(3))
    held = [[e.name for e in PACKS.entries(tmp_path, number)] for number in PACKS.numbers(tmp_path)]
    assert held == [[screen(1).name, screen(2).name], [screen(3).name]]


def test_names_in_memory_are_those_of_the_newest_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "WINDOW", 3)
    writer = PackWriter(tmp_path, 1)  # a pack for each
    for number in range(6):
        writer.put(screen(number).name, screen(number).data, "png")
    assert [writer.knows(screen(n).name) for n in range(6)] == [False, False, False, True, True, True]
    writer.close()
    again = PackWriter(tmp_path, 1)
    assert [again.knows(screen(n).name) for n in range(6)] == [False, False, False, True, True, True]
    again.close()


def test_many_frames_take_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = list[str](), os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, *(a_frame(n) for n in range(200)))
    assert synced == [str(tmp_path / "pack-000001.tar"), str(tmp_path)]


def test_a_reader_finds_what_is_written_meanwhile(tmp_path: Path) -> None:
    writer, store = FrameWriter(tmp_path, Retention(), 10_000), FrameStore(tmp_path)
    for number in range(10):
        frame = screen(number)
        assert not store.has(frame.name)
        writer.put(frame)
        if number % 3 == 0:
            writer.sync()
        assert store.frame(frame.name) == frame, "whether the index names it yet or not"
    writer.close()
    assert len(PACKS.numbers(tmp_path)) > 2


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_at_any_byte_loses_the_frames_after_it(tmp_path: Path) -> None:
    frames = [screen(n, 4, 4) for n in range(4)]
    whole = tmp_path / "whole"
    write(whole, *frames)
    data, index = (whole / "pack-000001.tar").read_bytes(), (whole / "pack-000001.index").read_bytes()
    ends = [entry.end for entry in PACKS.entries(whole, 1)]
    for cut in sorted({*range(0, len(data), 101), *ends, *(end - 1 for end in ends)}):
        for name, left in (("ahead", index), ("missing", None), ("torn", index[:-20]), ("behind", index[:150])):
            folder = tmp_path / f"{cut}-{name}"
            folder.mkdir()
            (folder / "pack-000001.tar").write_bytes(data[:cut])
            if left is not None:
                (folder / "pack-000001.index").write_bytes(left)
            there = [frame for frame, end in zip(frames, ends, strict=True) if end <= cut]
            store = FrameStore(folder)
            assert [frame for frame in frames if store.has(frame.name)] == there
            write(folder, *frames)
            assert [store.frame(frame.name) for frame in frames] == frames
            shutil.rmtree(folder)


def test_a_frame_whose_pages_never_reached_the_disk_is_written_again(tmp_path: Path) -> None:
    """After a power failure: the file has its length, the index was not flushed, and some pages are zeros."""
    frames = [screen(n, 64, 64) for n in range(3)]
    write(tmp_path, *frames)
    middle = PACKS.entries(tmp_path, 1)[1]
    with (tmp_path / "pack-000001.tar").open("r+b") as file:
        file.seek(middle.offset + 2048)
        file.write(bytes(4096))
    (tmp_path / "pack-000001.index").unlink()
    store = FrameStore(tmp_path)
    assert [store.has(frame.name) for frame in frames] == [True, False, True]
    write(tmp_path, *frames)
    assert [store.frame(frame.name) for frame in frames] == frames


def test_a_damaged_frame_is_an_error_that_names_its_pack(tmp_path: Path) -> None:
    one, other = screen(1), screen(2)
    writer = PackWriter(tmp_path)
    writer.put(one.name, other.data, "png")
    writer.sync()
    with pytest.raises(FrameError, match=r"pack-000001.tar: .*damaged"):
        FrameStore(tmp_path).get(one.name)
    writer.close()


def test_a_later_writer_does_not_append_to_what_an_earlier_one_holds_open(tmp_path: Path) -> None:
    """It may belong to a former attempt of the run, and live on."""
    former = FrameWriter(tmp_path, Retention())
    former.put(screen(1))
    later = FrameWriter(tmp_path, Retention())
    later.put(screen(2))
    former.put(screen(3))
    later.put(screen(4))
    former.sync()
    later.sync()
    store = FrameStore(tmp_path)
    assert [store.frame(screen(n).name) for n in (1, 2, 4)] == [screen(n) for n in (1, 2, 4)]
    former.close()
    later.close()


# --- what the spec says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "ending"), [("webp", "webp"), ("jpeg", "jpg")])
def test_lossy_frames_can_be_looked_at_and_not_learned_from(encoding: str, ending: str, tmp_path: Path) -> None:
    frame = screen(1, 200, 300)
    write(tmp_path, frame, retention=Retention(encoding=encoding, quality=50))  # type: ignore[arg-type]
    store = FrameStore(tmp_path)
    with Image.open(io.BytesIO(store.get(frame.name))) as image:
        assert (image.size, image.format) == ((200, 300), encoding.upper())
    assert len(store.get(frame.name)) < len(frame.data) / 2
    with pytest.raises(FrameError, match=f"recorded as {ending}, lossily.*recording.encoding: png"):
        store.frame(frame.name)
    assert not store.has(frame.name), "not as the model saw it"


@pytest.mark.parametrize(
    ("retention", "words"),
    [
        (Retention("none"), "No screens were recorded .*frames: none"),
        (Retention("sampled", share=0.25), "Only the screens of 25% of the groups were recorded"),
    ],
)
def test_what_the_spec_left_out_is_said_so(retention: Retention, words: str, tmp_path: Path) -> None:
    write(tmp_path, retention=retention)
    with pytest.raises(NotRecorded, match=words):
        FrameStore(tmp_path).get(screen(1).name)


def test_what_was_removed_is_said_so(tmp_path: Path) -> None:
    retention = Retention(max_bytes=2**30)
    writer = FrameWriter(tmp_path, retention, 1)
    for number in range(3):
        writer.put(screen(number))
    writer.sync()
    assert FrameStore(tmp_path).lacks == ""
    assert writer.full_packs() == [1, 2]
    assert writer.drop(1, [])
    with pytest.raises(NotRecorded, match=r"oldest screens were removed at the recording's bound of 1 GiB"):
        FrameStore(tmp_path).get(screen(0).name)
    writer.close()


def test_of_a_pack_that_is_removed_the_spared_frames_are_kept(tmp_path: Path) -> None:
    writer, store = FrameWriter(tmp_path, Retention(), 30_000), FrameStore(tmp_path)
    frames = [screen(n) for n in range(12)]
    for frame in frames:
        writer.put(frame)
    writer.sync()
    first = [e.name for e in PACKS.entries(tmp_path, 1)]
    assert len(first) >= 3
    assert not writer.drop(1, first[:-1]), "most of it is spared: it stays"
    assert writer.drop(1, first[:1])
    assert PACKS.numbers(tmp_path)[0] == 2 and not (tmp_path / "pack-000001.index").exists()
    assert [FrameStore(tmp_path).has(name) for name in first] == [True] + [False] * (len(first) - 1)
    kept = next(frame for frame in frames if frame.name == first[0])
    assert store.frame(kept.name) == kept
    writer.put(frames[1])
    assert store.frame(frames[1].name) == frames[1], "what was removed can be written again"
    writer.close()


def test_a_reader_survives_the_removal_of_a_pack(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path, 1)
    for number in range(3):
        writer.put(f"{number}", b"x", "png")
    writer.sync()
    reader = PackReader(tmp_path)
    assert reader.read("0") is not None
    writer.drop(1, [])
    assert reader.read("0") is None and reader.read("2") is not None
    writer.close()


# --- earlier versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ending"), [("png", "png"), ("jpeg", "jpg"), ("webp", "webp")])
def test_a_frame_of_an_earlier_version_is_named_by_its_file_and_readable(
    kind: str, ending: str, tmp_path: Path
) -> None:
    out = io.BytesIO()
    Image.new("RGB", (9, 7), "teal").save(out, kind)
    name = hashlib.sha256(out.getvalue()).hexdigest()
    path = tmp_path / name[:2] / f"{name}.{ending}"
    path.parent.mkdir(parents=True)
    path.write_bytes(out.getvalue())
    store = FrameStore(tmp_path)
    frame = store.frame(name)
    assert frame == FittedFrame(name, out.getvalue(), 9, 7)
    assert frame.pixels().shape == (7, 9, 3)
    assert store.get(name) == out.getvalue() and store.has(name)
    path.write_bytes(out.getvalue()[:-1])
    with pytest.raises(FrameError, match=f"{name}.{ending}: .*(damaged|decoded)"):
        store.frame(name)
