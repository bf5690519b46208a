"""What becomes of requests that are in flight: when weights change, when nobody waits any more, when the engine dies.

None of these tests hopes that a long answer is still being sampled: the engine is held until its moment has come."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from both_ends import END, SHOTS, TOLERANCE, Hand, ask, client_of, gap, new_client, prompts_of, shake
from tiny_samples import Tiny, at_hand, of_generation

from tapforge_trainer.engine.client import EngineError
from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.records import Sampling
from tapforge_trainer.sync.history import ProofHistory
from tapforge_trainer.sync.proof import Probe
from tapforge_trainer.sync.sync import SyncMismatch, synchronize, verify

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def asked(engines: Engines, hand: Hand, tiny: Tiny, count: int, max_tokens: int) -> asyncio.Task:
    """Requests that are in the held engine, all of them."""
    asking = [client_of(engines).generate(prompt, Sampling(max_tokens)) for prompt in prompts_of(tiny, count)]
    running = asyncio.gather(*asking, return_exceptions=True)
    await hand.until(lambda seen: len(seen.in_flight) == count)
    return running


async def test_a_failed_sync_fails_the_requests_in_flight_and_the_next_one_repairs(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, hand: Hand, next_version: int
) -> None:
    """Those that end while the new weights are unproven, too."""
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    payload = await fresh.weights()
    await fresh.run(shake, 0.05, "")
    await hand.hold()
    running = await asked(engines, hand, tiny, 16, 20)
    longest = asyncio.gather(client_of(engines).generate(tiny.prompt([]), Sampling(900)), return_exceptions=True)
    await hand.until(lambda seen: len(seen.in_flight) == 17)
    await engines.renew(payload, next_version + 1, "keep", END)
    await hand.until(lambda seen: len(seen.in_flight) <= 1)
    with pytest.raises(SyncMismatch) as mismatch:
        await verify(fresh, engines, probe, next_version + 1, TOLERANCE, END, ProofHistory())
    assert not running.done() and not longest.done()
    await engines.discard(str(mismatch.value), END)
    for failed in (*await running, *await longest):
        assert isinstance(failed, EngineError)
        assert "does not answer with the new weights" in str(failed)
    await synchronize(fresh, engines, probe, next_version + 2)
    prompts = prompts_of(tiny, 5)
    assert await gap(tiny, fresh, prompts, await ask(engines, prompts)) < TOLERANCE


async def test_weights_that_can_not_be_loaded_leave_the_engine_repairable(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, hand: Hand, next_version: int
) -> None:
    engines = both[0]
    await hand.hold()
    running = await asked(engines, hand, tiny, 16, 400)
    with pytest.raises(EngineError, match="renew failed"):
        await engines.renew(b"no weights", next_version, "keep", END)
    for failed in await running:
        assert isinstance(failed, EngineError)
        assert f"weights of version {next_version} failed" in str(failed)
    with pytest.raises(EngineError, match=f"weights of version {next_version} failed"):
        await ask(engines, prompts_of(tiny, 2))
    await synchronize(fresh, engines, probe, next_version)
    prompts = prompts_of(tiny, 5)
    assert await gap(tiny, fresh, prompts, await ask(engines, prompts)) < TOLERANCE


async def test_mid_episode_keep_gives_every_token_its_version(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, hand: Hand, next_version: int
) -> None:
    """Answers that were half said when the weights changed: each token's log-probability is that of its version."""
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    await hand.hold()
    prompts = prompts_of(tiny, 8)
    running = await asked(engines, hand, tiny, 8, 100)
    await hand.step(50)
    await fresh.run(shake, 0.02, "")
    await synchronize(fresh, engines, probe, next_version + 1, mode="keep")
    said = await running
    assert all(set(g.versions) == {next_version, next_version + 1} for g in said)
    assert all(list(g.versions) == sorted(g.versions) for g in said)
    samples = [of_generation(prompt, g) for prompt, g in zip(prompts, said, strict=True)]
    mine = await fresh.logprobs(samples, at_hand(samples, {f.name: f for prompt in prompts for f in prompt.frames}))
    for g, logprobs in zip(said, mine, strict=True):
        gaps = np.abs(np.subtract(logprobs, g.logprobs))
        new = np.asarray(g.versions) == next_version + 1
        assert gaps[new].max() < TOLERANCE
        assert gaps[~new].max() > 1e-3


async def test_mid_episode_wait_mixes_no_versions(
    tiny: Tiny,
    both: tuple[Engines, Learner],
    fresh: Learner,
    probe: Probe,
    hand: Hand,
    next_version: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who was in flight ends with the old weights; who comes before the new ones are proven waits for them."""
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    await hand.hold()
    running = await asked(engines, hand, tiny, 6, 40)
    await hand.step(10)
    await fresh.run(shake, 0.02, "")
    release, later = engines.release, []

    async def release_with_others_waiting(version: int, deadline: float) -> None:
        later.append(asyncio.create_task(ask(engines, prompts_of(tiny, 3))))
        await hand.until(lambda seen: len(seen.queued) == 3)
        await release(version, deadline)

    monkeypatch.setattr(engines, "release", release_with_others_waiting)
    await synchronize(fresh, engines, probe, next_version + 1, mode="wait")
    said = await running
    assert {version for g in said for version in g.versions} == {next_version}
    assert {version for g in await later[0] for version in g.versions} == {next_version + 1}


async def test_a_deadline_ends_a_generation_and_frees_the_engine(
    tiny: Tiny, both: tuple[Engines, Learner], hand: Hand
) -> None:
    engines = both[0]
    await hand.hold()
    client = new_client(engines, answer_seconds=0.05)
    with pytest.raises(EngineError, match=r"did not answer within 0 s"):
        await client.generate(tiny.prompt([]), Sampling(900))
    assert not client._engines[0].waiting
    await hand.until(lambda seen: len(seen.came) == 1 and not seen.in_flight)
    await hand.let_go()
    assert (await ask(engines, [tiny.prompt([])]))[0].ids


async def test_a_cancelled_generation_is_aborted(tiny: Tiny, both: tuple[Engines, Learner], hand: Hand) -> None:
    engines = both[0]
    await hand.hold()
    task = asyncio.create_task(client_of(engines).generate(tiny.prompt([SHOTS[0]]), Sampling(900)))
    await hand.until(lambda seen: len(seen.in_flight) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await hand.until(lambda seen: not seen.in_flight)
    await hand.let_go()
    assert (await ask(engines, [tiny.prompt([])]))[0].ids


async def test_a_dead_sole_engine_comes_back_with_the_current_weights_and_its_requests_wait(
    tiny: Tiny, both: tuple[Engines, Learner], fresh: Learner, probe: Probe, hand: Hand, next_version: int
) -> None:
    import ray

    engines = both[0]
    await fresh.run(shake, 0.02, "")
    await synchronize(fresh, engines, probe, next_version)
    await hand.hold()
    running = await asked(engines, hand, tiny, 3, 12)
    ray.kill(engines._engines[0].actor)
    await asyncio.wait_for(engines.starved.wait(), END)
    assert not engines.replicas.live and engines.restarts == 1
    late = asyncio.create_task(ask(engines, prompts_of(tiny, 2)))
    await asyncio.sleep(0)
    assert not running.done() and not late.done()
    await synchronize(fresh, engines, probe, next_version)
    said = [*await asyncio.wait_for(running, END), *await asyncio.wait_for(late, END)]
    assert {version for g in said for version in g.versions} == {next_version}
    prompts = prompts_of(tiny, 5)
    said = await ask(engines, prompts)
    assert {version for g in said for version in g.versions} == {next_version}
    assert await gap(tiny, fresh, prompts, said) < TOLERANCE
