"""`tapforge rescore`: the rewards of recorded episodes asked for anew, by other judges, prompts, weights or gates.

- Taken are the groups that updates took. Nothing is played, nothing is learned, and the recording is not changed.
- What was asked for is a journal, FOLDER/rescored/NAME.jsonl, one file for each `spec.rewards`: started again, the
  command asks only for what it doesn't have.
- An episode without its screens is left out where a reward looks at them, and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tapforge_api import TrainingRun, load
from tapforge_envs.protocol import Outcome

from ..frames.frame import FrameError
from ..recording.frames import RecordedFrames
from ..recording.lines import decode_rewards, encode_rewards
from ..recording.reader import FRAMES, Recording
from ..records import EpisodeRecord, EpisodeRewards, GroupRecord
from ..rewards.rewarder import Rewarder
from ..rewards.streams import OutcomeRewards, StreamRule, episode_streams, means_of, stream_rules, weights
from .assembly import ConfigurationError
from .columns import columns
from .folder import ROLLOUT, SPEC, run_of
from .learning_errors import reward_errors, rewarder_of
from .served_models import without_own_models

RESCORED: Final = "rescored"
#: episodes whose rewards are asked for between two writes
_CHUNK: Final = 64


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream's mean return per episode, times its weight; None: the run, or the other file, doesn't have it."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Rescored:
    episodes: int
    groups: int
    without_screens: int
    #: of the episodes, under the other rewards
    missing: int
    streams: tuple[Stream, ...]
    #: (before, after) -> episodes
    outcomes: Mapping[str, int]
    #: template -> share of successes before and after
    templates: Mapping[str, tuple[float, float]]
    #: groups in which some succeeded and some didn't, before and after
    mixed_before: int
    mixed_after: int
    journal: str


async def rescore(
    folder: Path,
    overrides: Sequence[str],
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] | None = None,
) -> Rescored:
    """`report` gets how many of how many episodes are done, `say` which judge is waited for. Raises
    ConfigurationError, RecordingError and OSError."""
    run, other = run_of(folder), load(folder / SPEC, overrides)
    if any(stage.rewards is not None for stage in run.spec.stages):
        raise ConfigurationError(f"{folder} is of a run whose stages have rewards of their own: rescore knows one")
    if errors := reward_errors(other):
        raise ConfigurationError("\n".join(errors))
    without_own_models([other.spec.rewards], "rescore")
    if other.spec.environment != run.spec.environment:
        raise ConfigurationError(
            "spec.environment: what the environment gave is recorded and stays; --set changes spec.rewards"
        )
    recording = Recording(folder / ROLLOUT)
    groups = await asyncio.to_thread(recording.settled, False)
    episodes = [one for group in groups for one in group.episodes if one.valid and one.steps]
    if not episodes:
        raise ConfigurationError(f"{folder} has no recorded group with episodes: run it first")
    journal = folder / RESCORED / f"{_digest(other)}.jsonl"
    asker = rewarder_of(other, say=say)
    found: Mapping[str, EpisodeRewards | None] = {}
    if asker is not None:
        try:
            found = await _Asking(recording, asker, journal).all(episodes, report)
        finally:
            await asker.close()
    anew = {one.id: _anew(one, found.get(one.id), asked=asker is not None) for one in episodes}
    return _table(groups, run, other, anew, str(journal) if asker is not None else "")


class _Asking:
    def __init__(self, recording: Recording, rewarder: Rewarder, journal: Path):
        self._recording, self._rewarder, self._journal = recording, rewarder, journal

    async def all(
        self, episodes: Sequence[EpisodeRecord], report: Callable[[int, int], None]
    ) -> dict[str, EpisodeRewards | None]:
        """By episode; None: its screens aren't there."""
        self._journal.parent.mkdir(exist_ok=True)
        found: dict[str, EpisodeRewards | None] = dict(_written(self._journal))
        left = [one for one in episodes if one.id not in found]
        with self._journal.open("ab") as file:
            for start in range(0, len(left), _CHUNK):
                chunk = left[start : start + _CHUNK]
                answers = await asyncio.gather(*map(self._one, chunk))
                for episode, rewards in zip(chunk, answers, strict=True):
                    found[episode.id] = rewards
                    if rewards is not None and rewards.outcome is not Outcome.INVALID:  # what is missing is asked again
                        file.write(encode_rewards(episode.id, rewards))
                file.flush()
                report(len(found), len(episodes))
        return found

    async def _one(self, episode: EpisodeRecord) -> EpisodeRewards | None:
        try:
            frames = RecordedFrames(self._recording.folder / FRAMES, episode.frames)
            return await self._rewarder.rewards(_unrewarded(episode), frames)
        except FrameError:
            return None


def _unrewarded(episode: EpisodeRecord) -> EpisodeRecord:
    """As it was before its rewards were asked for."""
    return replace(episode, outcome=episode.verified, rewards=None)


def _anew(episode: EpisodeRecord, rewards: EpisodeRewards | None, *, asked: bool) -> EpisodeRecord | None:
    """Under the other rewards; None: they can't be known."""
    if not asked:
        return episode if episode.verified is None else _unrewarded(episode)
    return None if rewards is None else _unrewarded(episode).rewarded(rewards)


def _digest(run: TrainingRun) -> str:
    """Of the rewards, and of what the prompt files say that they name. Raises OSError."""
    judges = [stream.judge for stream in run.spec.rewards.streams if stream.judge is not None]
    words = [Path(judge.prompt_file).read_bytes() for judge in judges if judge.prompt_file is not None]
    return hashlib.sha256(b"".join([run.spec.rewards.model_dump_json().encode(), *words])).hexdigest()[:16]


def _written(journal: Path) -> Iterator[tuple[str, EpisodeRewards]]:
    """What is there already. A last line that was cut off is asked for again, and removed."""
    if not journal.exists():
        return
    whole = 0
    with journal.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
                yield line["id"], decode_rewards(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigurationError(f"{journal}: broken line after byte {whole}: {error!r}; remove it") from error
            whole += len(raw)
    if whole < journal.stat().st_size:
        with journal.open("r+b") as file:
            file.truncate(whole)


# --- what changed -----------------------------------------------------------------------------------------------------


def _table(
    groups: Sequence[GroupRecord],
    run: TrainingRun,
    other: TrainingRun,
    anew: Mapping[str, EpisodeRecord | None],
    journal: str,
) -> Rescored:
    pairs = [
        [(one, other_one) for one in group.episodes if (other_one := anew.get(one.id)) is not None and other_one.valid]
        for group in groups
    ]
    means_before = _means([[one for one, _ in group] for group in pairs], run)
    means_after = _means([[two for _, two in group] for group in pairs], other)
    flat = [pair for group in pairs for pair in group]
    outcomes: dict[str, int] = defaultdict(int)
    templates: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for one, two in flat:
        assert one.outcome is not None and two.outcome is not None, "both are valid"
        outcomes[f"{one.outcome.value} -> {two.outcome.value}"] += 1
        templates[one.task.template].append((one.outcome is Outcome.SUCCESS, two.outcome is Outcome.SUCCESS))
    return Rescored(
        episodes=len(flat),
        groups=len(groups),
        without_screens=sum(one is None for one in anew.values()),
        missing=sum(one is not None and not one.valid for one in anew.values()),
        streams=tuple(
            Stream(name, means_before.get(name), means_after.get(name))
            for name in sorted({*means_before, *means_after})
        ),
        outcomes=dict(sorted(outcomes.items())),
        templates={
            name: (sum(a for a, _ in both) / len(both), sum(b for _, b in both) / len(both))
            for name, both in sorted(templates.items())
        },
        mixed_before=sum(_mixed([one for one, _ in group]) for group in pairs),
        mixed_after=sum(_mixed([two for _, two in group]) for group in pairs),
        journal=journal,
    )


def _means(groups: Sequence[Sequence[EpisodeRecord]], run: TrainingRun) -> dict[str, float]:
    rules: tuple[StreamRule, ...] = stream_rules(run.spec.rewards)
    outcomes = OutcomeRewards(invalid_answer_penalty=run.spec.algorithm.invalid_answer_penalty)
    weight_of, totals, count = weights(rules), defaultdict[str, float](float), 0
    for group in groups:
        mixed, unknown = _mixed(group), means_of(group, rules)
        for episode in group:
            count += 1
            for name, values in episode_streams(episode, rules, outcomes, mixed=mixed, unknown=unknown).items():
                totals[name] += weight_of[name] * sum(values)
    return {name: total / count for name, total in totals.items()} if count else {}


def _mixed(episodes: Sequence[EpisodeRecord]) -> bool:
    return len({episode.outcome for episode in episodes}) > 1


def lines(found: Rescored) -> Iterator[str]:
    """The table as text."""
    yield f"{found.episodes:,} episodes of {found.groups:,} groups"
    if found.without_screens:
        yield f"{found.without_screens:,} left out: their screens were not recorded, or were removed"
    if found.missing:
        yield f"{found.missing:,} have no verdict: they would leave their groups; ask again with the same command"
    rows = [("stream", "before", "after")]
    rows += [(one.name, _number(one.before), _number(one.after)) for one in found.streams]
    yield from columns(rows)
    yield from columns([("outcome", "episodes"), *((name, f"{count:,}") for name, count in found.outcomes.items())])
    rows = [("success of", "before", "after")]
    rows += [(name, f"{100 * one:.1f} %", f"{100 * two:.1f} %") for name, (one, two) in found.templates.items()]
    yield from columns(rows)
    yield f"groups in which some succeeded and some didn't: {found.mixed_before:,} before, {found.mixed_after:,} after"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
