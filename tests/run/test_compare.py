"""`tapforge compare`: two measurements, task by task."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.cli.main import cli
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRecord, Generation, StepRecord
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.compare import all_pass_at, compare, pass_at

ANSWER = Generation((1,), (2,), (-0.5,), (0,), "stop", 1)


def measured(folder: Path, name: str, outcomes: dict[tuple[str, int], list[Outcome]]) -> Path:
    """A measurement: by template and number of the task, how its episodes ended."""
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder / "evaluation" / name)
    for number, ((template, seed), ends) in enumerate(outcomes.items()):
        for member, outcome in enumerate(ends):
            one = f"{name}-{number:06d}.{member}.0"
            step = StepRecord(one, 0, (), None, None, ANSWER, "t", None, None, 0.0, "", 0.1, 0.1)
            reason = Reason.ENV_ERROR if outcome is Outcome.INVALID else Reason.DONE
            task = Task(suite="s", template=template, seed=seed)
            group = one.partition(".")[0]
            recorder.episode(EpisodeRecord(one, group, task, 0, "s", 1, reason, outcome, None, "", (step,), 0, 1), {})
    recorder.close()
    return folder


WON, LOST, BROKE = Outcome.SUCCESS, Outcome.FAILURE, Outcome.INVALID


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    before = {("a", 0): [LOST, LOST], ("a", 1): [WON, LOST], ("b", 0): [WON, WON], ("c", 0): [WON, BROKE]}
    after = {("a", 0): [WON, WON], ("a", 1): [WON, WON], ("b", 0): [LOST, LOST], ("d", 0): [WON, WON]}
    first = measured(tmp_path / "first", "after-sampled", before)
    return first, measured(tmp_path / "second", "after-sampled", after)


def test_tasks_are_paired_and_others_left_out(runs) -> None:
    found = compare(*runs, name="after-sampled", other="after-sampled")
    assert (found.difference.tasks, found.only_one, found.k) == (3, 2, 2)
    assert found.before.success == pytest.approx(0.5) and found.after.success == pytest.approx(2 / 3)
    assert found.difference.difference == pytest.approx(1 / 6)
    assert found.by_template == {"a": (0.25, 1.0, 2), "b": (1.0, 0.0, 1)}
    assert (found.gained, found.lost) == (("s/a?#0",), ("s/b?#0",))
    assert (found.before.pass_at_k, found.before.all_pass_at_k) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert found.before.invalid == 1


def test_a_run_against_itself_shows_no_difference(runs) -> None:
    found = compare(runs[0], runs[0], name="after-sampled", other="after-sampled")
    assert found.difference.difference == 0 and not found.gained and not found.lost


@pytest.mark.parametrize(
    ("k", "tries", "won", "any_of", "all_of"), [(1, 4, 1, 0.25, 0.25), (2, 4, 2, 5 / 6, 1 / 6), (3, 3, 3, 1, 1)]
)
def test_pass_at_k(k: int, tries: int, won: int, any_of: float, all_of: float) -> None:
    assert pass_at(k, tries, won) == pytest.approx(any_of)
    assert all_pass_at(k, tries, won) == pytest.approx(all_of)


def test_what_can_not_be_compared(runs, tmp_path: Path) -> None:
    other = measured(tmp_path / "third", "after-sampled", {("z", 0): [WON]})
    with pytest.raises(ConfigurationError, match="measured no task in common"):
        compare(runs[0], other, name="after-sampled", other="after-sampled")
    with pytest.raises(ConfigurationError, match="has no measurement after-greedy; it has: after-sampled"):
        compare(*runs, name="after-greedy", other="after-sampled")


def test_the_command(runs) -> None:
    shown = CliRunner().invoke(cli, ["compare", *map(str, runs)])
    assert shown.exit_code == 0, shown.output
    assert "second less first: +16.7 points" in shown.output and "pass@2" in shown.output
    written = CliRunner().invoke(cli, ["compare", *map(str, runs), "--output", "json"])
    assert json.loads(written.output)["difference"]["tasks"] == 3
    assert CliRunner().invoke(cli, ["compare", *map(str, runs), "--of", "nothing"]).exit_code != 0
