"""`tapforge plan --memory`: from arguments to an estimate that is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Teacher
from tapforge_api.gpus import cluster_gpus_error
from tapforge_api.model import ModelSource

from ..learner.families import FolderError, ModelConfig, Shape, shape_of
from ..model_source.hub import cached_snapshot
from ..model_source.ref import POLICY, TEACHER
from ..rollout.frame_budget import episode_bytes, longest_episode
from ..run.assembly import ConfigurationError
from ..tasks.selection import training_tasks
from ..tasks.stages import stages_of
from .advice import advice, faster, fuller
from .estimate import UnknownCard, card_of, estimate
from .known import config_of, published
from .learner import LearnerLoad, Moment
from .report import Figures, as_json, measured, render
from .served import served_estimates


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Of the command line; a figure that was not given is None."""

    gpu_memory: str | None = None
    config: Path | None = None
    output: Literal["text", "json"] = "text"
    #: also trace the learner's own step, which takes a minute
    trace: bool = False
    disk_rate: float | None = None
    tokens_per_second: float | None = None
    measured: Path | None = None


def plan_memory(run: TrainingRun, options: MemoryOptions) -> tuple[str, bool]:
    """(what is printed, whether the run fits: its GPUs are there, and large enough). Raises ConfigurationError."""
    try:
        config = model_config(run, options.config)
        shape = shape_of(config)
        card = card_of(run, options.gpu_memory)
        held = held_frames(run)
        teacher = teacher_shape(run)
        again = partial(estimate, shape=shape, card=card, held_frames=held, teacher=teacher, likely=likely_bytes(run))
        found = again(run)
        advised, quicker = advice(run, found, again), faster(run, found, again) + fuller(run, found, again)
        recorded = measured(options.measured) if options.measured is not None else None
        traced = _trace(found.learner, config) if options.trace else None
    except (FolderError, UnknownCard, ValueError) as error:
        raise ConfigurationError(str(error)) from error
    served = served_estimates(run, card)
    figures = Figures(options.disk_rate, options.tokens_per_second, recorded, traced, quicker, served)
    fits = found.fits and figures.served_fit and cluster_gpus_error(run.spec) is None
    if options.output == "json":
        document: dict[str, Any] = as_json(run, found, advised, figures)
        return json.dumps(document, indent=2), fits
    return render(run, found, advised, figures), fits


def _trace(load: LearnerLoad, config: ModelConfig) -> Moment:
    from .trace import trace  # pays for torch and transformers

    return trace(load, config).peak


def model_config(run: TrainingRun, given: Path | None) -> ModelConfig:
    """The model's config.json: `given` (the file or its folder), the run's folder, a file of Hugging Face's cache, or a
    published one that is known here. Raises FolderError."""
    if given is not None:
        return _of_file(given) if given.is_file() else ModelConfig.of_folder(given)
    return _config_of(run.spec.model.source, POLICY)


def teacher_shape(run: TrainingRun) -> Shape | None:
    """Of a distillation's teacher; None: there is none. Raises FolderError."""
    taught = run.spec.algorithm.distillation
    return None if taught is None else shape_of(_config_of(taught.teacher, TEACHER))


def _named(field: str, what: str) -> str:
    """How a plan gets to know a model's sizes. --config is the policy's."""
    if field == POLICY:
        return f"name {what} with --config"
    return f"plan with a folder of its config.json in its place, --set {field}='{{path: {{folder: FOLDER}}}}'"


def _config_of(source: ModelSource | Teacher, field: str) -> ModelConfig:
    if source.path is not None:
        return ModelConfig.of_folder(Path(source.path.folder))
    if source.hugging_face is not None:
        repo = source.hugging_face.repo
        found = _cached(repo, source.hugging_face.revision) or config_of(repo)
        if found is None:
            raise FolderError(
                f"{field}.huggingFace: the sizes of {repo} are not known here, and it is not in this machine's cache: "
                f"{_named(field, 'its config.json or folder')}. Known are {', '.join(published())}"
            )
        return found
    if source.object_storage is not None:
        raise FolderError(
            f"{field}.objectStorage: {source.object_storage.uri} is not read for a plan: "
            f"{_named(field, 'a copy of its config.json')}"
        )
    from ..model_source.tiny_base import base_folder

    try:
        return ModelConfig.of_folder(base_folder())
    except FileNotFoundError as error:
        raise FolderError(str(error)) from error


def _of_file(path: Path) -> ModelConfig:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(f"--config {path}: {error}") from error
    return ModelConfig.of_document(path.parent, document)


def _cached(repo: str, revision: str) -> ModelConfig | None:
    folder = cached_snapshot(repo, revision)
    return None if folder is None else ModelConfig.of_folder(folder)


def held_frames(run: TrainingRun) -> int:
    """Bytes of frames that wait for their update: of all groups that may be in flight."""
    rollout = run.spec.rollout
    if rollout.frames_gib is not None:
        return int(rollout.frames_gib * 2**30)
    episodes = (rollout.max_staleness + 1) * rollout.groups_per_update * rollout.group_size
    return episodes * episode_bytes(run, _longest(run))


def _longest(run: TrainingRun) -> int:
    """Steps of the longest episode of any stage."""
    if run.spec.environment.source.dataset is not None:
        return 1  # an episode is one answer, and the set may lie elsewhere
    return max(longest_episode(stage, training_tasks(stage)) for stage in stages_of(run))


def likely_bytes(run: TrainingRun) -> int:
    """Of what a teacher finds likely at each token of an update's answers: an id and a log-probability for each of
    `topK` (`learner/likely.py`), on the hosts of all ranks together. At most: where every answer is as long as it may
    be."""
    taught, rollout = run.spec.algorithm.distillation, run.spec.rollout
    if taught is None or taught.kind != "forward_kl":
        return 0
    replayed = 0.0 if rollout.replay is None else rollout.replay.share
    answers = (1 + replayed) * rollout.groups_per_update * rollout.group_size * _longest(run)
    return int(answers * rollout.response_tokens * taught.top_k * 8)
