"""What estimators of advantages are worth, in process: a small policy on phone tasks of up to 25 steps, paired seeds.

    python bench/study.py [--arms all] [--seeds 1-30] [--sweep] [--signal reward] [--jobs 2]

- The policy is a softmax over what can be tapped, Home, "done" and "can't be done", linear in hashed features of goal,
  screen and what was done so far (no pixels, no vLLM). It begins as an imitation of a demonstrator that errs.
- An episode is a chain of `CHAIN` tasks of the quickstart suite, one after another, and a success if all were solved:
  some 20 steps, at most 30. Detours end well, leaving a panel drops its draft, and a task that was given up is a dead
  end. States have exact keys.
- Every arm gets the same tasks, the same start, about as many environment steps (an update ends when they are used up)
  and its own learning rate: `--sweep` tries those of `RATES` on seeds that are in no table. Advantages have root mean
  square 1 in each batch, so that no arm wins by a larger step; with `--size own` they are as the rule says, another
  study. The budget ends before everything is learned.
- `--signal outcome` (the default of runs) gives 0 to what is compared with nothing that ended otherwise; `reward` is
  what the papers do. Each is a study of its own; the arms of `ENDS_ALONE`, which are the same under both, are taken
  over from the first.
- `discounted_grpo` has no states, `gigpo_shuffled` has states that are dealt anew among a group's steps, `gigpo_step`
  has GiGPO's step part alone: what is discounting, and what are states. `rejection_sft` imitates successes.
- `--staleness N` is another study: grpo's advantages, samples of weights that are N updates old and rounded to bf16;
  its arms are anchors and corrections of the loss (`load/offpolicy.py`). Differences are to `behavior`.
- A pair of arm and seed that is in the file already is not run again: start, stop and go on as you like.

Writes bench-results/algorithms.json, {study: {arms: {arm: {seeds, mean, ci95, vs_grpo: {mean, ci95, p, p_holm}}}}}:
success on held-out chains after training, differences paired by seed, 95 % intervals by Student's t, p two-sided by a
sign-flip test, Holm's correction over all arms.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from load import offpolicy
from load.arms import ARMS, CORE, Signal, arrays
from load.credit import Policy, flat, imitation, measured, played
from load.machine import machine, show, write
from load.paired import commit, table
from load.picture import picture

FILE = Path("bench-results/algorithms.json")
#: updates, and environment steps of one, for every arm
UPDATES, STEPS = 6, 400
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
#: arms that compare ends of episodes alone: under both signals each run of them is the same to the last decimal
ENDS_ALONE = frozenset({"grpo", "dr_grpo", "rloo", "gpg", "maxrl", "reinforce_plus_plus", "rejection_sft"})
#: seeds that choose learning rates
SWEEP_SEEDS = range(1001, 1007)


def run(arm: str, seed: int, rate: float, updates: int, signal: Signal, size: str = "equal") -> dict[str, Any]:
    """Trains and measures. The start, the tasks and what is measured depend on the seed alone."""
    begun = time.monotonic()
    policy, rng = Policy(imitation(seed)), np.random.default_rng((seed, 1))
    before, place, curve = measured(policy, seed), 0, []
    for _ in range(updates):
        groups = played(policy, seed, place, STEPS, rng)
        place += len(groups)
        advantages = ARMS[arm](arrays(groups, signal), rng)
        curve.append(float(np.mean([one.won for group in groups for one in group])))
        if (scale := math.sqrt(float(np.mean(advantages**2)))) > 0:
            policy.learn(flat(groups), advantages / scale if size == "equal" else advantages, rate)
    return {
        "before": before,
        "after": measured(policy, seed),
        "during": round(float(np.mean(curve)), 4),
        "rate": rate,
        "updates": updates,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", help=f"all, or some of {', '.join(ARMS)}; with --staleness {', '.join(offpolicy.ARMS)}"
    )
    parser.add_argument("--seeds", default="1-5", help="first-last")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--signal", choices=["outcome", "reward"], default="outcome")
    parser.add_argument("--size", choices=["equal", "own"], default="equal", help="of advantages, from batch to batch")
    parser.add_argument("--staleness", type=int, help="updates: studies anchors and corrections of the loss instead")
    parser.add_argument("--rate", type=float, help="of every arm; default: the best of its sweep, or 0.2")
    parser.add_argument("--sweep", action="store_true", help="choose learning rates, on seeds of their own")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument(
        "--publish", type=Path, metavar="FOLDER", help="only write the tables and pictures of what is done"
    )
    args = parser.parse_args()
    if args.publish is not None:
        publish(args.file, args.publish)
        return
    off = args.staleness is not None
    known = list(offpolicy.ARMS) if off else list(ARMS)
    arms = known if args.arms == "all" else args.arms.split(",") if args.arms else known if off else list(CORE)
    if unknown := [arm for arm in arms if arm not in known]:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(known)}")
    updates = args.updates or (offpolicy.UPDATES if off else UPDATES)
    train = partial(run, updates=updates, signal=args.signal, size=args.size)
    if off:
        train = partial(offpolicy.run, updates=updates, staleness=args.staleness)
    baseline = "behavior" if off else "grpo"
    everything = json.loads(args.file.read_text()) if args.file.exists() else {}
    name = f"off-policy, staleness {args.staleness}" if off else f"credit, signal {args.signal}"
    if args.size == "own":
        name += ", own size"
    empty = {"machine": machine(), "commit": commit(), "updates": updates, "pairs": {}, "sweep": {}, "arms": {}}
    study = everything.setdefault(name, empty)
    if study["updates"] != updates:
        parser.error(f"{args.file} has this study with {study['updates']} updates: name another --file")

    if args.signal == "reward" and args.size == "equal" and (other := everything.get("credit, signal outcome")):
        for arm in ENDS_ALONE & set(arms):
            for part in ("sweep", "pairs"):
                if arm in other[part]:
                    study[part][arm] = other[part][arm]

    def keep() -> None:
        study["arms"] = table(study["pairs"], baseline=baseline)
        write(args.file, everything)

    with ProcessPoolExecutor(args.jobs) as pool:

        def done(asked: Sequence[tuple[str, int, float]]) -> Iterator[tuple[str, int, float, dict[str, Any]]]:
            calls = {pool.submit(train, *each): each for each in asked}
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
    columns = ("arm", "seeds", "rate", "mean", "±", f"less {baseline}", "±", "p (Holm)")
    rows = []
    for arm, one in sorted(study["arms"].items(), key=lambda item: -item[1]["mean"]):
        against = one.get(f"vs_{baseline}", {})
        points = [_points(of.get(part)) for of in (one, against) for part in ("mean", "ci95")]
        rows.append((arm, one["seeds"], one["rate"], *points, against.get("p_holm", "–")))
    show(f"{name}: success on held-out chains, points", columns, rows)


def publish(file: Path, folder: Path) -> None:
    """The tables of all studies in one file, {study: {arms: ..., after: {arm: {seed: success}}}}, and a picture of
    each; those of forks beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, study in json.loads(file.read_text()).items():
        after = {arm: {seed: one["after"] for seed, one in of.items()} for arm, of in study["pairs"].items()}
        rates = {arm: chosen(of) for arm, of in study["sweep"].items()}
        facts = {key: study[key] for key in ("machine", "commit", "updates", "arms")}
        found[name] = facts | {"rates": rates, "after": after}
        baseline = "behavior" if name.startswith("off-policy") else "grpo"
        made = picture(f"{name}: success less {baseline}'s, paired by seed", study["arms"], baseline)
        (folder / f"{_slug(name)}.svg").write_text(made)
    (folder / file.name).write_text(json.dumps(found, indent=1) + "\n")
    if (forks := file.with_name("forks.json")).exists():
        tables = {name: of for name, of in json.loads(forks.read_text()).items() if name != "pairs"}
        (folder / forks.name).write_text(json.dumps(tables, indent=1) + "\n")
        for name, arms in tables.items():
            if name.startswith("after 2 updates") and name.endswith((": one_update", ": early")):
                made = picture(f"{name}, less grpo's", arms, "grpo", unit="hundredths")
                (folder / f"forks-{_slug(name)}.svg").write_text(made)


def _slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def chosen(sweep: dict[str, dict[str, float]]) -> float:
    """The learning rate with the best mean."""
    return max(map(float, sweep), key=lambda rate: np.mean(list(sweep[str(rate)].values())), default=0.2)


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


if __name__ == "__main__":
    main()
