"""Studies of whole runs: `tapforge run` with real Ray, vLLM, FSDP2 and phones, one process after another, arms paired
by seed. A pair of arm and seed that a study's file has is not run again, so a study may be stopped and gone on with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .machine import machine, show, write
from .paired import commit, table

#: seconds that one run may take, on a machine that does other things as well
PATIENCE = 1800.0
Spec = dict[str, Any]
_TAPFORGE = (sys.executable, "-m", "tapforge_trainer.cli.main")


@dataclass(frozen=True)
class Study:
    """`start`: the file of the run whose exported policy all arms begin with. `arms`: what each adds to `base`, a file
    whose model is that policy. All are files as users have them, with a field `spec`. `judges`: options of a `tapforge
    judge serve`, by the name that stands for its url in the files."""

    name: str
    start: Spec
    base: Spec
    arms: Mapping[str, Spec]
    baseline: str
    judges: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return "-".join(re.findall(r"[a-z0-9]+", self.name.lower()))


def merged(base: Spec, more: Spec) -> Spec:
    """`base` with `more` over it, mapping by mapping."""
    out = dict(base)
    for key, value in more.items():
        known = out.get(key)
        out[key] = merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else value
    return out


def tapforge(place: Path, name: str, document: Spec, urls: Mapping[str, str] | None = None) -> Path:
    """Runs a file, and returns the run's folder. Raises RuntimeError with the end of what the run said."""
    place.mkdir(parents=True, exist_ok=True)
    file, log = place / f"{name}.yaml", place / f"{name}.log"
    text = yaml.safe_dump(merged(document, {"metadata": {"name": name}}), sort_keys=False)
    for word, url in (urls or {}).items():
        text = text.replace(word, url)
    file.write_text(text)
    shutil.rmtree(place / "runs" / name, ignore_errors=True)
    command = [*_TAPFORGE, "run", "-f", file.name]
    with log.open("w") as out:
        code = subprocess.run(command, cwd=place, stdout=out, stderr=out, timeout=PATIENCE, check=False).returncode
    if code:
        raise RuntimeError(f"{file}: exit code {code}; the end of {log}:\n{log.read_text()[-2000:]}")
    return place / "runs" / name


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def figures(folder: Path) -> dict[str, Any]:
    """Of a run that has ended: greedy success before and after, success while it practised, and what that took."""
    measured = {e["name"]: e for e in events(folder, "evaluation") if e["mode"] == "greedy"}
    updates = events(folder, "update")
    return {
        "before": measured["before"]["success"],
        "after": measured["after"]["success"],
        "during": round(sum(e["success_rate_all"] for e in updates) / len(updates), 4),
        "updates": len(updates),
        "env_steps": round(sum(e["steps_mean"] * e["episodes"] for e in updates)),
        "steps_mean": updates[-1]["steps_mean"],
        "seconds": round(updates[-1]["seconds"], 1),
    }


def run(
    study: Study,
    file: Path,
    place: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    read: Callable[[Path], dict[str, Any]] = figures,
) -> None:
    """All arms of a seed side by side, so that a study that ends early has pairs. `read`: what is kept of a run's
    folder, which is deleted then; its `after` is compared."""
    place /= study.slug
    everything = json.loads(file.read_text()) if file.exists() else {}
    empty = {"machine": machine(), "commit": commit(), "baseline": study.baseline, "pairs": {}, "arms": {}}
    found = everything.setdefault(study.name, empty)
    left = [(s, arm) for s in seeds for arm in arms if str(s) not in found["pairs"].get(arm, {})]
    if left:
        made_start(study, place)
    with judges(study) as urls:
        for seed, arm in left:
            begun = time.monotonic()
            folder = tapforge(place, f"{arm.replace('_', '-')}-{seed}", of(study, place, arm, seed), urls)
            one = found["pairs"].setdefault(arm, {})[str(seed)] = read(folder)
            one["wall_seconds"] = round(time.monotonic() - begun, 1)
            found["arms"] = table(found["pairs"], baseline=study.baseline)
            write(file, everything)
            shutil.rmtree(folder)
            print(f"{study.name}: {arm}, seed {seed}: {one}", flush=True)
    print_table(study.name, found)


@contextmanager
def judges(study: Study) -> Iterator[dict[str, str]]:
    """Word -> url of the study's judges, until the end of the block."""
    with ExitStack() as stack:
        urls = {}
        for word, options in study.judges.items():
            command = [*_TAPFORGE, "judge", "serve", "--port", "0", *options]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            assert server.stdout is not None
            urls[word] = json.loads(server.stdout.readline())["url"]
        yield urls


def of(study: Study, place: Path, arm: str, seed: int) -> Spec:
    """The file of a run, whose model lies in `place`."""
    folder = str((place / "start" / "export").resolve())
    model = {"spec": {"seed": seed, "model": {"source": {"path": {"folder": folder}}}}}
    return merged(merged(study.base, model), study.arms[arm])


def made_start(study: Study, place: Path) -> None:
    """The policy that all arms begin with, once."""
    start = place / "start"
    if (start / "export").exists():
        return
    shutil.rmtree(start, ignore_errors=True)
    folder = tapforge(place, "made", study.start)
    start.mkdir()
    shutil.move(folder / "export", start / "export")


def print_table(name: str, found: dict[str, Any]) -> None:
    baseline = found["baseline"]
    columns = ("arm", "seeds", "after", "±", f"less {baseline}", "±", "p (Holm)")
    rows = []
    for arm, one in sorted(found["arms"].items(), key=lambda item: -item[1]["mean"]):
        against = one.get(f"vs_{baseline}", {})
        points = [_points(of.get(part)) for of in (one, against) for part in ("mean", "ci95")]
        rows.append((arm, one["seeds"], *points, against.get("p_holm", "–")))
    show(f"{name}: success on held-out tasks, points", columns, rows)


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
