"""The study of estimators: its arithmetic by hand, and that a run depends on its seed alone and is not run again."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import forks
import numpy as np
import pytest
from load import offpolicy, paired
from load.arms import ARMS, arrays
from load.credit import WEIGHTS, Policy, chain, play, played, step
from load.picture import picture
from study import ENDS_ALONE

SCRIPT = Path("bench/study.py")


def test_intervals_flips_and_holms_correction():
    assert paired.interval([0.5]) is None
    assert paired.interval([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(2.776 * 0.15811 / 5**0.5, rel=0.01)
    assert paired.sign_flips([0.1] * 10) == pytest.approx(2 / 1024, abs=0.002)
    assert paired.sign_flips([0.1, -0.1]) == 1.0
    assert paired.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}


def test_differences_are_paired_by_seed():
    pairs = {
        "grpo": {"1": {"after": 0.5}, "2": {"after": 0.7}},
        "gigpo": {"1": {"after": 0.6}, "2": {"after": 0.9}, "3": {"after": 0.1}},
    }
    found = paired.table(pairs)
    assert (found["gigpo"]["seeds"], found["gigpo"]["vs_grpo"]["seeds"]) == (3, 2)
    assert found["gigpo"]["vs_grpo"]["mean"] == pytest.approx(0.15)
    assert "vs_grpo" not in found["grpo"]


def test_every_arm_gives_each_step_a_number_and_knows_who_won():
    policy, rng = Policy(np.zeros(WEIGHTS)), np.random.default_rng(0)
    groups = [[play(policy, chain("train", 1, number), rng) for _ in range(3)] for number in range(2)]
    groups[0][0].won = True
    steps = arrays(groups)
    assert len(steps) == sum(len(one.steps) for group in groups for one in group)
    assert steps.success is not None and steps.success[: len(groups[0][0].steps)].all() and steps.reward.sum() == 1
    for name, arm in ARMS.items():
        assert np.isfinite(arm(steps, rng)).all(), name


def test_a_forked_episode_goes_on_as_the_first_would_and_leaves_it_alone():
    policy, games = Policy(np.zeros(WEIGHTS)), []
    found = play(policy, chain("train", 1, 0), np.random.default_rng(0), forks=games)
    assert [game.state for game in games] == [seen.state for seen in found.steps]
    for game, kept in zip(games, [game.state for game in games], strict=True):
        step(policy, game.fork(), np.random.default_rng(1))
        assert game.state == kept
    again = games[3].fork()
    for place in range(3, len(found.steps)):
        seen = found.steps[place]
        actions, words, features = again.options()
        assert np.array_equal(features, seen.features)
        again.act(actions[seen.chosen], words[seen.chosen])
    assert again.state == found.final


def test_true_advantages_of_an_episode_add_up_to_its_end():
    policy = forks.policy_after(0, 1)
    groups = played(policy, 1, 0, 100, np.random.default_rng(0), forks=(of := []))
    truth = forks.truth(policy, groups, of, np.random.default_rng(0))
    steps = [seen for group in groups for one in group for seen in one.steps]
    assert truth.shape == (2, len(steps))
    ends = np.cumsum([len(one.steps) for group in groups for one in group])
    for begin, end, one in zip([0, *ends[:-1]], ends, [one for group in groups for one in group], strict=True):
        # The differences of an episode add up to its end less what was to be expected at its beginning.
        assert (float(one.won) - truth[:, begin:end].sum(axis=1) <= 1).all()
        assert (float(one.won) - truth[:, begin:end].sum(axis=1) >= 0).all()


def test_staleness_keeps_the_actor_behind_and_on_policy_anchors_agree():
    fresh = offpolicy.run("behavior", 1, 0.1, 2, 0)
    assert fresh["kl_behavior"] < 0.05 and offpolicy.run("old_truncated", 1, 0.1, 2, 0)["after"] >= 0
    assert offpolicy.run("behavior", 1, 0.1, 4, 4)["kl_behavior"] > fresh["kl_behavior"]


def test_a_picture_has_a_row_for_each_arm_and_says_which_intervals_hold_nothing():
    arms = {
        "grpo": {"mean": 0.5, "ci95": 0.1},
        "better": {"vs_grpo": {"mean": 0.2, "ci95": 0.1}},
        "same": {"vs_grpo": {"mean": -0.05, "ci95": 0.1}},
        "once": {"vs_grpo": {"mean": 0.3, "ci95": None}},
    }
    drawn = ElementTree.fromstring(picture("a < b", arms, "grpo"))
    texts = ["".join(one.itertext()) for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:-1] == ["a < b", "grpo", "better", "+20.0 ± 10.0", "same", "-5.0 ± 10.0"]
    circles = [one.attrib["class"] for one in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert circles == ["b", "n"]


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells of the rows that begin with a rule's name."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): [cell.strip(" |") for cell in cells[1:]] for cells in lines}


def test_the_page_has_the_figures_of_the_files_beside_it():
    page = Path("docs/studies.md").read_text()
    credit, rest = page.split("## Credit beside the truth")
    truth, older = rest.split("## Samples of older weights")
    studies = json.loads(Path("docs/studies/algorithms.json").read_text())
    credit, own_size = credit.split("## Credit, with advantages of their own size")
    by_outcome, by_reward = map(rows_of, credit.split("## Credit, with `signal: reward`"))
    by_size = rows_of(own_size)
    assert by_size.keys() == studies["credit, signal outcome, own size"]["arms"].keys()
    assert by_outcome.keys() == studies["credit, signal outcome"]["arms"].keys()
    assert by_reward.keys() == by_outcome.keys() - (ENDS_ALONE - {"grpo"})
    for signal, shown in (("outcome", by_outcome), ("reward", by_reward), ("outcome, own size", by_size)):
        for name, cells in shown.items():
            of = studies[f"credit, signal {signal}"]["arms"][name]
            said = [f"{100 * of['mean']:.1f} ± {100 * of['ci95']:.1f} %"]
            if versus := of.get("vs_grpo"):
                p = versus["p_holm"]
                said += [f"{100 * versus['mean']:+.1f} ± {100 * versus['ci95']:.1f}"]
                said += ["< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.005 else f"{p:.2f}"]
            assert cells[: len(said)] == said, (signal, name)
    assert all(cells[-1] == by_outcome[name][0].split(" ± ")[0] + " %" for name, cells in by_reward.items())
    tables = json.loads(Path("docs/studies/forks.json").read_text())
    figures = ("early", "middle", "late", "wrong_sign", "direction", "one_update")
    for name, cells in rows_of(truth).items():
        for figure, cell in zip(figures, cells, strict=True):
            of = tables[f"after 2 updates, signal outcome: {figure}"][name]
            versus = of.get("vs_grpo", {})
            said = f"{versus['mean']:+.2f} ± {versus['ci95']:.2f}" if versus else f"{of['mean']:.2f}"
            assert cell == said, (name, figure)
    for name, cells in rows_of(older).items():
        for staleness, cell in zip((0, 2, 8), cells, strict=False):
            of = studies[f"off-policy, staleness {staleness}"]["arms"][name]
            said = f"{100 * of['mean']:.1f} ± {100 * of['ci95']:.1f} %"
            if versus := of.get("vs_behavior"):
                said += f", {100 * versus['mean']:+.1f} ± {100 * versus['ci95']:.1f}"
            assert cell == said, (name, staleness)


def test_a_run_depends_on_its_seed_and_is_not_run_again(tmp_path):
    command = [sys.executable, str(SCRIPT), "--arms", "grpo,gigpo", "--seeds", "1-1", "--updates", "1"]
    found = []
    for name in ("a.json", "b.json"):
        subprocess.run([*command, "--file", str(tmp_path / name)], check=True, capture_output=True, timeout=300)
        found.append(json.loads((tmp_path / name).read_text())["credit, signal outcome"]["pairs"])
    for arm in ("grpo", "gigpo"):
        one, other = (pairs[arm]["1"] for pairs in found)
        assert (one["before"], one["after"]) == (other["before"], other["after"])
    before = (tmp_path / "a.json").read_text()
    subprocess.run([*command, "--file", str(tmp_path / "a.json")], check=True, capture_output=True, timeout=300)
    assert (tmp_path / "a.json").read_text() == before
