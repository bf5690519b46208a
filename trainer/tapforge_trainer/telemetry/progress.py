"""How far a run is: what a checkpoint keeps of the driver, as plain JSON, and when reinforcement is finished.

Counters continue over sessions. Finished episodes of groups under way are not kept here: they are in the recording. The
newest checkpoint says how far a run is before anything is loaded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tapforge_api.learning import Stop
from tapforge_api.reading import read_record
from tapforge_api.stages import Stage
from tapforge_envs.protocol import Reason, Task

from ..recording.reader import Recording
from ..records import GroupRecord
from ..rollout.group import Resumed
from ..rollout.stats import RolloutStats, by_length, rate_of
from ..storage.object_storage import is_uri

if TYPE_CHECKING:
    from ..learner.checkpoint_storage import CheckpointBackend

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """Times are seconds."""

    #: metadata.name of the run whose progress it is; and on a cluster its metadata.uid
    run: str = ""
    uid: str = ""
    #: the own checkpoint that spec.checkpoints.resumeFrom named when this session began, `normalized`; or empty
    resumed_from: str = ""
    update: int = 0
    #: of spec.stages, from 0; the update that it began after; and tasks that were drawn in each one before it
    stage: int = 0
    stage_began: int = 0
    stages_drawn: list[int] = field(default_factory=list)
    #: policy version of the learner's weights
    version: int = 0
    next_order: int = 0
    tasks: int = 0
    #: what tasks came to, and those that are drawn: `tasks.source.TaskSource.practice`
    practice: dict[str, Any] = field(default_factory=dict)
    #: all time of the sessions before this one
    seconds_earlier: float = 0.0
    #: of all sessions until they could work
    seconds_start: float = 0.0
    seconds_sft: float = 0.0
    seconds_rl: float = 0.0
    #: success rate over all valid attempts of the last update, those in groups that it did not learn from included
    success: float | None = None
    episodes: int = 0
    invalid: int = 0
    env_steps: int = 0
    slot_seconds: float = 0.0
    busy_seconds: float = 0.0
    warm_started: bool = False
    #: sessions that played for this run: groups that are played again after a crash get other names
    starts: int = 0
    unfinished: list[dict[str, Any]] = field(default_factory=list)
    #: groups whose successes may be learned from again, as those
    replay: list[dict[str, Any]] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    #: the run's file, as far as it says something
    spec: dict[str, Any] = field(default_factory=dict)
    #: what was measured before reinforcement, by mode
    before: dict[str, Any] = field(default_factory=dict)
    #: figures of the run's first proof of a weight sync, `sync/agreement.py:figures`; None: there was none
    first_proof: dict[str, float] | None = None
    #: by which recorded prompts that was, `run/proof_prompts.py:name_of`; "": by made-up ones
    proof_prompts: str = ""
    #: that judges used, prompts and answers; and what they cost
    judge_tokens: int = 0
    judge_money: float = 0.0
    #: what members of groups came to, by length: `rollout.stats.by_length`
    members: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], **more: Any) -> Progress:
        """What a checkpoint keeps, and `more` in its place. Fields of a later release are left out."""
        known = {member.name for member in fields(cls)}
        return cls(**{name: value for name, value in {**state, **more}.items() if name in known})

    def go_back(self, saved: Progress) -> None:
        """To a checkpoint, within a session: what was played and learned since counts no longer. What is known of the
        run itself, of the session's time and of judges, whose tokens are spent, stays."""
        for member in fields(self):
            if member.name not in _STAYS:
                setattr(self, member.name, getattr(saved, member.name))


#: of `Progress`, when a session goes back to a checkpoint
_STAYS: Final = frozenset(
    [
        "run",
        "uid",
        "spec",
        "before",
        "first_proof",
        "proof_prompts",
        "starts",
        "seconds_earlier",
        "seconds_start",
        "judge_tokens",
        "judge_money",
    ]
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete. `time` is unix seconds; `path` a folder or a URI; `seconds` is what it took to
    write, 0 for one of an earlier session."""

    update: int
    time: float
    path: str
    seconds: float = 0.0


def newest_checkpoint(place: CheckpointBackend) -> Saved | None:
    """The newest one that is there. Raises CheckpointError for one that can't be read, and StorageError."""
    from ..learner.checkpoint_storage import read_state

    newest = place.latest()
    if newest is None:
        return None
    document = read_state(newest)
    return Saved(document["update"], document.get("time") or Path(newest).stat().st_mtime, newest)


def progress_of(saved: Saved) -> Progress:
    """The driver's state in a checkpoint. Raises CheckpointError."""
    from ..learner.checkpoint_storage import read_state

    return Progress.of(read_state(saved.path)["driver"])


def normalized(given: str) -> str:
    """A folder or URI as it is compared with another one."""
    return given.rstrip("/") if is_uri(given) else str(Path(given).resolve())


def saved_since_resuming(place: CheckpointBackend, given: str) -> bool:
    """Whether the newest checkpoint was made after the run had resumed from `given`, which names an older one of its
    own: then the newest one counts. One that can't be read doesn't. Raises StorageError."""
    from ..learner.checkpoint_storage import CheckpointError

    try:
        newest = newest_checkpoint(place)
        return newest is not None and progress_of(newest).resumed_from == normalized(given)
    except CheckpointError:
        return False


class Counters:
    """Adds what the rollout of this session did to the run's progress."""

    def __init__(self, progress: Progress):
        self._progress, self._before = progress, replace(progress)
        self._attempts: Counter[str] = Counter()
        self._started = time.monotonic()

    def count(self, stats: RolloutStats) -> None:
        """`stats`: totals of the session."""
        progress, before = self._progress, self._before
        progress.episodes = before.episodes + stats.successes + stats.failures
        progress.invalid = before.invalid + sum(stats.invalid.values())
        progress.env_steps = before.env_steps + stats.env_steps
        progress.slot_seconds = before.slot_seconds + stats.slot_seconds
        progress.busy_seconds = before.busy_seconds + stats.busy_seconds
        progress.members = by_length(stats.members, before.members)

    def update(self, stats: RolloutStats) -> Counter[str]:
        """After an update: also its time and success. Returns its attempts by outcome."""
        self.count(stats)
        self._progress.seconds_rl = self._before.seconds_rl + time.monotonic() - self._started
        attempts, self._attempts = stats.drawn - self._attempts, stats.drawn
        self._progress.success = rate_of(attempts)
        return attempts

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The time until the block ends is not the reinforcement's."""
        since = time.monotonic()
        yield
        self._started += time.monotonic() - since


def needed_episodes(checkpoints: Path) -> set[str]:
    """Of which the recording has to be kept: those of the groups under way at any checkpoint that is still there, or
    being written."""
    from ..learner.checkpoint_storage import CheckpointError, read_state

    needed = set[str]()
    for folder in checkpoints.glob("*update-*"):  # also one that is just being replaced
        try:
            unfinished = read_state(folder)["driver"].get("unfinished", ())
        except (CheckpointError, OSError):  # unfinished, removed meanwhile, or of no use for resuming
            continue
        needed.update(name for group in unfinished for name in _names(group))
    return needed


def belongs(state: Mapping[str, Any], run: str, uid: str = "") -> bool:
    """Whether a checkpoint's state is that of the run of this name and UID: then the run is resumed from it, else only
    warm-started from its weights, and counts from 0."""
    return bool(run) and (state.get("run"), state.get("uid", "")) == (run, uid)


def ended(stop: Stop, progress: Progress) -> str:
    """Which limit of `spec.stop` is reached, in words; empty: none."""
    if progress.update >= stop.max_updates:
        return f"{progress.update} updates"
    if stop.max_seconds is not None and progress.seconds_rl >= stop.max_seconds:
        return f"{progress.seconds_rl:.0f} s of reinforcement"
    if stop.target_success is not None and progress.success is not None and progress.success >= stop.target_success:
        return f"{progress.success:.0%} success over all attempts of an update"
    return ""


def stage_ended(stages: Sequence[Stage], progress: Progress) -> str:
    """Which limit of its own the stage has reached, in words; empty: none."""
    if not stages:
        return ""
    stop, updates = stages[progress.stage].stop, progress.update - progress.stage_began
    if stop.max_updates is not None and updates >= stop.max_updates:
        return f"{updates} updates of stage {progress.stage + 1}"
    if stop.target_success is not None and progress.success is not None and progress.success >= stop.target_success:
        return f"{progress.success:.0%} success over all attempts of an update in stage {progress.stage + 1}"
    return ""


def finished(stop: Stop, stages: Sequence[Stage], progress: Progress) -> str:
    """By what the whole run has ended, in words; empty: it goes on."""
    last = progress.stage == len(stages) - 1
    return ended(stop, progress) or (stage_ended(stages, progress) if last else "")


def begin_stage(progress: Progress) -> None:
    """The next one: with tasks of its own, and nothing under way. All other counters count on."""
    progress.stages_drawn.append(progress.tasks)
    progress.stage, progress.stage_began = progress.stage + 1, progress.update
    progress.tasks, progress.practice, progress.quarantined = 0, {}, {}
    progress.unfinished, progress.replay, progress.success = [], [], None


def kept(groups: Sequence[Resumed]) -> list[dict[str, Any]]:
    """Groups under way as JSON."""
    return [
        {
            "order": group.order,
            "version": group.version,
            "task": group.task.model_dump(),
            "episodes": [episode.id for episode in group.episodes],
            "awaiting": [episode.id for episode in group.awaiting],
            "unjudged": [episode.id for episode in group.unjudged],
        }
        for group in groups
    ]


def resumed(progress: Progress, rollout: Path) -> list[Resumed]:
    """The groups under way at the last checkpoint, with those of their episodes that are in the recording with all
    their frames, as the model saw them. The others are played again. One that awaited its rewards may have them by
    now, or have none for good."""
    return _recorded(progress.unfinished, rollout, "they are played again")


def replayable(progress: Progress, rollout: Path) -> list[GroupRecord]:
    """The groups whose successes might be learned from again at the last checkpoint, as far as all their episodes are
    in the recording."""
    found = _recorded(progress.replay, rollout, "they are not learned from again")
    whole = [
        one for one, kept in zip(found, progress.replay, strict=True) if len(one.episodes) == len(kept["episodes"])
    ]
    return [GroupRecord(g.episodes[0].group, g.order, g.task, g.version, g.episodes) for g in whole]


def _names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the episodes of a group under way; a checkpoint of an earlier release has fewer of them."""
    return (*group["episodes"], *group.get("awaiting", ()), *group.get("unjudged", ()))


def _recorded(groups: Sequence[Mapping[str, Any]], rollout: Path, otherwise: str) -> list[Resumed]:
    if not groups:
        return []
    named = [_names(group) for group in groups]
    wanted = {name for names in named for name in names}
    # A run that was warm-started from another run's checkpoint has none of that run's episodes.
    recording = Recording(rollout)
    found = {name: episode for name, episode in recording.find(wanted).items() if recording.is_complete(episode)}
    if lost := len(wanted) - len(found):
        log.info("%d finished episodes were not recorded whole: %s", lost, otherwise)
    kept = []
    for group, names in zip(groups, named, strict=True):
        there = [found[name] for name in names if name in found]
        kept.append(
            Resumed(
                group["order"],
                read_record(Task, group["task"]),
                group["version"],
                tuple(episode for episode in there if episode.valid),
                tuple(episode for episode in there if episode.awaits_rewards),
                tuple(episode for episode in there if episode.reason is Reason.VERDICT_MISSING),
            )
        )
    return kept
