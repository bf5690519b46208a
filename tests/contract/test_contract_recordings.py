"""What a run leaves behind for the next session, the next attempt and people's machines: written by this release, by
one that says a field more in every object, and by one that says a field less.

Writers and readers: the recording's lines (`recording.lines`) -> `Recording`; a checkpoint's state.json ->
`progress_of`, `check_same`; spec.yaml and events.jsonl -> `read_spec`, `read_events`, `write_report`; `.fetched.json`
-> the next fetch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tapforge_api import dump_set, load, to_yaml
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.learner.checkpoint_storage import FORMAT, CheckpointFolder
from tapforge_trainer.recording.lines import encode_episode, encode_group, encode_step
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.remote.target import MARKER, opened
from tapforge_trainer.run.folder import CURVE, SPEC, check_same, read_events, read_spec
from tapforge_trainer.run.report import write_report
from tapforge_trainer.telemetry.progress import Progress, newest_checkpoint, progress_of, resumed

STEP = StepRecord(
    episode="e-1",
    index=0,
    frames=(),
    state_key="home",
    app="mail",
    generation=Generation((1, 2), (3,), (-0.5,), (0,), "stop", 2),
    text="tap",
    action={"type": "tap", "x": 0.5, "y": 0.5},
    parse_error=None,
    reward=1.0,
    note="",
    seconds_model=0.1,
    seconds_environment=0.2,
)
TASK = Task(suite="quickstart", template="open-app", params={"app": "mail"}, goal="Open the mail", seed=7)
EPISODE = EpisodeRecord(
    id="e-1",
    group="g-1",
    task=TASK,
    attempt=0,
    slot="phone-0",
    seed=7,
    reason=Reason("done"),
    outcome=Outcome.SUCCESS,
    score=1.0,
    message="",
    steps=(STEP,),
    started=1.0,
    ended=2.0,
)
GROUP = GroupRecord("g-1", 0, TASK, 0, (EPISODE,))


def more(value: Any) -> Any:
    """As a later release may write it. What has names of its own instead of fields stays as it is."""
    if isinstance(value, dict):
        known = {name: one if name in ("action", "params") else more(one) for name, one in value.items()}
        return {**known, "laterField": {"deep": [1]}}
    return [more(one) for one in value] if isinstance(value, list) else value


def same(value: Any) -> Any:
    return value


RELEASES = pytest.mark.parametrize("written", [same, more], ids=["of today", "newer"])
Written = Callable[[Any], Any]


def record(folder: Path, written: Written) -> None:
    folder.mkdir()
    lines = [encode_step(STEP), encode_episode(EPISODE), encode_group(GROUP, None)]
    text = "".join(json.dumps(written(json.loads(line)), separators=(",", ":")) + "\n" for line in lines)
    (folder / "rollout-000001.jsonl").write_text(text)


@RELEASES
def test_episodes_of_another_release_are_read_and_gone_on_with(tmp_path: Path, written: Written) -> None:
    """`recording.lines` -> `Recording`, `progress.resumed`."""
    record(tmp_path / "rollout", written)
    recording = Recording(tmp_path / "rollout")
    (episode,), (group,) = recording.episodes(), recording.groups()
    assert (episode.task, episode.score, group.task) == (TASK, 1.0, TASK)
    assert recording.find({"e-1"})["e-1"].task == TASK
    under_way = {"order": 0, "version": 0, "task": TASK.model_dump(), "episodes": ["e-1"]}
    (again,) = resumed(Progress(unfinished=[written(under_way)]), tmp_path / "rollout")
    assert again.task == TASK and [one.id for one in again.episodes] == ["e-1"]


# --- checkpoints ------------------------------------------------------------------------------------------------------

STATE = Progress(run="tiny", uid="uid-1", update=3, version=4, episodes=64, success=0.5, before={"greedy": {"n": 1}})


def checkpoint(folder: Path, driver: dict[str, Any], **document: Any) -> CheckpointFolder:
    place = folder / "update-00000003"
    place.mkdir(parents=True)
    whole = {"format": FORMAT, "update": 3, "time": 1.0, "driver": driver, "files": {}, **document}
    (place / "state.json").write_text(json.dumps(whole))
    (folder / "latest").write_text(place.name)
    return CheckpointFolder(folder)


def test_a_checkpoint_of_a_newer_release_is_gone_on_from(tmp_path: Path) -> None:
    """state.json -> `newest_checkpoint`, `progress_of`: what is known counts."""
    place = checkpoint(tmp_path, {**asdict(STATE), "laterField": {"deep": [1]}}, laterField=1)
    saved = newest_checkpoint(place)
    assert saved is not None and saved.update == 3 and progress_of(saved) == STATE


@pytest.mark.parametrize("name", sorted(asdict(STATE)))
def test_a_checkpoint_of_a_release_that_knew_a_field_less_is_gone_on_from(tmp_path: Path, name: str) -> None:
    """state.json -> `newest_checkpoint`, `progress_of`: what this release added has a default."""
    less = {field: value for field, value in asdict(STATE).items() if field != name}
    saved = newest_checkpoint(checkpoint(tmp_path, less))
    assert saved is not None
    found = asdict(progress_of(saved))
    assert {field: value for field, value in found.items() if field != name} == less


def test_a_checkpoint_by_earlier_names_is_of_the_same_run() -> None:
    """A checkpoint's spec -> `check_same`, as spec.yaml -> `read_spec`: fields that were renamed since."""
    run = load(to_yaml({**HEAD, "spec": {"warmStart": {"errorRate": 0.5}, "evaluation": {"baselines": False}}}))
    earlier = {**HEAD, "spec": {"warmStart": {"carelessness": 0.5}, "evaluation": {"floors": False}}}
    check_same(earlier, run, "s3://lab/runs/x")
    assert earlier["spec"] == {"warmStart": {"carelessness": 0.5}, "evaluation": {"floors": False}}


HEAD: dict[str, Any] = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "tiny"}}

# --- the run's folder -------------------------------------------------------------------------------------------------


@RELEASES
def test_a_folder_of_another_release_is_shown(tmp_path: Path, written: Written) -> None:
    """spec.yaml, events.jsonl and the recording -> `read_events`, `write_report`."""
    (tmp_path / SPEC).write_text(to_yaml(dump_set(load(to_yaml({**HEAD, "spec": {}})))))
    record(tmp_path / "rollout", written)
    events = [
        {"at": 0.0, "event": "evaluation", "update": 0, "mode": "greedy", "success": 0.5, "interval": [0.1, 0.9]},
        {"at": 1.0, "event": "update", "update": 1, "success": 0.5, "seconds_rl": 1.0},
        {"at": 2.0, "event": "fromTheNextRelease"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(written(event)) + "\n" for event in events))
    assert [event["event"] for event in read_events(tmp_path)] == ["evaluation", "update", "fromTheNextRelease"]
    assert read_spec(tmp_path).metadata.name == "tiny"
    write_report(tmp_path)
    assert (tmp_path / CURVE).stat().st_size


@RELEASES
def test_a_folder_that_another_release_fetched_is_fetched_on(tmp_path: Path, written: Written) -> None:
    """`remote.target`'s `.fetched.json` -> the next fetch into that folder."""
    folder = tmp_path / "tiny"
    with opened(folder, "uid-1") as target:
        target.write("summary.json", "{}")
        target.publish(("summary",), {"summary.json"})
    marker = json.loads((folder / MARKER).read_text())
    files = {path: written(file) for path, file in marker["files"].items()}
    (folder / MARKER).write_text(json.dumps({**marker, "files": files}))
    with opened(folder, "uid-1") as target:
        target.write("summary.json", '{"updates": 3}')
        target.publish(("summary",), {"summary.json"})
    assert (folder / "summary.json").read_text() == '{"updates": 3}'
