"""Episodes in trackers: of a real recording, through the loggers' process, read back from what each library wrote."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_libraries import FOLDERS

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.loggers.channel import LOG, Channel
from tapforge_trainer.loggers.episodes import EpisodeReader
from tapforge_trainer.loggers.logger import EpisodeRow
from tapforge_trainer.loggers.registry import Chosen
from tapforge_trainer.recording import ROLLOUT
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord

FRAME = FittedFrame.of(np.full((40, 20, 3), (0, 128, 0), np.uint8))
WON, LOST, BROKEN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.INVALID
COLUMNS = [field.name for field in fields(EpisodeRow)]


def _episode(group: str, number: int, outcome: Outcome) -> EpisodeRecord:
    name = f"{group}.{number}.0"
    answer = Generation((1, 2), (3,), (-0.5,), (0,), "stop", 2)
    tap = {"type": "tap", "x": 0.4 + 0.1 * number, "y": 0.4 + 0.2 * int(group[-1])}
    step = StepRecord(name, 0, (FRAME.name,), "home", "mail", answer, f"tap | {name}", tap, None, 0.5, "", 0.1, 0.1)
    task = Task(suite="quickstart", template="open_app", params={"app": "mail"}, goal="Open <b>Mail</b>", seed=number)
    return EpisodeRecord(name, group, task, 0, "p", 0, Reason.DONE, outcome, None, "", (step,), 0.0, 1.0)


def _recorded(folder: Path, retention: Retention | None = None) -> None:
    """Two groups of four; of the first none has failed validly."""
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder / ROLLOUT, retention)
    for order, outcomes in enumerate(([BROKEN, WON, WON, WON], [WON, LOST, LOST, WON])):
        group = f"g-{order}"
        episodes = tuple(_episode(group, number, outcome) for number, outcome in enumerate(outcomes))
        for episode in episodes:
            recorder.episode(episode, {FRAME.name: FRAME})
        recorder.group(GroupRecord(group, order, episodes[0].task, 0, episodes))
    recorder.close()


def _session(folder: Path, name: str, updates: list[int], status: Any, plugin: bool = False) -> list[str]:
    reports: list[str] = []
    loggers = [Chosen(name, FOLDERS.get(name, {}), plugin)]
    channel = Channel(loggers, name="desk", folder=folder, config={"seed": 3}, episodes=3, report=reports.append)
    for update in updates:
        channel.log(update, {"learner/loss": 0.5})
        channel.log_episodes(update, ["g-0", "g-1", "g-lost"])
    channel.finish(status, 60.0)
    return reports


def _is_strip(picture: Image.Image) -> bool:
    """One green screen of 20 x 40 pixels, enlarged nine times, and words below."""
    return picture.size == (196, 422) and np.abs(np.asarray(picture.convert("RGB"))[40, 40] - (0, 128, 0)).max() < 12


def test_the_first_of_each_outcome_is_taken_group_by_group(tmp_path: Path) -> None:
    _recorded(tmp_path)
    for most, names in ((1, ["g-0.1.0"]), (64, ["g-0.1.0", "g-1.1.0", "g-1.0.0"])):
        rows = EpisodeReader(tmp_path, most).rows(["g-0", "g-1", "g-lost"])
        assert [row.episode for row in rows] == names
    (row, *_) = rows
    assert (row.outcome, row.reward, row.steps, row.answers) == ("success", 0.5, 1, "1. tap | g-0.1.0")


def test_without_recorded_screens_rows_have_no_picture(tmp_path: Path) -> None:
    _recorded(tmp_path, Retention(frames="none"))
    rows = EpisodeReader(tmp_path, 4).rows(["g-0", "g-1"])
    assert [row.picture for row in rows] == [None] * 3
    assert _session(tmp_path, "tensorboard", [1], "complete") == []
    assert {name for name, _, _ in _tensorboard(tmp_path)} == {"text"}


@pytest.mark.usefixtures("others")
def test_a_logger_that_shows_none_says_so_once_and_gets_its_figures(tmp_path: Path) -> None:
    (report,) = _session(tmp_path, "notes", [1, 2], "complete", plugin=True)
    assert report == "logger notes: it has no log_episodes, and shows no episodes"
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2]


@pytest.mark.parametrize(
    "name", [name if name == "tensorboard" else pytest.param(name, marks=pytest.mark.long) for name in FOLDERS]
)
def test_tables_and_pictures_are_there_once_after_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _recorded(tmp_path)
    for updates, status in (([1], "stopped"), ([1, 2], "complete")):
        assert _session(tmp_path, name, updates, status) == [], (tmp_path / LOG).read_text()[-2000:]
    read = {"tensorboard": _tensorboard, "wandb": _wandb, "swanlab": _swanlab, "mlflow": _mlflow}[name]
    found = list(read(tmp_path))
    for update in (1, 2):
        (text,) = [what for kind, step, what in found if (kind, step) == ("text", update)]
        assert all(word in text for word in ("open_app", "failure", "g-1.1.0", "tap ")), text
        pictures = [what for kind, step, what in found if (kind, step) == ("picture", update)]
        assert len(pictures) == 3 and all(map(_is_strip, pictures))
    assert len(found) == 2 * (1 + 3)


#: kind, update, and the text of its table or a picture
Found = Iterator[tuple[str, int, Any]]


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def _tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    for event in found.Tensors("episodes"):
        text = event.tensor_proto.string_val[0].decode()
        head, _, *rows = text.splitlines()
        assert head.count("|") == rows[0].count("|") == len(COLUMNS) + 2 - 1, "words make no columns"
        assert "<b>" not in text and len(rows) == 3
        yield "text", event.step, text
    for tag in found.Tags()["images"]:
        for image in found.Images(tag):
            yield "picture", image.step, _opened(image.encoded_image_string)


def _wandb(folder: Path) -> Found:
    """Tables and their pictures wait in the run's folder until they are sent, under made-up names, some twice."""
    staged = [path.read_bytes() for path in (folder / "wandb" / "artifacts" / "staging").iterdir()]
    named = {hashlib.sha256(data).hexdigest(): data for data in staged}
    for table in (json.loads(data) for data in named.values() if data.startswith(b"{")):
        assert table["columns"] == ["update", *COLUMNS] and len(table["data"]) == 3
        update = table["data"][0][0]
        yield "text", update, json.dumps(table["data"])
        for row in table["data"]:
            yield "picture", update, _opened(named[row[-1]["sha256"]])


def _swanlab(folder: Path) -> Found:
    for run in sorted((folder / "swanlab").glob("run-*")):
        for path in run.rglob("*.jpg"):
            yield "picture", int(path.name.split("-")[0]), Image.open(path)
        texts: dict[int, list[str]] = {}
        for path in run.rglob("*.txt"):
            texts.setdefault(int(path.name.split("-")[0]), []).append(path.read_text())
        yield from (("text", step, "open_app failure " + " ".join(some)) for step, some in texts.items())


def _mlflow(folder: Path) -> Found:
    import os

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("phones").experiment_id])
    for file in client.list_artifacts(run.info.run_id, "episodes"):
        table = json.loads(Path(client.download_artifacts(run.info.run_id, file.path)).read_text())
        assert table["columns"] == ["update", *COLUMNS[:-1]]
        yield "text", table["data"][0][0], json.dumps(table["data"])
    for file in client.list_artifacts(run.info.run_id, "images"):
        if file.path.endswith(".png"):
            step = int(file.path.split("+step+")[1].split("+")[0])
            yield "picture", step, Image.open(client.download_artifacts(run.info.run_id, file.path))
