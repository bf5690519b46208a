"""The same work scheduled in lock-step and asynchronously, over phones with heavy-tailed latency.

    python bench/rollout.py [--slots 16] [--updates 6] [--sigmas 0.25 0.5 1 1.5] [--only with-learner]

Both sides: the same phones in a process of their own behind real sockets, the same client, adapter and scripted engine,
the same tasks in the same order, the same answers (from the same seeds; the number of steps they execute is compared
and must be equal), latencies drawn from the same log-normal numbers (named by task, repetition and step), one update
per batch with the same fixed time to learn. Measured is the wall time from the first reset to the end of the last
update, for the same number of usable samples.

- Lock-step, as rollout workers of published GUI trainers do it: one episode per slot; all running episodes are asked
  together, and all their phones step together. Finished slots drop out of the following rounds (nothing waits for them
  any more); the next batch begins after the update.
- Asynchronous: `Scheduler` with a staleness bound of 1. Groups are consumed in issue order, none is dropped for being
  late. It also records everything to disk, which the lock-step side is spared. At the end it has begun episodes of
  batches that are not learned from any more: they count as no sample, and the time they took from others does.

`busy_share` is the share of slot time in which phones work on a call; `sample_age` the mean number of policy versions
between a group's admission and its update (0 for lock-step).

Then both again with a learner, over 40 updates: one that takes as long as an update's steps on these phones, as in the
split of GPUs that `tapforge plan --speed` finds best, and a staleness bound of 2. There `busy_share` is leased time, as
a run reports it; ages are of groups. Both halves go into bench-results/rollout.json:
{rows: [...], with_learner: {sigma: {ratio, busy_share, oldest, mean_age, dropped, ...}}}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from load.machine import machine, show, write
from load.phones import MeteredClients, SameLength, SlowPhones
from load.policy import SAMPLING, ScriptedEngine, adapter

from tapforge_envs.protocol import Environment, Reason, needs_score
from tapforge_envs.slots.source import Verdict
from tapforge_trainer.agents.agent import Agent, ContextLimit, Prepared, Turn
from tapforge_trainer.agents.parsing import ParseFailure
from tapforge_trainer.attempt import Attempt, EpisodeLimits, seed_of
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import Generator
from tapforge_trainer.rollout.episode import Standing, after_answer
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.source import TaskSource

GROUP, MAX_STEPS, SEED = 4, 16, 0
#: of one answer, whether it is asked for alone or in a batch; and of one update
ENGINE_SECONDS, LEARN_SECONDS = 0.005, 0.1
#: probability that an answer ends its episode
END = 1 / 8
MALFORMED = EpisodeLimits().max_parse_failures


@dataclass
class Load:
    slots: SlowPhones
    phones: MeteredClients
    agent: Agent
    engine: Generator
    groups_per_update: int
    updates: int
    learn_seconds: float = LEARN_SECONDS
    staleness: int = 1

    def tasks(self) -> TaskSource:
        return TaskSource(SameLength(MAX_STEPS), SEED)


@dataclass(frozen=True)
class Slow:
    """Phones: how many, in how many server processes, and how slow."""

    slots: int
    processes: int
    median: float
    sigma: float


@dataclass
class Figures:
    seconds: float
    #: environment steps of the samples that were learned from
    steps: int
    busy_share: float
    sample_age: float = 0.0
    #: of the slots' time, in which they were leased
    leased_share: float = 0.0
    oldest: int = 0
    dropped: int = 0


# --- lock-step --------------------------------------------------------------------------------------------------------


@dataclass
class _Player:
    """An episode in a lock-step batch."""

    work: Attempt
    environment: Environment
    seen: Prepared
    history: list[Turn]
    standing: Standing
    reason: Reason | None = None


async def lock_step(load: Load) -> Figures:
    tasks, steps, order = load.tasks(), 0, 0
    begun, worked = time.perf_counter(), load.phones.working
    for _ in range(load.updates):
        works = []
        for _ in range(load.groups_per_update):
            task = tasks.next()
            for member in range(GROUP):
                seed = seed_of(SEED, "train", order, member, 0)
                works.append(Attempt(f"g{order}", order, member, 0, 0, task, seed))
            order += 1
        steps += await _batch(load, works)
        await asyncio.sleep(load.learn_seconds)
    seconds = time.perf_counter() - begun
    return Figures(seconds, steps, (load.phones.working - worked) / (seconds * load.slots.size))


async def _batch(load: Load, works: list[Attempt]) -> int:
    leases = [await load.slots.acquire(60) for _ in works]
    opened = [load.phones.open(lease.phone) for lease in leases]
    first = await asyncio.gather(*(phone.reset(w.task) for phone, w in zip(opened, works, strict=True)))
    players = [
        _Player(work, phone, load.agent.prepare(seen)[0], [], Standing())
        for work, phone, seen in zip(works, opened, first, strict=True)
    ]
    running = players
    while running:
        await _round(load, running)
        running = [p for p in running if p.reason is None]
    await asyncio.gather(
        *(p.environment.evaluate() for p in players if p.reason and needs_score(p.reason, p.work.task.feasible))
    )
    for lease in leases:
        await load.slots.release(lease, Verdict.CLEAN)
    return sum(p.standing.executed for p in players)


async def _round(load: Load, running: list[_Player]) -> None:
    """One answer and one step of every running episode; ends when the slowest phone has answered."""
    prompts = []
    for p in running:
        prompt = load.agent.prompt(p.work.task.goal, p.history, p.seen)
        if isinstance(prompt, ContextLimit):
            raise RuntimeError(f"the benchmark's context is too small: {prompt}")
        prompts.append(prompt)
    generations = await asyncio.gather(
        *(
            load.engine.generate(prompt, replace(SAMPLING, seed=seed_of(p.work.seed, p.standing.answers)))
            for prompt, p in zip(prompts, running, strict=True)
        )
    )
    moves = []
    for p, generation in zip(running, generations, strict=True):
        text = load.agent.decode(generation.ids)
        answer = load.agent.read(text, generation.finish_reason, prompt.frames[-1])
        if isinstance(answer, ParseFailure):
            raise RuntimeError(f"the scripted engine's answer is malformed: {answer}")
        index = p.standing.executed
        p.standing, p.reason = after_answer(p.standing, answer, p.work.task.max_steps, MALFORMED)
        p.history.append(Turn(p.seen, text, answer))
        moves.append(p.environment.step(answer, index))
    for p, result in zip(running, await asyncio.gather(*moves), strict=True):
        p.seen, _ = load.agent.prepare(result.observation)


# --- asynchronous -----------------------------------------------------------------------------------------------------


async def asynchronous(load: Load, folder: Path) -> Figures:
    recorder = RecordingQueue(Recorder(folder))
    begun, worked, steps = time.perf_counter(), load.phones.working, 0
    scheduler = Scheduler(
        load.slots,
        RolloutWorker(load.agent, {"": load.engine}, load.phones),
        SAMPLING,
        tasks=load.tasks(),
        groups=GroupLimits(GROUP, load.groups_per_update, max_staleness=load.staleness, deadline_seconds=None),
        recorder=recorder,
        seed=SEED,
    )
    for version in range(1, load.updates + 1):
        batch = await scheduler.next_batch()
        steps += sum(len(e.steps) for g in batch for e in g.episodes)
        await asyncio.sleep(load.learn_seconds)
        scheduler.set_version(version)
    seconds = time.perf_counter() - begun
    busy = (load.phones.working - worked) / (seconds * load.slots.size)
    stats = scheduler.stats()
    await scheduler.close()
    await recorder.close()
    dropped, oldest = sum(stats.dropped.values()), max(stats.sample_age, default=0)
    return Figures(seconds, steps, busy, stats.mean_sample_age, stats.busy_share, oldest, dropped)


Sides = tuple[Figures, Figures]

# --- both -------------------------------------------------------------------------------------------------------------


async def both(load_of: Callable[[SlowPhones, MeteredClients], Load], slow: Slow, folder: Path) -> Sides:
    figures = []
    for side in ("lock-step", "asynchronous"):
        # Each side has fresh phones, whose latencies begin from the same names.
        slots = SlowPhones(slow.slots, slow.processes, slow.median, slow.sigma)
        phones = MeteredClients()
        await slots.start()
        try:
            load = load_of(slots, phones)
            figures.append(await (lock_step(load) if side == "lock-step" else asynchronous(load, folder)))
        finally:
            await slots.close()
            await phones.close()
    lock, free = figures
    if lock.steps != free.steps:
        raise RuntimeError(f"the sides did different work: {lock.steps} and {free.steps} steps")
    return lock, free


def compare(slow: Slow, updates: int, folder: Path) -> dict[str, Any]:
    """A learner that takes no time to speak of."""
    agent = adapter(folder / "model")

    def load(slots: SlowPhones, phones: MeteredClients) -> Load:
        return Load(slots, phones, agent, ScriptedEngine(agent, ENGINE_SECONDS, END), slow.slots // GROUP, updates)

    lock, free = asyncio.run(both(load, slow, folder / "recording"))
    return {
        "sigma": slow.sigma,
        "lockstep_seconds": round(lock.seconds, 2),
        "async_seconds": round(free.seconds, 2),
        "ratio": round(lock.seconds / free.seconds, 2),
        "busy_share": round(free.busy_share, 3),
        "lockstep_busy_share": round(lock.busy_share, 3),
        "sample_age": round(free.sample_age, 2),
        "samples": updates * (slow.slots // GROUP) * GROUP,
        "env_steps": lock.steps,
        "slots": slow.slots,
        "median_step_seconds": slow.median,
        **machine(),
    }


def compare_with_learner(slow: Slow, updates: int, folder: Path) -> dict[str, Any]:
    """A learner that takes as long as the split of GPUs which `tapforge plan --speed` calls balanced: as long as an
    update's steps on these phones."""
    agent = adapter(folder / "model")
    step = slow.median * math.exp(slow.sigma**2 / 2) + ENGINE_SECONDS
    learn = step * (1 - (1 - END) ** MAX_STEPS) / END  # an episode per slot, each of as many steps on average

    def load(slots: SlowPhones, phones: MeteredClients) -> Load:
        engine = ScriptedEngine(agent, ENGINE_SECONDS, END)
        return Load(slots, phones, agent, engine, slow.slots // GROUP, updates, learn, staleness=2)

    lock, free = asyncio.run(both(load, slow, folder / "recording"))
    return {
        "ratio": round(lock.seconds / free.seconds, 2),
        "busy_share": round(free.leased_share, 3),
        "working_share": round(free.busy_share, 3),
        "lockstep_working_share": round(lock.busy_share, 3),
        "oldest": free.oldest,
        "mean_age": round(free.sample_age, 2),
        "dropped": free.dropped,
        "lockstep_seconds": round(lock.seconds, 1),
        "async_seconds": round(free.seconds, 1),
        "learn_seconds": round(learn, 2),
        "updates": updates,
        "slots": slow.slots,
        "median_step_seconds": slow.median,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["without-learner", "with-learner"], help="one half; the other one stays")
    parser.add_argument("--slots", type=int, default=16, help="a batch is one episode per slot; a multiple of 4")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--median", type=float, default=0.02, help="median latency of a phone's step, seconds")
    parser.add_argument("--processes", type=int, default=1, help="phone servers")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.25, 0.5, 1.0, 1.5])
    parser.add_argument("--learner-updates", type=int, default=40)
    parser.add_argument("--learner-median", type=float, default=0.1)
    parser.add_argument("--learner-sigmas", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--out", type=Path, default=Path("bench-results/rollout.json"))
    args = parser.parse_args()
    if args.slots % GROUP:
        parser.error(f"--slots {args.slots} is not a multiple of the group size {GROUP}")
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = kept if isinstance(kept, dict) else {}  # earlier versions wrote rows alone
    if args.only != "with-learner":
        found["rows"] = []
        for sigma in args.sigmas:
            with tempfile.TemporaryDirectory() as folder:
                slow = Slow(args.slots, args.processes, args.median, sigma)
                found["rows"].append(compare(slow, args.updates, Path(folder)))
        shown = ("sigma", "lockstep_seconds", "async_seconds", "ratio", "busy_share", "lockstep_busy_share")
        rows = [[row[name] for name in (*shown, "sample_age")] for row in found["rows"]]
        show(f"{args.slots} phones, {found['rows'][0]['samples']} samples", (*shown, "sample_age"), rows)
        write(args.out, found)
    if args.only != "without-learner":
        learner = found.setdefault("with_learner", {})
        for sigma in args.learner_sigmas:
            with tempfile.TemporaryDirectory() as folder:
                slow = Slow(args.slots, args.processes, args.learner_median, sigma)
                learner[str(sigma)] = compare_with_learner(slow, args.learner_updates, Path(folder))
            write(args.out, found)
        shown = ("ratio", "busy_share", "oldest", "mean_age", "dropped")
        rows = [[sigma, *(of[name] for name in shown)] for sigma, of in learner.items()]
        show(f"{args.slots} phones, with a learner", ("sigma", *shown), rows)


if __name__ == "__main__":
    main()
