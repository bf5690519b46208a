"""Which figures loggers get, from a run's events, and what each means: docs/loggers.md has this table.

A figure's step is the number of updates so far. Times are seconds, shares go from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from tapforge_api import TrainingRun

#: metrics of the learner's event that are the engines'
_ENGINE: Final = (
    "gap",
    "gap_mean",
    "gap_rms",
    "gap_p90",
    "gap_kl",
    "gap_tokens",
    "gap_slope",
    "gap_slope_error",
    "gap_alarm",
    "sync_resends",
    "sync_unread_tensors",
    "sync_bytes",
    "sync_gigabytes_per_second",
    "prefix_cache_hit_rate",
    "mm_cache_hit_rate",
    "encoder_cache_hit_rate",
    "sync_dropped_tokens",
    "engine_restarts",
)

#: by name; `*` stands for names that a run makes
FIGURES: Final[Mapping[str, str]] = {
    "rollout/success_rate": "success over all valid attempts that were played for the update",
    "rollout/sample_age": "mean policy versions between a sample and the weights that learned from it",
    "rollout/attempts_*": "attempts that were played for the update, by outcome",
    "rollout/staleness_mean": "policy versions that the update's groups lagged behind",
    "rollout/staleness_max": "of the group that lagged most",
    "template/*/success": "success over the template's valid episodes of the update, groups included that were dropped",
    "template/*/low": "its Wilson interval, 95 %",
    "template/*/high": "its Wilson interval, 95 %",
    "template/*/episodes": "those episodes",
    "tasks/known": "different tasks with a result so far",
    "tasks/pausing": "of which pause now",
    "tasks/paused": "pauses that began so far",
    "tasks/retried": "tasks that were tried again after a pause so far",
    "replay/groups": "groups of which the update learned again",
    "replay/episodes": "successful episodes of theirs",
    "replay/share": "of the update's samples",
    "replay/age_mean": "policy versions since their groups began, over episodes",
    "alarms/active": "alarms that have not cleared",
    "alarms/*": "1: the alarm of that name has not cleared",
    "batch/groups": "groups of the update",
    "batch/groups_dropped": "groups with too few valid episodes",
    "batch/groups_zero_variance": "groups in which all episodes came to the same",
    "batch/mixed_group_share": "groups in which some succeeded and some didn't, over those that were compared",
    "batch/group_size_mean": "valid episodes of a group",
    "batch/group_size_min": "of the smallest group",
    "batch/episodes": "valid episodes",
    "batch/episodes_invalid": "episodes that phone, judge or infrastructure broke",
    "batch/episodes_stopped": "episodes that the run stopped itself",
    "batch/episodes_without_steps": "valid episodes that ended before the first answer",
    "batch/success_rate": "success over valid episodes",
    "batch/success_rate_attempted": "success over valid and invalid episodes",
    "batch/steps_mean": "steps of a valid episode",
    "batch/valid_action_ratio": "answers that could be read as an action, over all answers",
    "batch/step_limit_rate": "episodes that failed at their step limit, over valid episodes",
    "batch/answer_limit_rate": "answers without an end at the longest length, over all answers",
    "batch/samples": "answers that the learner got",
    "batch/response_tokens": "tokens that the policy produced in them",
    "batch/state_groups": "states in which steps are compared",
    "batch/state_group_size_mean": "steps of a state",
    "batch/state_group_size_max": "steps of the most frequent state",
    "batch/singleton_group_share": "states with a single step",
    "batch/singleton_step_share": "steps that are alone in their state",
    "batch/step_advantage_spread": "standard deviation of the steps' advantages",
    "batch/episode_advantage_spread": "standard deviation of the episodes' advantages",
    "batch/explained_variance": "share of the variance of returns that the critic had foreseen",
    "learner/loss": "policy loss; of a warm start cross-entropy",
    "learner/policy_loss": "policy loss",
    "learner/value_loss": "half the squared distance of the critic's values to returns, without its coefficient",
    "learner/entropy": "nats per response token",
    "learner/gradient_norm": "before clipping",
    "learner/learning_rate": "of the last optimizer step",
    "learner/ratio_mean": "new probability over the anchor's, of a token or a sequence; absent where it is always 1",
    "learner/ratio_max": "the largest",
    "learner/approx_kl": "divergence of the anchor and the new policy, k3",
    "learner/kl_loss": "divergence from the reference, as the loss has it",
    "learner/kl_reference": "divergence from the reference, k3",
    "learner/distillation_kl": "divergence from the teacher, as log-probabilities of the policy's own tokens have it, "
    "k1: it falls while the policy learns from it",
    "learner/clip_fraction_low": "tokens clipped from below",
    "learner/clip_fraction_high": "tokens clipped from above",
    "learner/dual_clip_fraction": "tokens bounded by dual clipping",
    "learner/clip_cov_fraction": "tokens that Clip-Cov has left without a gradient",
    "learner/kl_cov_fraction": "tokens that KL-Cov pulls back",
    "learner/importance_mean": "importance weight of what another policy sampled",
    "learner/importance_capped": "share of tokens whose importance weight is at its cap",
    "learner/cut_*": "share of tokens that the correction of that name has capped or masked",
    "learner/masked": "share of tokens that corrections leave out of the loss",
    "learner/engine_gap": "engine and learner apart, per token of the update, older weights included",
    "learner/engine_gap_max": "the largest",
    "learner/kl_age_*": "divergence of the policy from the one that sampled, k3, by the tokens' age in versions",
    "learner/tokens_age_*": "tokens of that age; 8 stands for 8 and more",
    "learner/tokens": "tokens of the samples, prompts and frames included; what those of a micro-batch share once",
    "learner/positions": "positions that were computed, padding included",
    "learner/response_tokens": "tokens with a loss",
    "learner/padding_share": "computed positions that hold no token",
    "learner/flops": "operations that the model needs for both passes",
    "learner/tokens_per_second": "tokens over the update's time",
    "learner/positions_per_second": "positions over the update's time",
    "learner/mfu": "model FLOPs utilisation of the learner's GPUs",
    "learner/peak_mib": "largest memory of a rank so far, MiB",
    "engine/gap": "largest difference of a log-probability in the last sync's proof",
    "engine/gap_mean": "engine and learner apart per token, in the last sync's proof",
    "engine/gap_rms": "root mean square of the same",
    "engine/gap_p90": "exceeded by a tenth of its tokens",
    "engine/gap_kl": "the same as a divergence, k3",
    "engine/gap_tokens": "tokens of the proof",
    "engine/gap_slope": "the engines' change since the session's first proof on the learner's, where it is known",
    "engine/gap_slope_error": "its standard error",
    "engine/gap_alarm": "1: the mean is over sync.gapAlarm",
    "engine/failed_gap_*": "of a proof that failed before it",
    "engine/sync_resends": "1: the first proof failed, and a full set was sent once more",
    "engine/sync_unread_tensors": "tensors of which bytes can't be compared where engines keep them",
    "engine/sync_bytes": "bytes of weights that each engine got in the last sync",
    "engine/sync_gigabytes_per_second": "the same over the time of gathering and transfer",
    "engine/prefix_cache_hit_rate": "prompt tokens whose keys and values were at hand",
    "engine/mm_cache_hit_rate": "frames that were at hand",
    "engine/encoder_cache_hit_rate": "frames of prompts that no vision tower had to compute for them",
    "engine/sync_dropped_tokens": "tokens whose keys and values the last sync dropped, of all engines",
    "engine/engine_restarts": "engines that were started again so far",
    "time/reinforcement": "of the reinforcement so far, all sessions",
    "time/update": "of the learner's update, as the driver waits for it",
    "time/computing": "of the optimizer steps, mean over ranks",
    "time/learn": "of batch building and update",
    "time/rollout_wait": "until the update's groups were played",
    "time/prepare": "for batch, plan, and waiting for frames",
    "time/forward": "of the forward passes, mean over ranks",
    "time/backward": "of the backward passes, mean over ranks",
    "time/optimizer": "of clipping and optimizer steps, mean over ranks",
    "time/sync": "until the engines had new weights and the proof held",
    "time/sync_*": "of which for a part of the sync",
    "time/checkpoint": "for which the last checkpoint held the learner",
    "time/driver_stall_*": "the driver's event loop was late by this much",
    "rewards/answered": "episodes whose rewards came",
    "rewards/missing": "of which without a verdict that an episode can't be without",
    "rewards/missing_share": "of which as a share",
    "rewards/seconds_waiting_for_verdicts": "that an episode waited for its rewards, mean",
    "rewards/compared": "episodes of the update of which a judge and the verifier said how they ended",
    "rewards/success_judged": "success of the update's episodes by the stream of success, where a verifier was asked",
    "rewards/success_verified": "success of the same episodes by the verifier",
    "rewards/judge_minus_verifier": "their difference: a policy that learns to please its judge lets it grow",
    "rewards/disagreements": "share of these episodes in which the two differ",
    "rewards/judges_used_tokens": "of judges since the run began, over all sessions: stop.judgeTokens limits them",
    "rewards/judges_used_money": "what they have cost since then: stop.judgeMoney limits it",
    "rewards/judge_*": "of judges since the last update: verdicts, votes, requests, failed, prompt_tokens, "
    "answer_tokens, seconds, money, cached, cascaded, estimated (requests without usage), unreadable, asked_again, "
    "missing",
    "workers/*": "of the rollout workers: how many, their restarts, attempts and stalls",
    "phones/*": "phones by state",
    "warm_start/*": "of the warm start's last step, as learner/*",
    "evaluation/*": "on held-out tasks by mode, and other_templates: success, success_attempted, episodes, invalid",
    "baseline/*": "the same tasks played by a policy that has learned nothing",
}

_MEASURED: Final = ("success", "success_attempted", "episodes", "invalid")
_PATTERNS: Final = {name: re.compile(re.escape(name).replace(r"\*", ".+")) for name in FIGURES}


def meaning(figure: str) -> str | None:
    """What it means; None for one that is not documented."""
    if figure in FIGURES:
        return FIGURES[figure]
    return next((FIGURES[name] for name, pattern in _PATTERNS.items() if pattern.fullmatch(figure)), None)


def figures_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Of a line of events.jsonl; of most kinds there are none."""
    match event["event"]:
        case "update":
            found = dict(_update(event))
        case "warm_start":
            found = {f"warm_start/{name}": value for name, value in event["learner"].items()}
        case "evaluation":
            found = {f"evaluation/{event['mode']}/{name}": event[name] for name in _MEASURED}
        case "baseline":
            found = {f"baseline/{event['policy']}/{name}": event[name] for name in _MEASURED}
        case _:
            return {}
    return {name: float(value) for name, value in found.items() if _is_figure(value)}


def _update(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in event.items():
        match name:
            case "at" | "event" | "update" | "members" | "so_far" | "learner" | "run":
                pass
            case "seconds":
                yield "time/reinforcement", value
            case "success_rate_all":
                yield "rollout/success_rate", value
            case "sample_age":
                yield "rollout/sample_age", value
            case "attempts":
                yield from ((f"rollout/attempts_{outcome}", count) for outcome, count in value.items())
            case "staleness":
                yield from ((f"rollout/staleness_{part}", versions) for part, versions in value.items())
            case "templates":
                yield from ((f"template/{t}/{part}", v) for t, parts in value.items() for part, v in parts.items())
            case "tasks" | "replay":
                yield from ((f"{name}/{part}", count) for part, count in value.items())
            case "alarms":
                yield "alarms/active", len(value)
                yield from ((f"alarms/{alarm}", 1) for alarm in value)
            case "driver_stall_seconds":
                yield from ((f"time/driver_stall_{part}", seconds) for part, seconds in value.items())
            case "rollout_workers":
                yield from ((f"workers/{part}", count) for part, count in (value or {}).items())
            case "rewards":
                yield from ((f"rewards/{part}", number) for part, number in value.items())
            case "phones":
                yield from ((f"phones/{state}", count) for state, count in value.items())
            case _:
                yield f"batch/{name}", value
    for name, value in event["learner"].items():
        if name == "seconds":
            yield "time/update", value
        elif name.startswith("seconds_"):
            yield f"time/{name.removeprefix('seconds_')}", value
        else:
            yield f"{'engine' if name in _ENGINE or name.startswith('failed_gap_') else 'learner'}/{name}", value


def _is_figure(value: Any) -> bool:
    value = value.item() if hasattr(value, "item") else value
    return isinstance(value, int | float) and math.isfinite(value)


# --- the configuration ------------------------------------------------------------------------------------------------

#: members of the spec that are logged: what is learned and how. Pod templates, addresses of phones and loggers are not
_LOGGED: Final = (
    "model",
    "algorithm",
    "learner",
    "engine",
    "rollout",
    "sync",
    "placement",
    "warmStart",
    "tasks",
    "evaluation",
    "stop",
    "seed",
)


def settings_of(run: TrainingRun) -> dict[str, Any]:
    """The run's settings for a tracker, without anything that could be a credential."""
    spec = run.spec.model_dump(mode="json", by_alias=True)
    return {name: _clean(spec[name]) for name in _LOGGED if spec.get(name) is not None}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _clean(member) for name, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_clean(member) for member in value]
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return value
