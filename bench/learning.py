"""What a setting does to learning: a warm start, then short whole runs with paired seeds on the simulated phone.

    python bench/learning.py [--studies history,history-long,...] [--seeds 1-10]

- Each run is `tapforge run` with vLLM, Ray, phones and recordings, as short as it can be: the tiny model begins where
  imitation (`tapforge sft`, once per form of prompt) has ended.
- `history`: a sliding window of 3 screens beside a history in blocks of 2 to 6, the quickstart suite, a prompt with
  turns. `history-long`: the same on its longest tasks alone, 8 to 11 steps, in which the window of blocks moves.
  `history-slow`: those at half the learning rate, with a warmup and a run of two updates more. (The standard suite is
  out of reach: its lists are scrolled, for which this model's prompt has no word.)
- `staleness`: `maxStaleness` 1 beside 2 on phones with log-normal latencies (sigma 1), to the same number of updates;
  `seconds` is what reinforcement took.
- `rules`: advantages, each with its defaults, on the suite's longest tasks, with the quickstart's learning rate.
- `judges`: success by the verifier, by a judge that errs in a tenth of its answers, and by three votes of that judge.
- `hacked`: a judge that takes every episode of 600 characters (six answers) for a success, beside the verifier: how far
  the two go apart, and when the run's alarm says so. `hacked-long`: the same on the suite's longest tasks, where true
  success is rare at first, beside runs that learn from the verifier.
- `generated`: tasks that were made by walks on the phone (`tapforge tasks walk`) beside those of people's templates,
  measured on held-out tasks of people's templates.
- `stages`: walked tasks, then the tasks that are measured, without their verifier, with three votes of the judge that
  errs, beside as many updates of walked tasks.
- A pair of arm and seed that is in the file is not run again: start, stop and go on as you like.

Writes bench-results/learning.json, {study: {pairs: {arm: {seed: result}}, arms: {arm: {seeds, mean, ci95,
vs_BASELINE: {mean, ci95, p, p_holm}}}, figures: {arm: {name: mean}}}}: success on held-out tasks after training,
sampled, with `rules` greedy; differences paired by seed, 95 % intervals by Student's t.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from load.machine import machine, show, write
from load.paired import commit
from load.whole_runs import Study, curve, hacked, judges, run, started, summed_up

STARTS = Path("bench-results/learning")
#: tasks that `tapforge tasks walk` makes, once
WALKED = (STARTS / "walked.jsonl").resolve()

_TURNS = ("model.adapter.prompt=turns", "model.contextTokens=384")
_LONG_TURNS = (*_TURNS, "model.adapter.historySteps=16", "tasks.templates=[two_panels]")
_WINDOWS = {
    "sliding": ("model.adapter.historyImages=3",),
    "blocks": ("model.adapter.historyImages=null", "model.adapter.history={blocks: {keep: 2, upTo: 6}}"),
}
_LONGEST = ("tasks.templates=[two_panels, switch_then_open]", "model.adapter.historySteps=12")
_SHORT_START = ("warmStart.demonstrations=600", "warmStart.steps=140")
_MANY_PHONES = ("environment.source.processes.count=48",)
_EASY = ("tasks.templates=[open, open_two, switch, switch_two]",)
#: those that walks are compared with, and measured on
_PEOPLE = "tasks.templates=[switch, switch_two, two_panels]"
_MEASURED = "{suite: quickstart, split: test, templates: [switch, switch_two, two_panels]}"
_ON_PEOPLE = f"evaluation.tasks={_MEASURED}"
_WALKS = f"tasks={{file: {WALKED}}}"
_EIGHT = "stop: {maxUpdates: 8}"
_ERRS, _HACKABLE = "http://judge.invalid/v1", "http://hackable.invalid/v1"


def _rewards(url: str, samples: int, verifier: str = "ignored") -> str:
    model = f'{{url: "{url}", model: simulated-phone, samples: {samples}, temperature: 1.0, concurrency: 32}}'
    judge = f"{{prompt: simulated-phone, models: [{model}]}}"
    return f"{{success: judge, verifier: {verifier}, streams: [{{name: judge, judge: {judge}}}]}}"


STUDIES = {
    "history": Study(_WINDOWS, updates=12, common=_TURNS),
    "history-long": Study(_WINDOWS, updates=12, common=_LONG_TURNS),
    "history-slow": Study(
        _WINDOWS,
        updates=14,
        common=_LONG_TURNS,
        run=("learner.learningRate=1.5e-4", "learner.warmupUpdates=4"),
        more=curve,
    ),
    "staleness": Study(
        {str(bound): (f"rollout.maxStaleness={bound}",) for bound in (1, 2)},
        updates=12,
        run=("environment.source.processes.latency={medianSeconds: 0.1, sigma: 1.0}",),
        shared=True,
    ),
    "rules": Study(
        {
            "grpo": ("algorithm.advantage={grpo: {}}",),
            "gigpo": ("algorithm.advantage={gigpo: {}}",),
            "graphgpo": ("algorithm.advantage={plugin: {name: graphgpo}}",),
        },
        # after ten grpo is at 98 %: too late to tell rules apart
        updates=6,
        common=_LONGEST,
        run=(
            *_MANY_PHONES,
            "learner.learningRate=1.5e-4",
            "learner.warmupUpdates=4",
            "evaluation.greedy=true",
            "evaluation.sampled=false",
            "evaluation.episodes=200",
        ),
        start=_SHORT_START,
        shared=True,
    ),
    "judges": Study(
        {
            "verifier": (),
            "judge": (f"rewards={_rewards(_ERRS, 1)}",),
            "voted": (f"rewards={_rewards(_ERRS, 3)}",),
        },
        updates=8,
        common=_EASY,
        start=("warmStart.steps=90",),
        shared=True,
        judges={_ERRS: ("--error-rate", "0.1")},
    ),
    "hacked": Study(
        {"hackable": (f"rewards={_rewards(_HACKABLE, 1, 'asked')}",)},
        updates=12,
        common=_EASY,
        start=("warmStart.steps=90",),
        shared=True,
        judges={_HACKABLE: ("--favour-long", "600")},
        more=hacked,
    ),
    "hacked-long": Study(
        {"verifier": (), "hackable": (f"rewards={_rewards(_HACKABLE, 1, 'asked')}",)},
        updates=12,
        common=_LONGEST,
        run=_MANY_PHONES,
        start=_SHORT_START,
        shared=True,
        judges={_HACKABLE: ("--favour-long", "600")},
        more=hacked,
    ),
    "generated": Study(
        {"people": (_PEOPLE,), "walked": (_WALKS,)},
        updates=12,
        run=(_ON_PEOPLE,),
        start=(*_EASY, "warmStart.steps=90"),
        shared=True,
    ),
    "stages": Study(
        {
            "one": (),
            "two": (f"stages=[{{{_EIGHT}}}, {{tasks: {_MEASURED}, rewards: {_rewards(_ERRS, 3)}, {_EIGHT}}}]",),
        },
        updates=16,
        run=(_WALKS, _ON_PEOPLE),
        start=(*_EASY, "warmStart.steps=90"),
        shared=True,
        judges={_ERRS: ("--error-rate", "0.1")},
    ),
}


def walked() -> None:
    if not WALKED.exists():
        WALKED.parent.mkdir(parents=True, exist_ok=True)
        words = ("tasks", "walk", "-o", str(WALKED), "--suite", "quickstart", "--count", "500", "--seed", "0")
        subprocess.run((sys.executable, "-m", "tapforge_trainer.cli.main", *words), check=True, timeout=1800)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default=",".join(STUDIES), help="some of them, by commas")
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument("--file", type=Path, default=Path("bench-results/learning.json"))
    parser.add_argument("--starts", type=Path, default=STARTS, help="warm-started models")
    parser.add_argument(
        "--publish", type=Path, metavar="FOLDER", help="only write the file of whole pairs there, and print its tables"
    )
    args = parser.parse_args()
    if args.publish is not None:
        publish(args.file, args.publish)
        return
    if unknown := [name for name in args.studies.split(",") if name not in STUDIES]:
        parser.error(f"unknown study {unknown[0]}; known: {', '.join(STUDIES)}")
    first, _, last = args.seeds.partition("-")
    everything = json.loads(args.file.read_text()) if args.file.exists() else {}
    for name in args.studies.split(","):
        study, folder = STUDIES[name], (args.starts / name).resolve()
        kept = everything.setdefault(name, {"machine": machine(), "commit": commit(), "updates": study.updates})
        pairs = kept.setdefault("pairs", {})
        if kept["updates"] != study.updates:
            parser.error(f"{args.file} has {name} with {kept['updates']} updates: name another --file")
        # The arms of a seed one after another, so that a study that ends early has pairs.
        seeds = range(int(first), int(last or first) + 1)
        left = [(arm, seed) for seed in seeds for arm in study.arms if str(seed) not in pairs.get(arm, {})]
        if left and any(str(WALKED) in one for arm in study.arms for one in study.settings(arm)):
            walked()
        with judges(study) as urls:
            for arm, seed in left:
                found = run(study, arm, seed, started(study, arm, folder), urls)
                pairs.setdefault(arm, {})[str(seed)] = found
                summed_up(study, kept)
                write(args.file, everything)
        report(name, study, kept)


def publish(file: Path, folder: Path) -> None:
    """Of the seeds that all arms of a study have: the file, and the rows of the page."""
    found = json.loads(file.read_text())
    for name, kept in list(found.items()):
        whole = set.intersection(*(set(kept["pairs"].get(arm, {})) for arm in STUDIES[name].arms))
        if not whole:
            del found[name]
            continue
        kept["pairs"] = {arm: {s: one for s, one in of.items() if s in whole} for arm, of in kept["pairs"].items()}
        summed_up(STUDIES[name], kept)
        print("\n".join(rows(name, kept)))
    write(folder / file.name, found)


def rows(name: str, kept: Mapping[str, Any]) -> list[str]:
    """Of a table in Markdown."""
    made = []
    baseline = STUDIES[name].baseline
    for arm, one in kept["arms"].items():
        against, figures = one.get(f"vs_{baseline}", {}), kept["figures"][arm]
        after, less = (_with_interval(of, sign) for of, sign in ((one, ""), (against, "+")))
        steps = f"{figures['env_steps']:,.0f}"
        cells = (name, arm, one["seeds"], f"{100 * figures['before']:.1f} %", f"{after} %", less, steps)
        made.append(f"| {' | '.join(map(str, cells))} |")
    return made


def _with_interval(of: Mapping[str, Any], sign: str) -> str:
    """In points."""
    if of.get("ci95") is None:
        return f"{100 * of['mean']:{sign}.1f}" if of else ""
    return f"{100 * of['mean']:{sign}.1f} ± {100 * of['ci95']:.1f}"


def report(name: str, study: Study, kept: Mapping[str, Any]) -> None:
    baseline = study.baseline
    cells = []
    for arm, one in kept["arms"].items():
        against, means = one.get(f"vs_{baseline}", {}), kept["figures"][arm]
        cells.append((arm, one["seeds"], _with_interval(one, ""), _with_interval(against, "+"), *means.values()))
    columns = ("arm", "seeds", "after", f"less {baseline}", "before", "env steps", "seconds", "whole")
    show(f"{name}: success on held-out tasks, points", columns, cells)


if __name__ == "__main__":
    main()
