"""What a setting does to learning: a warm start, then short whole runs with paired seeds on the simulated phone.

    python bench/learning.py [--studies history,history-long,staleness] [--seeds 1-10]

- Each run is `tapforge run` with vLLM, Ray, phones and recordings, as short as it can be: the tiny model begins where
  imitation (`tapforge sft`, once per form of prompt) has ended.
- `history`: a sliding window of 3 screens beside a history in blocks of 2 to 6, the quickstart suite, a prompt with
  turns. `history-long`: the same on its longest tasks alone, 8 to 11 steps, in which the window of blocks moves. (The
  standard suite is out of reach: its lists are scrolled, for which this model's prompt has no word.)
- `staleness`: `maxStaleness` 1 beside 2 on phones with log-normal latencies (sigma 1), to the same number of updates;
  `seconds` is what reinforcement took.
- A pair of arm and seed that is in the file is not run again: start, stop and go on as you like.

`--publish docs/studies` writes the file and the rows of docs/studies.md.

Writes bench-results/learning.json, {study: {pairs: {arm: {seed: result}}, arms: {arm: {seeds, mean, ci95,
vs_BASELINE: {mean, ci95, p, p_holm}}}, figures: {arm: {name: mean}}}}: success on held-out tasks after training,
sampled; differences paired by seed, 95 % intervals by Student's t.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from load.machine import machine, show, write
from load.paired import commit, table

from tapforge_trainer.run.folder import SUMMARY
from tapforge_trainer.run.sft import MODEL

SAMPLE = Path("manifests/samples/quickstart.yaml")
#: seconds after which a run counts as hung, and the study ends
PATIENCE = 3600.0
#: of every run that is compared; the warm start is made before
RUN = (
    "warmStart=null",
    "rollout.groupsPerUpdate=8",
    "learner.learningRate=3e-4",
    "learner.warmupUpdates=2",
    "evaluation.greedy=false",
    "evaluation.baselines=false",
    "evaluation.otherTemplates=0",
    "evaluation.episodes=240",
    "checkpoints.everyUpdates=1000",
    "checkpoints.export=false",
    "stop.maxSeconds=null",
)


@dataclass(frozen=True, slots=True)
class Study:
    #: arm -> what it sets; the first one is what the others are compared with
    arms: Mapping[str, tuple[str, ...]]
    updates: int
    #: of all arms, also of the warm start
    common: tuple[str, ...] = ()
    #: of the compared runs alone
    run: tuple[str, ...] = ()
    #: of the warm start alone
    start: tuple[str, ...] = ()
    #: whether the arms ask alike, and begin with the same model
    shared: bool = False


_TURNS = ("model.adapter.prompt=turns",)
_WINDOWS = {
    "sliding": ("model.adapter.historyImages=3",),
    "blocks": ("model.adapter.historyImages=null", "model.adapter.history={blocks: {keep: 2, upTo: 6}}"),
}
STUDIES = {
    "history": Study(_WINDOWS, updates=12, common=(*_TURNS, "model.contextTokens=384")),
    "history-long": Study(
        _WINDOWS,
        updates=12,
        common=(*_TURNS, "model.contextTokens=384", "model.adapter.historySteps=16", "tasks.templates=[two_panels]"),
    ),
    "staleness": Study(
        {str(bound): (f"rollout.maxStaleness={bound}",) for bound in (1, 2)},
        updates=12,
        run=("environment.source.processes.latency={medianSeconds: 0.1, sigma: 1.0}",),
        shared=True,
    ),
}


def tapforge(command: str, runs: Path, sets: Iterable[str]) -> None:
    """Raises RuntimeError with the end of what the command said."""
    words = [word for one in sets for word in ("--set", one if one.startswith("metadata.") else f"spec.{one}")]
    words = [sys.executable, "-m", "tapforge_trainer.cli.main", command, "-f", str(SAMPLE), "--runs", str(runs), *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def started(study: Study, arm: str, folder: Path) -> Path:
    """The model that the arm begins with; imitation is made where it isn't yet."""
    name = "start" if study.shared else f"start-{arm}"
    model = folder / name / MODEL
    if not (model / "config.json").exists():
        chosen = () if study.shared else study.arms[arm]
        tapforge("sft", folder, (f"metadata.name={name}", *study.common, *chosen, *study.start))
    return model


def run(study: Study, arm: str, seed: int, model: Path) -> dict[str, Any]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as runs:
        chosen = (*study.common, *study.arms[arm], *RUN, *study.run)
        last = (f"seed={seed}", f"stop.maxUpdates={study.updates}", f"model.source={{path: {{folder: {model}}}}}")
        tapforge("run", Path(runs), (f"metadata.name={arm}-{seed}", *chosen, *last))
        found = json.loads((Path(runs) / f"{arm}-{seed}" / SUMMARY).read_text())
    before, after = (_success(found[f"success_{when}"]) for when in ("before", "after"))
    return {
        "before": before,
        "after": after,
        "env_steps": found["env_steps"],
        "seconds": found["seconds_rl"],
        "whole_seconds": round(time.monotonic() - begun, 1),
    }


def _success(measured: Mapping[str, Any]) -> float:
    return float(measured["sampled"]["success"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default=",".join(STUDIES), help="some of them, by commas")
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument("--file", type=Path, default=Path("bench-results/learning.json"))
    parser.add_argument("--starts", type=Path, default=Path("bench-results/learning"), help="warm-started models")
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
        for seed in range(int(first), int(last or first) + 1):
            for arm in study.arms:
                if str(seed) in pairs.get(arm, {}):
                    continue
                pairs.setdefault(arm, {})[str(seed)] = run(study, arm, seed, started(study, arm, folder))
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
    baseline = next(iter(STUDIES[name].arms))
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


def summed_up(study: Study, kept: dict[str, Any]) -> None:
    pairs = kept["pairs"]
    kept["arms"] = table(pairs, baseline=next(iter(study.arms)))
    means = ("before", "env_steps", "seconds", "whole_seconds")
    kept["figures"] = {
        arm: {mean: round(float(np.mean([one[mean] for one in seeds.values()])), 4) for mean in means}
        for arm, seeds in pairs.items()
    }


def report(name: str, study: Study, kept: Mapping[str, Any]) -> None:
    baseline = next(iter(study.arms))
    cells = []
    for arm, one in kept["arms"].items():
        against, means = one.get(f"vs_{baseline}", {}), kept["figures"][arm]
        cells.append((arm, one["seeds"], _with_interval(one, ""), _with_interval(against, "+"), *means.values()))
    columns = ("arm", "seeds", "after", f"less {baseline}", "before", "env steps", "seconds", "whole")
    show(f"{name}: success on held-out tasks, points", columns, cells)


if __name__ == "__main__":
    main()
