"""Studies of whole runs: `tapforge run` on the quickstart's file with settings of an arm, with real Ray, vLLM, FSDP2
and phones, from a policy that imitation has begun."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapforge_trainer.run.folder import SUMMARY, read_events
from tapforge_trainer.run.sft import MODEL

from .paired import table

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
TAPFORGE = (sys.executable, "-m", "tapforge_trainer.cli.main")


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
    #: url in the settings -> options of the `tapforge judge serve` that stands behind it
    judges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: what else is kept of a run's folder
    more: Callable[[Path], dict[str, Any]] = lambda folder: {}

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    def settings(self, arm: str) -> tuple[str, ...]:
        """Of a run of the arm, but for its seed and its model."""
        return (*self.common, *RUN, *self.run, *self.arms[arm], f"stop.maxUpdates={self.updates}")

    def imitation(self, arm: str) -> tuple[str, ...]:
        """Of the warm start that the arm begins with."""
        return (*self.common, *(() if self.shared else self.arms[arm]), *self.start)


def options(sets: Iterable[str]) -> list[str]:
    return [word for one in sets for word in ("--set", one if one.startswith("metadata.") else f"spec.{one}")]


def tapforge(command: str, runs: Path, sets: Iterable[str], *more: str, file: Path = SAMPLE) -> str:
    """What it prints. Raises RuntimeError with the end of what the command said."""
    words = [*TAPFORGE, command, "-f", str(file), "--runs", str(runs), *options(sets), *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def started(study: Study, arm: str, folder: Path) -> Path:
    """The model that the arm begins with; imitation is made where it isn't yet."""
    name = "start" if study.shared else f"start-{arm}"
    model = folder / name / MODEL
    if not (model / "config.json").exists():
        tapforge("sft", folder, (f"metadata.name={name}", *study.imitation(arm)))
    return model


@contextmanager
def judges(study: Study) -> Iterator[dict[str, str]]:
    """The study's urls -> those of its judges, until the end of the block."""
    with ExitStack() as stack:
        urls = {}
        for url, options in study.judges.items():
            command = (*TAPFORGE, "judge", "serve", "--port", "0", *options)
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            assert server.stdout is not None
            urls[url] = json.loads(server.stdout.readline())["url"]
        yield urls


def run(study: Study, arm: str, seed: int, model: Path, urls: Mapping[str, str]) -> dict[str, Any]:
    begun = time.monotonic()
    name = f"{arm.replace('_', '-')}-{seed}"
    own = (f"metadata.name={name}", f"seed={seed}", f"model.source={{path: {{folder: {model}}}}}")
    sets: Sequence[str] = (*study.settings(arm), *own)
    for url, served in urls.items():
        sets = [one.replace(url, served) for one in sets]
    with tempfile.TemporaryDirectory() as runs:
        tapforge("run", Path(runs), sets)
        folder = Path(runs) / name
        found = json.loads((folder / SUMMARY).read_text())
        more = study.more(folder)
    before, after = (_success(found[f"success_{when}"]) for when in ("before", "after"))
    return {
        "before": before,
        "after": after,
        "env_steps": found["env_steps"],
        "seconds": found["seconds_rl"],
        "whole_seconds": round(time.monotonic() - begun, 1),
        **more,
    }


def _success(measured: Mapping[str, Any]) -> float:
    return float(measured["sampled" if "sampled" in measured else "greedy"]["success"])


def summed_up(study: Study, kept: dict[str, Any]) -> None:
    pairs = kept["pairs"]
    kept["arms"] = table(pairs, baseline=study.baseline)
    means = ("before", "env_steps", "seconds", "whole_seconds")
    kept["figures"] = {
        arm: {mean: round(float(np.mean([one[mean] for one in seeds.values()])), 4) for mean in means}
        for arm, seeds in pairs.items()
    }


def curve(folder: Path) -> dict[str, Any]:
    """Success in practice by update."""
    found = [event["success_rate"] for event in read_events(folder) if event["event"] == "update"]
    return {"curve": [None if rate is None else round(rate, 3) for rate in found]}


def hacked(folder: Path) -> dict[str, Any]:
    """The judge's success less the verifier's by update, the first update in which it is over 10 points, and the update
    of the alarm; empty without a judge."""
    happened = list(read_events(folder))
    compared = [event["rewards"] for event in happened if event["event"] == "update" and "rewards" in event]
    if not compared:
        return {}
    apart = [one["judge_minus_verifier"] for one in compared]
    over = [place for place, share in enumerate(apart, 1) if share > 0.1]
    said = [e["update"] for e in happened if e["event"] == "alarm" and e["alarm"] == "judge_and_verifier"]
    return {
        "judge_minus_verifier": [round(share, 3) for share in apart],
        "over_at": over[0] if over else None,
        "alarm_at": said[0] if said else None,
    }
