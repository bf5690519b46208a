"""`tapforge sft`: the supervised warm start of a run, alone; the model is written into the run's folder.

With held-out steps the model is the one whose loss of them was smallest after a pass over the data, and answers to them
are measured after each. Answers need engines; phones are never started.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tapforge_api import TrainingRun
from tapforge_api.learning import Ended, ImitationData, WarmStart

from ..data.convert import convert
from ..data.sources import read
from ..tasks.selection import evaluation_tasks
from ..telemetry.progress import Progress
from ..telemetry.telemetry import ProgressView, Telemetry
from .assembly import ConfigurationError
from .context import RunContext
from .evaluation import measured, play
from .folder import EVALUATION, locked
from .held_out import Epoch, answering
from .local_files import folder_of
from .shutdown import StopSignal, unless_stopped
from .start import running
from .warm_start import imitated, warm_start

#: of the run's folder: the model, and what was imitated of another run's recording
MODEL: Final = "sft"
IMITATED: Final = "imitated"
#: share of recorded episodes that may be unreadable
_MAX_BAD: Final = 0.1


def imitating(
    run: TrainingRun, runs: Path, recorded: Path, *, successes: bool, balance: bool
) -> tuple[TrainingRun, str]:
    """The run with what another one has recorded in place of its data, and what that is, in words. It lies in the run's
    folder, in place of an earlier one. Blocks. Raises DataError, and SetupError where the folder is in use."""
    folder = folder_of(run, runs) / IMITATED
    options = {name: "true" for name, chosen in (("successes", successes), ("balance", balance)) if chosen}
    made_of = {"source": "recording", "path": str(recorded), **options}
    with locked(folder.parent):  # another session of the run may be imitating what is there
        shutil.rmtree(folder, ignore_errors=True)
        found = convert(read("recording", recorded, options), "recording", folder, made_of, _MAX_BAD)
    warm = run.spec.warm_start or WarmStart()
    outcomes: tuple[Ended, ...] = ("success",) if successes else ("success", "failure", "unknown")
    data = ImitationData(path=str(folder), outcomes=outcomes)
    if warm.data is not None:
        data = warm.data.model_copy(update={"path": str(folder)})
    spec = run.spec.model_copy(update={"warm_start": warm.model_copy(update={"data": data})})
    return run.model_copy(update={"spec": spec}), f"{found.episodes:,} episodes, {found.steps:,} steps of {recorded}"


async def sft_session(run: TrainingRun, runs: Path, stop: StopSignal) -> int:
    settings = run.spec.warm_start
    if settings is None:
        raise ConfigurationError(
            "spec.warmStart is not set: there is nothing to imitate; write `warmStart: {}` for the defaults"
        )
    folder = folder_of(run, runs)
    measures = settings.data is not None and settings.data.held_out is not None
    if settings.data is not None and measures:
        run = answering(run, settings.data)
    with locked(folder), closing(Telemetry(folder, ProgressView(run.metadata.name, 0), Console())) as telemetry:
        async with running(run, folder, telemetry, stop, engines=measures, resume=False) as (context, _):
            telemetry.phase(f"warm start: imitating {imitated(settings)}")
            epochs = _Epochs(context, folder / MODEL)
            await warm_start(context, Progress(), epochs.ended if measures else None)
            if not measures:
                await context.policy.export(folder / MODEL)
        telemetry.phase(f"the model is in {folder / MODEL}{epochs.chosen}")
    return 0


class _Epochs:
    """Keeps the best one as it comes."""

    def __init__(self, context: RunContext, model: Path):
        self._context, self._model = context, model
        self._best: Epoch | None = None
        self._count = 0

    @property
    def chosen(self) -> str:
        """Which it was, in words."""
        if self._best is None:
            return ""
        return f", of epoch {self._best.number} of {self._count}: held-out loss {self._best.held_out_loss:.4g}"

    async def ended(self, epoch: Epoch) -> None:
        context, self._count = self._context, epoch.number
        found = await self._answers(epoch)
        better = self._best is None or epoch.held_out_loss < self._best.held_out_loss
        context.telemetry.event("imitation_epoch", **asdict(epoch), best=better, answers=found)
        accuracy = [f"{name.replace('_', ' ')} {found[name]:.1%}" for name in _SHOWN if found.get(name) is not None]
        loss = f"loss {epoch.loss:.4g}, held out {epoch.held_out_loss:.4g}"
        context.telemetry.phase(f"epoch {epoch.number}: {', '.join([loss, *accuracy])}")
        if better:
            self._best = epoch
            await context.policy.export(self._model)

    async def _answers(self, epoch: Epoch) -> dict[str, Any]:
        context = self._context
        await unless_stopped(context.stop, context.policy.sync(epoch.number))
        playing = play(
            context.rollout_setup,
            evaluation_tasks(context.run).tasks,
            repeats=1,
            temperature=0.0,
            seed=context.run.spec.evaluation.seed,
            folder=context.folder / EVALUATION / f"epoch-{epoch.number}",
        )
        return measured(await unless_stopped(context.stop, playing), version=epoch.number)


_SHOWN: Final = ("type_accuracy", "parameter_accuracy", "success")
