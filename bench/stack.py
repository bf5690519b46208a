"""Studies of whole runs, with vLLM, FSDP2, Ray and phones: arms from one warm start, paired by seed.

    python bench/stack.py [--study rules|judges|hacked|generated|stages] [--arms ...] [--seeds 1-5]

- `rules`: learning rules, each with its defaults, on the quickstart suite's longest tasks: two panels, where a solution
  takes eight steps, and a switch with another app in front afterwards. The learning rate is the quickstart's for all.
- `judges`: success by the verifier, by a judge that errs in a tenth of its answers, and by three votes of that judge.
- `hacked`: a judge that takes every episode of 600 characters (six answers) for a success, beside the verifier: how far
  success by the judge goes away, and when the run's alarm says so.
- `generated`: tasks that were made by walks on the phone (`tapforge tasks walk`), and those of people's templates, both
  measured on held-out tasks of people's templates.
- `stages`: ZeroGUI's two stages: walked tasks, then the tasks that are measured, without their verifier, with three
  votes of a judge that errs in a tenth of its answers; beside as many updates of the first stage.
- Measured by the verifier: greedy success on 200 held-out tasks after a fixed number of updates of 64 episodes.
- A run that is in the file already is not run again: start, stop and go on as you like.

Writes bench-results/stack.json, {study: {arms: {arm: {seeds, mean, ci95, vs_BASELINE: {mean, ci95, p, p_holm}}}}}.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from load import whole_runs
from load.whole_runs import Spec, Study, events, figures, merged

FILE, PLACE = Path("bench-results/stack.json"), Path("bench-results/stack")
WALKED = (PLACE / "walked.jsonl").resolve()
UPDATES = 8
_COMMON: Spec = {
    "apiVersion": "tapforge.dev/v1alpha1",
    "kind": "TrainingRun",
    "spec": {
        "model": {
            "dtype": "float32",
            "freezeVision": True,
            "contextTokens": 256,
            "adapter": {"name": "qwen3-vl", "prompt": "compact", "historyImages": 1, "historySteps": 12},
        },
        "environment": {
            "source": {"processes": {"count": 48, "servers": 1}},
            "screen": {"width": 96, "height": 160},
            "deadlines": {"episodeSeconds": 120},
        },
        "rollout": {"groupSize": 8, "groupsPerUpdate": 8, "maxStaleness": 1, "responseTokens": 24, "minValid": 4},
        "algorithm": {"loss": {"clipLow": 0.2, "clipHigh": 0.28}},
        "learner": {"learningRate": 1.5e-4, "warmupUpdates": 4, "miniBatches": 2, "tokensPerMicroBatch": 8192},
        "engine": {"replicas": 1, "maxConcurrentSequences": 48, "kvCacheMiB": 128},
        "evaluation": {"tasks": {"split": "test"}, "episodes": 200, "sampled": False, "baselines": False},
    },
}


def _spec(**fields: Any) -> Spec:
    return {"spec": fields}


def _start(tasks: Spec, demonstrations: int, steps: int) -> Spec:
    """Imitates demonstrations half of which go wrong, and practises nothing that would count."""
    warm = {"batchSize": 64, "learningRate": 1e-3, "warmupSteps": 20, "errorRate": 0.5}
    return merged(
        _COMMON,
        _spec(
            seed=1,
            model={"source": {"tiny": {}}},
            tasks=tasks,
            warmStart={"demonstrations": demonstrations, "steps": steps, **warm},
            learner={"learningRate": 1e-9, "warmupUpdates": 0},
            stop={"maxUpdates": 1},
        ),
    )


def _base(tasks: Spec, updates: int = UPDATES, **fields: Any) -> Spec:
    base = _spec(tasks=tasks, checkpoints={"export": False}, stop={"maxUpdates": updates}, **fields)
    return merged(_COMMON, base)


def _judged(word: str, samples: int, verifier: str = "ignored") -> Spec:
    model = {"url": word, "model": "simulated-phone", "samples": samples, "temperature": 1.0, "concurrency": 32}
    judge = {"prompt": "simulated-phone", "models": [model]}
    return {"success": "judge", "verifier": verifier, "streams": [{"name": "judge", "judge": judge}]}


def _hacked(folder: Path) -> dict[str, Any]:
    """Beside a run's figures: the judge's success less the verifier's by update, the first update in which it is over
    10 points, and the update of the alarm."""
    apart = [event["rewards"]["judge_minus_verifier"] for event in events(folder, "update")]
    over = [place + 1 for place, share in enumerate(apart) if share > 0.1]
    said = [event["update"] for event in events(folder, "alarm") if event["alarm"] == "judge_and_verifier"]
    return figures(folder) | {
        "judge_minus_verifier": [round(share, 3) for share in apart],
        "over_at": over[0] if over else None,
        "alarm_at": said[0] if said else None,
    }


_LONG: Spec = {"suite": "quickstart", "split": "train", "templates": ["two_panels", "switch_then_open"]}
_EASY: Spec = {"suite": "quickstart", "split": "train", "templates": ["open", "open_two", "switch", "switch_two"]}
_PEOPLE: Spec = {"suite": "quickstart", "split": "train", "templates": ["switch", "switch_two", "two_panels"]}
_WALKED: Spec = {"file": str(WALKED)}
_MEASURED: Spec = {"suite": "quickstart", "split": "test", "templates": _PEOPLE["templates"]}
_ERRS = {"http://judge.invalid/v1": ("--error-rate", "0.1")}
(_JUDGE,) = _ERRS
_HACKABLE = "http://hackable.invalid/v1"
STUDIES: dict[str, Study] = {
    "rules": Study(
        "learning rules on the full stack",
        _start(_LONG, 600, 140),
        # After ten updates grpo is at 98 %: too late to tell rules apart.
        _base(_LONG, 6),
        {
            "grpo": _spec(algorithm={"advantage": {"grpo": {}}}),
            "gigpo": _spec(algorithm={"advantage": {"gigpo": {}}}),
            "graphgpo": _spec(algorithm={"advantage": {"plugin": {"name": "graphgpo"}}}),
        },
        "grpo",
    ),
    "judges": Study(
        "a judge that errs in a tenth of its answers",
        _start(_EASY, 400, 90),
        _base(_EASY),
        {
            "verifier": {},
            "judge": _spec(rewards=_judged(_JUDGE, 1)),
            "voted": _spec(rewards=_judged(_JUDGE, 3)),
        },
        "verifier",
        _ERRS,
    ),
    "hacked": Study(
        "a judge that favours long answers",
        _start(_EASY, 400, 90),
        _base(_EASY),
        {"hackable": _spec(rewards=_judged(_HACKABLE, 1, "asked"))},
        "hackable",
        {_HACKABLE: ("--favour-long", "600")},
    ),
    "generated": Study(
        "tasks made by walks",
        _start(_EASY, 400, 90),
        _base(_PEOPLE, evaluation={"tasks": _MEASURED}),
        {"people": {}, "walked": _spec(tasks=_WALKED)},
        "people",
    ),
    "stages": Study(
        "two stages",
        _start(_EASY, 400, 90),
        _base(_WALKED, 2 * UPDATES, evaluation={"tasks": _MEASURED}),
        {
            "one": {},
            "two": _spec(
                stages=[
                    {"stop": {"maxUpdates": UPDATES}},
                    {"tasks": _MEASURED, "rewards": _judged(_JUDGE, 3), "stop": {"maxUpdates": UPDATES}},
                ]
            ),
        },
        "one",
        _ERRS,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(STUDIES), default="rules")
    parser.add_argument("--arms", help="some of the study's, with commas between; default: all")
    parser.add_argument("--seeds", default="1-5", help="first-last")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    study = STUDIES[args.study]
    arms = args.arms.split(",") if args.arms else list(study.arms)
    if unknown := [arm for arm in arms if arm not in study.arms]:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(study.arms)}")
    if args.study in ("generated", "stages") and not WALKED.exists():
        WALKED.parent.mkdir(parents=True, exist_ok=True)
        walk = ("tasks", "walk", "-o", str(WALKED), "--suite", "quickstart", "--count", "500", "--seed", "0")
        subprocess.run((sys.executable, "-m", "tapforge_trainer.cli.main", *walk), check=True, timeout=1800)
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    whole_runs.run(study, args.file, PLACE, arms, seeds, _hacked if args.study == "hacked" else figures)


if __name__ == "__main__":
    main()
