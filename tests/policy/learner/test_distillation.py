"""A frozen teacher beside the policy: its log-probabilities are its own, and each kind moves the policy towards it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_samples import PlainFrames, Tiny, one_rank

from tapforge_trainer.algorithms.distillation import Distillation
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.learner import head
from tapforge_trainer.learner.batch_loss import DeviceFigures
from tapforge_trainer.learner.batches import plan_micro_batches
from tapforge_trainer.learner.likely import Likely
from tapforge_trainer.learner.metrics import UpdateMetrics
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.learner.sharding import unsharded
from tapforge_trainer.placement.settings import LoraSettings, UpdateSettings
from tapforge_trainer.tiny.folder import write_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "tiny"
    write_model(folder, 7)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.language_model.embed_tokens.weight"] *= 0.25  # as flat as the policy
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def padded(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with more rows of padding after its vocabulary than the policy has."""
    folder = tmp_path_factory.mktemp("padded") / "tiny"
    shutil.copytree(teacher, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    rows = config["text_config"]["vocab_size"]
    for name, values in weights.items():
        if len(values) == rows and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name] = torch.cat([values, torch.ones(64, values.shape[1])])
    save_file(weights, path, {"format": "pt"})
    config["text_config"]["vocab_size"] = rows + 64
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def work(tiny: Tiny) -> tuple[Any, MiniBatch, PlainFrames]:
    """Answers with screens, no screen and several."""
    samples, frames = tiny.mixed(5)
    data = tiny.token_batch(samples)
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    return data, MiniBatch(tuple(plan_micro_batches(data.lengths, 1, 8192)[0]), counts), PlainFrames(frames)


def logprobs(rank: Rank, work: Any) -> np.ndarray:
    data, batch, frames = work
    return rank.logprobs(data, frames, batch.plans, 0.8)


def distil(rank: Rank, work: Any, steps: int, taught: Distillation, rate: float = 3e-3) -> list[float]:
    """The divergence from the teacher before each step."""
    data, batch, frames = work
    objective = Objective(importance_cap=None, distillation=taught)
    settings = UpdateSettings(objective=objective, learning_rate=rate, temperature=0.8)
    return [rank.update(data, frames, [batch], settings, step).sums["distillation_kl"] for step in range(steps)]


def test_the_teacher_reads_the_policys_tokens_as_it_reads_its_own(tiny: Tiny, teacher: Path, work: Any) -> None:
    with one_rank(dataclasses.replace(tiny, folder=teacher)) as rank:
        expected = logprobs(rank, work)
    with one_rank(tiny, teacher=str(teacher)) as rank:
        data, batch, frames = work
        own = logprobs(rank, work)
        found = rank.read(rank.teacher, data, frames, batch.plans, 0.8)[0]
        (kl,) = distil(rank, work, 1, Distillation("k2", alone=True))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert kl == pytest.approx(float((own - expected).mean()), abs=1e-4)


@pytest.mark.parametrize("kind", ["k2", "k3", "forward_kl"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=8, alpha=16.0)])
def test_the_policy_moves_towards_its_teacher(
    tiny: Tiny, teacher: Path, work: Any, kind: Any, lora: LoraSettings | None
) -> None:
    with one_rank(tiny, teacher=str(teacher), lora=lora) as rank:
        data, batch, frames = work
        taught = rank.read(rank.teacher, data, frames, batch.plans, 0.8)[0]
        before = np.abs(logprobs(rank, work) - taught).mean()
        distil(rank, work, 12, Distillation(kind, alone=True), rate=1e-2 if lora else 3e-3)
        after = np.abs(logprobs(rank, work) - taught).mean()
        again = rank.read(rank.teacher, data, frames, batch.plans, 0.8)[0]
    assert after < 0.6 * before
    assert np.array_equal(again, taught)  # the teacher learns nothing


def test_a_step_of_k1_is_a_step_of_k2_and_adds_to_what_rewards_teach(tiny: Tiny, teacher: Path, work: Any) -> None:
    """At a ratio of 1 both have the gradient of the reverse KL; with rewards kept theirs is added."""

    with one_rank(tiny, teacher=str(teacher)) as rank:

        def gradient(taught: Distillation | None) -> torch.Tensor:
            data, batch, frames = work
            objective = Objective(importance_cap=None, distillation=taught)
            settings = UpdateSettings(objective=objective, temperature=0.8, off_policy=True)
            figures = DeviceFigures(metrics := UpdateMetrics())
            ((_, loss, likely),) = rank.losses(data, frames, [batch], settings, figures)
            rank.accumulate(data, frames, batch, settings, loss, metrics, figures, likely=likely)
            found = [p.grad for p in rank.policy.parameters() if p.grad is not None]
            return torch.cat([unsharded(one).flatten() for one in found])

        k1, k2 = (gradient(Distillation(kind, 0.5, alone=True)) for kind in ("k1", "k2"))
        rewards, both = gradient(None), gradient(Distillation("k1", 0.5))
    torch.testing.assert_close(k1, k2, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(both, rewards + k1, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pieces, more_rows", [(1, False), (3, False), (1, True)])
def test_forward_kl_compares_all_that_the_teacher_may_say(
    tiny: Tiny,
    teacher: Path,
    padded: Path,
    work: Any,
    pieces: int,
    more_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the whole vocabulary it is KL(teacher || policy), by whole distributions of either alone; over fewer tokens
    a part of it. Whole or in pieces of the head, and by a teacher with rows that the policy lacks."""
    data, batch, frames = work

    def distributions(folder: Path) -> torch.Tensor:
        with one_rank(dataclasses.replace(tiny, folder=folder)) as rank, torch.no_grad():
            found = torch.empty(len(data.index), 0)
            for _, micro, shown in rank._micro_batches(data, batch.plans, frames):
                every = rank.policy.allowed.numel()
                _, _, ids, logp = rank.policy(micro, shown, 0.8, likely=every)
                found = torch.empty(len(data.index), every) if not found.numel() else found
                found[micro.response] = torch.empty_like(logp).scatter(1, ids, logp)
            return found

    own, other = distributions(tiny.folder), distributions(teacher)
    said = torch.isfinite(other)
    assert not said.all()  # the adapter's policy may not say everything
    expected = torch.where(said, other.exp() * (other - own), 0.0).sum(-1).mean()
    if pieces > 1:
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", own.shape[1] * (len(own) // pieces))
    with one_rank(tiny, teacher=str(padded if more_rows else teacher)) as rank:

        def first(taught: Distillation) -> float:
            settings = UpdateSettings(
                objective=Objective(importance_cap=None, distillation=taught), learning_rate=0.0, temperature=0.8
            )
            figures = DeviceFigures(UpdateMetrics())
            ((_, loss, likely),) = rank.losses(data, frames, [batch], settings, figures)
            metrics, total = UpdateMetrics(), []

            def kept(*given: Any) -> torch.Tensor:
                value: torch.Tensor = loss(*given)
                total.append(float(value.detach()))
                return value

            rank.accumulate(data, frames, batch, settings, kept, metrics, figures, likely=likely)
            return sum(total)

        whole, some = (first(Distillation("forward_kl", alone=True, top=top)) for top in (100_000, 8))
    assert whole == pytest.approx(float(expected), rel=1e-4)
    assert 0.0 < some < whole


def test_a_distillation_needs_a_teacher(tiny: Tiny, work: Any) -> None:
    with one_rank(tiny) as rank, pytest.raises(ValueError, match="was started without a teacher"):
        distil(rank, work, 1, Distillation())


def test_a_loss_that_selects_by_advantages_of_a_whole_step_has_no_k1() -> None:
    with pytest.raises(ValueError, match="the loss clip_cov selects by advantages .* use kind k2 or k3"):
        Objective(loss="clip_cov", distillation=Distillation("k1"))
    Objective(loss="clip_cov", distillation=Distillation("k3"))


def test_a_rank_holds_what_is_likely_at_its_own_tokens_alone() -> None:
    """Wherever they are among those of all ranks, and in whatever order they are asked for."""
    places, k = 10_000, 4
    own = np.random.default_rng(0).permutation(places)[:300]
    likely = Likely(places, k)
    for some in np.split(own, 3):
        ids = torch.from_numpy(some)[:, None] + torch.arange(k)
        likely.put(some, ids, -ids.float())
    asked = np.random.default_rng(1).permutation(own)
    ids, logp = likely.at(asked, torch.device("cpu"))
    assert ids.tolist() == [[place + n for n in range(k)] for place in asked] and torch.equal(logp, -ids.float())
    assert sum(values.nbytes for part in likely._parts for values in part) == len(own) * k * 8
