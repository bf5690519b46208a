"""Private words, places of screens and episodes are gone from every file of a data set, and the rest is as it was."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tapforge_envs.protocol import Task, Type
from tapforge_trainer.cli.main import cli
from tapforge_trainer.data.convert import convert
from tapforge_trainer.data.demo import ROWS, demo
from tapforge_trainer.data.episodes import DataError, Episode, Provenance, Step
from tapforge_trainer.data.folder import DataFolder, DataWriter, Rejected
from tapforge_trainer.data.redact import redact, rules_of
from tapforge_trainer.data.sources import read


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    demo(folder / "demo", episodes=4, seed=0)
    convert(read("verl", folder / "demo" / ROWS, {}), "verl", folder / "plain", {}, 0.1)
    data = DataFolder(folder / "plain")
    with DataWriter(folder / "set") as writer:
        for episode in data:
            for name in episode.screens:
                writer.screen(data.screen(name))
            first, *others = episode.steps
            first = first.model_copy(update={"answer": "Ada's number", "ids": (1, 2), "ui_tree": "<node text='Ada'/>"})
            task = episode.task.model_copy(update={"goal": f"{episode.task.goal} for Ada", "params": {"who": "Ada"}})
            before = ("Ada was called",)
            writer.episode(episode.model_copy(update={"steps": (first, *others), "task": task, "before": before}))
        writer.finish({"source": "verl"}, Rejected())
    return folder / "set"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "set"))


def said(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def pixels(data: DataFolder, name: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data.screen(name))).convert("RGB"))


def typed(*words: str | Path) -> str:
    done = CliRunner().invoke(cli, ["data", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def test_words_are_gone_from_every_text(folder: Path) -> None:
    before = list(DataFolder(folder))
    assert "20 texts of 4 episodes" in typed("redact", folder, "--text", r"\bAda\b", "-o", folder.with_name("out"))
    found = DataFolder(folder.with_name("out"))
    assert b"Ada" not in said(found.folder) and b"Ada" in said(folder), "the other folder is as it was"
    for old, new in zip(before, found, strict=True):
        assert new.task.goal.endswith("for [redacted]") and new.task.params == {"who": "[redacted]"}
        assert new.before == ("[redacted] was called",) and new.steps[0].answer == "[redacted]'s number"
        assert new.steps[0].ids == () and new.screens == old.screens
        assert [step.action for step in new.steps] == [step.action for step in old.steps]
    assert "Ada" not in json.dumps(found.about) and found.about["made_of"]["redacted"]["texts"] == 5 * 4


def test_places_are_black_in_the_pixels_and_trees_go(folder: Path) -> None:
    before = DataFolder(folder)
    old = [[pixels(before, step.screen) for step in episode.steps] for episode in before]
    names = {name for episode in before for name in episode.screens}
    typed("redact", folder, "--box", "0,0,1,0.25", "--box", "0.5,0.5,0.75,0.75")
    found = DataFolder(folder)
    for shown, episode in zip(old, found, strict=True):
        for was, step in zip(shown, episode.steps, strict=True):
            now, (height, width, _) = pixels(found, step.screen), was.shape
            black = np.zeros((height, width), bool)
            black[: height // 4] = black[height // 2 : height * 3 // 4, width // 2 : width * 3 // 4] = True
            assert not now[black].any() and np.array_equal(now[~black], was[~black])
            assert step.ui_tree == ""
    assert not names & {name for episode in found for name in episode.screens}
    assert not any(name.encode() in said(folder) for name in names), "the old screens are gone"
    assert [path.name for path in folder.parent.iterdir()] == ["set"]


def test_only_in_an_episode(folder: Path) -> None:
    first, second, *_ = before = list(DataFolder(folder))
    typed("redact", folder, "--text", "Ada", "--box", "0,0,1,1", "--episode", second.id)
    now = list(DataFolder(folder))
    assert now[0] == first and now[2:] == before[2:] and "Ada" not in now[1].task.goal
    assert not pixels(DataFolder(folder), now[1].steps[0].screen).any()


def test_deleted_episodes_go_with_their_screens_and_exports_made_anew_lack_them(folder: Path) -> None:
    before = DataFolder(folder)
    gone = before[1]
    shared = {name for episode in before if episode.id != gone.id for name in episode.screens}
    assert "3 episodes, 1 are deleted" in typed("delete", folder, "--episode", gone.id)
    found = DataFolder(folder)
    assert [episode.id for episode in found] == [episode.id for episode in before if episode.id != gone.id]
    assert not any(name.encode() in said(folder) for name in set(gone.screens) - shared)
    typed("export", folder, "-o", folder.with_name("rows.parquet"))
    assert gone.id.encode() not in folder.with_name("rows.parquet").read_bytes()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"boxes": ["0,0,1"]}, "the box 0,0,1 is not LEFT,TOP,RIGHT,BOTTOM"),
        ({"boxes": ["0.5,0,0.1,1"]}, "the box 0.5,0,0.1,1: .*reversed"),
        ({"boxes": ["0,0,100,100"]}, "the box 0,0,100,100: "),
        ({"texts": ["("]}, "is not a regular expression"),
        ({"texts": ["x*"]}, "is found in an empty text"),
        ({"deleted": ["none"]}, "has no episode none"),
        ({"texts": ["Ada"], "only": ["none"]}, "has no episode none"),
        ({"deleted": ["verl-0000001", "verl-0000002", "verl-0000003", "verl-0000004"]}, "nothing would be left"),
    ],
    ids=str,
)
def test_what_can_not_be_is_said_and_nothing_is_changed(folder: Path, given: dict, words: str) -> None:
    before = said(folder)
    with pytest.raises(DataError, match=words):
        redact(folder, None, rules_of(**given))
    assert said(folder) == before


def small(folder: Path, **fields: object) -> Path:
    """Two episodes of one step, which show the same screen."""
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(out, "PNG")
    task = Task(suite="s", template="t", goal="g").model_copy(update={"params": fields.pop("params", {})})
    with DataWriter(folder) as writer:
        step = Step(screen=writer.screen(out.getvalue()), **fields)
        for name in ("a", "b"):
            row = Provenance(source="x", row="/data/Jürgen/1")
            writer.episode(Episode(id=name, task=task, steps=(step,), provenance=row))
        writer.finish({"source": "x", "path": "/data/Jürgen"}, Rejected())
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        *({"params": {name: "Jürgen"}} for name in ("id", "type", "row", "template", "screen")),
        {"params": {"Jürgen": "1", "for Jürgen": "2"}},
        {"ids": (1, 2), "action": Type(text="Jürgen")},
        {"ids": (1, 2), "action": Type(text="Jürgen"), "answer": json.dumps({"text": 'a "Jürgen"'})},
        {"answer": "type(content='J\\xfcrgen')"},
        {"ui_tree": "<node text='J&#252;rgen'/>"},
        {"ui_tree": r"{text: J\u00fcrgen}"},
    ],
    ids=str,
)
def test_words_are_found_behind_every_name_and_escape(tmp_path: Path, fields: dict) -> None:
    folder = small(tmp_path / "set", **fields)
    redact(folder, None, rules_of(texts=["Jürgen"]))
    assert b"rgen" not in said(folder)
    for episode in DataFolder(folder):
        assert episode.steps[0].ids == () and len(episode.task.params) == len(fields.get("params", ()))
        if "action" in fields and "answer" in fields:
            assert episode.steps[0].answer == '{"text": "a \\"[redacted]\\""}', "the rest of the answer is as it was"


def test_what_stays_is_said(tmp_path: Path) -> None:
    assert "1 of these screens stay" in typed("delete", small(tmp_path / "one"), "--episode", "a")
    assert "1 of these screens stay" in typed("redact", small(tmp_path / "two"), "--box", "0,0,1,1", "--episode", "a")
    assert "2 episodes hold it in their id" in typed("redact", small(tmp_path / "three"), "--text", "^[ts]$")


def test_links_other_files_and_interrupted_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link = small(tmp_path / "set"), tmp_path / "link"
    link.symlink_to(folder)
    (folder / "rows.parquet").write_text("exported before")
    with pytest.raises(DataError, match=r"holds rows\.parquet"):
        redact(link, None, rules_of(texts=["rgen"]))
    (folder / "rows.parquet").unlink()
    redact(link, None, rules_of(texts=["rgen"]))
    assert b"rgen" not in said(folder) and link.is_symlink()
    folder.rename(tmp_path / ".set.before")  # killed before the new one had its name
    redact(folder, None, rules_of(deleted=["a"]))
    monkeypatch.chdir(folder)
    redact(Path("."), None, rules_of(boxes=["0,0,1,1"]))
    assert [episode.id for episode in DataFolder(folder)] == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "set"]
