"""Alarms in words: what the figures of the last updates say a person should look at, and what helps.

`alarms` is a pure function of these figures; `AlarmMonitor` fires each alarm once until it has cleared, which is when
it hasn't held for `CLEARS` updates in a row, so that a figure at its threshold isn't reported again and again.

- `entropy_collapse`: mean entropy of the last 5 updates is under a fifth of the first 5's, and success not up by 5
  points. A policy that gets better gets surer, often by half; surer without being better has stopped to explore.
- `uniform_groups`: in the last 3 updates or more, and 12 groups, no group had an advantage other than 0. At 10 %
  success one group of eight in two ends alike; 12 in a row are not chance (4e-5).
- `kl_reference`: its mean over 5 updates doubled twice within 15, and is over 0.1 nats a token. In healthy runs it
  grows steadily, which doubles it once at most; below 0.1 the two policies hardly differ.
- `kl_behavior`: over 0.1 nats a token in the last 3 updates, for tokens that older weights sampled. Then a token's
  ratio is off by 45 % in the mean, outside of the usual clips.
- `clipped`, `masked`, `capped`: over 30 % of the tokens of the last 3 updates. Published runs clip a few per cent, GSPO
  15 %; at 30 % much of what was played teaches nothing.
- `step_limit`: over half of the valid episodes of the last 5 updates failed there. Then the limit says more about
  success than the policy.
- `success_falls/TEMPLATE`: the last 5 updates against the 20 before, down by 10 points and with 99.9 % intervals apart.
  Less is noise where many templates are looked at after each update.
- `judge_and_verifier`: over the last 5 updates, at least 30 episodes, the judge's success is 10 points or more above
  the verifier's, and the paired 95 % interval of the difference is above 0. A judge that errs both ways alike doesn't
  fire it; a policy that learns what the judge likes does.
- `verdicts_late`: an episode waits longer for its verdict than an update takes, mean of the last 5 updates. Then
  episodes are a version older than they need to be, or the learner waits.
- `verdicts_missing`: over 10 % of the last 3 updates' episodes have none. Those that are hard to judge leave first.
- `format_alone`: no attempt of the last 5 updates or more succeeded, and the share of answers that could be read rose
  by 20 points over them. A published case: format from 0.008 to 0.86 within 13 steps, accuracy 0 in all.
- `rollout_waiting`: over 90 % of the last 5 updates' time. Where phones are slow the learner may well idle for long; at
  90 % twice the phones nearly double the pace.

Where 90 % of all attempts succeed, little entropy and uniform groups are what a solved task looks like, and no alarm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..statistics import wilson

#: updates that an alarm hasn't held when it counts as cleared
CLEARS: Final = 5
#: updates that are looked back at
WINDOW: Final = 200
_SOLVED: Final = 0.9
_SHARE: Final = 0.3
_NATS: Final = 0.1
#: of the intervals of a template's success, with the attempts that either needs
_CONFIDENCE, _ATTEMPTS, _FALL = 0.999, 16, 0.1
#: of the share of answers that can be read, while none is right
_FORMAT_RISE: Final = 0.2
#: episodes from which on a judge and the verifier are compared
_PAIRS: Final = 30


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """What alarms look at; None where an update has no such figure."""

    update: int
    success: float | None = None
    #: groups that were compared, and those of them with an advantage other than 0
    groups: int = 0
    varied: int = 0
    step_limit: float | None = None
    #: share of the answers that could be read as an action
    understood: float | None = None
    entropy: float | None = None
    kl_reference: float | None = None
    kl_behavior: float | None = None
    clipped: float | None = None
    masked: float | None = None
    capped: float | None = None
    #: share of the update's time in which the learner waited for episodes
    waiting: float | None = None
    #: template -> (successes, valid episodes)
    templates: Mapping[str, tuple[int, int]] | None = None
    #: episodes of which judge and verifier said how they ended; the judge's success less the verifier's, and the share
    #: of the episodes in which they differ
    compared: int = 0
    judge_above: float = 0.0
    disagreements: float = 0.0
    #: seconds that an episode waits for its verdict over those of the update; share of episodes without
    verdict_wait: float | None = None
    verdicts_missing: float | None = None

    @staticmethod
    def of(event: Mapping[str, Any]) -> UpdateFigures:
        """Of an update's event; one of an earlier release lacks figures."""
        learner = event.get("learner") or {}
        groups = event.get("groups", 0) - event.get("groups_dropped", 0)
        ages = {name.removeprefix("kl_age_"): kl for name, kl in learner.items() if name.startswith("kl_age_")}
        # Older than any group of the batch is only what is replayed on purpose.
        oldest = (event.get("staleness") or {}).get("max", math.inf)
        older = {age: learner.get(f"tokens_age_{age}", 0.0) for age in ages if 0 < int(age) <= oldest}
        rewards = event.get("rewards") or {}
        seconds, waited = _seconds(learner), rewards.get("seconds_waiting_for_verdicts")
        clips = [learner[name] for name in ("clip_fraction_low", "clip_fraction_high") if name in learner]
        return UpdateFigures(
            update=event["update"],
            success=event.get("success_rate_all"),
            groups=groups,
            varied=groups - event.get("groups_zero_variance", 0),
            step_limit=event.get("step_limit_rate"),
            understood=event.get("valid_action_ratio"),
            entropy=learner.get("entropy"),
            kl_reference=learner.get("kl_reference"),
            kl_behavior=sum(ages[age] * tokens for age, tokens in older.items()) / sum(older.values())
            if sum(older.values())
            else None,
            clipped=sum(clips) if clips else None,
            masked=learner.get("masked"),
            capped=learner.get("importance_capped"),
            waiting=_waiting(learner),
            templates={
                name: (round(row["success"] * row["episodes"]), row["episodes"])
                for name, row in (event.get("templates") or {}).items()
            },
            compared=rewards.get("compared", 0),
            judge_above=rewards.get("judge_minus_verifier", 0.0),
            disagreements=rewards.get("disagreements", 0.0),
            verdict_wait=None if waited is None or not seconds else waited / seconds,
            verdicts_missing=rewards.get("missing_share"),
        )


def _waiting(learner: Mapping[str, Any]) -> float | None:
    """None where nothing was learned: then there is nothing else to spend time on."""
    if "seconds_learn" not in learner:
        return None
    total = _seconds(learner)
    return learner.get("seconds_rollout_wait", 0.0) / total if total else None


def _seconds(learner: Mapping[str, Any]) -> float:
    return sum(learner.get(f"seconds_{part}", 0.0) for part in ("rollout_wait", "learn", "sync", "checkpoint"))


def alarms(updates: Sequence[UpdateFigures]) -> dict[str, str]:
    """Those that hold after the last of `updates`: name -> what is so, and the remedy."""
    if not updates:
        return {}
    found: dict[str, str] = {}
    success = _mean(updates, 5, lambda one: one.success)
    for check in _CHECKS if success is None or success < _SOLVED else _ALSO_WHEN_SOLVED:
        found.update(check(updates))
    return found


class AlarmMonitor:
    """Which alarms hold in the course of a run."""

    def __init__(self) -> None:
        self._updates: deque[UpdateFigures] = deque(maxlen=WINDOW)
        #: active alarm -> updates since it last held
        self.active: dict[str, int] = {}

    def update(self, event: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """After an update: alarms that fire now, with their words, and those that have cleared."""
        self._updates.append(UpdateFigures.of(event))
        holding = alarms(list(self._updates))
        fired = {name: text for name, text in holding.items() if name not in self.active}
        since = {name: 0 if name in holding else count + 1 for name, count in self.active.items()}
        cleared = [name for name, count in since.items() if count >= CLEARS]
        self.active = {name: count for name, count in since.items() if name not in cleared} | dict.fromkeys(fired, 0)
        return fired, cleared

    def replay(self, events: Iterable[Mapping[str, Any]], update: int, since: int = 0) -> None:
        """Takes in what was reported up to an update, in place of what is known: what was said isn't said again.
        `since`: the update after which the present stage began, with other tasks and rewards than those before."""
        self._updates.clear()
        self.active = {}
        last: dict[int, Mapping[str, Any]] = {}
        for event in events:
            if event["event"] == "update" and since < event["update"] <= update:
                last[event["update"]] = event
        for _, event in sorted(last.items()):
            self.update(event)


# --- the alarms -------------------------------------------------------------------------------------------------------

Check = Callable[[Sequence[UpdateFigures]], Iterator[tuple[str, str]]]
Figure = Callable[[UpdateFigures], float | None]


def _entropy(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    known = [one for one in updates if one.entropy is not None]
    if len(known) < 10:
        return
    first, last = _mean(known[:5], 5, lambda one: one.entropy), _mean(known, 5, lambda one: one.entropy)
    before, now = _mean(known[:5], 5, lambda one: one.success), _mean(known, 5, lambda one: one.success)
    better = before is not None and now is not None and now >= before + 0.05
    if first and last is not None and last < first / 5 and not better:
        text = (
            f"entropy fell from {first:.2g} to {last:.2g} nats a token and success did not rise: the policy repeats "
            "itself. Lower learner.learningRate, raise algorithm.loss.clipHigh or set algorithm.kl.coefficient, and "
            "resume from an earlier checkpoint"
        )
        yield "entropy_collapse", text


def _uniform(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    run: list[UpdateFigures] = []
    for one in reversed(updates):
        if one.varied or not one.groups:
            break
        run.append(one)
    groups = sum(one.groups for one in run)
    if len(run) >= 3 and groups >= 12:
        failed = not any(one.success for one in run)
        remedy = (
            "No attempt succeeds: begin with easier tasks or a warm start"
            if failed
            else "Set tasks.sampler to near_half, raise rollout.groupSize or set rollout.dynamicSampling"
        )
        what = f"all {groups} groups of the last {len(run)} updates ended alike and taught nothing"
        yield "uniform_groups", f"{what}. {remedy}"


def _kl_reference(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    values = [one.kl_reference for one in updates if one.kl_reference is not None][-15:]
    if len(values) < 15:
        return
    first, second, third = (sum(values[start : start + 5]) / 5 for start in (0, 5, 10))
    if third > _NATS and third > 2 * second > 4 * first:
        text = (
            f"the divergence from the reference doubles every 5 updates and is {third:.2g} nats a token. Raise "
            "algorithm.kl.coefficient or lower learner.learningRate"
        )
        yield "kl_reference", text


def _kl_behavior(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    value = _mean(updates, 3, lambda one: one.kl_behavior)
    if value is not None and value > _NATS:
        text = (
            f"the policy diverges by {value:.2g} nats a token from the older weights that sampled the episodes. Lower "
            "rollout.maxStaleness or learner.learningRate"
        )
        yield "kl_behavior", text


def _shares(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    rows: tuple[tuple[str, Figure, str, str], ...] = (
        (
            "clipped",
            lambda one: one.clipped,
            "are clipped",
            "Lower learner.learningRate or learner.miniBatches, or widen algorithm.loss.clipLow and clipHigh",
        ),
        (
            "masked",
            lambda one: one.masked,
            "are masked by algorithm.loss.corrections",
            "Widen their ranges, lower rollout.maxStaleness, or look at engine/gap_mean",
        ),
        (
            "capped",
            lambda one: one.capped,
            "have an importance weight at its cap",
            "Lower rollout.maxStaleness or learner.learningRate, or look at engine/gap_mean",
        ),
    )
    for name, figure, what, remedy in rows:
        share = _mean(updates, 3, figure)
        if share is not None and share > _SHARE:
            yield name, f"{share:.0%} of the tokens of the last 3 updates {what}. {remedy}"


def _step_limit(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    share = _mean(updates, 5, lambda one: one.step_limit)
    if share is not None and share > 0.5:
        text = (
            f"{share:.0%} of the last 5 updates' episodes failed at their step limit. Raise the tasks' max_steps, "
            "or leave such episodes out with algorithm.truncated.episodes: masked"
        )
        yield "step_limit", text


def _format_alone(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    failed: list[UpdateFigures] = []
    for one in reversed(updates):
        if one.success or one.success is None:
            break
        failed.append(one)
    understood = [one.understood for one in reversed(failed) if one.understood is not None]
    if len(understood) >= 5 and understood[-1] - min(understood) >= _FORMAT_RISE:
        text = (
            f"in {len(understood)} updates answers that can be read rose from {min(understood):.0%} to "
            f"{understood[-1]:.0%} and none was right: the policy learns the form of an answer and nothing else. Give "
            "rewards of format the gate mixedOutcomes, and begin with a warm start, easier tasks or a larger tolerance"
        )
        yield "format_alone", text


def _success_falls(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    recent, before = _pooled(updates[-5:]), _pooled(updates[-25:-5])
    for template, (won, played) in sorted(recent.items()):
        earlier_won, earlier = before.get(template, (0, 0))
        if min(played, earlier) < _ATTEMPTS or earlier_won / earlier - won / played < _FALL:
            continue
        now, then = wilson(won, played, _CONFIDENCE), wilson(earlier_won, earlier, _CONFIDENCE)
        if now is not None and then is not None and now.high < then.low:
            text = (
                f"success of {template} fell from {earlier_won / earlier:.0%} to {won / played:.0%} ({played} "
                "episodes). Look at its episodes in the replay: the policy forgets it, or its phones changed. A lower "
                "learner.learningRate or a resume from an earlier checkpoint helps against the former"
            )
            yield f"success_falls/{template}", text


def _rollout_waiting(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    share = _mean(updates, 5, lambda one: one.waiting)
    if share is not None and share > 0.9:
        text = (
            f"the learner waited for episodes in {share:.0%} of the last 5 updates' time. More phones or engines help, "
            "or a larger rollout.maxStaleness where phones idle (phones/free)"
        )
        yield "rollout_waiting", text


def _judge_and_verifier(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    recent = updates[-5:]
    count = sum(one.compared for one in recent)
    if count < _PAIRS:
        return
    above = sum(one.judge_above * one.compared for one in recent) / count
    # A pair differs by -1, 0 or 1, so its square is whether it differs.
    spread = sum(one.disagreements * one.compared for one in recent) / count - above**2
    if above >= _FALL and above - 1.96 * math.sqrt(max(0.0, spread) / count) > 0:
        text = (
            f"the judge calls {100 * above:.0f} points more of the last {count} episodes a success than the verifier: "
            "the policy may be learning what the judge likes. See what it rewarded with `tapforge judge calibrate`, "
            "and use more votes, another prompt or another model"
        )
        yield "judge_and_verifier", text


def _verdicts(updates: Sequence[UpdateFigures]) -> Iterator[tuple[str, str]]:
    wait = _mean(updates, 5, lambda one: one.verdict_wait)
    if wait is not None and wait > 1:
        text = (
            f"an episode waits {wait:.1f} times as long for its verdict as an update takes. Raise the judge's "
            "concurrency, ask it fewer times, or use a faster one"
        )
        yield "verdicts_late", text
    missing = _mean(updates, 3, lambda one: one.verdicts_missing)
    if missing is not None and missing > 0.1:
        text = (
            f"{missing:.0%} of the last 3 updates' episodes have no verdict and left their groups. Look at the judge's "
            "endpoint and at rewards/judge_unreadable"
        )
        yield "verdicts_missing", text


_ALSO_WHEN_SOLVED: Final[tuple[Check, ...]] = (
    _judge_and_verifier,
    _verdicts,
    _kl_reference,
    _kl_behavior,
    _shares,
    _success_falls,
    _rollout_waiting,
)
_CHECKS: Final[tuple[Check, ...]] = (*_ALSO_WHEN_SOLVED, _entropy, _uniform, _step_limit, _format_alone)


def _mean(updates: Sequence[UpdateFigures], count: int, figure: Figure) -> float | None:
    """Over the last `count` updates that have the figure; None where fewer do."""
    known = [value for one in updates if (value := figure(one)) is not None][-count:]
    return sum(known) / count if len(known) == count else None


def _pooled(updates: Sequence[UpdateFigures]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for one in updates:
        for template, (won, played) in (one.templates or {}).items():
            before = total.get(template, (0, 0))
            total[template] = before[0] + won, before[1] + played
    return total
