"""Episodes as data: what is converted comes back as it was, what is wrong is counted, and a model can imitate it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tapforge_api import load
from tapforge_envs.protocol import LongPress, Swipe, Tap, Terminate
from tapforge_trainer.agents import make_agent
from tapforge_trainer.data import sources
from tapforge_trainer.data.convert import Bad, convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.episodes import Box, DataError, Episode, read_line
from tapforge_trainer.data.folder import ABOUT, EPISODES, DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.data.sets import export, merge, split
from tapforge_trainer.run.local_files import inspect_files
from tapforge_trainer.run.plan import plan
from tapforge_trainer.tiny.folder import write_model


def image(seed: int, width: int = 100, height: int = 200, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def made(source: str, path: Path, into: Path, max_bad: float = 1.0, **options: str) -> DataFolder:
    convert(sources.read(source, path, options), source, into, {"source": source}, max_bad)
    return DataFolder(into)


@pytest.fixture(scope="module")
def demo_set(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("demo")
    demo(folder / "verl", episodes=30, seed=3)
    return made("verl", folder / "verl" / ROWS, folder / "set", max_bad=0.0)


def test_a_file_without_rows_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="there are no rows to convert"):
        made("verl", tmp_path / "rows.jsonl", tmp_path / "set")


# --- the format -------------------------------------------------------------------------------------------------------


def test_a_line_comes_back_as_it_was(demo_set: DataFolder) -> None:
    for place, episode in enumerate(demo_set):
        assert read_line(episode.line()) == episode == demo_set[place]
        assert episode.provenance.source == "verl" and episode.provenance.row == f"{ROWS} line {place + 1}"
        assert isinstance(episode.steps[-1].action, Terminate) and episode.last_screen is not None
        for name in episode.screens:
            assert Image.open(io.BytesIO(demo_set.screen(name))).size == (96, 160)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "EOF"),
        (b'{"version": 2}', "version"),
        (b'{"version": 1, "id": "a", "task": {"suite": "s", "template": "t"}, "steps": [], "provenance": {}}', "steps"),
        (b"\xff\xfe", "JSON"),
        (b'{"id": NaN}', "id"),
    ],
)
def test_a_broken_line_is_said(line: bytes, why: str) -> None:
    with pytest.raises(DataError, match=why):
        read_line(line)


def test_a_folder_that_was_cut_off_changed_or_not_finished_is_refused(demo_set: DataFolder, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    assert merge([demo_set.folder], folder) == len(demo_set)
    lines = (folder / EPISODES).read_bytes()
    (folder / EPISODES).write_bytes(lines[:-20])
    with pytest.raises(DataError, match="middle of a line"):
        DataFolder(folder)
    (folder / EPISODES).write_bytes(lines[: lines.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(DataError, match=f"{len(demo_set) - 1} lines"):
        DataFolder(folder)
    (folder / EPISODES).write_bytes(lines.replace(b'"tap"', b'"tip"', 1))
    with pytest.raises(DataError, match="line 1: steps"):
        list(DataFolder(folder))
    (folder / EPISODES).write_bytes(lines)
    pack = next((folder / "screens").glob("*.tar"))
    data = bytearray(pack.read_bytes())
    data[600] ^= 255
    pack.write_bytes(data)
    damaged = DataFolder(folder)
    with pytest.raises(DataError, match="damaged|not a screen"):
        for episode in damaged:
            for name in episode.screens:
                damaged.screen(name)
    (folder / ABOUT).unlink()
    with pytest.raises(DataError, match="convert it again"):
        DataFolder(folder)


# --- sources ----------------------------------------------------------------------------------------------------------


def aguvis_row(file: str, code: str, goal: str = "Open the clock", before: str = "None") -> dict[str, Any]:
    asked_for = (
        "<image>\nPlease generate the next move according to the UI screenshot, instruction and previous actions.\n\n"
        f"Instruction: {goal}\n\nPrevious actions:\n{before}\n"
    )
    return {
        "image": file,
        "conversations": [
            {"from": "system", "value": "You are a GUI agent."},
            {"from": "human", "value": asked_for},
            {"from": "gpt", "recipient": "all", "value": "Thought: it is there.\nAction: Tap the clock.\n"},
            {"from": "gpt", "recipient": "os", "value": code},
        ],
    }


def test_aguvis_rows_and_what_is_wrong_with_some(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(1))
    (tmp_path / "b.jpg").write_bytes(image(2, kind="JPEG"))
    (tmp_path / "c.png").write_bytes(b"no image")
    rows = [
        aguvis_row("a.png", "pyautogui.click(x=0.25, y=0.5)", before="Step 1: Swipe up\nStep 2: Go home"),
        aguvis_row("b.jpg", "mobile.swipe(from_coord=[0.5, 0.8], to_coord=[0.5, 0.2])", goal="開く 時計 🕒"),
        aguvis_row("a.png", "mobile.back()", goal="Go back"),
        aguvis_row("a.png", "mobile.back()", goal="Go back"),
        aguvis_row("a.png", "pyautogui.click(x=540, y=1200)"),
        aguvis_row("a.png", "mobile.fly(1)"),
        aguvis_row("gone.png", "mobile.home()"),
        aguvis_row("c.png", "mobile.home()"),
        {"image": "a.png"},
        "text",
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = made("aguvis", tmp_path / "rows.json", tmp_path / "set")
    first, second, third = data
    assert first.steps[0].action == Tap(x=0.25, y=0.5) and first.before == ("Swipe up", "Go home")
    assert first.asked == "Open the clock\nBefore: Swipe up\nBefore: Go home" and third.asked == "Go back"
    assert isinstance(second.steps[0].action, Swipe) and second.task.goal == "開く 時計 🕒"
    assert {reason: one["rows"] for reason, one in data.about["rejected"].items()} == {
        "duplicate": 1, "action": 2, "image": 2, "row": 2,
    }  # fmt: skip
    assert "rows.json item 5" in data.about["rejected"]["action"]["first"]
    with pytest.raises(DataError, match=r"6 of 10 rows.*more than 10 %[^$]*--option coordinates=pixels"):
        made("aguvis", tmp_path / "rows.json", tmp_path / "other", max_bad=0.1)
    assert not (tmp_path / "other" / ABOUT).exists()


def test_verl_rows_of_both_forms(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.png").write_bytes(image(1))
    calls = [{"action": "long_press", "coordinate": [999, 0]}, {"action": "terminate", "status": "success"}]
    lines = [
        {"instruction": "hold", "screenshots": ["a.png", "a.png"], "actions": calls},
        {"instruction": "hold it", "images": ["a.png"], "actions": calls},
        {"instruction": "hold", "images": ["a.png"], "actions": [{"action": "click", "coordinate": [1000, 5]}]},
        {"instruction": "", "images": ["a.png"], "actions": calls},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{broken\n")
    data = made("verl", tmp_path / "rows.jsonl", tmp_path / "lines")
    one, other = data
    assert one.steps[0].action == LongPress(x=1.0, y=0.0, seconds=1.0) and len(one.steps) == 2 and len(other.steps) == 1
    assert set(data.about["rejected"]) == {"action", "row", "no_screen"}
    about = {"instruction": "hold", "expected_actions": calls}
    mixed = [{"images": [{"bytes": image(3)}], "extra_info": about}, {"images": [{"bytes": b""}], "extra_info": about}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(mixed), tmp_path / "rows.parquet")
    [row] = made("verl", tmp_path / "rows.parquet", tmp_path / "parquet")
    assert row.steps[0].action == LongPress(x=1.0, y=0.0, seconds=1.0)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:300])
    with pytest.raises(DataError, match="parquet"):
        made("verl", tmp_path / "cut.parquet", tmp_path / "nothing")


def test_grounding_rows_have_a_box(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(1))
    rows = [
        {"img_filename": "a.png", "bbox": [10, 20, 30, 40], "instruction": "the clock"},
        {"img_filename": "a.png", "bbox": [90, 20, 30, 40], "instruction": "outside"},
        {"img_filename": "a.png", "bbox": [30, 20, -10, 40], "instruction": "reversed"},
        {"img_filename": "a.png", "bbox": [30, None, 10, 40], "instruction": "not numbers"},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = made("screenspot", tmp_path / "rows.json", tmp_path / "set")
    [episode] = data
    [step] = episode.steps
    assert step.target == Box(left=0.1, top=0.1, right=0.4, bottom=0.3)
    assert isinstance(step.action, Tap) and step.target.holds(step.action.x, step.action.y)
    assert {reason: one["rows"] for reason, one in data.about["rejected"].items()} == {"coordinates": 2, "row": 1}


def test_shares_are_not_taken_for_pixels_and_a_size_that_is_said_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image(1))
    rows = [
        {"img_filename": "a.png", "bbox": [0.1, 0.1, 0.4, 0.1 + n / 50], "instruction": f"{n}", "img_size": [100, 200]}
        for n in range(1, 25)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="all of 24 places are in the first 1 % .*--option coordinates=fraction"):
        made("screenspot", tmp_path / "rows.json", tmp_path / "set", 0.1, box="corners")
    assert not (tmp_path / "set" / ABOUT).exists()
    data = made("screenspot", tmp_path / "rows.json", tmp_path / "shares", box="corners", coordinates="fraction")
    target = next(iter(data)).steps[0].target
    assert len(data) == 24 and target is not None and (target.left, target.top, target.right) == (0.1, 0.1, 0.4)
    actions = [{"action": "click", "coordinate": [0.5, 0.25]}]
    clicks = [{"instruction": f"{n}", "images": ["a.png"], "actions": actions} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, clicks)))
    with pytest.raises(DataError, match="all of 20 places"):
        made("verl", tmp_path / "rows.jsonl", tmp_path / "grid", 0.1)
    sizes = [[1080, 2400], "100x200", [100.0, 200.0]]
    told = [{**row, "bbox": [10, 10, 40, 60], "img_size": size} for row, size in zip(rows, sizes, strict=False)]
    (tmp_path / "rows.json").write_text(json.dumps(told))
    smaller = made("screenspot", tmp_path / "rows.json", tmp_path / "smaller", box="corners", coordinates="grid")
    assert len(smaller) == 3, "shares are of a screen of any size"
    data = made("screenspot", tmp_path / "rows.json", tmp_path / "sized", box="corners")
    assert len(data) == 2
    assert data.about["rejected"]["image"]["first"].endswith("the image is 100x200, and img_size says [1080, 2400]")


def test_a_list_that_breaks_off_and_names_that_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(json.dumps([aguvis_row("a.png", "mobile.home()")] * 3)[:-30])
    rows = sources.read("aguvis", tmp_path / "cut.json", {})
    with pytest.raises(DataError, match="item 3: the list breaks off"):
        assert all(isinstance(row, Bad) for row in rows)
    with pytest.raises(DataError, match="known are aguvis, android-control, gui-odyssey, recording"):
        sources.read("agvis", tmp_path, {})
    with pytest.raises(DataError, match="did you mean 'images'"):
        sources.read("aguvis", tmp_path, {"image": "x"})
    with pytest.raises(DataError, match="not a folder of a run"):
        list(sources.read("recording", tmp_path, {}))


def test_recordings_are_a_source_and_only_successes_on_demand(tmp_path: Path) -> None:
    from tests.recording.test_recorder import record

    groups = record(tmp_path / "run" / "rollout")
    played = [episode for group in groups for episode in group.episodes if episode.valid]
    data = made("recording", tmp_path / "run", tmp_path / "set")
    assert len(data) + data.about["rejected"].get("duplicate", {"rows": 0})["rows"] == len(played)
    episode = data[0]
    assert episode.task == played[0].task and episode.steps[0].ids == tuple(played[0].steps[0].generation.ids)
    won = made("recording", tmp_path / "run", tmp_path / "won", successes="true")
    assert {one.outcome for one in won} == {"success"}
    assert len(won) == sum(one.outcome == "success" for one in data)


# --- parts, and out again ---------------------------------------------------------------------------------------------


def test_parts_share_no_task_and_make_the_whole_again(demo_set: DataFolder, tmp_path: Path) -> None:
    counts = split(demo_set.folder, tmp_path / "a", tmp_path / "b", share=0.3, by="task", seed=1)
    first, second = DataFolder(tmp_path / "a"), DataFolder(tmp_path / "b")
    assert counts == (len(first), len(second)) and sum(counts) == len(demo_set) and min(counts) > 0
    assert not {one.task.goal for one in first} & {one.task.goal for one in second}
    assert merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "c") == len(demo_set)
    whole = DataFolder(tmp_path / "c")
    assert {one.content for one in whole} == {one.content for one in demo_set}
    assert whole.about["rejected"]["duplicate"]["rows"] == len(first)
    with pytest.raises(DataError, match="would be empty"):  # all are of one template
        split(demo_set.folder, tmp_path / "e", tmp_path / "f", share=0.5, by="template", seed=1)
    assert not (tmp_path / "e").exists() and not (tmp_path / "f").exists()
    with pytest.raises(DataError, match="has a data set already"):
        merge([tmp_path / "a"], tmp_path / "c")


def test_held_out_episodes_that_are_imitated_are_noted(demo_set: DataFolder, tmp_path: Path) -> None:
    _, held_out = split(demo_set.folder, tmp_path / "a", tmp_path / "b", share=0.3, by="task", seed=1)
    for imitated, noted in ((tmp_path / "a", False), (demo_set.folder, True)):
        data = {"path": str(imitated), "heldOut": str(tmp_path / "b")}
        run = load(Path("manifests/samples/quickstart.yaml"), [f"warmStart={json.dumps({'data': data})}"])
        notes = plan(run, inspect_files(run, tmp_path / "runs")).notes
        words = f"of {held_out} held-out episodes {held_out} are imitated as well"
        assert any(note.startswith(words) for note in notes) is noted


def test_what_is_exported_is_read_by_hugging_face(demo_set: DataFolder, tmp_path: Path) -> None:
    import datasets

    rows = export(demo_set.folder, tmp_path / "out.parquet")
    found = datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(found) == rows == sum(len(one.steps) for one in demo_set)
    assert found[0]["image"].size == (96, 160) and found[0]["goal"] == demo_set[0].task.goal
    assert json.loads(found[0]["action"])["type"] in ("tap", "home")


# --- imitation --------------------------------------------------------------------------------------------------------


def test_samples_are_what_a_rollout_would_ask_and_the_adapters_answer(demo_set: DataFolder, tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    options: dict[str, Any] = {"prompt": "compact", "history_images": 1, "history_steps": 8, "response_tokens": 24}
    agent = make_agent("qwen3-vl", tmp_path / "model", context_tokens=256, **options)
    data = ImitationData(agent, demo_set, ("unknown",))
    assert len(data) == sum(len(one.steps) for one in demo_set) and data.episodes == len(demo_set)
    data.check(range(len(data)))
    found = data.batch(range(8))
    assert len(found.samples) == 8
    for sample, (episode, place) in zip(found.samples, data.places, strict=False):
        [span] = sample.spans
        text = agent.decode(sample.ids[span.start : span.end])
        shown = found.frames[sample.episode][sample.frames[-1]]
        assert agent.read(text, "stop", shown).type == demo_set[episode].steps[place].action.type  # type: ignore[union-attr]
    with pytest.raises(DataError, match="nothing to imitate"):
        ImitationData(agent, demo_set, ("success",))
    short = ImitationData(
        make_agent("qwen3-vl", tmp_path / "model", context_tokens=40, **options), demo_set, ("unknown",)
    )
    with pytest.raises(
        DataError, match=r"can't be imitated by this model:\n  \d+ x context.*raise model.contextTokens"
    ):
        short.check(range(len(short)))


def test_an_episode_needs_a_step() -> None:
    with pytest.raises(ValueError, match="steps"):
        Episode.model_validate({"id": "a", "task": {"suite": "s", "template": "t"}, "steps": [], "provenance": {}})
