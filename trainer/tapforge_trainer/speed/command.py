"""`tapforge plan --speed`: from a run to seconds of its updates, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tapforge_api import TrainingRun

from ..learner.families import FolderError, Shape, family_named, shape_of
from ..learner.flops import Costs
from ..memory.advice import ANSWER, TEXT, with_overrides
from ..memory.command import model_config, teacher_shape
from ..memory.engine import EngineLoad
from ..memory.estimate import Card, UnknownCard, card_of, estimate, settings_of, visual_tokens
from ..run.assembly import ConfigurationError
from ..run.local_files import NO_FILES, LocalFiles
from ..run.plan import known_slots
from ..run.plan_algorithm import reads_line
from ..tasks.selection import training_tasks
from .balance import Better, better_split, both, enough_players
from .cards import DEFAULT, CardSpeed, card_speed
from .estimate import Assumed, Speed, Work, prompt_tokens

#: of phones that are not simulated
_PHONE_SECONDS: Final = 1.5
#: tasks that are looked at for their steps
_LOOKED_AT: Final = 64
#: episodes at once up to which more phones are thought of
_MOST_PHONES: Final = 1024


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Of the command line; a figure that is not given is None."""

    gpu_memory: str | None = None
    config: Path | None = None
    output: Literal["text", "json"] = "text"
    steps: int | None = None
    answer_tokens: int | None = None
    phones: int | None = None
    phone_seconds: float | None = None


def plan_speed(run: TrainingRun, options: SpeedOptions, files: LocalFiles = NO_FILES) -> str:
    """What is printed. Raises ConfigurationError."""
    if run.spec.device == "cpu":
        raise ConfigurationError("spec.device is cpu: only GPUs' speed is estimated; `make demo` shows this machine's")
    try:
        shape = shape_of(model_config(run, options.config))
        card, memory, named = _card(run, options.gpu_memory)
        teacher = teacher_shape(run)
        work, assumed = work_of(run, shape, files, options.phones), assumed_of(run, options)
        low, high = both(work, assumed, card)

        def fits(other: Work) -> bool:
            split = (f"learner.ranks={other.ranks}", f"engine.replicas={other.engines}")
            changed = with_overrides(run, split)
            return estimate(changed, shape, memory, teacher=teacher).fits

        together = run.spec.placement.mode == "colocated"
        better = better_split(work, assumed, card, colocated=together, fits=fits)
    except (FolderError, UnknownCard, ValueError) as error:
        raise ConfigurationError(str(error)) from error
    phones = enough_players(work, assumed, card, min(_MOST_PHONES, _admitted(run)))
    counted = options.phones is not None or _slots(run, files) is not None
    if options.output == "json":
        found = {**_as_json(work, assumed, card, (low, high), better, phones), "phones_known": counted}
        return json.dumps(found, indent=2)
    return _render(work, assumed, card, named, (low, high), better, phones, counted=counted)


# --- from a run -------------------------------------------------------------------------------------------------------


def work_of(run: TrainingRun, shape: Shape, files: LocalFiles = NO_FILES, phones: int | None = None) -> Work:
    """`phones`: instead of what the file says. Raises FolderError."""
    spec, settings = run.spec, settings_of(run)
    recorded = spec.environment.source.dataset is not None
    engine = EngineLoad(shape, spec.engine.tensor_parallel, spec.model.context_tokens, 1, 1, 1)
    frame = visual_tokens(run, shape)
    later = 1 - 1 / spec.learner.mini_batches if spec.algorithm.loss.anchor == "old" else 0.0
    before = settings.reference + bool(reads_line(spec)) + later
    if (teacher := teacher_shape(run)) is not None:
        before += teacher.parameters / shape.parameters
    return Work(
        Costs.of(shape),
        episodes=spec.rollout.groups_per_update * spec.rollout.group_size,
        screens=spec.model.adapter.images,
        keep=None if spec.model.adapter.history.blocks is None else spec.model.adapter.history.blocks.keep,
        joined=files.model is None or not files.model.broken,
        screen_tokens=frame,
        screen_patches=frame * shape.vision.merge**2,
        context_tokens=spec.model.context_tokens,
        weight_bytes=2.0 * shape.parameters,
        cache_bytes=engine.kv_bytes_per_token * spec.engine.tensor_parallel,
        weights=settings.lora is None,
        tower=not settings.freeze_vision,
        more_forwards=settings.activation_checkpointing * settings.checkpointed_share + before,
        ranks=settings.ranks,
        engines=spec.engine.replicas,
        tensor_parallel=spec.engine.tensor_parallel,
        players=_players(run, phones or _slots(run, files)),
        in_turns=spec.placement.mode == "colocated" or spec.rollout.max_staleness == 0,
        token_budget=settings.tokens_per_micro_batch,
        sharing=spec.rollout.group_size if recorded and family_named(shape.model_type).shares_prompts else 1,
    )


def assumed_of(run: TrainingRun, options: SpeedOptions = SpeedOptions()) -> Assumed:
    """Half of the steps that the run's tasks allow, and what is usual of the rest; whatever the options say counts."""
    spec = run.spec
    tasks = training_tasks(run)
    most = [tasks.sample(spec.seed, number).max_steps for number in range(_LOOKED_AT)]
    simulated = spec.environment.source.processes
    phone = _PHONE_SECONDS if simulated is None else simulated.latency.median_seconds if simulated.latency else 0.0
    return Assumed(
        steps=options.steps or max(1, round(sum(most) / len(most) / 2)),
        answer_tokens=options.answer_tokens or min(ANSWER, spec.rollout.response_tokens),
        text_tokens=TEXT,
        phone_seconds=phone if options.phone_seconds is None else options.phone_seconds,
    )


def _admitted(run: TrainingRun) -> int:
    rollout = run.spec.rollout
    return (rollout.max_staleness + 1) * rollout.groups_per_update * rollout.group_size


def _slots(run: TrainingRun, files: LocalFiles) -> int | None:
    """Phones, as far as the file says; None: as many as adb has."""
    source = run.spec.environment.source
    wants = source.pool or source.own_pool
    return wants.slots if wants is not None else known_slots(source, files)


def _players(run: TrainingRun, slots: int | None) -> int:
    """Episodes that play at once: as many as there are phones, and as may wait for an update."""
    bounds = [slots, run.spec.rollout.concurrency, _admitted(run)]
    return min(one for one in bounds if one is not None)


def _card(run: TrainingRun, given: str | None) -> tuple[CardSpeed, Card, str]:
    """The card's speed, its memory, and who says so."""
    memory = card_of(run, given)
    found = card_speed(memory.product) if memory.product is not None else None
    if found is not None:
        return found, memory, memory.source
    if memory.product is not None:
        raise UnknownCard(f"{memory.source}: what this GPU computes in a second is not known here")
    assumed = card_speed(DEFAULT)
    assert assumed is not None
    return assumed, memory, "assumed; --gpu-memory H200 names another"


# --- for people and for programs --------------------------------------------------------------------------------------


def _render(
    work: Work,
    assumed: Assumed,
    card: CardSpeed,
    named: str,
    now: tuple[Speed, Speed],
    better: Better | None,
    phones: int | None,
    *,
    counted: bool,
) -> str:
    """`counted`: the number of phones is known."""
    low, high = now
    given = "" if counted else " (the most that may play, as the file doesn't say how many there are: --phones)"
    waits = "they take turns" if work.in_turns else f"{_slower(now)} is what is waited for"
    lines = {
        "estimate": "counted operations at a share of the GPUs' peak that is assumed; not measured",
        "GPU": f"{card.name}, {card.peak / 1e12:,.0f} TFLOP/s, {card.bandwidth / 1e12:.2f} TB/s ({named})",
        "share": f"{assumed.shares[0]:.0%} to {assumed.shares[1]:.0%} of the peak in the learner's matrices",
        "episode": f"{assumed.steps} steps, answers of {assumed.answer_tokens} tokens, prompts of "
        f"{prompt_tokens(work, assumed):,}, phones that take {assumed.phone_seconds:g} s a step (--steps, "
        "--answer-tokens, --phone-seconds)",
        "learner": f"{_span(low.learner, high.learner)} s on {_count(work.ranks, 'rank')}",
        "rollout": f"{_span(low.rollout, high.rollout)} s on {_count(work.engines, 'engine')} and "
        f"{_count(work.players, 'phone')}{given}: a step "
        f"takes {_span(low.step, high.step, 1)} s",
        "update": f"{_span(low.update, high.update)} s with {assumed.sync_seconds:g} s for a sync: {waits}",
        "episodes": f"{_span(low.episodes_per_hour, high.episodes_per_hour)} an hour",
    }
    if better is not None:
        said = " ".join(f"--set {override}" for override in better.overrides)
        lines["faster"] = f"{_span(better.low.update, better.high.update)} s an update with {said}"
    if phones is not None:
        lines["phones"] = f"from {phones} on the learner is what is waited for"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _slower(now: tuple[Speed, Speed]) -> str:
    sides = {one.bound for one in now}
    return f"the {sides.pop()}" if len(sides) == 1 else "now the one, now the other"


def _span(one: float, other: float, digits: int = 0) -> str:
    low, high = sorted((one, other))
    texts = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _as_json(
    work: Work,
    assumed: Assumed,
    card: CardSpeed,
    now: tuple[Speed, Speed],
    better: Better | None,
    phones: int | None,
) -> Mapping[str, Any]:
    """Figures at the low share and at the high one."""
    sized = {name: value for name, value in asdict(work).items() if name != "costs"}
    return {
        "assumed": asdict(assumed),
        "card": asdict(card),
        "work": sized,
        "low": {**asdict(now[0]), "bound": now[0].bound},
        "high": {**asdict(now[1]), "bound": now[1].bound},
        "faster": None if better is None else {"overrides": better.overrides, **_ends(better)},
        "phones_enough": phones,
    }


def _ends(better: Better) -> dict[str, Any]:
    return {"low": asdict(better.low), "high": asdict(better.high)}
