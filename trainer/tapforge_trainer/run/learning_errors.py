"""What is wrong with the algorithm and the rewards of a file, before anything is started: names, options, and what they
need of the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tapforge_api import TrainingRun
from tapforge_api.rewards import Rewards

from ..algorithms.composition import objective_of
from ..algorithms.registry import built_in
from ..batch import BatchRules, build_batch
from ..judges.journal import Verdicts
from ..rewards.rewarder import Rewarder
from ..rewards.streams import stream_rules


def rewarder_of(
    run: TrainingRun,
    processes: int = 1,
    journal: Verdicts | None = None,
    say: Callable[[str], None] | None = None,
) -> Rewarder | None:
    """What asks for the rewards of episodes; None: all are computed from records. `processes`: how many share what an
    endpoint may be asked at once; `journal`: of their verdicts; `say`: which one is waited for."""
    rewards = run.spec.rewards
    return Rewarder(rewards, processes=processes, journal=journal, say=say) if rewards.asked else None


def reward_errors(run: TrainingRun, others: Iterable[Rewards] = ()) -> list[str]:
    """What is wrong with the rewards of a file, before anything is asked for. `others`: of the run's stages."""
    rewards, recording = run.spec.rewards, run.spec.recording
    wrong = []
    try:
        stream_rules(rewards)
        rewarder_of(run)
    except Exception as error:  # noqa: BLE001 - another package's code, which may break in any way
        wrong.append(f"spec.rewards: {str(error) or type(error).__name__}")
    if rewards.asked and (recording.frames != "all" or recording.encoding != "png"):
        wrong.append(
            f"spec.rewards: {', '.join(s.name for s in rewards.asked)} look at recorded screens, also after a restart: "
            "set recording.frames to all and recording.encoding to png"
        )
    streams = [stream for one in (rewards, *others) for stream in one.streams]
    judges = [stream.judge for stream in streams if stream.judge is not None]
    prices = [model.price for judge in judges for model in (*judge.models, *judge.cascade)]
    if run.spec.stop.judge_money is not None and not any(price.prompt or price.answer for price in prices):
        wrong.append("spec.stop.judgeMoney: no model of a judge has a price; set one, or limit judgeTokens")
    return wrong


def algorithm_errors(run: TrainingRun) -> list[str]:
    algorithm, longest = run.spec.algorithm, run.spec.rollout.response_tokens
    composed: dict[str, Callable[[], object]] = {
        "advantage.plugin": partial(_estimated, run),
        "loss.plugin" if algorithm.loss.plugin else "loss": partial(objective_of, algorithm, longest),
    }
    wrong = []
    for field, compose in composed.items():
        try:
            compose()
        except Exception as error:  # noqa: BLE001 - another package's code, which may break in any way
            wrong.append(f"spec.algorithm.{field}: {str(error) or type(error).__name__}")
    if not wrong and run.spec.rollout.replay is not None:
        rules = BatchRules.of(algorithm, run.spec.rewards, min_valid=run.spec.rollout.min_valid)
        if rules.reads:
            wrong.append(
                "spec.rollout.replay: successes that come again have no frames of their group, which "
                f"{'algorithm.kl.place: reward' if rules.kl_reward else rules.estimator} reads before advantages are "
                "made; leave one of them out"
            )
    return wrong


def _estimated(run: TrainingRun) -> None:
    """Raises ValueError for an estimator or options that can't be."""
    rules = BatchRules.of(run.spec.algorithm, run.spec.rewards, min_valid=run.spec.rollout.min_valid)
    if rules.estimator in built_in():  # ours take a batch without steps, and refuse options that make no sense
        build_batch((), rules)
