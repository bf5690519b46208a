"""The loop's surroundings with a learner that only counts, on real phones."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
from phones import PATIENT, bounded, phones
from rich.console import Console
from scripted import AGENT, TASKS, Demonstrator

from tapforge_api import load
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.frames.handles import FramesLost
from tapforge_trainer.learner.checkpoints import WrittenCheckpoint
from tapforge_trainer.learner.token_readings import TokenReadings, by_episode
from tapforge_trainer.policy import PolicySettings
from tapforge_trainer.recording.frames import FrameStore
from tapforge_trainer.records import AnswerFacts, Facts
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.run.assembly import rollout_setup_of
from tapforge_trainer.run.context import RunContext
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.run.learning_errors import rewarder_of
from tapforge_trainer.run.shutdown import StopSignal
from tapforge_trainer.sync.history import ProofHistory
from tapforge_trainer.telemetry.telemetry import ProgressView, Telemetry

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: counted}
spec:
  seed: 3
  tasks: {suite: quickstart, split: train}
  rollout: {groupSize: 4, groupsPerUpdate: 4, maxStaleness: 1}
  evaluation: {episodes: 2, sampled: false}
  checkpoints: {everyUpdates: 2}
  stop: {maxUpdates: 3}
"""


async def _nothing() -> None:
    pass


class Learner:
    """Counts updates. `during` is called in each of them."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, int]] = []
        self.samples: list[Any] = []
        #: updates that find an episode's frames lost, and the episodes
        self.loses, self.lost = 0, list[str]()
        #: which sample's episode that is
        self.loses_sample = 0
        self.during: Callable[[], Awaitable[None]] = _nothing
        #: what is read before advantages are made, and how many answers
        self.read: list[tuple[list[str], int]] = []

    async def answers(self, samples: Any, frames: Any, temperature: float, reads: Any) -> Facts:
        self.read.append((sorted(reads), len(samples)))
        if self.loses:
            self.loses -= 1
            self.lost.append(samples[self.loses_sample].episode)
            raise FramesLost(self.lost)
        facts = AnswerFacts(divergence=0.5, score_square=1.0)
        return {(sample.episode, sample.spans[0].step): facts for sample in samples}

    async def update(self, samples: Any, frames: Any, settings: Any, version: int, keep_tokens: Any) -> dict[str, Any]:
        await self.during()
        recorded = FrameStore(frames.recorded)
        for sample in samples:
            assert all(map(recorded.has, sample.frames)) or set(sample.frames) <= set(frames.handles[sample.episode])
        self.samples.append(samples)
        if self.loses:
            self.loses -= 1
            self.lost.append(samples[self.loses_sample].episode)
            raise FramesLost(self.lost)
        self.updates.append((len(samples), version, settings.seed))
        tokens = np.arange(sum(len(span.logprobs) for sample in samples for span in sample.spans))
        keep_tokens(by_episode(samples, [TokenReadings([(tokens, np.full((2, len(tokens)), -version, float))])]))
        return {"kl_age_0": 0.01}


class Policy:
    """What the loop needs of one; answers are a demonstrator's that fails at times."""

    def __init__(self) -> None:
        self.learner = Learner()
        self.settings = PolicySettings(engine=None, learner=None)
        self.proofs = ProofHistory({"gap_mean": 0.5})
        self.engine_metrics = {"gap_mean": 0.5, "gap_alarm": 1.0, "sync_resends": 1.0}
        self.generator = Demonstrator([TASKS.sample(3, n) for n in range(80)], lambda s: s.seed % 3 == 0)
        self.version = 0
        self.saved: list[tuple[int, dict[str, Any]]] = []
        self.synced: list[int] = []
        #: whether engines that share the learner's GPUs would sleep
        self.asleep = False
        self.on_sync: Callable[[], None] = lambda: None
        self.proof_prompts = ""
        #: why learner and engines can't be used again
        self.lost: Exception | None = None

    @asynccontextmanager
    async def learning(self, version: int | None = None) -> AsyncIterator[Learner]:
        self.asleep = True
        yield self.learner
        self.version = self.version if version is None else version

    async def sync(self, version: int) -> float:
        assert version == self.version
        self.on_sync()
        self.asleep = False
        self.synced.append(version)
        self.generator.version = version
        return 0.0

    def wake_engines(self) -> None:
        self.asleep = False

    async def save(self, update: int, state: dict[str, Any], report: Callable[[WrittenCheckpoint], None]) -> None:
        self.saved.append((update, state))
        report(WrittenCheckpoint(update, f"update-{update}", 0.0, 0.0, 0, 0.0))

    async def settle(self) -> None:
        return


@asynccontextmanager
async def parts(folder: Path, *overrides: str) -> AsyncIterator[RunContext]:
    run = load(SPEC, overrides)
    policy = Policy()
    with bounded(), closing(Telemetry(folder, ProgressView("counted", 0), Console(file=io.StringIO()))) as telemetry:
        async with phones(4) as server:
            slots = UrlSlots(parse_urls(server.urls, "phones"), PATIENT)
            await slots.start()
            rewarder = rewarder_of(run)
            worker = RolloutWorker(AGENT, {"": policy.generator}, rewarder=rewarder)  # type: ignore[arg-type]
            try:
                rollout_setup = rollout_setup_of(run, slots, AGENT, worker, tuple)  # type: ignore[arg-type]
                yield RunContext(run, folder, policy, rollout_setup, telemetry, StopSignal())  # type: ignore[arg-type]
                assert slots.counts().leased == 0, "every lease was returned"
            finally:
                await slots.close()
                await worker.close()


def group_of(episode: str) -> str:
    return episode.split(".")[0]


def updates(folder: Path) -> list[int]:
    return [event["update"] for event in read_events(folder) if event["event"] == "update"]
