"""The ways that the first run does not take: a task file, another model folder, the weights of another run, strictly
on-policy, no zero-variance groups, no new weights in the middle of an episode, rollout workers and a recorder in
processes of their own; stopped while it starts, and a disk that fills.
"""

from __future__ import annotations

import resource
import signal
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from whole import Command, Run, tapforge

from tapforge_api.progress import EXIT_STOPPED
from tapforge_envs.phone import catalog
from tapforge_trainer.cli.main import cli
from tapforge_trainer.recording.frames import FrameStore

pytestmark = pytest.mark.long

GROUPS, ROUNDS, UPDATES = 2, 2, 2
FILE = "rollout-000001.jsonl"

OTHER = f"""
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: other}}
spec:
  model: {{contextTokens: 256, adapter: {{prompt: compact}}, source: {{path: {{folder: model}}}}}}
  environment: {{source: {{processes: {{count: 8, servers: 2}}}}}}
  tasks: {{file: tasks.jsonl}}
  rollout:
    {{groupSize: 4, groupsPerUpdate: {GROUPS}, maxStaleness: 0, responseTokens: 24, phonesPerWorker: 4,
      dynamicSampling: {{enabled: true, maxRounds: {ROUNDS}}}}}
  algorithm: {{advantage: {{rloo: {{}}}}}}
  learner: {{miniBatches: 2, learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 8, kvCacheMiB: 64}}
  sync: {{midEpisode: false}}
  evaluation: {{sampled: false, baselines: false, episodes: 4}}
  checkpoints: {{export: false, resumeFrom: checkpoint}}
  stop: {{maxUpdates: {UPDATES}}}
"""


@pytest.fixture(scope="session")
def other(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Stopped once while it started, then left alone to the end."""
    place = tmp_path_factory.mktemp("other")
    (place / "model").symlink_to(trained.folder / "export")
    newest = (trained.folder / "checkpoints" / "latest").read_text().strip()
    (place / "checkpoint").symlink_to(trained.folder / "checkpoints" / newest)
    tasks = [catalog.tasks("quickstart", "train").sample(5, index) for index in range(6)]
    (place / "tasks.jsonl").write_text("# six tasks\n" + "".join(task.model_dump_json() + "\n" for task in tasks))
    (place / "other.yaml").write_text(OTHER)
    early = Command("run", "-f", "other.yaml", place=place)
    folder = place / "runs" / "other"
    early.until(lambda: any("raylet" in line for line in early.processes().values()))
    early.interrupt(signal.SIGTERM)
    ended = early.wait()
    assert (ended.code, ended.left_behind) == (EXIT_STOPPED, []), ended.said
    assert "Traceback" not in ended.err
    assert not (folder / "checkpoints").exists()
    return Run(folder, place / "other.yaml", tapforge("run", "-f", "other.yaml", place=place))


def test_it_ends_well_after_a_start_that_was_stopped(other: Run) -> None:
    assert other.finished.code == 0, other.finished.said
    assert other.finished.left_behind == []
    assert [event["update"] for event in other.events("update")] == [1, 2]
    assert other.events("warm_start") == []
    assert not (other.folder / "export").exists()
    assert other.summary["held_out"]["held_out"].startswith("nothing")
    assert set(other.summary["success_after"]) == {"greedy"}


def test_another_runs_checkpoint_gives_its_weights_and_none_of_its_counts(trained: Run, other: Run) -> None:
    assert trained.state["update"] == UPDATES, "what was inherited would end the run at once"
    assert other.state["update"] == other.summary["updates"] == UPDATES
    assert (other.state["run"], trained.state["run"]) == ("other", "tiny")
    assert other.events("reinforcement")[0]["version"] == 0 and other.events("checkpoint")[0]["update"] == 0
    assert other.state["starts"] == 1
    assert min(group.order for group in other.recording("rollout").groups(dropped=True)) == 0
    assert 0 < other.summary["episodes"] <= sum(e.valid for e in other.recording("rollout").episodes())
    notes = [event["text"] for event in other.events("note")]
    assert f"warm-started from checkpoint (update {UPDATES} of tiny)" in notes


def _versions(run: Run) -> list[int]:
    """Those that play for each update, and after the last one. What is sampled decides: an update whose groups are all
    without contrast learns nothing, and the version stays."""
    learned = [event["samples"] > 0 for event in run.events("update")]
    return [sum(learned[:updates]) for updates in range(UPDATES + 1)]


def test_strictly_on_policy_means_one_version_per_batch(other: Run) -> None:
    groups = list(other.recording("rollout").groups(dropped=True))
    # The last update's weights play on until its checkpoint is written: a group of theirs may be settled by then.
    *played, last = _versions(other)
    assert set(played) <= {group.version for group in groups} <= {*played, last}
    for group in groups:
        assert {v for e in group.episodes for s in e.steps for v in s.generation.versions} == {group.version}
    assert all(event["sample_age"] == 0 for event in other.events("update"))


def test_zero_variance_groups_are_replaced_within_bounds(other: Run) -> None:
    recording = other.recording("rollout")
    kept = {group.id: group for group in recording.groups()}
    dropped = [group for group in recording.groups(dropped=True) if group.id not in kept]
    played, after = Counter(_versions(other)[:UPDATES]), Counter(_versions(other))
    taken = Counter(group.version for group in kept.values())
    assert all(played[version] * GROUPS <= taken[version] <= after[version] * GROUPS for version in after)
    for group in dropped:
        assert len({episode.outcome for episode in group.episodes}) == 1
    replaced = Counter(group.version for group in dropped)
    assert all(count <= after[version] * ROUNDS * GROUPS for version, count in replaced.items())
    assert any(len({e.outcome for e in g.episodes}) == 1 for g in recording.groups(dropped=True))


def test_workers_play_and_the_recorder_has_all_that_they_saw(other: Run) -> None:
    seen = [event["rollout_workers"] for event in other.events("update")]
    assert [(found["workers"], found["restarts"]) for found in seen] == [(2, 0)] * UPDATES
    recording = other.recording("rollout")
    frames = FrameStore(other.folder / "rollout" / "frames")
    shown = {name for episode in recording.episodes() for step in episode.steps for name in step.frames}
    assert shown and all(frames.frame(name).name == name for name in shown)
    assert len({episode.slot for episode in recording.episodes()}) == 8, "both workers' phones are played on"


def test_only_tasks_of_the_file_are_practised_and_measured(other: Run) -> None:
    listed = {catalog.tasks("quickstart", "train").sample(5, index).key for index in range(6)}
    practised = {episode.task.key for episode in other.recording("rollout").episodes()}
    measured = {episode.task.key for episode in other.recording("evaluation", "before-greedy").episodes()}
    assert practised <= listed
    assert measured <= listed and len(measured) == 4


@pytest.fixture(scope="session")
def killed(other: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Killed outright after updates of which there is no checkpoint."""
    copy = other.copied(tmp_path_factory.mktemp("killed"))
    rare = ("--set", "spec.stop.maxUpdates=1000", "--set", "spec.checkpoints.everyUpdates=1000")
    command = Command("run", "-f", "other.yaml", "--runs", copy.folder.parent, *rare, place=other.file.parent)
    command.until(lambda: copy.events("update")[-1]["update"] > UPDATES)
    command.process.kill()
    # Ray's own agents look for their parent every few seconds.
    return Run(copy.folder, other.file, command.wait(grace=180))


def test_a_killed_run_leaves_no_process_and_a_recording_that_can_be_read(other: Run, killed: Run) -> None:
    assert (killed.finished.code, killed.finished.left_behind) == (-signal.SIGKILL, [])
    assert killed.state["update"] == UPDATES
    groups, before = (list(run.recording("rollout").groups()) for run in (killed, other))
    assert len(before) >= UPDATES * GROUPS and groups[: len(before)] == before


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs a limit that another process can set")
def test_a_recording_that_can_not_grow_ends_the_run_and_loses_nothing(killed: Run, tmp_path: Path) -> None:
    """It goes on after the kill, until a limit on the size of the driver's files stands for a full disk."""
    copy = killed.copied(tmp_path)
    # The driver's process plays and records: it is the one that is limited.
    more = ("--runs", tmp_path, "--set", "spec.stop.maxUpdates=1000", "--set", "spec.rollout.phonesPerWorker=null")
    command = Command("run", "-f", "other.yaml", *more, place=killed.file.parent)
    earlier = len(copy.events("update"))
    command.until(lambda: len(copy.events("update")) > earlier)
    most = (copy.folder / "rollout" / FILE).stat().st_size + 50_000
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (most, most))
    full = command.wait()
    assert (full.code, full.left_behind) == (1, []), full.said
    assert "Traceback" not in full.err
    updates = [event["update"] for event in copy.events("update")][earlier:]
    assert updates == list(range(UPDATES + 1, updates[-1] + 1))
    assert "can't be written" in full.err and f"update {updates[-1]} is saved" in full.err
    assert copy.state["update"] == updates[-1]
    names = [episode.id for episode in copy.recording("rollout").episodes()]
    assert len(names) == len(set(names))
    before = list(killed.recording("rollout").groups())
    assert list(copy.recording("rollout").groups())[: len(before)] == before


@pytest.mark.parametrize(
    "setting, words",
    [
        ("spec.seed=9", ["spec.seed: 0 there, 9 here", "metadata.name"]),
        ("spec.rollout.groupSize=2", ["spec.rollout.groupSize: 4 there, 2 here"]),
        ("spec.evaluation.episodes=5", ["spec.evaluation.episodes: 4 there, 5 here"]),
        ("spec.environment.screen.width=128", ["spec.environment.screen.width: 96 there, 128 here"]),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    other: Run, setting: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other.file.parent)
    before = (other.folder / "spec.yaml").read_bytes()
    said = CliRunner().invoke(cli, ["run", "-f", "other.yaml", "--set", setting])
    assert said.exit_code == 2
    assert all(word in said.output for word in words), said.output
    assert (other.folder / "spec.yaml").read_bytes() == before


def test_a_default_that_is_written_out_is_no_difference(other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(other.file.parent)
    said = CliRunner().invoke(cli, ["run", "-f", "other.yaml", "--set", "spec.seed=0"])
    assert said.exit_code == 0, said.output
    assert "is complete" in said.output


def test_a_broken_export_is_named_by_whoever_loads_it(trained: Run, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    weights = copy.folder / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    few = ("--set", "spec.evaluation.episodes=4")
    failed = tapforge("eval", "-f", trained.file, "--runs", tmp_path, *few, place=tmp_path)
    assert (failed.code, failed.left_behind) == (2, []), failed.said
    assert "Traceback" not in failed.err
    assert f"{copy.folder / 'export'}" in failed.err
    assert "model.safetensors, which is not a safetensors file" in failed.err
