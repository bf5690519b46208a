"""What a data set from elsewhere may hold: nothing of it is read outside its folder, breaks off a conversion or fills
the memory, and nothing that lies there is removed."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from PIL import Image
from tests.data.test_data_sets import aguvis_row, image, made

from tapforge_envs.protocol import Action, Tap, Task
from tapforge_trainer.cli.main import cli
from tapforge_trainer.data import rows as row_files
from tapforge_trainer.data.episodes import DataError, Episode, Provenance, Step
from tapforge_trainer.data.folder import ABOUT, EPISODES, SCREENS, UNFINISHED, DataFolder, DataWriter, Rejected
from tapforge_trainer.data.images import ending_of
from tapforge_trainer.data.rows import json_rows
from tapforge_trainer.data.sets import export
from tapforge_trainer.run.shutdown import failure_of, message_of

CLICK = [{"action": "click", "coordinate": [5, 5]}]


def rejected(data: DataFolder) -> dict[str, int]:
    return {reason: one["rows"] for reason, one in data.about["rejected"].items()}


def row_of(source: str, name: str) -> Mapping[str, Any]:
    if source == "verl":
        return {"instruction": f"see {name!r}", "images": [name], "actions": CLICK}
    if source == "screenspot":
        return {"instruction": f"see {name!r}", "img_filename": name, "bbox": [1, 2, 3, 4]}
    return aguvis_row(name, "mobile.home()", goal=f"see {name!r}")


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["aguvis", "screenspot", "verl"])
def test_rows_read_no_file_outside_their_folder(tmp_path: Path, source: str) -> None:
    (tmp_path / "secret.png").write_bytes(image(1))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "own.png").write_bytes(image(2))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    names = ["own.png", "../secret.png", str(tmp_path / "secret.png"), "link.png", "a\0b.png", "\ud800.png", "."]
    (folder / "rows.json").write_text("\n".join(json.dumps(row_of(source, name)) for name in names))
    data = made(source, folder / "rows.json", tmp_path / "out")
    assert len(data) == 1 and rejected(data) == {"image": 6}
    assert "outside" in data.about["rejected"]["image"]["first"]
    (folder / "rows.json").write_text(json.dumps(row_of(source, "secret.png")))
    assert len(made(source, folder / "rows.json", tmp_path / "other", images=str(tmp_path))) == 1


def bomb(side: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def saved(mode: str, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (20, 30)).save(out, kind, **options)
    return out.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved("RGB", "JPEG", exif=exif)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bomb(8000), "8000x8000 pixels is not a screen"),
        (bomb(64) + bytes(65 << 20), "64 MiB"),
        (turned(), "EXIF"),
        (image(1)[:3000], "not a whole image"),
        (saved("RGB", "BMP"), "not an image; PNG, JPEG and WebP"),
        (saved("RGB", "EPS"), "not an image; PNG, JPEG and WebP"),  # Pillow would start Ghostscript
    ],
)
def test_what_no_screen_is_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(DataError, match=why):
        ending_of(data)


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "1", "I;16"])
def test_screens_of_any_pixels_are_taken(mode: str) -> None:
    assert ending_of(saved(mode)) == "png"


# --- files of rows ----------------------------------------------------------------------------------------------------


def test_lines_of_other_encodings_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\n{"a": "\xe9"}\r\n\n{"a": 3}\n')
    first, second, third = json_rows(path)
    assert first == ("rows.jsonl line 1", {"a": "é"}) and third == ("rows.jsonl line 4", {"a": 3})
    assert second[0] == "rows.jsonl line 2" and isinstance(second[1], DataError)
    path.write_bytes(b'[{"a": "\xc3\xa9"}, {"a": "\xe9"}, {"a": 3}]')
    first, second, third = json_rows(path)
    assert first[1] == {"a": "é"} and isinstance(second[1], DataError) and third[1] == {"a": 3}
    path.write_bytes('[{"a": 1}]'.encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        list(json_rows(path))


def test_a_parquet_row_whose_text_is_no_text_is_counted(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"see", b"\xff", b"go"]).view(pyarrow.string())
    table = pyarrow.table({"instruction": texts, "images": [[image(1)]] * 3, "actions": [CLICK] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = made("verl", tmp_path / "rows.parquet", tmp_path / "set")
    assert len(data) == 2 and rejected(data) == {"row": 1}


def test_enormous_rows_are_counted_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_LONGEST", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": "x" * 5000}) + "\n" + json.dumps({"a": 2}) + "\n")
    (_, long), (name, value) = json_rows(path)
    assert isinstance(long, DataError) and (name, value) == ("rows.jsonl line 2", {"a": 2})


def test_items_of_a_list_come_whole_wherever_chunks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"a": "é" * 50}, [1, [2]], "x]", 12345678, None, True, {"a": {"b": []}}] * 20
    (tmp_path / "rows.json").write_text("  " + json.dumps(items, ensure_ascii=False, indent=1))
    for size in (1, 7, 1 << 20):
        monkeypatch.setattr(row_files, "_CHUNK", size)
        assert [value for _, value in json_rows(tmp_path / "rows.json")] == items


def test_numbers_that_are_none_and_shapes_of_others_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(1))
    spots = [
        {"img_filename": "a.png", "instruction": "x", "bbox": [value, 2, 3, 4]}
        for value in (float("nan"), float("inf"), 10**400, -(10**400))
    ]
    (tmp_path / "spots.json").write_text(json.dumps(spots))
    with pytest.raises(DataError, match="4 of 4"):
        made("screenspot", tmp_path / "spots.json", tmp_path / "spots", max_bad=0.5)
    rows = [
        {"instruction": "x", "images": ["a.png"], "actions": [{"action": "click", "coordinate": [value, 5]}]}
        for value in (float("nan"), 10**400, 5)
    ]
    rows += [{"extra_info": other, "images": ["a.png"]} for other in ("text", [1])]
    rows += [{"instruction": "\ud800", "images": ["a.png"], "actions": CLICK}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="5 of 6"):
        made("verl", tmp_path / "rows.jsonl", tmp_path / "few", max_bad=0.5)
    assert rejected(made("verl", tmp_path / "rows.jsonl", tmp_path / "rows")) == {"action": 2, "row": 3}


# --- folders ----------------------------------------------------------------------------------------------------------


def test_what_lies_in_a_folder_is_never_removed(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    (own / SCREENS).mkdir(parents=True)
    (own / SCREENS / "holiday.png").write_bytes(image(1))
    (own / EPISODES).write_text(json.dumps(row_of("verl", "screens/holiday.png")))
    with pytest.raises(DataError, match="holds other files"):
        made("verl", own / EPISODES, own)
    assert (own / SCREENS / "holiday.png").exists() and (own / EPISODES).exists()


def test_one_writer_at_a_time_and_what_a_killed_one_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(1))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row_of("verl", "a.png")))
    with DataWriter(tmp_path / "set") as writer:
        writer.screen(image(2))
        with pytest.raises(DataError, match="another process"):
            made("verl", tmp_path / "rows.jsonl", tmp_path / "set")
    assert (tmp_path / "set" / UNFINISHED).exists()
    assert len(made("verl", tmp_path / "rows.jsonl", tmp_path / "set")) == 1
    assert sorted(os.listdir(tmp_path / "set")) == [ABOUT, EPISODES, SCREENS]


def test_a_full_disk_is_said_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tapforge_trainer.data.folder.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as found:
        long_episode(tmp_path / "set", 1)
    assert str(tmp_path / "set") in message_of(found.value)
    with pytest.raises(DataError, match="wasn't finished"):
        DataFolder(tmp_path / "set")


@pytest.mark.parametrize("about", ["[]", '"x"', '{"version": 1}', "{"])
def test_a_broken_description_is_said(tmp_path: Path, about: str) -> None:
    (tmp_path / ABOUT).write_text(about)
    with pytest.raises(DataError, match=ABOUT):
        DataFolder(tmp_path)


def long_episode(folder: Path, steps: int, actions: Mapping[int, Action] = {}) -> DataFolder:
    """Taps, but for `actions` by their step."""
    with DataWriter(folder) as writer:
        shown = tuple(
            Step(screen=writer.screen(image(place, 60, 90)), action=actions.get(place, Tap(x=0.5, y=0.5)))
            for place in range(steps)
        )
        task = Task(suite="s", template="t", goal="go")
        writer.episode(Episode(id="one", task=task, steps=shown, provenance=Provenance(source="test", row="1")))
        writer.finish({}, Rejected())
    return DataFolder(folder)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    data = long_episode(tmp_path / "set", 5)
    pack = next((data.folder / SCREENS).glob("*.tar"))
    pack.write_bytes(pack.read_bytes()[:20_000])
    for index in (data.folder / SCREENS).glob("*.index"):
        index.unlink()
    with pytest.raises(DataError, match="has no screen"):
        export(data.folder, tmp_path / "out.parquet")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["set"]


def test_what_is_wrong_with_files_is_the_caller_s_turn(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["data", "convert", "nothing", str(tmp_path), "-o", str(tmp_path / "set")])
    assert result.exit_code == 2 and "unknown data set 'nothing'" in result.stderr
    result = CliRunner().invoke(cli, ["data", "inspect", str(tmp_path / "gone")])
    assert result.exit_code == 2, result.stderr


def test_a_disk_that_fails_is_worth_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, code in ((errno.ESTALE, 1), (errno.EACCES, 2)):
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(DataError, match="can't be read") as raised:
            DataFolder(tmp_path)
        found = failure_of(raised.value)
        assert found is not None and found[0] == code
