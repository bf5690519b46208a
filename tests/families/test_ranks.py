"""Every family on two ranks: adapters on a frozen base, and towers that learn, with frames on one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import real
from tests.families.samples import Case, tokens
from tests.policy.two_ranks import TwoRanks, two_ranks

from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.learner import lora
from tapforge_trainer.learner.batch_loss import DeviceFigures, batch_loss
from tapforge_trainer.learner.batches import MicroBatchPlan
from tapforge_trainer.learner.metrics import UpdateMetrics
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.learner.sharding import EngineWeights, unsharded
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings, UpdateSettings

OBJECTIVE = Objective(importance_cap=None)


class Frames:
    def __init__(self, found: Any):
        self.found = found

    def read(self, episode: str, names: Any) -> Any:
        return {name: self.found[name] for name in names}

    def lost(self, wanted: Any) -> list[str]:
        return []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with two_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def settings_of(case: Case, **changes: Any) -> LearnerSettings:
    options: dict[str, Any] = {"lora": LoraSettings(rank=4, alpha=8.0), "sharded_gradients": True} | changes
    return LearnerSettings(str(case.folder), tokens().allowed_ids, **options)


def gradients(index: int, store: Any, folder: Any, settings: LearnerSettings, plans: Any) -> dict[str, Any]:
    """Whole gradients by name, and how the weights for engines begin."""
    case = Case(folder)
    rank = Rank(settings, index, store)
    for name, parameter in lora.matrices(rank.policy.model).items():
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.detach().to_local().copy_(lora._shard(parameter, 0.1 * values))
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in case.samples)
    figures = DeviceFigures(UpdateMetrics())
    loss = partial(batch_loss, case.data, case.data.behavior, None, None, OBJECTIVE, counts, figures, 1, False)
    batch = MiniBatch(tuple(plans[index]), counts)
    rank.accumulate(case.data, Frames(case.frames), batch, UpdateSettings(), loss, UpdateMetrics(), figures)
    found: dict[str, Any] = {}
    for name, parameter in rank.policy.model.named_parameters():
        if parameter.grad is not None:
            found[name] = unsharded(parameter.grad).numpy().copy()
    for name, tensor in EngineWeights(rank.policy.model, torch.float32):
        found[f"weight {name}"] = tensor.flatten()[:64].numpy().copy()
    return found


@pytest.mark.parametrize("name", real.TINY)
@pytest.mark.parametrize("learns", ["adapters", pytest.param("everything", marks=pytest.mark.long)])
def test_two_ranks_learn_what_one_learns(pair: TwoRanks, name: str, learns: str) -> None:
    """Texts on one rank and frames on the other."""
    folder = real.folder(name)
    case = Case(folder)
    changes: dict[str, Any] = {} if learns == "adapters" else {"lora": None, "freeze_vision": False}
    texts = tuple(k for k, s in enumerate(case.samples) if not s.frames)
    others = tuple(k for k, s in enumerate(case.samples) if s.frames)
    everything = [[MicroBatchPlan(tuple(range(len(case.samples))))]]
    try:
        expected = gradients(0, torch.distributed.HashStore(), folder, settings_of(case, **changes), everything)
    finally:
        torch.distributed.destroy_process_group()
    plans = [[MicroBatchPlan(texts)], [MicroBatchPlan(others)]]
    found = pair.run(gradients, folder, settings_of(case, ranks=2, **changes), plans)
    assert found[0].keys() == found[1].keys() == expected.keys()
    learned = [key for key in expected if not key.startswith("weight ")]
    assert all(".lora_" in key for key in learned) == (learns == "adapters") and len(learned) > 10
    scale = max(float(np.linalg.norm(expected[key])) for key in learned)
    for key, value in expected.items():
        size = max(float(np.linalg.norm(value)), 1e-2 * scale if key in learned else 1e-6)
        assert np.linalg.norm(found[0][key] - value) <= 2e-5 * size, key
        assert np.array_equal(found[0][key], found[1][key]), key
