"""The learning curve: drawn from any figures a run can have, without a display, without inventing points."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image

from tapforge_trainer.statistics import wilson
from tapforge_trainer.viewer.curve import EvaluationPoint, UpdatePoint, draw_curve, percent, trailing_mean

UPDATES = [UpdatePoint(i, i / 10, 0.9, 0.2, 0.5, 0.7, i / 12) for i in range(1, 9)]
#: of a recording that doesn't say how all attempts went
OLD = [UpdatePoint(i, i / 10, 0.9, 0.2, 0.5, 0.7) for i in range(1, 9)]
GAP = UpdatePoint(9, None, None, None, None, None)
EVALUATIONS = [
    EvaluationPoint(0, "sampled", 0.4, wilson(40, 100)),
    EvaluationPoint(8, "sampled", 1.0, wilson(100, 100)),
    EvaluationPoint(0, "greedy", 0.0, None),
]


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # a file or socket that another test left open
@pytest.mark.parametrize(
    ("updates", "evaluations", "baselines"),
    [
        (UPDATES, EVALUATIONS, {"random": 0.02, "infeasible": 0.02}),
        ([], [], {}),
        (OLD, EVALUATIONS, {}),
        ([GAP], [], {}),
        ([], EVALUATIONS, {}),
    ],
)
def test_draws_whatever_a_run_has(tmp_path, updates, evaluations, baselines):
    path = tmp_path / "curve.png"
    draw_curve(path, title="a run", updates=updates, evaluations=evaluations, baselines=baselines)
    with Image.open(path) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", (1440, 1080))
        assert len(image.convert("L").getcolors(256)) > 1


def test_a_gap_draws_nothing(tmp_path):
    for name, updates in (("with", [*UPDATES, GAP]), ("without", [*UPDATES, UpdatePoint(9, *[float("nan")] * 6)])):
        draw_curve(tmp_path / name, title="a run", updates=updates)
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()


@pytest.mark.parametrize("update", [0, 8, 30])
def test_every_evaluation_is_on_the_picture(tmp_path, update):
    for name, rate in (("low", 0.4), ("high", 0.6)):
        point = EvaluationPoint(update, "greedy", rate, None)
        draw_curve(tmp_path / name, title="a run", updates=UPDATES, evaluations=[EVALUATIONS[2], point])
    assert (tmp_path / "low").read_bytes() != (tmp_path / "high").read_bytes()


def test_all_attempts_and_the_groups_learned_from_are_two_lines(tmp_path):
    draw_curve(tmp_path / "both", title="a run", updates=UPDATES)
    draw_curve(tmp_path / "one", title="a run", updates=[replace(p, success_rate=p.success_rate_all) for p in UPDATES])
    assert (tmp_path / "both").read_bytes() != (tmp_path / "one").read_bytes()


def test_trailing_mean_looks_back_only():
    assert trailing_mean([1.0, None, 3.0, 5.0, 7.0], window=2) == [1.0, None, 3.0, 4.0, 6.0]


def test_drawing_leaves_no_pyplot_behind(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tapforge_trainer.viewer.curve import draw_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw_curve(Path({str(tmp_path / 'c.png')!r}), title='t', updates=[])\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "0 %"),
        (0.0001, "0.1 %"),
        (0.005, "0.5 %"),
        (0.5, "50 %"),
        (0.995, "99.5 %"),
        (0.9999, "99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_only_all_is_a_hundred_percent_and_only_nothing_none(rate, text):
    assert percent(rate) == text
