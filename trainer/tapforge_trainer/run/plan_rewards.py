"""`tapforge plan` on rewards: what an episode is worth, how many verdicts that takes, and where screens are sent."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from tapforge_api.algorithm import Teacher
from tapforge_api.model import ModelSource
from tapforge_api.models import models_asked
from tapforge_api.rewards import RewardStream
from tapforge_api.training_run import TrainingRunSpec


def rewards_line(spec: TrainingRunSpec) -> str:
    rewards = spec.rewards
    if not rewards.streams:
        return "outcome + environment; the environment says what succeeded"
    text = " + ".join(map(_stream, rewards.streams))
    if rewards.success is None:
        return f"{text}; the environment says what succeeded"
    ignored = ", and no environment is asked" if rewards.verifier == "ignored" else ", the environment is asked beside"
    return f"{text}; {rewards.success} says what succeeded, from {rewards.threshold:g} on{ignored}"


def verdicts_per_update(spec: TrainingRunSpec) -> str:
    """Verdicts that the judges of an update's episodes give; empty: there is no judge."""
    episodes = spec.rollout.groups_per_update * spec.rollout.group_size
    parts = []
    for stream in spec.rewards.streams:
        if stream.judge is not None:
            each = " for each of their steps" if stream.kind == "steps" else ""
            votes = sum(model.samples for model in stream.judge.models)
            at_once = sum(model.concurrency for model in stream.judge.models)
            parts.append(f"{stream.name}: {episodes:,}{each}, {votes} votes each, {at_once} questions at once")
    if parts and spec.evaluation.judged:
        parts.append(f"for a measurement {judged_episodes(spec):,} instead")
    return "; ".join(parts)


def models_line(spec: TrainingRunSpec) -> str:
    """Models that are served beside the policy; empty: there are none."""
    asked = models_asked(spec.models, spec.rewards, spec.stages)
    return "; ".join(
        f"{model.name}: {shown_source(model.source)}, {model.replicas:,} x {model.tensor_parallel:,} GPUs of their own"
        f", {model.context_tokens:,} tokens of context{'' if model in asked else ', as a teacher alone'}"
        for model in spec.models
    )


def shown_source(source: ModelSource | Teacher) -> str:
    if source.path is not None:
        return f"the model in {source.path.folder}"
    if source.hugging_face is not None:
        return f"{source.hugging_face.repo} at {source.hugging_face.revision}, from Hugging Face"
    if source.object_storage is not None:
        return f"the model in {source.object_storage.uri}"
    tiny = None if isinstance(source, Teacher) else source.tiny
    judge = tiny is not None and tiny.weights == "judge"
    return "the built-in tiny judge" if judge else "the built-in tiny Qwen3-VL"


def judged_episodes(spec: TrainingRunSpec) -> int:
    """Of a measurement, where judges say how its episodes end."""
    evaluation = spec.evaluation
    return evaluation.episodes * (evaluation.repeats * evaluation.sampled + evaluation.greedy)


def judge_budget(spec: TrainingRunSpec) -> str:
    """What judges may use, and how much that is for each vote of the run; empty: there is no limit. Votes of steps are
    known where rollout.maxSteps says how many steps there may be."""
    stop = spec.stop
    judges = judging(spec)
    limits = []
    if stop.judge_tokens is not None:
        limits.append((f"{stop.judge_tokens:,} tokens", float(stop.judge_tokens), "{:,.0f}"))
    if stop.judge_money is not None:
        limits.append((f"{stop.judge_money:,g} of money", stop.judge_money, "{:,.4g}"))
    if not limits or not judges:
        return ""
    votes = 0
    for stream in judges:
        steps = 1 if stream.kind != "steps" else spec.rollout.max_steps or 0
        votes += steps * sum(model.samples for model in stream.judge.models) if stream.judge is not None else 0
    votes *= stop.max_updates * spec.rollout.groups_per_update * spec.rollout.group_size
    bounded = all(stream.kind != "steps" for stream in judges) or spec.rollout.max_steps is not None
    known = bounded and not spec.stages
    each = f", for each of {votes:,} votes " if known else ""
    texts = [text + (each + form.format(limit / votes) if known else "") for text, limit, form in limits]
    return f"{'; '.join(texts)}; then the run suspends itself after a checkpoint, until it is raised"


def judging(spec: TrainingRunSpec) -> list[RewardStream]:
    """Streams that ask judges, of all stages."""
    everywhere = (spec.rewards, *(stage.rewards for stage in spec.stages if stage.rewards is not None))
    return [stream for rewards in everywhere for stream in rewards.streams if stream.judge is not None]


def notes_on_rewards(spec: TrainingRunSpec, *, judged: bool = False) -> list[str]:
    """`judged`: another stage of the run asks judges."""
    rewards, notes = spec.rewards, []
    where = {
        urlsplit(model.url or "").netloc.rpartition("@")[2]
        for stream in rewards.streams
        if stream.judge is not None
        for model in (*stream.judge.models, *stream.judge.cascade)
        if model.url is not None and not _near(urlsplit(model.url).hostname or "")
    }
    notes += [f"screens of the phones are sent to {place}" for place in sorted(where)]
    limited = spec.stop.judge_tokens is not None or spec.stop.judge_money is not None
    if limited and not judged and not judging(spec):
        notes.append("stop.judgeTokens and judgeMoney limit judges, and rewards has none")
    if rewards.streams and all(stream.weight == 0 or stream.scale == 0 for stream in rewards.streams):
        notes.append("every stream of rewards has the weight or scale 0: nothing is learned from")
    if spec.algorithm.signal == "outcome" and rewards.streams and rewards.success is None:
        refining = [s.name for s in rewards.streams if s.kind in ("judge", "steps", "format", "length")]
        if refining:
            notes.append(
                f"algorithm.signal is outcome: {', '.join(refining)} refine what outcomes tell, and teach nothing in "
                "groups that ended alike"
            )
    return notes


def _stream(stream: RewardStream) -> str:
    factor = stream.weight * stream.scale
    name = stream.name if stream.name == stream.kind else f"{stream.name} ({stream.kind})"
    gate = "" if stream.gate == "always" else f" [{stream.gate}]"
    return f"{name}{gate}" if factor == 1 else f"{factor:g} x {name}{gate}"


def _near(host: str) -> bool:
    """On this machine or in the cluster."""
    if host == "localhost" or host.endswith((".svc", ".cluster.local", ".internal")) or "." not in host.strip("[]"):
        return ":" not in host or ipaddress.ip_address(host.strip("[]")).is_loopback
    try:
        return ipaddress.ip_address(host.strip("[]")).is_private
    except ValueError:
        return False
