"""What the golden numbers don't show: splits, weights, importance correction, KL, extreme numbers, metrics."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tapforge_trainer.algorithms.loss_registry import BUILT_IN, loss, loss_options
from tapforge_trainer.algorithms.losses import importance_weight, kl, policy_loss, token_shares
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.algorithms.whole_step import StepTokens, TopEntropy

quick = settings(max_examples=25, deadline=None)
OBJECTIVES = {
    "token mean": Objective(),
    "sequence mean of means, dual": Objective(aggregation="seq_mean_token_mean", options={"dual_clip": 3.0}),
    "sequence mean of sums, kl": Objective(aggregation="seq_mean_token_sum", kl="k3", kl_coefficient=0.1),
    "gspo": Objective(loss="gspo", aggregation="seq_mean_token_mean"),
    "capped kl": Objective(kl_coefficient=0.1, kl_advantage_cap=True, importance_cap=1.2),
}
OBJECTIVES["over a whole step"] = Objective(
    corrections={"second_moment": {"threshold": 0.05}, "normalised": {"by": "sequence", "cap": 1.2}},
    top_entropy=TopEntropy(share=0.6),
    entropy_bonus=0.1,
    importance_cap=None,
)
MASKS = {
    "range": {"by": "product", "low": 0.5, "high": 3.0},
    "reject": {"by": "sequence_max", "measure": "k3", "high": 0.3},
    "veto": {"below": 0.5, "above": 3.0},
    "opsm": {"above": 0.05},
}
#: log-ratios
RATIOS = (-1e4, -20.0, -1.0, -0.1, 0.0, 0.1, 1.0, 20.0, 1e4)
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
for index, name in enumerate(BUILT_IN):
    how = {"loss": name, "importance_cap": None, "aggregation": AGGREGATIONS[index % 4], "constant_length": 7}
    OBJECTIVES[f"{name} against the engine"] = Objective(anchor="behavior", corrections=MASKS, **how)
    weight = {"icepop": {"by": "geometric"}} if index % 2 else {"truncate": {"by": "sequence"}}
    OBJECTIVES[f"{name} with a weight"] = Objective(corrections=weight, kl="k3_ratio", kl_coefficient=0.1, **how)
#: what pulls towards the anchor, with an advantage or without
PULLING = {"dro", "prime_rl", "ipo", "kl_cov"}
each_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def batch_of(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -torch.rand(n, generator=random, dtype=torch.float64) * 3
    noise = torch.randn(4, n, generator=random, dtype=torch.float64)
    per_sequence = torch.randn(len(lengths), generator=random, dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {
        "logp": old + 0.3 * noise[0],
        "old_logp": old,
        "behavior_logp": old + 0.3 * noise[1],
        "ref_logp": old + 0.5 * noise[2],
        "advantage": per_sequence[sequence],
        "weight": torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)[sequence % 3],
        "sequence": sequence,
        "score": (per_sequence > 0.5).double()[sequence],
        "entropy": torch.rand(n, generator=random, dtype=torch.float64),
    }


def decided(batch: dict[str, torch.Tensor], objective: Objective) -> dict[str, torch.Tensor]:
    """With what is decided over all of it, as after a statistics pass."""
    chosen = (batch["weight"] > 0).nonzero()[:, 0].numpy()
    read = {"logp": "logp", "old": "old_logp", "behavior": "behavior_logp", "entropy": "entropy"}
    found = {name: batch[key].numpy()[chosen] for name, key in read.items()}
    anchor = found["old" if objective.anchor == "old" else "behavior"]
    _, sequence = np.unique(batch["sequence"].numpy()[chosen], return_inverse=True)
    step = StepTokens(batch["advantage"].numpy()[chosen], sequence, chosen, anchor=anchor, **found)
    told = {}
    for name, part in objective.whole_step().items():
        told[f"whole {name}"] = torch.zeros_like(batch["logp"])
        told[f"whole {name}"][chosen] = torch.tensor(part.gather(step)).double()
    return batch | told


@each_objective
def test_nothing_is_read_from_a_device_before_the_backward_pass_is_queued(objective: Objective) -> None:
    """Numbers of fake tensors can't be read: it raises."""
    real = batch_of([3, 1, 4])
    with FakeTensorMode() as mode:
        batch = {name: mode.from_tensor(values) for name, values in real.items()}
        leaf = batch["logp"].detach().requires_grad_()
        whole = {name: leaf.detach() for name in objective.whole_step()}
        found = policy_loss(
            **(batch | {"logp": leaf}), objective=objective, counts=Counts(8.0, 3.0), sequences=3, gathered=whole
        )
        found.loss.backward()
        assert all(value.numel() == 1 for value in (found.sums | found.maxima).values())


def run(batch: dict[str, torch.Tensor], objective: Objective, counts: Counts):
    leaf = batch["logp"].clone().requires_grad_()
    given = {name: values for name, values in batch.items() if not name.startswith("whole ")}
    whole = {name.removeprefix("whole "): values for name, values in batch.items() if name not in given}
    result = policy_loss(**(given | {"logp": leaf}), objective=objective, counts=counts, gathered=whole)
    result.loss.backward()
    return result, leaf.grad


def counts_of(batch: dict[str, torch.Tensor]) -> Counts:
    ids = batch["sequence"].unique()
    return Counts.of(
        (int((batch["sequence"] == i).sum()), float(batch["weight"][batch["sequence"] == i][0])) for i in ids
    )


def part(batch: dict[str, torch.Tensor], sequences: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tokens of some sequences, renumbered, and where they were."""
    where = torch.isin(batch["sequence"], torch.tensor(sequences, dtype=torch.int64)).nonzero()[:, 0]
    chosen = {name: values[where] for name, values in batch.items()}
    chosen["sequence"] = torch.unique(chosen["sequence"], return_inverse=True)[1]
    return chosen, where


@each_objective
@quick
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    owner=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    seed=st.integers(0, 99),
)
def test_any_split_adds_up_to_the_whole(objective, lengths, owner, seed):
    batch = decided(batch_of(lengths, seed), objective)
    counts = counts_of(batch)
    whole, gradient = run(batch, objective, counts)
    loss, added = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient)
    sums = dict.fromkeys(whole.sums, 0.0)
    maxima = dict.fromkeys(whole.maxima, 0.0)
    for micro in range(4):  # an empty micro-batch is one of the cases
        chosen, where = part(batch, [i for i in range(len(lengths)) if owner[i] == micro])
        result, some = run(chosen, objective, counts)
        loss += result.loss.detach()
        added[where] += some
        sums = {name: value + result.sums[name].item() for name, value in sums.items()}
        maxima = {name: max(value, result.maxima[name].item()) for name, value in maxima.items()}
    torch.testing.assert_close(loss, whole.loss.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(added, gradient, rtol=0, atol=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in whole.sums.items()}, abs=1e-12)
    assert maxima == pytest.approx({name: value.item() for name, value in whole.maxima.items()}, abs=1e-12)


@each_objective
def test_tokens_of_weight_zero_are_not_there(objective):
    batch = batch_of([3, 4, 2, 5])  # sequence 1 has weight 0
    counts = counts_of(batch)
    without, where = part(batch, [0, 2, 3])
    expected, gradient = run(without, objective, counts)
    silent = batch["weight"] == 0
    poisons = {"logp": -math.inf, "old_logp": math.nan, "ref_logp": 1e30, "advantage": math.inf, "score": math.nan}
    for name, poison in poisons.items():
        batch[name] = torch.where(silent, poison, batch[name])
    batch["behavior_logp"] = torch.where(silent, math.nan, batch["behavior_logp"])
    result, all_gradients = run(batch, objective, counts)
    assert result.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
    torch.testing.assert_close(all_gradients[where], gradient)
    assert not all_gradients[silent].any()
    assert all(torch.isfinite(value) for value in (result.sums | result.maxima).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shift", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("whose", ["logp", "behavior_logp"])
@each_objective
def test_extreme_ratios_stay_finite(objective, whose, shift, dtype):
    batch = batch_of([3, 2, 4])
    batch[whose] = batch[whose] + shift
    batch = {name: values if name == "sequence" else values.to(dtype) for name, values in batch.items()}
    result, gradient = run(batch, objective, Counts(9.0, 3.0))
    assert torch.isfinite(result.loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in (result.sums | result.maxima).values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_options_are_taken_numbers_stay_finite(name):
    """Extreme ones are refused by name, or work."""
    for option in fields(loss(name, {})):
        for value in ("inf", "nan", "1e300", "1e39", "1e30", "1e9", "1e-9", "1e-320", "0", "-1"):
            try:
                options = loss_options(name, {option.name: value})
            except ValueError as error:
                assert option.name in str(error) or "clip is" in str(error)
                continue
            batch = batch_of([1] * len(RATIOS)) | {"weight": torch.ones(len(RATIOS))}
            batch["old_logp"] = batch["logp"] - torch.tensor(RATIOS, dtype=torch.float64)
            batch = {key: values if key == "sequence" else values.float() for key, values in batch.items()}
            for sign in (-1.0, 0.0, 1.0):
                batch["advantage"] = torch.full_like(batch["logp"], sign)
                result, gradient = run(batch, Objective(loss=name, options=options), Counts(9.0, 9.0))
                told = [result.loss.detach(), *gradient, *result.sums.values(), *result.maxima.values()]
                assert all(math.isfinite(one) for one in told), (option.name, value, sign)


@each_objective
@quick
@given(order=st.permutations(range(5)), seed=st.integers(0, 99))
def test_the_order_of_sequences_changes_nothing(objective, order, seed):
    batch = decided(batch_of([3, 1, 2, 5, 4], seed), objective)
    counts = counts_of(batch)
    expected, gradient = run(batch, objective, counts)
    where = torch.cat([(batch["sequence"] == k).nonzero()[:, 0] for k in order])
    moved = {name: values[where] for name, values in batch.items()}
    moved["sequence"] = torch.argsort(torch.tensor(order))[moved["sequence"]]
    result, of_moved = run(moved, objective, counts)
    assert result.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
    torch.testing.assert_close(of_moved, gradient[where], rtol=0, atol=1e-12)
    for told, again in ((expected.sums, result.sums), (expected.maxima, result.maxima)):
        assert {name: value.item() for name, value in again.items()} == pytest.approx(
            {name: value.item() for name, value in told.items()}, abs=1e-12
        )


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("anchor", ["behavior", "old"])
def test_without_advantages_nothing_is_pushed(name, anchor):
    batch = batch_of([3, 1, 4])
    batch["advantage"] = torch.zeros_like(batch["advantage"])
    _, gradient = run(batch, Objective(loss=name, anchor=anchor, importance_cap=None), counts_of(batch))
    assert bool(gradient.any()) is (name in PULLING)


@pytest.mark.parametrize("name", BUILT_IN)
def test_at_the_anchor_every_loss_is_the_policy_gradient(name):
    """Of constant advantages in a sequence; a clip holds nothing where nothing has moved."""
    batch = batch_of([3, 2])
    batch |= {"old_logp": batch["logp"], "weight": torch.ones(5, dtype=torch.float64)}
    _, gradient = run(batch, Objective(loss=name, importance_cap=None), Counts(5.0, 2.0))
    torch.testing.assert_close(gradient, -batch["advantage"] / 5)


@pytest.mark.parametrize(("form", "slope"), [("log", 20.0), ("ratio", math.exp(5))])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_rare_token_may_change_by_any_factor_and_is_weighed_by_at_most_the_cap(name, form, slope):
    batch = batch_of([1]) | {"advantage": torch.ones(1, dtype=torch.float64)}
    batch |= {"logp": torch.tensor([-5.0], dtype=torch.float64), "old_logp": torch.tensor([-10.0], dtype=torch.float64)}
    _, gradient = run(batch, Objective(loss=name, options={"form": form}, importance_cap=None), Counts(1.0, 1.0))
    assert gradient.item() == pytest.approx(-slope)


def test_what_a_correction_cuts_is_told_by_share():
    batch = batch_of([5]) | {"advantage": torch.ones(5, dtype=torch.float64), "weight": torch.ones(5)}
    gap = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0], dtype=torch.float64)
    batch |= {"logp": batch["old_logp"], "behavior_logp": batch["old_logp"] - gap}
    corrections = {"icepop": {"low": 0.2, "high": 5.0}, "range": {"by": "token", "low": 0.95, "high": 1e9}}
    result, gradient = run(batch, Objective(importance_cap=None, corrections=corrections), Counts(5.0, 1.0))
    torch.testing.assert_close(gradient, -torch.tensor([0.0, 0.0, 1.0, math.exp(0.1), 0.0], dtype=torch.float64) / 5)
    told = {name: round(value.item(), 6) for name, value in result.sums.items()}
    assert (told["cut_icepop"], told["cut_range"], told["masked"]) == (0.4, 0.4, 0.6)
    assert told["importance_mean"] == pytest.approx((math.exp(-0.1) + 1 + math.exp(0.1)) / 5, abs=1e-6)


def test_figures_are_of_the_anchor():
    batch = batch_of([3, 4])
    old, _ = run(batch, Objective(), counts_of(batch))
    behavior, _ = run(batch, Objective(anchor="behavior", importance_cap=None), counts_of(batch))
    assert behavior.of_ratio == old.of_ratio
    assert old.sums.keys() - behavior.sums.keys() == {"engine_gap", "importance_mean", "importance_capped"}
    assert old.sums["approx_kl"] != behavior.sums["approx_kl"]


def test_divergences_are_means_over_tokens_and_point_from_whom_was_sampled():
    """k3 of tokens of the anchor estimates KL(anchor, policy); that to the reference is of the policy. Whatever the
    loss averages over."""
    batch = batch_of([1, 4]) | {"weight": torch.ones(5, dtype=torch.float64)}
    kind = {"kl_coefficient": 0.1, "aggregation": "seq_mean_token_mean"}
    result, _ = run(batch, Objective(**kind), Counts(5.0, 2.0))
    moved, pulled = batch["logp"] - batch["old_logp"], batch["ref_logp"] - batch["logp"]
    assert result.sums["approx_kl"].item() == pytest.approx((moved.expm1() - moved).mean().item())
    assert result.sums["kl_reference"].item() == pytest.approx((pulled.expm1() - pulled).mean().item())


def test_what_an_objective_compares_with_has_to_be_there():
    batch = batch_of([2])
    del batch["behavior_logp"], batch["score"]
    for lacking in ({"anchor": "behavior", "importance_cap": None}, {"corrections": {"veto": {}}}):
        with pytest.raises(ValueError, match="no behavior_logp"):
            run(batch, Objective(**lacking), Counts(2.0, 1.0))
    with pytest.raises(ValueError, match="topr needs the returns"):
        run(batch, Objective(loss="topr"), Counts(2.0, 1.0))


def test_shares_are_rounded_as_they_were():
    """Two divisions in another order are another number in fp32, and a resumed run another one."""
    weight, sequence = torch.full((7,), 0.3), torch.zeros(7, dtype=torch.int64)
    shares = token_shares(weight, sequence, "seq_mean_token_mean", Counts(7.0, 11.0))
    assert torch.equal(shares, weight / 7 / 11) and not torch.equal(shares, weight / 11 / 7)


def test_on_policy_gradient_is_the_policy_gradient():
    batch = batch_of([3, 2])
    batch |= {"old_logp": batch["logp"], "weight": torch.ones(5, dtype=torch.float64), "behavior_logp": batch["logp"]}
    result, gradient = run(batch, Objective(), Counts(5.0, 2.0))
    torch.testing.assert_close(gradient, -batch["advantage"] / 5)
    assert result.sums["ratio_mean"].item() == pytest.approx(1.0)
    assert result.sums["importance_mean"].item() == pytest.approx(1.0)
    assert result.sums["approx_kl"].item() == result.sums["engine_gap"].item() == 0.0


def test_importance_weight_is_a_truncated_constant():
    gap = torch.tensor([-1.0, 0.0, 0.5, 3.0, 800.0], requires_grad=True)
    weight = importance_weight(gap, 2.0)
    assert weight.tolist() == pytest.approx([math.exp(-1), 1.0, math.exp(0.5), 2.0, 2.0])
    assert not weight.requires_grad
    batch = batch_of([5]) | {"advantage": torch.ones(5, dtype=torch.float64), "weight": torch.ones(5)}
    batch["logp"] = batch["old_logp"]
    batch["behavior_logp"] = batch["old_logp"] - gap.detach().double()
    result, gradient = run(batch, Objective(importance_cap=2.0), Counts(5.0, 1.0))
    torch.testing.assert_close(gradient, -weight.double() / 5)
    assert result.sums["importance_capped"].item() == pytest.approx(0.4)
    assert result.maxima["engine_gap_max"].item() == pytest.approx(800.0)
    _, uncorrected = run(batch, Objective(importance_cap=None), Counts(5.0, 1.0))
    torch.testing.assert_close(uncorrected, torch.full((5,), -0.2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient", "metric"),
    [
        (0.5, 1.0, 0.0, "clip_fraction_high"),
        (-0.5, -1.0, 0.0, "clip_fraction_low"),
        (-0.5, 1.0, -math.exp(-0.5), None),  # the clip never stops a step back towards the old policy
        (0.5, -1.0, math.exp(0.5), None),
        (2.0, -1.0, 0.0, "dual_clip_fraction"),
    ],
)
def test_where_the_gradient_stops(log_ratio, advantage, gradient, metric):
    one = torch.ones(1, dtype=torch.float64)
    logp = (one * (log_ratio - 1)).requires_grad_()
    counts, zero = Counts(1.0, 1.0), torch.zeros(1, dtype=torch.int64)
    objective = Objective(options={"dual_clip": 3.0})
    result = policy_loss(logp, -one, one * advantage, zero, objective=objective, counts=counts)
    result.loss.backward()
    assert logp.grad.item() == pytest.approx(gradient)
    told = ("clip_fraction_high", "clip_fraction_low", "dual_clip_fraction")
    assert {name for name in told if result.sums.get(name)} == ({metric} if metric else set())


@quick
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=20), st.floats(0, 5))
def test_kl_estimators(distances, cap):
    ref = torch.linspace(-3, 0, len(distances), dtype=torch.float64)
    leaf = (ref + torch.tensor(distances, dtype=torch.float64)).requires_grad_()
    for kind in ("k2", "k3"):
        assert (kl(leaf, ref, kind) >= 0).all()
        assert not kl(ref, ref, kind).any()
    assert (kl(leaf, ref, "k2", torch.full_like(ref, cap)) <= kl(leaf, ref, "k2") + 1e-12).all()
    kl(leaf, ref, "k2", torch.full_like(ref, cap)).sum().backward()
    assert (leaf.grad.abs() <= cap + 1e-9).all()


def test_what_the_kl_estimators_pull_towards():
    """Expected gradients over all tokens that the policy may say, beside those of the divergences themselves."""
    random = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 6, generator=random, dtype=torch.float64)
    reference = other.log_softmax(0)

    def gradient(value):
        leaf = logits.clone().requires_grad_()
        logp = leaf.log_softmax(0)
        value(logp).backward()
        return leaf.grad

    def estimated(kind):
        return gradient(lambda logp: (logp.detach().exp() * kl(logp, reference, kind)).sum())

    forward = gradient(lambda logp: (logp.exp() * (logp - reference)).sum())
    reverse = gradient(lambda logp: (reference.exp() * (reference - logp)).sum())
    assert estimated("k1").abs().max() < 1e-12  # pulls nowhere, which is why a loss refuses it
    torch.testing.assert_close(estimated("k2"), forward)
    torch.testing.assert_close(estimated("k3"), reverse)


def test_a_coefficient_needs_a_reference_and_zero_needs_none():
    batch = batch_of([2])
    del batch["ref_logp"]
    result, _ = run(batch, Objective(), Counts(2.0, 1.0))
    assert "kl_loss" not in result.sums
    with pytest.raises(ValueError, match="no ref_logp"):
        run(batch, Objective(kl_coefficient=0.1), Counts(2.0, 1.0))


def test_counts_are_weighted_and_ignore_empty_sequences():
    assert Counts.of([(3, 1.0), (4, 0.0), (5, 0.5), (0, 1.0)]) == Counts(tokens=5.5, sequences=1.5)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("aggregation", "mean", "one of token_mean"),
        ("constant_length", 0, "at least 1"),
        ("importance_cap", 0.0, "over 0"),
        ("kl_coefficient", -0.1, "at least 0"),
    ],
)
def test_objectives_that_make_no_sense(field, value, error):
    with pytest.raises(ValueError, match=error):
        Objective(**{field: value})
    with pytest.raises(ValueError, match="set kl to k2"):
        Objective(kl="k3", kl_advantage_cap=True)
    with pytest.raises(ValueError, match="expected gradient is 0"):
        Objective(kl="k1", kl_coefficient=0.1)
