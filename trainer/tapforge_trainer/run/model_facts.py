"""What is known of a run's model before anything starts, without a download: from its folder, this machine's cache, or
what its family publishes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tapforge_api import TrainingRun

from ..agents import ContextLimit, make_agent
from ..agents.agent import Prepared
from ..agents.chat_agent import ChatAgent
from ..agents.coordinates import Plane
from ..agents.dialect import Dialect
from ..agents.extending import prompts_differ, template_breaks
from ..agents.prompt_file import PromptFile
from ..agents.registry import dialect_of, is_built_in
from ..agents.vision import VisionGrid, tokens_per_frame
from ..frames.frame import FittedFrame
from ..learner.families import FolderError, ModelConfig, families, family_of, shape_of
from ..model_source.hub import cached_snapshot
from ..model_source.tiny_base import tiny_folder
from ..records import Prompt
from ..tasks.selection import training_tasks
from ..tasks.source import TaskError
from .adapters import adapter_options, prompted_by
from .feasibility import ModelFacts

#: tasks that are looked at for the shortest and the longest goal
_LOOKED_AT = 64
#: characters of a token in prompts, at most and at least: in those of all adapters 3.4 to 3.9 with Qwen's vocabulary
_CHARACTERS = 5, 3
#: visual tokens that published image processors allow a frame
_MOST_VISUAL = 16_384


def facts_of(run: TrainingRun) -> ModelFacts | None:
    """None: nothing is known, or what is there is reported by what looks into it."""
    found = _at_hand(run)
    if found is None:
        return None
    name, config, folder = found
    try:
        family, shape = family_of(config), shape_of(config)
        grid = _grid(run, config, folder)
    except (FolderError, ValueError, OSError):
        return None
    screen = run.spec.environment.screen if run.spec.environment.source.processes is not None else None
    shown, whole = grid
    positions = config.text.get("max_position_embeddings")
    return ModelFacts(
        name=name,
        model_type=config.model_type,
        adapter=family.adapter,
        merged_only=family.merged_only,
        heads=shape.attention.heads,
        kv_heads=shape.attention.kv_heads,
        parameters=shape.parameters,
        cache_bytes=len(shape.layers) * 2 * shape.attention.key_value * 2,
        positions=positions if isinstance(positions, int) else None,
        screen=None if screen is None else shown.visual_tokens(screen.width, screen.height),
        whole_screen=None if screen is None else whole.visual_tokens(screen.width, screen.height),
        text=_text(run, config, folder, shown),
        cell=shown.cell,
        prompted=None if folder is None else prompted_by(folder),
        adapter_refused=_refused(run, config) if folder is None else "",  # `adapter_errors` reads the folder
        broken=_broken(run, folder),
        shares_prompts=family.shares_prompts,
    )


def _at_hand(run: TrainingRun) -> tuple[str, ModelConfig, Path | None] | None:
    """(name, config.json, the folder with tokenizer and image processor; None: only the config is known)."""
    source = run.spec.model.source
    try:
        if source.path is not None:
            folder = Path(source.path.folder)
            return str(folder), ModelConfig.of_folder(folder), folder
        if source.tiny is not None:
            folder = tiny_folder(source.tiny.weights)
            return "the tiny model", ModelConfig.of_folder(folder), folder
        if source.hugging_face is None:
            return None
        repo = source.hugging_face.repo
        cached = cached_snapshot(repo, source.hugging_face.revision)
        if cached is not None:
            return repo, ModelConfig.of_folder(cached), cached if (cached / "tokenizer.json").is_file() else None
        known = published_as(repo)
        return None if known is None else (repo, ModelConfig.of_document(Path(repo), known), None)
    except (FolderError, OSError):
        return None


def published_as(repo: str) -> dict[str, object] | None:
    """What config.json of a repository of Hugging Face says, as far as a family knows it."""
    wanted = repo.rpartition("/")[2].lower()
    for family in families().values():
        if (name := family.repositories.get(wanted)) is not None:
            return dict(family.published[name])
    return None


def _grid(run: TrainingRun, config: ModelConfig, folder: Path | None) -> tuple[VisionGrid, VisionGrid]:
    """(as the run shows frames, the same without the bound that leaves room for texts)."""
    spec = run.spec
    model = spec.model
    if folder is not None:
        whole = VisionGrid.load(folder)
    else:
        vision = shape_of(config).vision
        whole = VisionGrid(vision.patch, vision.merge, 1, _MOST_VISUAL)
    otherwise = tokens_per_frame(model.context_tokens, spec.rollout.response_tokens, model.adapter.images)
    bounds = model.min_pixels, model.max_pixels or model.adapter.max_pixels
    return whole.bounded(*bounds, otherwise=otherwise), whole.bounded(*bounds, otherwise=whole.max_tokens)


def _text(run: TrainingRun, config: ModelConfig, folder: Path | None, grid: VisionGrid) -> tuple[int, int] | None:
    """Length in tokens of first prompts without their screens: at least, of the shortest goal, and at most, of the
    longest."""
    own = run.spec.environment.source.processes is not None
    screen = run.spec.environment.screen
    # How large the frame is makes no difference to the text, but for a word or two of its size.
    width, height = grid.fit(screen.width, screen.height) if own else grid.within(1).fit(1, 1)
    visual = (width // grid.cell) * (height // grid.cell)
    frame = FittedFrame("first", b"", width, height)
    options = adapter_options(run) | {"context": None}  # what another package adds is its own
    try:
        tasks = training_tasks(run)
        goals = [tasks.sample(run.spec.seed, n).goal for n in range(_LOOKED_AT)]
        ends = min(goals, key=len), max(goals, key=len)
        if folder is not None:
            if not is_built_in(run.spec.model.adapter.name):
                return None  # another package's code is not run for a plan
            agent = make_agent(run.spec.model.adapter.name, folder, **options)
            least, most = (_length(agent.prompt(goal, [], Prepared(frame, visual))) - visual for goal in ends)
            return least, most
        if run.spec.model.adapter.prompt != "full" or options["prompt_file"] is not None:
            return 1, len(ends[1])
        said = _said(run, config, frame)
    except (TaskError, ValueError, KeyError, LookupError, OSError):  # reported by what looks into them
        return None
    longest, shortest = _CHARACTERS
    return (len(ends[0]) + said) // longest, (len(ends[1]) + said) // shortest


def _broken(run: TrainingRun, folder: Path | None) -> tuple[str, ...]:
    """Why steps of a history in blocks don't extend each other."""
    adapter, options = run.spec.model.adapter, adapter_options(run)
    if adapter.history.blocks is None or not is_built_in(adapter.name):
        return ()
    try:
        dialect = dialect_of(adapter.name, folder)
        file = options["prompt_file"]
        own = None if file is None else PromptFile(file, image_allowed=dialect is None or dialect.history != "all")
        found = [*prompts_differ(own, adapter.context)]
        if folder is not None:
            agent = make_agent(adapter.name, folder, **options | {"context": None, "prompt_file": None})
            assert isinstance(agent, ChatAgent)
            found += template_breaks(agent)
    except (ValueError, OSError):  # reported by what looks into them
        return ()
    return tuple(found)


def _length(prompt: Prompt | ContextLimit) -> int:
    return prompt.prompt_tokens if isinstance(prompt, ContextLimit) else prompt.expanded_length


def _refused(run: TrainingRun, config: ModelConfig) -> str:
    try:
        _dialect(run, config)
    except ValueError as error:
        return str(error)
    return ""


def _dialect(run: TrainingRun, config: ModelConfig) -> Dialect | None:
    """Raises ValueError for an adapter that is not for models of this type."""
    with tempfile.TemporaryDirectory() as folder:  # which adapters read
        Path(folder, "config.json").write_text(json.dumps({"model_type": config.model_type}))
        return dialect_of(run.spec.model.adapter.name, Path(folder))


def _said(run: TrainingRun, config: ModelConfig, frame: FittedFrame) -> int:
    """Characters of what the adapter says before the task. Raises ValueError."""
    dialect = _dialect(run, config)
    if dialect is None:
        return 0
    plane = Plane(dialect.coordinates, frame.width, frame.height)
    return len(dialect.system(plane, False)) + len(dialect.preface) + len(dialect.task("", ""))
