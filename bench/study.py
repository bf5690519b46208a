"""What estimators of advantages are worth, in process: a small policy on phone tasks of up to 25 steps, paired seeds.

    python bench/study.py [--arms all] [--seeds 1-30] [--sweep] [--signal reward] [--jobs 2]

- The policy is a softmax over what can be tapped, Home, "done" and "can't be done", linear in hashed features of goal,
  screen and what was done so far (no pixels, no vLLM). It begins as an imitation of a demonstrator that errs.
- An episode is a chain of `CHAIN` tasks of the quickstart suite, one after another, and a success if all were solved:
  some 20 steps, at most 30. Detours end well, leaving a panel drops its draft, and a task that was given up is a dead
  end. States have exact keys.
- Every arm gets the same tasks, the same start, about as many environment steps (an update ends when they are used up)
  and its own learning rate: `--sweep` tries those of `RATES` on seeds that are in no table. Advantages have root mean
  square 1 in each batch, so that no arm wins by a larger step. The budget ends before everything is learned.
- `--signal outcome` (the default of runs) gives 0 to what is compared with nothing that ended otherwise; `reward` is
  what the papers do. Each is a study of its own.
- `discounted_grpo` has no states, `gigpo_shuffled` has states that are dealt anew among a group's steps, `gigpo_step`
  has GiGPO's step part alone: what is discounting, and what are states.
- A pair of arm and seed that is in the file already is not run again: start, stop and go on as you like.

Writes bench-results/algorithms.json, {study: {arms: {arm: {seeds, mean, ci95, vs_grpo: {mean, ci95, p, p_holm}}}}}:
success on held-out chains after training, differences paired by seed, 95 % intervals by Student's t, p two-sided by a
sign-flip test, Holm's correction over all arms.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from load.credit import SIZE, Floats, Played, Policy, chain, imitation, play
from load.machine import machine, show, write

from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import Steps

FILE = Path("bench-results/algorithms.json")
#: updates, and environment steps of one, for every arm
UPDATES, STEPS = 6, 400
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
#: seeds that choose learning rates
SWEEP_SEEDS = range(1001, 1007)
#: held-out tasks of a measurement
MEASURED = 300

Signal: TypeAlias = Literal["outcome", "reward"]


# --- arms -------------------------------------------------------------------------------------------------------------


def arrays(groups: Sequence[Sequence[Played]], signal: Signal = "outcome") -> Steps:
    numbers: dict[tuple[int, str], int] = {}
    group_of, trajectory, states, rewards, won, finals = (list[Any]() for _ in range(6))
    episodes = [(number, played) for number, group in enumerate(groups) for played in group]
    for place, (number, played) in enumerate(episodes):
        length = len(played.steps)
        final = numbers.setdefault((number, played.final), len(numbers))
        states += [numbers.setdefault((number, step.state), len(numbers)) for step in played.steps]
        rewards += [0.0] * (length - 1) + [float(played.won)]
        for column, value in ((group_of, number), (trajectory, place), (won, played.won), (finals, final)):
            column += [value] * length
    success = np.array(won)
    return Steps(
        group=np.array(group_of), trajectory=np.array(trajectory), state=np.array(states), reward=np.array(rewards),
        valid=np.ones(len(won), dtype=bool), success=success if signal == "outcome" else None,
        tokens=np.ones(len(won), dtype=np.int64),
        final_state=np.array(finals), goal=success,
    )  # fmt: skip


def _total(name: str, steps: Steps, rng: np.random.Generator, **options: Any) -> Floats:
    return estimate(name, steps, **options).total


def _shuffled(steps: Steps, rng: np.random.Generator) -> Floats:
    state = steps.state.copy()
    for number in np.unique(steps.group):
        inside = np.flatnonzero(steps.group == number)
        state[inside] = rng.permutation(state[inside])
    other = Steps(
        group=steps.group, trajectory=steps.trajectory, state=state, reward=steps.reward, valid=steps.valid,
        success=steps.success, tokens=steps.tokens, final_state=steps.final_state, goal=steps.goal,
    )  # fmt: skip
    return estimate("gigpo", other).total


def _step_alone(steps: Steps, rng: np.random.Generator) -> Floats:
    return estimate("gigpo", steps).step


Arm = Callable[[Steps, np.random.Generator], Floats]
ARMS: dict[str, Arm] = {
    **{
        name: partial(_total, name)
        for name in ("grpo", "discounted_grpo", "gigpo", "hgpo", "graphgpo", "dr_grpo", "rloo", "maxrl", "gpg")
    },
    "reinforce_plus_plus": partial(_total, "reinforce_plus_plus"),
    "gigpo_shuffled": _shuffled,
    "gigpo_step": _step_alone,
}
CORE = ("grpo", "discounted_grpo", "gigpo", "gigpo_shuffled", "hgpo")


def run(arm: str, seed: int, rate: float, updates: int, signal: Signal) -> dict[str, Any]:
    """Trains and measures. The start, the tasks and what is measured depend on the seed alone."""
    begun = time.monotonic()
    policy, rng = Policy(imitation(seed)), np.random.default_rng((seed, 1))
    before, place, curve = measured(policy, seed), 0, []
    for _ in range(updates):
        groups: list[list[Played]] = []
        used = 0
        while used < STEPS or len(groups) < 2:
            tasks = chain("train", seed, place)
            place += 1
            groups.append([play(policy, tasks, rng) for _ in range(SIZE)])
            used += sum(len(played.steps) for played in groups[-1])
        advantages = ARMS[arm](arrays(groups, signal), rng)
        scale = math.sqrt(float(np.mean(advantages**2)))
        curve.append(float(np.mean([played.won for group in groups for played in group])))
        if scale > 0:
            steps = [step for group in groups for played in group for step in played.steps]
            policy.learn(steps, advantages / scale, rate)
    return {
        "before": before,
        "after": measured(policy, seed),
        "during": round(float(np.mean(curve)), 4),
        "rate": rate,
        "updates": updates,
        "seconds": round(time.monotonic() - begun, 1),
    }


def measured(policy: Policy, seed: int) -> float:
    """Success on held-out tasks."""
    rng = np.random.default_rng((seed, 2))
    return float(np.mean([play(policy, chain("test", 5, number), rng).won for number in range(MEASURED)]))


# --- the table --------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return None
    return round(_t975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values)), 4)


def _t975(freedom: int) -> float:
    """Cornish-Fisher's expansion of Student's quantile; within 0.01 from 4 degrees of freedom on."""
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def sign_flips(differences: Sequence[float], draws: int = 20_000) -> float:
    """Two-sided p of a mean of 0, where each difference might as well have the other sign."""
    values = np.array(differences)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (draws, len(values)))
    return float((1 + np.sum(np.abs(signs @ values) >= abs(values.sum()) - 1e-12)) / (1 + draws))


def holm(values: dict[str, float]) -> dict[str, float]:
    found, worst = {}, 0.0
    for place, name in enumerate(sorted(values, key=values.__getitem__)):
        worst = max(worst, min(1.0, values[name] * (len(values) - place)))
        found[name] = round(worst, 4)
    return found


def table(pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of the pairs that were run: arm -> seed -> result."""
    found: dict[str, Any] = {}
    for arm, seeds in pairs.items():
        after = [one["after"] for one in seeds.values()]
        rate = next(iter(seeds.values())).get("rate")
        found[arm] = {
            "seeds": len(after),
            "rate": rate,
            "mean": round(float(np.mean(after)), 4),
            "ci95": interval(after),
        }
        common = sorted(seeds.keys() & pairs.get("grpo", {}).keys()) if arm != "grpo" else []
        if len(common) >= 2:
            differences = [seeds[seed]["after"] - pairs["grpo"][seed]["after"] for seed in common]
            found[arm]["vs_grpo"] = {
                "seeds": len(common),
                "mean": round(float(np.mean(differences)), 4),
                "ci95": interval(differences),
                "p": round(sign_flips(differences), 4),
            }
    for arm, value in holm({arm: one["vs_grpo"]["p"] for arm, one in found.items() if "vs_grpo" in one}).items():
        found[arm]["vs_grpo"]["p_holm"] = value
    return found


def commit() -> str:
    return subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(CORE), help=f"all, or some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="1-5", help="first-last")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--signal", choices=["outcome", "reward"], default="outcome")
    parser.add_argument("--rate", type=float, help="of every arm; default: the best of its sweep, or 0.2")
    parser.add_argument("--sweep", action="store_true", help="choose learning rates, on seeds of their own")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    arms = list(ARMS) if args.arms == "all" else args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(ARMS)}")
    everything = json.loads(args.file.read_text()) if args.file.exists() else {}
    name = f"credit, signal {args.signal}"
    empty = {"machine": machine(), "commit": commit(), "updates": args.updates, "pairs": {}, "sweep": {}, "arms": {}}
    study = everything.setdefault(name, empty)
    if study["updates"] != args.updates:
        parser.error(f"{args.file} has this study with {study['updates']} updates: name another --file")

    def keep() -> None:
        study["arms"] = table(study["pairs"])
        write(args.file, everything)

    with ProcessPoolExecutor(args.jobs) as pool:

        def done(asked: Sequence[tuple[str, int, float]]) -> Iterator[tuple[str, int, float, dict[str, Any]]]:
            calls = {
                pool.submit(run, arm, seed, rate, args.updates, args.signal): (arm, seed, rate)
                for arm, seed, rate in asked
            }
            for call in as_completed(calls):
                yield *calls[call], call.result()

        if args.sweep:
            tried = study["sweep"]
            asked = [(a, s, r) for s in SWEEP_SEEDS for a in arms for r in RATES]
            asked = [(a, s, r) for a, s, r in asked if str(s) not in tried.get(a, {}).get(str(r), {})]
            for arm, seed, rate, found in done(asked):
                tried.setdefault(arm, {}).setdefault(str(rate), {})[str(seed)] = found["after"]
                keep()
        first, _, last = args.seeds.partition("-")
        rates = {arm: args.rate or chosen(study["sweep"].get(arm, {})) for arm in arms}
        # All arms of a seed side by side, so that a study that ends early has pairs.
        pairs = [(arm, seed, rates[arm]) for seed in range(int(first), int(last or first) + 1) for arm in arms]
        left = [(arm, seed, rate) for arm, seed, rate in pairs if str(seed) not in study["pairs"].get(arm, {})]
        for arm, seed, _, found in done(left):
            study["pairs"].setdefault(arm, {})[str(seed)] = found
            keep()
    keep()
    columns = ("arm", "seeds", "rate", "mean", "±", "less grpo", "±", "p (Holm)")
    rows = []
    for arm, one in sorted(study["arms"].items(), key=lambda item: -item[1]["mean"]):
        against = one.get("vs_grpo", {})
        points = [_points(of.get(part)) for of in (one, against) for part in ("mean", "ci95")]
        rows.append((arm, one["seeds"], one["rate"], *points, against.get("p_holm", "–")))
    show(f"{name}: success on held-out chains, points", columns, rows)


def chosen(sweep: dict[str, dict[str, float]]) -> float:
    """The learning rate with the best mean."""
    return max(map(float, sweep), key=lambda rate: np.mean(list(sweep[str(rate)].values())), default=0.2)


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


if __name__ == "__main__":
    main()
