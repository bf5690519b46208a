"""What two logs prove about a run on sick phones: the run's own recording, and what each phone wrote down itself.

No counter of the run is asked. Samples are built anew from the recording, by the code that built them for the learner,
and each is traced to the phones: every screen that its prompt shows, the action, and the verdict of its episode.

A sample is poisoned unless
1. every picture of its prompt was answered by the phone that the recording names, in one and the same episode there, in
   the order of its steps, by an answer with which nothing was wrong;
2. its action is what that phone was asked to do at that step, and was answered with nothing wrong;
3. the verdict of its episode is the one that this phone gave, with nothing wrong, or its reason needs none;
4. it is one of those that the run learned from, and the run learned from none that is not found so.

A phone had two holders if two recorded episodes on it overlap in time, if a call of one of its episodes arrived after
another one had begun, or if two recorded episodes are one episode there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapforge_envs.protocol import needs_score
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.frames.frame import FrameError
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.records import EpisodeRecord, GroupRecord, StepRecord

#: (episode, step) of a sample
SampleName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Served:
    """A request as a phone saw it. `status` 0: it was not answered."""

    phone: str
    at: float
    call: str
    episode: str
    index: int
    action: dict[str, Any] | None
    status: int = 0
    fault: str | None = None
    picture: str | None = None
    score: float | None = None

    @property
    def right(self) -> bool:
        """Answered, with nothing wrong."""
        return self.status == 200 and self.fault is None


@dataclass(slots=True)
class Proof:
    samples: int = 0
    #: sample -> what is wrong with it
    poisoned: dict[SampleName, str] = field(default_factory=dict)
    double_holders: list[str] = field(default_factory=list)
    #: by kind: requests that went wrong, as the phones wrote it down
    faults: Counter[str] = field(default_factory=Counter)


def read_log(path: Path, names: Mapping[int, str]) -> list[Served]:
    """In the order in which requests arrived. `names`: of phones, as the recording has them."""
    seen: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        seen.setdefault(line["n"], {}).update(line)
    wanted = ("at", "call", "episode", "index", "action", "status", "fault", "picture", "score")
    return [
        Served(names[line["phone"]], **{name: line[name] for name in wanted if name in line}) for line in seen.values()
    ]


def prove(
    log: Iterable[Served], recording: Recording, rules: BatchRules, learned: Collection[SampleName], groups: int
) -> Proof:
    """`groups`: of the first so many in issue order the run learned, and `learned` are the samples it made of them."""
    phones: dict[str, list[Served]] = {}
    for served in log:
        phones.setdefault(served.phone, []).append(served)
    trace = _Trace(phones)
    found = Proof(faults=Counter(s.fault for calls in phones.values() for s in calls if s.fault))
    episodes = {episode.id: episode for episode in recording.episodes()}
    taken = sorted(recording.groups(), key=lambda group: group.order)[:groups]
    samples = build_batch(taken, rules).samples
    found.samples = len(samples)
    names = {(sample.episode, span.step) for sample in samples for span in sample.spans}
    for name in names ^ set(learned):
        where = "was recorded, but not learned from" if name in names else "was learned from, but not recorded"
        found.poisoned[name] = where
    steps = _steps(taken)
    for sample in samples:
        for span in sample.spans:
            episode, step, executed = steps[sample.episode, span.step]
            wrong = trace.wrong(episode, step, executed) or _unread(recording, step)
            if wrong:
                found.poisoned[sample.episode, span.step] = wrong
    found.double_holders = [*_overlaps(episodes.values()), *_late_calls(phones), *trace.shared]
    return found


def _steps(groups: Sequence[GroupRecord]) -> dict[SampleName, tuple[EpisodeRecord, StepRecord, int]]:
    """With the number of actions that were carried out before the step."""
    found = {}
    for group in groups:
        for episode in group.episodes:
            executed = 0
            for step in episode.steps:
                found[episode.id, step.index] = (episode, step, executed)
                executed += step.action is not None
    return found


class _Trace:
    """Where recorded steps come from."""

    def __init__(self, phones: Mapping[str, Sequence[Served]]):
        self._pictures: dict[str, list[Served]] = {}
        self._calls: dict[tuple[str, str, str], list[Served]] = {}
        for calls in phones.values():
            for served in calls:
                if served.picture is not None:
                    self._pictures.setdefault(served.picture, []).append(served)
                self._calls.setdefault((served.phone, served.episode, served.call), []).append(served)
        #: (phone, its episode) -> the recorded one
        self._episodes: dict[tuple[str, str], str] = {}
        self.shared: list[str] = []

    def wrong(self, episode: EpisodeRecord, step: StepRecord, executed: int) -> str:
        """ "": nothing."""
        origins = []
        for frame in step.frames:
            answers = self._pictures.get(frame)
            if not answers:
                return f"no phone showed the picture {frame[:12]}"
            # Shown once more by mistake (stale, foreign) it is still the picture of the answer that it was made for.
            right = [answer for answer in answers if answer.right]
            if not right:
                return f"the picture {frame[:12]} is of an answer with fault {answers[0].fault}"
            if len({(a.phone, a.episode, a.index) for a in right}) > 1:
                return f"the picture {frame[:12]} is of several answers"
            origins.append(right[0])
        if {(o.phone, o.episode) for o in origins} != {(episode.slot, origins[-1].episode)}:
            return f"its pictures are of {[(o.phone, o.episode) for o in origins]}, the recording says {episode.slot}"
        order = [o.index for o in origins]
        if order != sorted(set(order)) or order[-1] != executed - 1:
            return f"its pictures were shown after steps {order}, the last one should be after step {executed - 1}"
        there = origins[-1].episode
        if (other := self._episodes.setdefault((episode.slot, there), episode.id)) != episode.id:
            self.shared.append(f"{episode.slot}: {other} and {episode.id} are one episode there")
        return self._wrong_action(episode, step, executed, there) or self._wrong_verdict(episode, there)

    def _wrong_action(self, episode: EpisodeRecord, step: StepRecord, executed: int, there: str) -> str:
        if step.action is None:
            return ""
        asked = [s for s in self._calls.get((episode.slot, there, "step"), ()) if s.index == executed]
        if not any(s.right for s in asked):
            return f"step {executed} was never answered right: {[(s.status, s.fault) for s in asked]}"
        if any(s.action != step.action for s in asked):
            return f"step {executed} was asked as {asked[0].action}, recorded as {step.action}"
        return ""

    def _wrong_verdict(self, episode: EpisodeRecord, there: str) -> str:
        given = [s.score for s in self._calls.get((episode.slot, there, "evaluate"), ()) if s.right]
        if needs_score(episode.reason, episode.task.feasible):
            return "" if episode.score in given else f"its verdict {episode.score} is none that the phone gave: {given}"
        return "" if episode.score is None else f"it ended as {episode.reason} and has a verdict of {episode.score}"


def _unread(recording: Recording, step: StepRecord) -> str:
    try:
        for frame in step.frames:
            recording.frames.frame(frame)
    except FrameError as error:
        return str(error)
    return ""


def _overlaps(episodes: Iterable[EpisodeRecord]) -> list[str]:
    found = []
    last: dict[str, EpisodeRecord] = {}
    for episode in sorted(episodes, key=lambda episode: episode.started):
        before = last.get(episode.slot)
        if before is not None and episode.started < before.ended:
            found.append(
                f"{episode.slot}: {episode.id} began {before.ended - episode.started:.3f} s before {before.id} ended"
            )
        if before is None or episode.ended > before.ended:
            last[episode.slot] = episode
    return found


def _late_calls(phones: Mapping[str, Sequence[Served]]) -> list[str]:
    found = []
    for phone, calls in phones.items():
        holder, gone = "", set[str]()
        for served in calls:
            if served.call == "reset" and served.episode != holder:
                gone.add(holder)
                holder = served.episode
            if served.episode in gone:
                found.append(f"{phone}: {served.call} of {served.episode} arrived after {holder} had begun")
    return found
