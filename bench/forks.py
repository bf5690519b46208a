"""What estimators of advantages say beside the truth, which forks of the phone know.

    python bench/forks.py [--arms all] [--seeds 1-5] [--stages 1,2,4] [--jobs 2]

Nothing is learned here but the policies that are looked at. The policy is that of `bench/study.py`
after some updates (`--stages`). It plays the groups of some updates of about `STEPS` environment steps each. In a part
of them the phone is forked before each step, and each fork is played to its end `FORKS` times. A step's true advantage
is the success that its forks have after it less what they have before it: rewards come at the end, and the phone is
deterministic. Of each estimator:

- `one_update`: the cosine between one update's gradient and the true one. It has all in it: what is wrong on average,
  and noise.
- `direction`: the same of infinitely many updates. It has only what is wrong on average. Both are divided by what forks
  leave uncertain in the true gradient, which two halves of the updates tell.
- `early`, `middle`, `late`: correlation of a step's advantage with the true one, by thirds of the episode, divided by
  what forks leave uncertain.
- `wrong_sign`: of the steps whose true advantage is beyond `CLEAR`, the share that is pushed the other way.

Writes bench-results/forks.json, {study: {arm: {seeds, mean, ci95, vs_grpo: {...}}}} with a study per stage and figure.
A pair of arm and seed that is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from load.arms import ARMS, Signal, arrays
from load.credit import MAX_STEPS, Floats, Game, Played, Policy, flat, gradient, imitation, played, step
from load.machine import machine, show, write
from load.paired import commit, table

FILE = Path("bench-results/forks.json")
#: updates that are looked at, with forks and without, and how often each step is forked
FORKED, PLAIN, FORKS = 8, 32, 8
#: updates that made the policy (grpo at this learning rate), and environment steps of one
STAGES, RATE, STEPS = (1, 2, 4), 0.3, 400
CLEAR = 0.1
FIGURES = ("one_update", "direction", "early", "middle", "late", "wrong_sign")

Groups: TypeAlias = list[list[Played]]
Forks: TypeAlias = list[Game]


def policy_after(updates: int, seed: int) -> Policy:
    policy, rng = Policy(imitation(seed)), np.random.default_rng((seed, 3))
    for number in range(updates):
        groups = played(policy, seed, 5_000 + 100 * number, STEPS, rng)
        advantages = ARMS["grpo"](arrays(groups), rng)
        if (scale := float(np.sqrt(np.mean(advantages**2)))) > 0:
            policy.learn(flat(groups), advantages / scale, RATE)
    return policy


# --- the truth --------------------------------------------------------------------------------------------------------


def truth(policy: Policy, groups: Groups, forks: list[Forks], rng: np.random.Generator) -> Floats:
    """[2, steps]: two estimates of each step's advantage, of independent forks."""
    found = []
    for episode, games in zip((one for group in groups for one in group), forks, strict=True):
        values = np.array([[_success(policy, game, MAX_STEPS - k, rng) for k, game in enumerate(games)] for _ in "12"])
        found.append(np.diff(np.column_stack([values, np.full(2, float(episode.won))])))
    return np.concatenate(found, axis=1)


def _success(policy: Policy, game: Game, steps: int, rng: np.random.Generator) -> float:
    won = 0
    for _ in range(FORKS // 2):
        other, left = game.fork(), steps
        while not other.over and left:
            step(policy, other, rng)
            left -= 1
        won += other.won
    return won / (FORKS // 2)


# --- what estimators say ----------------------------------------------------------------------------------------------


def look(arms: list[str], stage: int, seed: int, signal: Signal) -> dict[str, dict[str, float]]:
    """Figures of each arm, on the same episodes."""
    policy, rng = policy_after(stage, seed), np.random.default_rng((seed, stage, 4))
    known: list[tuple[Groups, Floats]] = []
    for number in range(FORKED):
        groups = played(policy, seed, 10_000 + 100 * number, STEPS, rng, forks=(forks := []))
        known.append((groups, truth(policy, groups, forks, rng)))
    plain = [played(policy, seed, 20_000 + 100 * number, STEPS, rng) for number in range(PLAIN)]
    true = [
        _mean([gradient(flat(groups), advantage.mean(0)) for groups, advantage in known[half::2]]) for half in (0, 1)
    ]
    both = (true[0] + true[1]) / 2
    # What two independent halves agree on is the squared length of the truth.
    length = math.sqrt(max(true[0] @ true[1], 1e-18))
    advantages = np.concatenate([advantage for _, advantage in known], axis=1)
    clear = np.abs(advantages.mean(0)) > CLEAR
    episodes = [episode for groups, _ in known for group in groups for episode in group]
    where = np.concatenate([np.arange(len(one.steps)) / len(one.steps) for one in episodes])
    thirds = {"early": where < 1 / 3, "middle": (where >= 1 / 3) & (where < 2 / 3), "late": where >= 2 / 3}
    found = {}
    for arm in arms:
        given = [gradient(flat(groups), ARMS[arm](arrays(groups, signal), rng)) for groups in plain]
        halves = _mean(given[0::2]), _mean(given[1::2])
        own = math.sqrt(max(halves[0] @ halves[1], 1e-18))
        steps = np.concatenate([ARMS[arm](arrays(groups, signal), rng) for groups, _ in known])
        cosines = [float(one @ both) / length / norm for one in given if (norm := float(np.linalg.norm(one))) > 0]
        found[arm] = {
            "one_update": sum(cosines) / len(given),  # one that moves nothing counts as 0
            "direction": float(_mean(given) @ both) / own / length,
            **{name: _correlation(steps[part], advantages[:, part]) for name, part in thirds.items()},
            "wrong_sign": float(np.mean((steps * advantages.mean(0))[clear] < 0)),
            "success": float(np.mean([episode.won for episode in episodes])),
        }
    return found


def _mean(values: list[Floats]) -> Floats:
    return np.mean(values, axis=0)


def _correlation(given: Floats, halves: Floats) -> float:
    """With the truth, of which there are two noisy halves [2, steps]; 0 for advantages that are all equal."""
    if np.std(given) == 0:
        return 0.0
    reliable = float(np.corrcoef(halves)[0, 1])
    whole = max(2 * reliable / (1 + reliable), 0.05)  # Spearman-Brown: of the mean of both halves
    return float(np.corrcoef(given, halves.mean(0))[0, 1]) / float(np.sqrt(whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="all", help=f"all, or some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="1-5", help="first-last")
    parser.add_argument("--stages", default=",".join(map(str, STAGES)), help="updates behind the policy")
    parser.add_argument("--signal", choices=["outcome", "reward"], default="outcome")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    arms = list(ARMS) if args.arms == "all" else args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(ARMS)}")
    found = json.loads(args.file.read_text()) if args.file.exists() else {}
    found.setdefault("machine", machine())
    found.setdefault("commit", commit())
    pairs = found.setdefault("pairs", {})
    first, _, last = args.seeds.partition("-")
    with ProcessPoolExecutor(args.jobs) as pool:
        calls = {}
        for seed in range(int(first), int(last or first) + 1):
            for stage in map(int, args.stages.split(",")):
                of = pairs.setdefault(f"after {stage} updates, signal {args.signal}", {})
                if left := [arm for arm in arms if str(seed) not in of.get(arm, {})]:
                    calls[pool.submit(look, left, stage, seed, args.signal)] = (of, seed)
        for call in as_completed(calls):
            of, seed = calls[call]
            for arm, figures in call.result().items():
                of.setdefault(arm, {})[str(seed)] = figures
            for name, these in pairs.items():
                for figure in FIGURES:
                    if these:
                        found[f"{name}: {figure}"] = table(these, figure)
            write(args.file, found)
    for name, these in pairs.items():
        if not these:
            continue
        rows = [
            [arm, *(_shown(found[f"{name}: {figure}"][arm]) for figure in FIGURES)]
            for arm in sorted(these, key=lambda arm: -found[f"{name}: one_update"][arm]["mean"])
        ]
        success = np.mean([one["success"] for of in these.values() for one in of.values()])
        show(f"{name} ({100 * success:.0f} % success)", ("arm", *FIGURES), rows)


def _shown(of: dict[str, Any]) -> str:
    return f"{of['mean']:.2f} ± {of['ci95']:.2f}" if of["ci95"] is not None else f"{of['mean']:.2f}"


if __name__ == "__main__":
    main()
