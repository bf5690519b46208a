"""From a file to what is found: `tapforge doctor -f FILE`, and the quick part before a run starts anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tapforge_api import TrainingRun
from tapforge_api.gpus import gpus_needed

from ..learner.families import FolderError, ModelConfig, family_of
from ..loggers.registry import chosen, missing
from ..loggers.session import check_installed
from ..memory.command import MemoryOptions, plan_memory
from ..model_source.folder import incomplete
from ..model_source.hub import cached_snapshot
from ..placement.machine import Machine, NoDevice, device_of
from ..placement.ray_start import in_cluster
from ..run.assembly import ConfigurationError, SetupError, inspect
from ..run.local_files import RUNS, checkpoints_of, folder_of
from ..telemetry.telemetry import Telemetry
from .findings import Finding, Needs, as_text, diagnose
from .machine import observe
from .phones import phones


def examine(run: TrainingRun | None, runs: Path = RUNS) -> list[Finding]:
    """Everything. Without a run: what any run would want to know."""
    if run is None:
        return diagnose(observe(_caches()), Needs())
    wrong = []
    try:
        inspect(run, runs)
    except ConfigurationError as error:
        wrong += str(error).splitlines()
    if run.spec.logging is not None:
        wrong += missing(chosen(run.spec.logging))
    source = run.spec.model.source
    if source.path is not None and not wrong:
        try:
            family_of(ModelConfig.of_folder(Path(source.path.folder)))
        except FolderError as error:
            wrong.append(f"spec.model.source.path.folder: {error}")
    needs = _needs(run, tuple(wrong))
    repository = source.hugging_face
    facts = observe(
        _places(run, runs),
        repository="" if repository is None else repository.repo,
        revision="main" if repository is None else repository.revision,
    )
    return diagnose(facts, needs) + ([] if wrong else phones(run))


def preflight(run: TrainingRun, folder: Path, telemetry: Telemetry) -> None:
    """The quick part, for the machine that the driver is on. What is doubtful becomes a note. Raises SetupError, and
    ConfigurationError for loggers that are not installed."""
    check_installed(run)
    needs = Needs(cuda=False) if in_cluster() else _needs(run, ())
    findings = diagnose(observe(_places(run, folder.parent), whole=False), needs)
    for finding in findings:
        if finding.state == "warn":
            telemetry.note(f"{finding.check}: {finding.text}; {finding.remedy}")
    if failed := [finding for finding in findings if finding.state == "fail"]:
        raise SetupError(f"this machine can't run {run.metadata.name} (tapforge doctor):\n{as_text(failed)}")


def _needs(run: TrainingRun, wrong: tuple[str, ...]) -> Needs:
    machine = Machine.local()
    try:
        cuda = device_of(run, machine, in_cluster=in_cluster()) == "cuda"
    except NoDevice as error:
        cuda, wrong = True, (*wrong, str(error))
    host = checkpoint = parameters = None
    try:
        plan = json.loads(plan_memory(run, MemoryOptions(output="json"))[0])
        host, checkpoint = plan["host_bytes"], plan["checkpoint_bytes"]
        parameters = plan["parameters"]
    except ConfigurationError:  # a model or a card whose sizes are not known yet
        pass
    repository = run.spec.model.source.hugging_face
    return Needs(
        cuda=cuda,
        gpus=gpus_needed(run.spec) if cuda else 0,
        bf16=run.spec.model.dtype == "bfloat16",
        flash_attn=run.spec.learner.attention == "flash-attn",
        host_bytes=sum(host.values()) if isinstance(host, dict) else host,
        checkpoint_bytes=checkpoint,
        checkpoints_kept=run.spec.checkpoints.keep,
        # Published in 16 bits.
        weights_bytes=None if repository is None or parameters is None else 2 * parameters,
        repository="" if repository is None else repository.repo,
        cached=repository is not None and _is_cached(repository.repo, repository.revision),
        wrong=wrong,
    )


def _is_cached(repository: str, revision: str) -> bool:
    """Whether all of it is: the weights, by their index, too."""
    folder = cached_snapshot(repository, revision)
    return folder is not None and not incomplete(folder)


def _caches() -> dict[str, Path]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"model cache": Path(os.environ.get("HF_HOME") or home / "huggingface").expanduser()}


def _places(run: TrainingRun, runs: Path) -> dict[str, Path]:
    """Folders that the run writes."""
    places = {"recordings": folder_of(run, runs)}
    if run.spec.checkpoints.uri is None:
        places["checkpoints"] = checkpoints_of(run, folder_of(run, runs))
    return places | (_caches() if run.spec.model.source.hugging_face is not None else {})
