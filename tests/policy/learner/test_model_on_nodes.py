"""Ranks and engines load what their own node has; what it can't have ends the run in the model's own words."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from tapforge_trainer.learner.client import LearnerError, RankActor
from tapforge_trainer.model_source.ref import ModelError, ModelRef, ModelRefused
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.placement.placement import PlacementError
from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings, on_this_node
from tapforge_trainer.run.assembly import ConfigurationError, SetupError
from tapforge_trainer.run.start import policy_started


def test_the_drivers_folder_is_nobody_elses(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "volume")
    source = ModelRef.of_folder(tmp_path / "volume")
    engine = on_this_node(EngineSettings("/of/the/driver", (1,), (2,), source=source))
    learner = on_this_node(LearnerSettings("/of/the/driver", (1,), source=source))
    assert engine.model == learner.model == str(tmp_path / "volume")
    assert on_this_node(LearnerSettings("/everywhere", (1,))).model == "/everywhere"
    (tmp_path / "volume" / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="lacks weights"):
        RankActor(LearnerSettings("/of/the/driver", (1,), source=source), 0).fetch()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(ModelRefused("it lacks a shard"), ConfigurationError), (ModelError("the disk is full"), SetupError)],
)
async def test_why_a_node_has_no_model_is_said_as_it_is(cause: ModelError, kind: type[Exception]) -> None:
    async def start(report: object) -> None:
        remote = RayTaskError("RankActor.fetch", "Traceback ...", cause).as_instanceof_cause()
        raise LearnerError("fetch failed on a rank") from remote

    with pytest.raises(kind) as error:
        await policy_started(SimpleNamespace(start=start), ModelRef("tiny"), _Telemetry())
    assert type(error.value) is kind and str(error.value) == str(cause)


async def test_what_a_run_waits_for_is_its_phase_and_its_end() -> None:
    async def start(report) -> None:
        report("waiting for GPUs: 1 of 2 are in the Ray cluster")
        raise PlacementError("waiting for GPUs: 1 of 2 are in the Ray cluster, after 3 s")

    telemetry = _Telemetry()
    with pytest.raises(SetupError, match="after 3 s"):
        await policy_started(SimpleNamespace(start=start), ModelRef("tiny"), telemetry)
    assert telemetry.told == [("waiting for GPUs: 1 of 2 are in the Ray cluster", "Loading")]


class _Telemetry:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def phase(self, words: str, stage: str = "") -> None:
        self.told.append((words, stage))
