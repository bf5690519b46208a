"""What tries of a policy say of a task, and the file that `tapforge tasks try` writes."""

import json
from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord
from tapforge_trainer.run.tries import TriedFile
from tapforge_trainer.tasks.files import read_abouts, read_tasks
from tapforge_trainer.tasks.lines import line_of
from tapforge_trainer.tasks.source import TaskError
from tapforge_trainer.tasks.tries import tries_of

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
TASK = Task(suite="quickstart", template="open", params={"app": "mail"}, feasible=None)
WEIGHTS = Path("weights")
WON, LOST = Outcome.SUCCESS, Outcome.FAILURE
LIMIT, SAID, DONE = Reason.STEP_LIMIT, Reason.DECLARED_INFEASIBLE, Reason.DONE


def episode(reason, outcome, task=TASK):
    return EpisodeRecord("e", "g", task, 0, "s", 0, reason, outcome, None, "", (), 0.0, 1.0)


@pytest.mark.parametrize(
    "played, feasible, says",
    [
        ([(DONE, WON)] + [(LIMIT, LOST)] * 7, True, "feasible"),
        ([(SAID, WON)] + [(LIMIT, LOST)] * 7, False, "infeasible"),
        # running out of steps is no way to say that it can't be done, however often
        ([(LIMIT, LOST)] * 8, None, "out of steps"),
        # nor is saying so where nothing agrees
        ([(SAID, LOST)] * 8, None, "never done"),
        ([(DONE, LOST)] * 8, None, "never done"),
        ([(DONE, WON), (SAID, WON)], None, "contradictory"),
        ([(Reason.DEADLINE, Outcome.INVALID), (Reason.CANCELLED, None)], None, "nothing"),
        ([(Reason.PARSE_FAILURES, LOST)] * 3, None, "never done"),
    ],
)
def test_what_tries_tell(played, feasible, says):
    tries = tries_of(episode(reason, outcome) for reason, outcome in played)
    assert (tries.feasible, tries.says) == (feasible, says)
    assert tries.valid + tries.invalid == len(played)
    said = tries.as_json()
    assert said["step_limit"] == sum(reason is LIMIT for reason, _ in played)
    assert (said["success"] is None) == (tries.valid == 0)


def tasks_file(path, count):
    apps = ["mail", "maps", "shop", "music", "notes", "clock"][:count]
    tasks = [
        TASK.model_copy(update={"params": {"app": app}, "feasible": None if n % 2 else True})
        for n, app in enumerate(apps)
    ]
    path.write_text("".join(line_of(task, {"by": "test"}) + "\n" for task in tasks))
    return load(SAMPLE, [f"spec.tasks={{file: {path}}}", "spec.warmStart=null"])


def test_the_file_is_written_again_with_what_was_found_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr("tapforge_trainer.run.tries._PART", 2)
    run, path = tasks_file(tmp_path / "tasks.jsonl", 5), tmp_path / "tried.jsonl"

    def play(tried, parts):
        for part, _ in zip(tried.parts(), range(parts), strict=False):
            tried.write(part, [episode(SAID, WON, task) for task in part for _ in range(3)])

    play(TriedFile(run, path, 3, WEIGHTS), 9)
    whole = path.read_bytes()
    for cut in (0, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        play(TriedFile(run, path, 3, WEIGHTS), 9)
        assert path.read_bytes() == whole
    tried = TriedFile(run, path, 3, WEIGHTS)
    assert list(tried.parts()) == [] and tried.summary()["infeasible"] == 5
    tasks, about = read_tasks(path).tasks, read_abouts(path)
    assert [task.key for task in tasks] == [task.key for task in tried.tasks]
    # a label that the file has is not overruled
    assert [task.feasible for task in tasks] == [True, False, True, False, True]
    assert all(one["by"] == "test" and one["tries"]["infeasible"] == 3 for one in about.values())
    with pytest.raises(TaskError, match="with --tries 3"):
        TriedFile(run, path, 4, WEIGHTS)
    with pytest.raises(TaskError, match="with the weights of .*/weights: name another one"):
        TriedFile(run, path, 3, Path("others"))
    with pytest.raises(TaskError, match="is the file that is tried"):
        TriedFile(run, tmp_path / "tasks.jsonl", 3, WEIGHTS)
    other = tasks_file(tmp_path / "other.jsonl", 2)
    with pytest.raises(TaskError, match="more tasks than"):
        TriedFile(other, path, 3, WEIGHTS)
    with pytest.raises(TaskError, match=r"spec\.tasks\.file is not set"):
        TriedFile(load(SAMPLE, []), path, 3, WEIGHTS)
    assert json.loads(path.read_text().splitlines()[0])["about"]["tries_asked"] == 3
