"""What a command works with, as the session has started it: phones, policy, telemetry, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tapforge_api import TrainingRun
from tapforge_api.stages import updates_at_most

from ..policy import Policy
from ..rewards.budget import JudgeBudget
from ..telemetry.progress import Progress, ended, finished, stage_ended
from ..telemetry.telemetry import Telemetry
from .assembly import RolloutSetup
from .local_files import checkpoints_of
from .shutdown import StopSignal


@dataclass(frozen=True, slots=True)
class RunContext:
    """Started and closed by the session."""

    #: in a stage as it is there
    run: TrainingRun
    #: the run's
    folder: Path
    policy: Policy
    rollout_setup: RolloutSetup
    telemetry: Telemetry
    stop: StopSignal
    #: of judges, over all sessions
    judge_budget: JudgeBudget = field(default_factory=JudgeBudget)
    #: the checkpoint of another run whose weights this one started with, in words; "" for none
    warm_started_from: str = ""
    #: the run as its file says, where it has stages
    whole: TrainingRun | None = None

    @property
    def of_file(self) -> TrainingRun:
        return self.whole or self.run

    @property
    def checkpoints(self) -> Path:
        """The run's folder of them; where they are in object storage, of what the driver knows of them."""
        return checkpoints_of(self.run, self.folder)

    def finished(self, progress: Progress) -> str:
        """Which limit of `spec.stop`, as it was edited last, or of the stage is reached, in words; empty: none."""
        limits, view = self.stop.limits or self.run.spec.stop, self.telemetry.view
        stages = self.of_file.spec.stages
        view.max_updates, view.max_seconds = updates_at_most(limits.max_updates, stages), limits.max_seconds
        return ended(limits, progress) or stage_ended(stages, progress)

    def complete(self, progress: Progress) -> str:
        """By what the whole run has ended, in words; empty: it goes on, if only in its next stage."""
        return finished(self.stop.limits or self.run.spec.stop, self.of_file.spec.stages, progress)
