"""Episodes on the simulated phone, with their screens, and a judge's server in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random

from aiohttp import web

from tapforge_api.judge import JudgeSpec
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.protocol import ACTION, Outcome, Reason, Task, Terminate, outcome_of
from tapforge_trainer.judges.judge import Trajectory
from tapforge_trainer.judges.server import JudgeServer
from tapforge_trainer.records import EpisodeRecord, Generation, StepRecord

WIDTH, HEIGHT = 96, 160


def spec(url: str, **fields: object) -> JudgeSpec:
    model = {"url": url, "model": "simulated-phone", **fields.pop("model", {})}  # type: ignore[dict-item]
    return JudgeSpec.model_validate({"models": [model], "prompt": "simulated-phone", **fields})


def played(task: Task, name: str = "e1", error_rate: float = 0.0, seed: int = 0, text: str = "tap") -> Trajectory:
    """A demonstrator with an error rate. Every screen is there, the last one too."""
    template = catalog.template_of(task)
    phone = catalog.phone_for(task.suite, WIDTH, HEIGHT)
    screens = [phone.reset(task.seed, template.rules(task.params)).frame.data]
    rng, steps = Random(f"{seed}:{task.key}"), list[StepRecord]()
    reason = Reason.STEP_LIMIT
    for action in demonstration(phone, template, task.params, lambda: rng.random() < error_rate):
        result = phone.step(action)
        screens.append(result.observation.frame.data)
        generation = Generation((1,), (2,), (-0.5,), (0,), "stop", 1)
        wire = ACTION.dump_python(action)
        steps.append(
            StepRecord(name, len(steps), ("f",), None, None, generation, text, wire, None, 0.0, result.note, 0.1, 0.1)
        )
        if result.done:
            infeasible = isinstance(action, Terminate) and action.status == "infeasible"
            reason = Reason.DECLARED_INFEASIBLE if infeasible else Reason.DONE
            break
    score = phone.evaluate().value if reason is Reason.DONE else None
    outcome = outcome_of(reason, feasible=task.feasible, threshold=task.threshold, score=score)
    record = EpisodeRecord(name, "g", task, 0, "s", 0, reason, outcome, score, "", tuple(steps), 0.0, 1.0)
    return Trajectory(record, tuple(screens))


def some(count: int, suite: str = "quickstart", error_rate: float = 0.5) -> Iterator[Trajectory]:
    tasks = catalog.tasks(suite, "train")
    for number in range(count):
        yield played(tasks.sample(7, number), f"e{number}", error_rate, seed=number)


def solved(trajectory: Trajectory) -> bool:
    return trajectory.episode.outcome is Outcome.SUCCESS


@asynccontextmanager
async def serving(server: JudgeServer | web.Application) -> AsyncIterator[str]:
    """The endpoint's url."""
    app = server.application() if isinstance(server, JudgeServer) else server
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
