"""A process dies at each step of a sync, with real ranks and engines: an engine costs a retry, a rank a restart of all,
after which the engines answer with the checkpoint's weights. They are ranks and engines of their own, because they die.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from both_ends import END, TOLERANCE, gap, prompts_of, shake
from tiny_samples import Tiny

from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.checkpoint_storage import CheckpointFolder
from tapforge_trainer.learner.client import Learner, RanksLost
from tapforge_trainer.policy import Policy, PolicySettings
from tapforge_trainer.records import Generation, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")
#: calls of a sync, in their order: begin, transfer, the two halves of the proof, publish
STEPS = {
    "begin": (Learner, "weights"),
    "transfer": (Engines, "renew"),
    "proof of bytes": (Engines, "arrivals"),
    "proof of answers": (Engines, "probe"),
    "publish": (Engines, "release"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policy(tiny: Tiny, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policy]:
    place = CheckpointFolder(tmp_path_factory.mktemp("lost") / "checkpoints")
    engine = tiny.engine_settings()
    policy = Policy(PolicySettings(engine, tiny.learner_settings(ranks=2), place=place, sync_seconds=END))

    async def nothing() -> None:
        """Ray is the tests'."""

    policy.start_ray = nothing  # type: ignore[method-assign]
    try:
        await policy.start()
        await policy._engines_ready  # type: ignore[misc]
        await policy.sync(0)
        await policy.save(7, {"version": 7}, lambda written: None)
        await policy.settle()
        yield policy
    finally:
        await policy.close()


def ended(actor: Any) -> None:
    """Killed, and known to be: Ray kills while calls go on, and one may still be answered."""
    import ray

    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):
            ray.get(actor.__ray_ready__.remote(), timeout=END)
            time.sleep(0.1)


def killing(monkeypatch: pytest.MonkeyPatch, step: str, kill: Callable[[], Any]) -> list[str]:
    """Before that call; once. Returns what was called."""
    called: list[str] = []
    kind, name = STEPS[step]
    method = getattr(kind, name)

    async def dying(self: Any, *arguments: Any, **further: Any) -> Any:
        if not called:
            kill()
        called.append(name)
        return await method(self, *arguments, **further)

    monkeypatch.setattr(kind, name, dying)
    return called


async def _answers(tiny: Tiny, policy: Policy) -> list[Generation]:
    asked = (policy.generator.generate(prompt, Sampling(6)) for prompt in prompts_of(tiny, 4))
    return list(await asyncio.wait_for(asyncio.gather(*asked), END))


@pytest.mark.parametrize(
    "step",
    ["proof of answers", *(pytest.param(step, marks=pytest.mark.long) for step in ("begin", "transfer", "publish"))],
)
async def test_an_engine_that_dies_in_a_sync_costs_a_retry(
    tiny: Tiny, policy: Policy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    version, restarts = policy._version + 1, policy._engines.restarts
    called = killing(monkeypatch, step, lambda: ended(policy._engines._engines[0].actor))
    assert await asyncio.wait_for(policy.sync(version), END) < TOLERANCE
    assert len(called) == 2 and policy._engines.restarts == restarts + 1 and policy.lost is None
    assert {v for g in await _answers(tiny, policy) for v in g.versions} == {version}


@pytest.mark.parametrize(
    "step",
    ["transfer", *(pytest.param(step, marks=pytest.mark.long) for step in ("begin", "proof of bytes", "publish"))],
)
async def test_a_rank_that_dies_in_a_sync_costs_a_restart_of_all(
    tiny: Tiny, policy: Policy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """At the last step engines are asked alone: the next update, or sync, finds it dead."""
    async with policy.learning(8) as learner:
        await learner.run(shake, 0.02, "")  # an update that no checkpoint has
    learner = policy._learner
    killing(monkeypatch, step, lambda: ended(learner._ranks[1]))
    waiting = asyncio.create_task(_answers(tiny, policy)) if step == "transfer" else None
    with pytest.raises(RanksLost, match="died during"):
        await asyncio.wait_for(policy.sync(8), END)
        await asyncio.wait_for(policy.sync(9), END)
    assert policy.lost is learner.lost is not None
    await asyncio.wait_for(policy.restart(), END)
    assert await policy.resume() == {"version": 7} and policy.lost is None
    assert await asyncio.wait_for(policy.sync(7), END) < TOLERANCE
    answers = await _answers(tiny, policy)
    assert {v for g in answers for v in g.versions} == {7}
    assert await gap(tiny, policy._learner, prompts_of(tiny, 4), answers) < TOLERANCE
    if waiting is not None:  # asked of the engine that was ended
        assert len(await asyncio.wait_for(waiting, END)) == 4
