"""Losses by name: strict, options read as they are meant, and those that an installed package offers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch

from tapforge_api import TrainingRun
from tapforge_api.algorithm import LossPlugin
from tapforge_api.loading import from_object
from tapforge_trainer.algorithms.composition import objective_of
from tapforge_trainer.algorithms.loss_registry import BUILT_IN, loss, loss_options, names
from tapforge_trainer.algorithms.losses import policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.policy_settings import update_settings

THEIRS = """
from dataclasses import dataclass
from tapforge_trainer.algorithms.tokens import TokenLoss

@dataclass(frozen=True, kw_only=True)
class Plain:
    scale: float = 1.0
    rounds: int = 2

    def __post_init__(self):
        if self.scale <= 0:
            raise ValueError(f"scale is {self.scale}; it must be over 0")

    def __call__(self, tokens):
        return TokenLoss(-self.scale * tokens.advantage * tokens.logp)

def answering(of_tokens):
    return lambda: of_tokens

Short = answering(lambda tokens: TokenLoss(tokens.logp[:1]))
Bare = answering(lambda tokens: tokens.logp)
Constant = answering(lambda tokens: TokenLoss(-tokens.advantage))
ShareOfOne = answering(lambda tokens: TokenLoss(tokens.logp, {"cut_fraction": tokens.counted[:1]}))
ShareOfNone = answering(lambda tokens: TokenLoss(tokens.logp, {"cut_fraction": True}))
RatioOfOne = answering(lambda tokens: TokenLoss(tokens.logp, {}, tokens.logp[:1]))
Weight = answering(lambda tokens: TokenLoss(tokens.logp, {"weight": tokens.counted}))
Number = answering(3)

def wild(tokens):
    gone = tokens.advantage.masked_fill(~tokens.counted, float("inf"))
    return TokenLoss(-tokens.advantage * tokens.logp / tokens.counted + gone, {"cut_fraction": ~tokens.counted}, gone)

Wild = answering(wild)
"""


def install(folder, monkeypatch, entry_points: str) -> None:
    """Puts a real distribution with entry points on the path."""
    (folder / "their_losses.py").write_text(THEIRS)
    info = folder / "their_losses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tapforge.losses]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "their_losses", raising=False)


def run_with(written: dict) -> TrainingRun:
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    return from_object(TrainingRun, {**head, "spec": {"algorithm": {"loss": written}}})


def plugin(name: str, **options: str) -> dict:
    return {"plugin": {"name": name, "options": [{"name": key, "value": value} for key, value in options.items()]}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl": {"place": "reward", "estimator": "k1", "coefficient": 0.1}},
        {"advantage": {"plugin": {"name": "otb"}}},
    ],
)
def test_what_is_read_of_whole_groups_is_refused_where_parts_of_groups_come_again(algorithm, tmp_path):
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    spec = {
        "algorithm": {"loss": {"anchor": "behavior"}, **algorithm},
        "rollout": {"replay": {}},
        "environment": {"source": {"processes": {"count": 1}}},
    }
    with pytest.raises(ConfigurationError, match="spec.rollout.replay: successes that come again have no frames"):
        inspect(from_object(TrainingRun, {**head, "spec": spec}), tmp_path)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_of_ours_reads_its_own_defaults(name):
    made = loss(name, {})
    written = {field.name: str(getattr(made, field.name)) for field in fields(made)}
    assert loss(name, loss_options(name, written)) == made


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (plugin("cisp"), "unknown loss 'cisp'; did you mean 'cispo'"),
        (plugin("cispo", clip_hig="1"), "option of cispo 'clip_hig'; did you mean 'clip_high'"),
        (plugin("cispo", clip_high="much"), "option clip_high of cispo: should be a number, not 'much'"),
        (plugin("cispo", clip_low="1.5"), "loss cispo: clip is 1.5/0.28; low lies in [0, 1]"),
        (plugin("ppo", ratio="tokens"), "loss ppo: ratio is 'tokens'; it is one of token, sequence"),
        (plugin("ppo", dual_clip="1"), "dual_clip is 1.0; it must be over 1"),
        (plugin("dppo_kl", form="lin"), "form is 'lin'; it is one of log, ratio"),
        (plugin("dro", beta="inf"), "beta is inf; it must be at least 0 and at most 1e+06"),
        (plugin("cispo", clip_high="1e39"), "high in [0, 1e+09], or is inf"),
        (plugin("vespo", k_negative="100"), "the weight would be over exp(20)"),
        (plugin("topr", clip_low="0"), "unknown option of topr 'clip_low'"),
        (plugin("plain", scale="0"), "loss plain: scale is 0.0; it must be over 0"),
        (plugin("plain", rounds="2.5"), "option rounds of plain: should be a whole number"),
        (plugin("gspo"), "'gspo' of tapforge.losses is offered more than once"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_starts(tmp_path, monkeypatch, written, said):
    install(tmp_path, monkeypatch, "plain = their_losses:Plain\ngspo = their_losses:Plain")
    with pytest.raises(ConfigurationError, match="spec.algorithm.loss.plugin: .*" + re.escape(said)):
        inspect(run_with(written), tmp_path)


def test_a_file_names_a_loss_of_another_package_and_the_ranks_get_it(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plain = their_losses:Plain")
    assert "plain" in names()
    objective = update_settings(run_with(plugin("plain", scale="3")), 1).objective
    assert (objective.loss, objective.options) == ("plain", {"scale": 3.0})
    logp = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    one = torch.ones(2, dtype=torch.float64)
    sequence = torch.zeros(2, dtype=torch.int64)
    policy_loss(logp, None, one, sequence, objective=objective, counts=Counts(2.0, 1.0)).loss.backward()
    assert logp.grad.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Short", r"loss theirs returned (1,) for 2 tokens; one number per token"),
        ("Bare", "loss theirs returned a Tensor; a TokenLoss is due"),
        ("Constant", "loss theirs has no gradient by tokens.logp"),
        ("ShareOfOne", "loss theirs returned (1,) for 2 tokens as cut_fraction"),
        ("ShareOfNone", "loss theirs returned () for 2 tokens as cut_fraction"),
        ("RatioOfOne", "loss theirs returned (1,) for 2 tokens as ratio"),
        ("Weight", "a share 'weight'; names of shares contain 'fraction'"),
    ],
)
def test_what_a_loss_answers_with_is_looked_at(tmp_path, monkeypatch, answer, said):
    install(tmp_path, monkeypatch, f"theirs = their_losses:{answer}")
    one = torch.ones(2)
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        policy_loss(
            one.clone().requires_grad_(),
            one,
            one,
            one.long() * 0,
            objective=Objective(loss="theirs"),
            counts=Counts(2.0, 1.0),
        )


def test_what_a_loss_says_of_padding_is_not_looked_at(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "theirs = their_losses:Wild")
    logp, one = torch.zeros(2, requires_grad=True), torch.ones(2)
    counted = torch.tensor([1.0, 0.0])
    objective = Objective(loss="theirs")
    result = policy_loss(logp, one, one, one.long() * 0, objective=objective, counts=Counts(1.0, 1.0), weight=counted)
    result.loss.backward()
    assert logp.grad.tolist() == [-1.0, 0.0]
    assert all(torch.isfinite(value) for value in (result.sums | result.maxima).values())
    assert result.sums["cut_fraction"].item() == 0.0


def test_a_loss_that_is_none_is_refused_before_anything_starts(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "theirs = their_losses:Number")
    with pytest.raises(ConfigurationError, match="loss theirs made 3, which can't be called"):
        inspect(run_with(plugin("theirs")), tmp_path)


def test_a_file_as_the_ranks_get_it():
    written = {
        **plugin("dppo_tv", low="0.2", form="ratio"),
        "anchor": "behavior",
        "aggregation": "constant",
        "corrections": {"range": {"by": "token", "low": 0.5, "high": 2}, "veto": {}, "opsm": {}},
    }
    spec = run_with(written).spec
    assert objective_of(spec.algorithm, spec.rollout.response_tokens) == Objective(
        loss="dppo_tv",
        options={"low": 0.2, "form": "ratio"},
        anchor="behavior",
        importance_cap=None,
        aggregation="constant",
        constant_length=spec.rollout.response_tokens,
        corrections={
            "range": {"by": "token", "low": 0.5, "high": 2.0},
            "veto": {"below": 1e-4},
            "opsm": {"above": 0.1, "against": "behavior"},
        },
    )


def test_the_length_that_sums_are_divided_by():
    algorithm = run_with({"aggregation": "constant", "constantLength": 7}).spec.algorithm
    assert objective_of(algorithm, 64).constant_length == 7


@pytest.mark.parametrize(
    ("written", "cap"),
    [
        ({}, 2.0),
        ({"importanceCap": 5}, 5.0),
        ({"corrections": {"range": {}}}, 2.0),
        ({"corrections": {"truncate": {}}}, None),
        ({"corrections": {"icepop": {}}}, None),
        ({"anchor": "behavior"}, None),
    ],
)
def test_a_token_is_weighted_once(written, cap):
    assert objective_of(run_with(written).spec.algorithm, 8).importance_cap == cap


@pytest.mark.parametrize(
    ("objective", "error"),
    [
        ({"anchor": "engine"}, "one of behavior, old"),
        ({"anchor": "behavior"}, "importance_cap weighs tokens .* it would be squared"),
        ({"anchor": "behavior", "importance_cap": None, "corrections": {"icepop": {}}}, "icepop weighs tokens"),
        ({"corrections": {"truncate": {}}}, "importance_cap and the correction truncate both weigh"),
        ({"corrections": {"vetto": {}}}, "unknown correction 'vetto'; did you mean 'veto'"),
        ({"corrections": {"veto": {"under": 1}}}, "unknown option of veto 'under'"),
        ({"corrections": {"range": {"by": "tokens"}}}, "correction range: by is 'tokens'; it is one of token, product"),
        ({"corrections": {"range": {"low": 2.0}}}, "2.0 and 1.01; .* 1, which is on policy, lies between"),
        ({"corrections": {"reject": {"measure": "k1"}}}, "with k1 they are ratios around 1"),
        ({"corrections": {"reject": {"low": 0.5}}}, "a bound of k1"),
        (
            {"anchor": "behavior", "importance_cap": None, "corrections": {"opsm": {"against": "old"}}},
            "opsm is against old, which is not computed",
        ),
    ],
)
def test_objectives_that_contradict_themselves(objective, error):
    with pytest.raises(ValueError, match=error):
        Objective(**objective)


def test_the_field_names_all_of_ours():
    described = LossPlugin.model_fields["name"].description.split(", or an entry point")[0]
    assert described.split(", ") == sorted(BUILT_IN)


def test_names_and_options_cost_no_torch():
    program = (
        "import sys; from tapforge_trainer.algorithms.loss_registry import BUILT_IN, loss;"
        "from tapforge_trainer.algorithms import composition, corrections;"
        "[loss(name, {}) for name in BUILT_IN]; [one() for one in corrections.BUILT_IN.values()];"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_page_has_every_loss_with_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().partition("## The loss")[2]
    rows = {line.split("|")[1]: line for line in page.partition("###")[0].splitlines() if line.startswith("| `")}
    for name, kind in BUILT_IN.items():
        said = " ".join(row for first, row in rows.items() if f"`{name}`" in first)
        assert said, f"docs/algorithms.md lacks {name}"
        for option in signature(kind).parameters:
            assert f"`{option}`" in said, f"{name}: {option}"
