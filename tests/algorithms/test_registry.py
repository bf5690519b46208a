"""Estimators by name: strict, nearest name, and those that an installed package offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Algorithm, Critic
from tapforge_api.loading import from_object
from tapforge_trainer import plugins
from tapforge_trainer.algorithms.options import UnknownName
from tapforge_trainer.algorithms.registry import built_in, defaults_of, estimate, estimator, names
from tapforge_trainer.algorithms.steps import Steps
from tapforge_trainer.batch import BatchRules
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.plan import plan

HEAD = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
PAIR = Steps([0, 0], [0, 1], [0, 0], [1.0, 0.0], [True, True])


def install(folder, monkeypatch, entry_point: str, source: str) -> None:
    """Puts a real distribution with one entry point on the path."""
    (folder / "their_estimator.py").write_text(source)
    info = folder / "their_estimator-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-estimator\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tapforge.algorithms]\n{entry_point}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "their_estimator", raising=False)


def test_names_are_strict():
    assert set(built_in()) <= set(names())
    assert {"gae", "gigpo", "grpo", "hgpo", "rloo"} <= set(built_in())
    with pytest.raises(UnknownName, match="'gigo'; did you mean 'gigpo'"):
        estimator("gigo")
    with pytest.raises(UnknownName, match="'HGPO'; did you mean 'hgpo'"):
        estimator("HGPO")
    with pytest.raises(UnknownName, match="'nothing alike'[.] Known: "):
        estimator("nothing alike")
    with pytest.raises(UnknownName, match="option of gigpo 'gama'; did you mean 'gamma'"):
        estimate("gigpo", PAIR, gama=1.0)
    with pytest.raises(UnknownName, match="option of rloo 'normalization'"):
        estimate("rloo", PAIR, normalization="mean")


def test_the_table_of_the_docs_has_each_of_ours_with_its_options():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().partition("### By name")[2]
    rows = {cells[1].strip(" `"): cells[4] for line in text.splitlines() if len(cells := line.split("|")) == 7}
    assert sorted(set(rows) - {"name", "---"}) == built_in()
    for name in built_in():
        told = re.findall(r"`(\w+)", rows[name])
        assert set(defaults_of(name)) - {"epsilon"} == set(told) - {"epsilon"}, name


def test_packages_are_searched_once(monkeypatch):
    estimate("rloo", PAIR)
    monkeypatch.delattr(plugins, "entry_points")
    estimate("rloo", PAIR)


def test_an_estimator_of_another_package(tmp_path, monkeypatch):
    source = """
import numpy as np
from tapforge_trainer.algorithms.steps import Advantages

def raw(steps, *, scale=1.0):
    zero = np.zeros(len(steps))
    return Advantages(steps.reward * scale, zero, zero, np.ones(len(steps), dtype=np.int64))
"""
    install(tmp_path, monkeypatch, "raw = their_estimator:raw", source)
    assert "raw" in names()
    np.testing.assert_array_equal(estimate("raw", PAIR, scale=3.0).total, [3.0, 0.0])
    with pytest.raises(UnknownName, match="did you mean 'scale'"):
        estimate("raw", PAIR, scal=3.0)


OPTIONS = """
import numpy as np
from tapforge_trainer.algorithms.steps import Advantages

def mine(steps, *, scale=1.0, rounds=2, flip=False, of="reward"):
    total = steps.reward * scale * rounds * (-1 if flip else 1)
    return Advantages(total, total, total, np.ones(len(steps), dtype=np.int64))

def needs(steps, *, key):
    ...

def infinite(steps):
    total = np.array([1.0, np.inf])
    return Advantages(total, total, total, np.ones(2, dtype=np.int64))
"""


def plugin(name, **options):
    given = [{"name": key, "value": value} for key, value in options.items()]
    return Algorithm.model_validate({"advantage": {"plugin": {"name": name, "options": given}}})


def test_a_file_names_an_estimator_of_another_package_and_its_options(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "mine = their_estimator:mine", OPTIONS)
    rules = BatchRules.of(plugin("mine", scale="1e1", rounds="3", flip="true", of="x"), min_valid=2)
    assert (rules.estimator, rules.options) == ("mine", {"scale": 10.0, "rounds": 3, "flip": True, "of": "x"})
    np.testing.assert_array_equal(estimate(rules.estimator, PAIR, **rules.options).total, [-30.0, 0.0])


def run_of(algorithm: Algorithm) -> TrainingRun:
    written = algorithm.model_dump(by_alias=True, exclude_none=True, include={"advantage", "critic"})
    return from_object(TrainingRun, {**HEAD, "spec": {"algorithm": written}})


@pytest.mark.parametrize("name", sorted(set(built_in()) - {"gae"}))
def test_a_file_names_ours_as_those_of_another_package(name, tmp_path):
    inspect(run_of(plugin(name)), tmp_path)
    assert BatchRules.of(plugin(name), min_valid=2).estimator == name


def test_options_of_ours_are_those_of_the_file(tmp_path):
    algorithm = plugin("hgpo", form="paper", history="3", alpha="0.5")
    inspect(run_of(algorithm), tmp_path)
    rules = BatchRules.of(algorithm, min_valid=2)
    assert rules.options == {"form": "paper", "history": 3, "alpha": 0.5}
    assert plan(run_of(algorithm)).algorithm.startswith(
        "hgpo (normalization mean_std, gamma 0.95, history 3, alpha 0.5, form paper, drop_zeros false, base false, "
        "min_deviation 0.0, epsilon 1e-06), clip"
    )
    assert plan(run_of(plugin("opo"))).algorithm.startswith("opo, clip")
    assert plan(run_of(plugin("gdpo", weights="outcome=2"))).algorithm.startswith("gdpo (weights outcome=2, whiten")


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (plugin("opoo"), "unknown estimator 'opoo'; did you mean 'opo'"),
        (plugin("hgpo", histori="1"), "unknown option of hgpo 'histori'; did you mean 'history'"),
        (plugin("hgpo", form="papers"), "unknown form 'papers'; known are code, paper"),
        (plugin("hgpo", history="1.5"), "option history of hgpo: should be a whole number, not '1.5'"),
        (plugin("hgpo", alpha="nan"), "option alpha of hgpo: should be a number, not 'nan'"),
        (plugin("hgpo", gamma="2"), "gamma is 2; it lies in [0, 1]"),
        (plugin("gigpo", weight="inf"), "weight is inf; it lies in [0, 1e+06]"),
        (plugin("grpo", epsilon="-1"), "epsilon is -1; it lies in [0, inf)"),
        (plugin("graphgpo", omega="-1"), "omega is -1; it lies in [0, 1]"),
        (plugin("gdpo", weights="outcom=1"), "weights: unknown stream 'outcom'; did you mean 'outcome'"),
        (plugin("gae"), "gae compares with a critic's values, and there is none: add `critic: {}` to algorithm"),
        (
            Algorithm(advantage=plugin("grpo").advantage, critic=Critic()),
            "grpo reads no values, so that algorithm.critic would",
        ),
    ],
)
def test_what_ours_can_not_do_is_said_before_anything_starts(tmp_path, algorithm, said):
    with pytest.raises(ConfigurationError, match=re.escape(f"spec.algorithm.advantage.plugin: {said}")):
        inspect(run_of(algorithm), tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (plugin("mine", scal="1"), "option of mine 'scal'; did you mean 'scale'"),
        (plugin("mine", rounds="2.5"), "option rounds of mine: should be a whole number, not '2.5'"),
        (plugin("mine", scale="much"), "option scale of mine: should be a number, not 'much'"),
        (plugin("mine", flip="1"), "should be true or false, not '1'"),
        (plugin("needs"), "options of needs: missing a required argument: 'key'"),
        (plugin("mini"), "unknown estimator 'mini'; did you mean 'mine'"),
    ],
)
def test_what_no_package_offers_is_said_before_anything_starts(tmp_path, monkeypatch, algorithm, said):
    install(tmp_path, monkeypatch, "mine = their_estimator:mine\nneeds = their_estimator:needs", OPTIONS)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        inspect(run_of(algorithm), tmp_path)


def test_advantages_that_are_no_numbers_name_the_step_and_its_group(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "mine = their_estimator:infinite", OPTIONS)
    with pytest.raises(ValueError, match="mine returned inf for step 1 of 2, of group 0"):
        estimate("mine", PAIR)


RETURNS = """
import numpy as np
from tapforge_trainer.algorithms.steps import Advantages

def returns(steps, *, what="lists"):
    n = len(steps)
    zero, ones = np.zeros(n), np.ones(n, dtype=np.int64)
    return {
        "lists": Advantages([0.0] * n, [0] * n, [0.0] * n, [1] * n),
        "nothing": None,
        "one number": Advantages(1.0, zero, zero, ones),
        "a column": Advantages(zero[:, None], zero, zero, ones),
        "a short part": Advantages(zero, zero[:1], zero, ones),
        "a text": Advantages(zero, zero, ["much"] * n, ones),
        "a part that is none": Advantages(zero, zero, zero + np.nan, ones),
    }[what]
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "returns returned None; Advantages are due"),
        ("one number", "returns returned 1 advantages for 2 steps"),
        ("a column", "returned total of shape (2, 1) for 2 steps; one number per step is due"),
        ("a short part", "returned episode of shape (1,) for 2 steps"),
        ("a text", "returned step that isn't one number per step: could not convert"),
        ("a part that is none", "returned nan as step for step 0 of 2, of group 0"),
    ],
)
def test_what_is_returned_is_checked(tmp_path, monkeypatch, what, said):
    install(tmp_path, monkeypatch, "returns = their_estimator:returns", RETURNS)
    with pytest.raises(ValueError, match=re.escape(said)):
        estimate("returns", PAIR, what=what)
    # Lists will do: whether a group has a signal is asked of arrays.
    assert not (estimate("returns", PAIR).total != 0.0).any()


@pytest.mark.parametrize(
    ("entry_point", "source", "error"),
    [
        ("gigpo = their_estimator:f", "def f(steps): ...", "offered more than once"),
        ("bad = their_estimator:f", "f = 3", "is not a function"),
    ],
)
def test_a_bad_offer_is_refused(tmp_path, monkeypatch, entry_point, source, error):
    install(tmp_path, monkeypatch, entry_point, source)
    with pytest.raises((ValueError, TypeError), match=error):
        estimator(entry_point.split()[0])


def test_a_wrong_number_of_advantages_is_an_error(tmp_path, monkeypatch):
    source = """
import numpy as np
from tapforge_trainer.algorithms.steps import Advantages

def short(steps):
    return Advantages(*[np.zeros(1)] * 4)
"""
    install(tmp_path, monkeypatch, "short = their_estimator:short", source)
    with pytest.raises(ValueError, match="short returned 1 advantages for 2 steps"):
        estimate("short", PAIR)


def test_estimators_and_objectives_cost_no_torch():
    program = (
        "import sys, tapforge_trainer.algorithms.registry, tapforge_trainer.algorithms.objective;"
        "import tapforge_trainer.batch;"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert answer.stdout.strip() == "[]"
