"""Whole runs with paired seeds: each run that a study starts is a valid one, and what is done is not run again."""

import json
import subprocess
import sys
from pathlib import Path

import distillation
import learning
import pytest
from load import whole_runs

from tapforge_api import load
from tapforge_trainer.run.feasibility import judge
from tapforge_trainer.run.model_facts import facts_of

ARMS = [(name, arm) for name, study in learning.STUDIES.items() for arm in study.arms]


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_each_arm_is_a_run_that_can_start(name: str, arm: str) -> None:
    study = learning.STUDIES[name]
    run = load(whole_runs.SAMPLE, [f"spec.{one}" for one in study.settings(arm)])
    assert judge(run, facts_of(run)).errors == () and run.spec.warm_start is None
    start = load(whole_runs.SAMPLE, [f"spec.{one}" for one in study.imitation(arm)])
    assert start.spec.warm_start is not None and start.spec.model.adapter == run.spec.model.adapter


def test_a_pair_that_is_in_the_file_is_not_run_again(tmp_path: Path) -> None:
    def result(after: float) -> dict[str, float]:
        return {"before": 0.5, "after": after, "env_steps": 100, "seconds": 1.0, "whole_seconds": 2.0}

    pairs = {"sliding": {"1": result(0.7), "2": result(0.8)}, "blocks": {"1": result(0.8), "2": result(0.7)}}
    study: dict[str, object] = {"updates": learning.STUDIES["history"].updates, "pairs": pairs}
    whole_runs.summed_up(learning.STUDIES["history"], study)
    file = tmp_path / "learning.json"
    file.write_text(json.dumps({"history": study}))
    before = file.read_text()
    words = (sys.executable, "bench/learning.py", "--studies", "history", "--seeds", "1-2", "--file", str(file))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == before and "blocks" in done.stdout and "0.0" in done.stdout


@pytest.mark.parametrize("arm", distillation.ARMS)
def test_each_arm_of_the_study_of_distillation_is_a_run_from_the_same_start(arm: str, tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text(distillation.SPEC)
    spec = load(file, whole_runs.options(distillation.settings(arm, 3, 24))[1::2]).spec
    taught = spec.algorithm.distillation
    assert (taught and (taught.kind, taught.rewards)) == distillation.ARMS[arm]
    assert spec.seed == 3 and spec.warm_start is None
    assert spec.model.source.path is not None and spec.stop.max_updates % spec.evaluation.every_updates == 0


def test_a_curve_is_success_in_practice_by_update(tmp_path: Path) -> None:
    lines = [{"event": "update", "success_rate": rate} for rate in (0.12345, None)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"event": "phase"}, *lines]))
    assert whole_runs.curve(tmp_path) == {"curve": [0.123, None]}


def test_environment_steps_of_the_study_of_distillation_are_those_until_a_measurement(tmp_path: Path) -> None:
    assert distillation.measured(tmp_path) == []
    lines: list[dict[str, object]] = [{"event": "evaluation", "mode": "greedy", "update": 0, "success": 0.3}]
    for update in range(1, 5):
        lines.append({"event": "update", "update": update, "episodes": 64, "steps_mean": None if update == 2 else 2.5})
        if update in (3, 4):
            lines.append({"event": "evaluation", "mode": "greedy", "update": update, "success": 0.1 * update})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert distillation.measured(tmp_path) == [(0, 0, 0.3), (3, 320, pytest.approx(0.3)), (4, 480, 0.4)]


def test_the_page_has_the_figures_of_the_file_beside_it() -> None:
    page, found = Path("docs/studies.md").read_text(), json.loads(Path("docs/studies/learning.json").read_text())
    shown = [line for line in page.splitlines() if line.startswith(tuple(f"| {name} |" for name in learning.STUDIES))]
    assert sorted(shown) == sorted(row for name, kept in found.items() for row in learning.rows(name, kept))


def test_the_page_has_how_many_runs_fall_once_they_were_good() -> None:
    found = json.loads(Path("docs/studies/learning.json").read_text())["history-slow"]["pairs"]

    def falls(curve: list[float]) -> bool:
        good = next((at for at, success in enumerate(curve) if success > 0.85), len(curve))
        return min(curve[good:], default=1.0) < 0.6

    blocks, sliding = (sum(falls(run["curve"]) for run in found[arm].values()) for arm in ("blocks", "sliding"))
    page = " ".join(Path("docs/studies.md").read_text().split())
    assert sliding == 0 and f"{blocks} of {len(found['blocks'])} runs in blocks fell below 60 %" in page


def test_the_page_has_the_figures_of_the_study_of_distillation() -> None:
    page, found = Path("docs/studies.md").read_text(), json.loads(Path("docs/studies/distillation.json").read_text())
    for arm, one in found["arms"].items():
        reached = sum(run["reached"] for run in found["pairs"][arm].values())
        cells = [arm, one["seeds"], f"{reached} of {one['seeds']}", f"{one['mean']:,.0f} ± {one['ci95']:,.0f}"]
        if vs := one.get("vs_grpo"):
            cells.append(f"{vs['mean']:+,.0f} ± {vs['ci95']:,.0f}")
        assert f"| {' | '.join(map(str, cells))} |" in page
