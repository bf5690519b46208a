"""Environment steps until a student is as good as its teacher: distillation beside plain grpo, whole runs, paired.

    python bench/distillation.py [--seeds 1-10] [--updates 24]

- Teacher and start are exports of `tapforge sft`, made once: the tiny model after a long imitation of a demonstrator
  that seldom errs, and after a short one of a demonstrator that often does.
- Each arm is `tapforge run` from that start on the simulated phone, with the same seed, tasks, learning rate and
  episodes per update. `grpo` learns from rewards alone, `forward_kl` and `k1` from the teacher alone (rewards ignored),
  by its likeliest tokens at each place or by its log-probability of the sampled one; `both` from rewards and k1.
- Every `EVERY` updates the most probable answers are measured on the same held-out tasks as the teacher's. A run has
  reached its teacher when a measurement is at or above the lower end of the teacher's 95 % interval (Wilson), and is
  stopped then. Environment steps are those of all episodes learned from until that measurement.
- A run that ends without it counts with the steps that it has used: a lower bound, so the difference is one, too.
- A run that is in the file already is not run again: start, stop and go on as you like.

Writes bench-results/distillation.json, {teacher, arms: {arm: {seeds, mean, ci95, vs_grpo}}, pairs: {arm: {seed: {steps,
reached, measured}}}}: means of environment steps, differences paired by seed, 95 % intervals by Student's t, p
two-sided by a sign-flip test, Holm's correction over the arms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from load.machine import machine, show, write
from load.paired import commit, table
from load.whole_runs import PATIENCE, TAPFORGE, options, tapforge

from tapforge_trainer.run.folder import read_events

FILE = Path("bench-results/distillation.json")
#: updates between two measurements
EVERY = 2

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: student}
spec:
  model:
    source: {tiny: {}}
    dtype: float32
    freezeVision: true
    contextTokens: 256
    adapter: {prompt: compact, historyImages: 1, historySteps: 8}
  environment:
    source: {processes: {count: 32, servers: 1}}
    screen: {width: 96, height: 160}
  tasks:
    suite: quickstart
    templates: [open, open_two, switch, switch_two, switch_then_open, two_panels, missing_switch]
  rollout: {groupSize: 8, groupsPerUpdate: 8, maxStaleness: 0, responseTokens: 24, minValid: 4}
  algorithm: {advantage: {grpo: {}}}
  learner: {learningRate: 3e-4, miniBatches: 4, tokensPerMicroBatch: 8192}
  engine: {maxConcurrentSequences: 32, kvCacheMiB: 64}
  evaluation: {episodes: 100, sampled: false, baselines: false, everyUpdates: 2}
"""
TEACHER = "{demonstrations: 1000, steps: 100, batchSize: 64, learningRate: 1e-3, warmupSteps: 20, errorRate: 0.1}"
START = "{demonstrations: 1000, steps: 100, batchSize: 64, learningRate: 1e-3, warmupSteps: 20, errorRate: 0.5}"
#: arm -> kind, and what becomes of rewards
ARMS = {
    "grpo": None,
    "forward_kl": ("forward_kl", "ignored"),
    "k1": ("k1", "ignored"),
    "both": ("k1", "kept"),
}


def settings(arm: str, seed: int, updates: int) -> list[str]:
    sets = [
        f"seed={seed}",
        "model.source={path: {folder: runs/start/sft}}",
        f"stop.maxUpdates={updates}",
        f"evaluation.everyUpdates={EVERY}",
    ]
    if (taught := ARMS[arm]) is not None:
        teacher = "{path: {folder: runs/teacher/sft}}"
        kind, rewards = taught
        sets.append(f"algorithm.distillation={{teacher: {teacher}, kind: {kind}, rewards: {rewards}}}")
    return sets


def exported(place: Path, name: str, warm_start: str) -> Path:
    """The imitated model, made once."""
    folder = place / "runs" / name / "sft"
    if not (folder / "config.json").exists():
        shutil.rmtree(place / "runs" / name, ignore_errors=True)
        tapforge("sft", place / "runs", (f"metadata.name={name}", f"warmStart={warm_start}"), file=place / "run.yaml")
    return folder


@contextmanager
def started(place: Path, sets: Iterable[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a group of its own, with a log; what is left of it is ended."""
    with (place / "log").open("ab") as log:
        process = subprocess.Popen(
            [*TAPFORGE, "run", "-f", "run.yaml", *options(sets)],
            cwd=place,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def trained(place: Path, arm: str, seed: int, updates: int, floor: float) -> dict[str, Any]:
    """A run until it has reached `floor` or its last update. `measured`: [update, environment steps, success]."""
    name = f"{arm}-{seed}".replace("_", "-")
    folder = place / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    begun, found = time.monotonic(), []
    with started(place, (f"metadata.name={name}", *settings(arm, seed, updates))) as process:
        while process.poll() is None and time.monotonic() - begun < PATIENCE:
            time.sleep(0.5)
            found = measured(folder)
            if found and found[-1][2] >= floor:
                os.killpg(process.pid, signal.SIGINT)  # it saves a checkpoint and ends its processes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                break
        else:
            found = measured(folder)
            if process.returncode:
                raise SystemExit(f"{name} ended with {process.returncode}: see {place / 'log'}")
    reached = bool(found) and found[-1][2] >= floor
    if not reached and (not found or found[-1][0] < updates):
        at = found[-1][0] if found else 0
        raise SystemExit(f"{name} was at update {at} of {updates} after {time.monotonic() - begun:.0f} s")
    shutil.rmtree(folder, ignore_errors=True)
    figures = {"steps": found[-1][1], "reached": reached, "measured": found}
    return figures | {"seconds": round(time.monotonic() - begun, 1)}


def measured(folder: Path) -> list[tuple[int, int, float]]:
    """Of a run so far: update, environment steps until then, success of its most probable answers."""
    if not (folder / "events.jsonl").exists():
        return []
    steps, found = {0: 0}, {}
    for event in read_events(folder):
        if event["event"] == "update":
            number = event["update"]
            steps[number] = steps[number - 1] + round(event["episodes"] * (event["steps_mean"] or 0))
        elif event["event"] == "evaluation" and event["mode"] == "greedy":
            found[event["update"]] = event["success"]
    return [(update, steps[update], success) for update, success in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument("--updates", type=int, default=24, help="after which a run has failed")
    parser.add_argument("--arms", default="grpo,forward_kl", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(ARMS)}")
    place = args.file.resolve().with_suffix("")
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.yaml").write_text(SPEC)
    study: dict[str, Any] = json.loads(args.file.read_text()) if args.file.exists() else {}
    if not study:
        study = {"machine": machine(), "commit": commit(), "updates": args.updates, "pairs": {}, "arms": {}}
    if study["updates"] != args.updates:
        parser.error(f"{args.file} has runs of {study['updates']} updates: name another --file")
    exported(place, "start", START)
    teacher = exported(place, "teacher", TEACHER)
    if "teacher" not in study:
        sets, model = ("metadata.name=measured",), ("--model", str(teacher))
        said = tapforge("eval", place / "runs", sets, *model, file=place / "run.yaml")
        study["teacher"] = json.loads(said)["greedy"]
        write(args.file, study)
    floor = study["teacher"]["interval"][0]
    first, _, last = args.seeds.partition("-")
    # All arms of a seed side by side, so that a study that ends early has pairs.
    for seed in range(int(first), int(last or first) + 1):
        for arm in arms:
            if str(seed) in study["pairs"].get(arm, {}):
                continue
            found = trained(place, arm, seed, args.updates, floor)
            study["pairs"].setdefault(arm, {})[str(seed)] = found
            study["arms"] = table(study["pairs"], "steps")
            write(args.file, study)
            print(f"{arm} {seed}: {found}", flush=True)
    rows = []
    for arm, one in study["arms"].items():
        against, runs = one.get("vs_grpo", {}), study["pairs"][arm].values()
        reached = f"{sum(run['reached'] for run in runs)} of {len(runs)}"
        shown = (against.get(part, "–") for part in ("mean", "ci95", "p"))
        rows.append((arm, reached, one["mean"], one["ci95"] or "–", *shown))
    title = f"Environment steps until the teacher's interval, from {floor:.1%} on"
    show(title, ("arm", "reached", "steps", "±", "less grpo", "±", "p"), rows)


if __name__ == "__main__":
    main()
