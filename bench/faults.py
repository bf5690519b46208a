"""What sick phones cost a run, and a proof that nothing of what they do enters a sample.

    python bench/faults.py [--phones 64] [--share 0.3] [--updates 12] [--seed 0]

A run's data path twice at the same time, on healthy phones and with a part of them sick on a seeded schedule
(`load/faulty.py`: they hang, crash, lie, slow down, corrupt and mix up what they answer, all the time): scheduler,
groups, leases, rollout worker, recorder and batches as in a run, over real sockets; an engine stand-in answers from a
script after a fixed time. Deadlines and spells of sickness are to latencies as real phones' are. Both sides learn the
same number of batches, each for the same fixed time. Measured is the wall time from the first reset to the end of the
last update; `throughput_ratio` is usable samples per second of the sick fleet over those of the healthy one. Other work
on the machine slows both sides down alike, and longer latencies (`--median`) leave phones their time.

The proof (`load/proof.py`) reads the recording that the run left and the phones' own logs. Writes
bench-results/faults.json, and to its stderr what was found wrong, if anything; then its exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from load.children import child
from load.faulty import sick_phones
from load.machine import machine, show, write
from load.policy import SAMPLING, ScriptedEngine, adapter
from load.proof import Proof, SampleName, Served, prove, read_log

from tapforge_api.algorithm import Algorithm
from tapforge_envs.clients.http import Deadlines
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Task
from tapforge_envs.slots.source import SlotCounts
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.stats import RolloutStats
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.source import TaskSource

GROUP, MAX_STEPS, END = 8, 16, 1 / 8
#: seconds of an update
LEARN_SECONDS = 0.5
SERVERS = 4
RULES = BatchRules.of(Algorithm(), min_valid=2)


class JudgedTasks:
    """The quickstart's tasks with one limit of steps. Verdicts are numbers from 0 to 1: every second is a success."""

    def __init__(self) -> None:
        self._tasks = catalog.tasks("quickstart", "train")

    def sample(self, seed: int, index: int) -> Task:
        return self._tasks.sample(seed, index).model_copy(update={"max_steps": MAX_STEPS, "threshold": 0.5})


@dataclass(frozen=True, slots=True)
class Campaign:
    phones: int
    sick: tuple[int, ...]
    updates: int
    seed: int
    #: of a healthy phone's calls
    median_seconds: float = 0.6
    #: times that until a step's deadline
    patience: float = 13.0

    @property
    def deadlines(self) -> Deadlines:
        step = self.patience * self.median_seconds
        return Deadlines(health=step / 2, reset=1.5 * step, step=step, evaluate=step, close=step / 2)

    @property
    def engine_seconds(self) -> float:
        """Of an answer."""
        return self.median_seconds / 3

    @property
    def groups_per_update(self) -> int:
        return max(1, self.phones // GROUP)


@dataclass(slots=True)
class Played:
    seconds: float
    #: of the episodes that were learned from
    steps: int
    learned: set[SampleName]
    stats: RolloutStats
    slots: SlotCounts
    #: what the phones wrote down
    log: list[Served]
    recording: Recording
    proof: Proof


# --- phones -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    urls: tuple[str, ...]
    logs: tuple[Path, ...]
    servers: tuple[subprocess.Popen[str], ...]

    def begin(self) -> None:
        """From here on sick phones are sick."""
        for server in self.servers:
            assert server.stdin is not None
            server.stdin.write("begin\n")
            server.stdin.flush()

    def end(self) -> None:
        """Logs are complete from here on."""
        for server in self.servers:
            server.communicate("", timeout=30)


@contextmanager
def fleet(campaign: Campaign, folder: Path) -> Iterator[Fleet]:
    shares = [range(k * campaign.phones // SERVERS, (k + 1) * campaign.phones // SERVERS) for k in range(SERVERS)]
    servers, logs = [], []
    for number, share in enumerate(share for share in shares if share):
        logs.append(folder / f"phones-{number}.jsonl")
        command = ["--phones", str(len(share)), "--first", str(share.start)]
        command += ["--seed", str(campaign.seed), "--median", str(campaign.median_seconds), "--log", str(logs[-1])]
        command += ["--sick", *(str(phone) for phone in campaign.sick if phone in share)]
        servers.append(child("load.faulty", *command))
    try:
        ports = []
        for server in servers:
            assert server.stdout is not None
            ports += json.loads(server.stdout.readline())["ports"]
        yield Fleet(tuple(f"http://127.0.0.1:{port}" for port in ports), tuple(logs), tuple(servers))
    finally:
        for server in servers:
            server.kill()
            server.communicate()


# --- a run ------------------------------------------------------------------------------------------------------------


async def play(campaign: Campaign, folder: Path) -> Played:
    folder.mkdir()
    agent = adapter(folder / "model")
    with fleet(campaign, folder) as phones:
        worker = RolloutWorker(agent, {"": ScriptedEngine(agent, campaign.engine_seconds, END)})
        slots = UrlSlots(parse_urls(phones.urls, "bench"), campaign.deadlines, health=worker.health)
        await slots.start()
        recording = RecordingQueue(Recorder(folder / "rollout"))
        scheduler = Scheduler(
            slots,
            worker,
            SAMPLING,
            tasks=TaskSource(JudgedTasks(), campaign.seed),
            groups=GroupLimits(GROUP, campaign.groups_per_update, max_staleness=1),
            recorder=recording,
            seed=campaign.seed,
        )
        try:
            phones.begin()
            begun, steps, learned = time.perf_counter(), 0, set[SampleName]()
            for version in range(1, campaign.updates + 1):
                groups = await scheduler.next_batch()
                batch = await asyncio.to_thread(build_batch, groups, RULES)
                learned |= {(sample.episode, span.step) for sample in batch.samples for span in sample.spans}
                steps += sum(len(episode.steps) for group in groups for episode in group.episodes)
                await asyncio.sleep(LEARN_SECONDS)
                scheduler.set_version(version)
            seconds, stats, counts = time.perf_counter() - begun, scheduler.stats(), slots.counts()
        finally:
            await scheduler.close()
            await recording.close()
            await slots.close()
            await worker.close()
        await asyncio.to_thread(phones.end)
    names = dict(enumerate(phones.urls))
    log = [served for path in phones.logs for served in read_log(path, names)]
    groups_learned = campaign.updates * campaign.groups_per_update
    recorded = Recording(folder / "rollout")
    proof = await asyncio.to_thread(prove, log, recorded, RULES, learned, groups_learned)
    return Played(seconds, steps, learned, stats, counts, log, recorded, proof)


async def both(campaign: Campaign, folder: Path) -> tuple[Played, Played]:
    """Side by side: what else the machine has to do slows both down alike."""
    healthy = replace(campaign, sick=())
    return await asyncio.gather(play(healthy, folder / "healthy"), play(campaign, folder / "sick"))


def figures(healthy: Played, sick: Played, campaign: Campaign) -> dict[str, Any]:
    rates = [len(played.learned) / played.seconds for played in (healthy, sick)]
    return {
        "throughput_ratio": round(rates[1] / rates[0], 3),
        "poisoned_samples": len(healthy.proof.poisoned) + len(sick.proof.poisoned),
        "double_holders": len(healthy.proof.double_holders) + len(sick.proof.double_holders),
        "invalid_by_reason": dict(sick.stats.invalid),
        "steps": sick.steps,
        "samples": len(sick.learned),
        "samples_traced": healthy.proof.samples + sick.proof.samples,
        "samples_per_second": [round(rate, 1) for rate in rates],
        "seconds": [round(healthy.seconds, 1), round(sick.seconds, 1)],
        "busy_share": [round(healthy.stats.busy_share, 3), round(sick.stats.busy_share, 3)],
        "faults": dict(sick.proof.faults),
        "episodes": sick.stats.episodes,
        "reruns": sick.stats.reruns,
        "members": {why: n for (why, _), n in sick.stats.members.items()},
        "dropped": dict(sick.stats.dropped),
        "quarantines": sick.slots.quarantines,
        "phones": campaign.phones,
        "sick_phones": len(campaign.sick),
        "median_seconds": campaign.median_seconds,
        "seed": campaign.seed,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phones", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--share", type=float, default=0.3, help="of sick phones")
    parser.add_argument("--updates", type=int, default=12, help="a batch is one episode per phone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--median", type=float, default=0.6, help="of a healthy phone's calls, seconds")
    parser.add_argument("--keep", type=Path, help="folder for recordings and logs; default: they are removed")
    parser.add_argument("--out", type=Path, default=Path("bench-results/faults.json"))
    args = parser.parse_args()
    if args.phones % GROUP:
        parser.error(f"--phones {args.phones} is not a multiple of the group size {GROUP}")
    sick = tuple(sick_phones(args.phones, args.share, args.seed))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(args.phones, sick, args.updates, args.seed, args.median)
        healthy, ill = asyncio.run(both(campaign, folder))
    found = figures(healthy, ill, campaign)
    write(args.out, found)
    shown = ("throughput_ratio", "poisoned_samples", "double_holders", "samples_traced", "invalid_by_reason", "seconds")
    title = f"{args.phones} phones, {len(sick)} of them sick, {found['cores']} cores"
    show(title, ("", "found"), [[name, found[name]] for name in shown])
    for played in (healthy, ill):
        for name, wrong in list(played.proof.poisoned.items())[:20]:
            print(f"poisoned: {name}: {wrong}", file=sys.stderr)
        for wrong in played.proof.double_holders[:20]:
            print(f"two holders: {wrong}", file=sys.stderr)
    sys.exit(bool(found["poisoned_samples"] or found["double_holders"]))


if __name__ == "__main__":
    main()
