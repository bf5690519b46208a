"""One engine dies in the middle of an answer and the other one answers; then both work again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from both_ends import END, SHOTS, TOLERANCE, Hand, ask, client_of, gap, new_client, prompts_of, shake
from tiny_samples import Tiny

from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.records import Sampling
from tapforge_trainer.sync.proof import Probe
from tapforge_trainer.sync.sync import synchronize

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two(tiny: Tiny, ray_cluster: None) -> AsyncIterator[Engines]:
    engines = Engines(tiny.engine_settings(), tiny.form, tiny.tokens.image_pad, replicas=2)
    await engines.ready()
    yield engines
    await engines.close()


async def test_two_clients_in_two_processes_have_one_engine(tiny: Tiny, two: Engines) -> None:
    """The other client is made from the connection in a process that has nothing but that."""
    import ray

    async def elsewhere(connection: object, prompts: object) -> object:
        from tapforge_trainer.engine.client import EngineClient
        from tapforge_trainer.records import Sampling

        client = EngineClient(connection)  # type: ignore[arg-type]
        return await asyncio.gather(*(client.generate(p, Sampling(6, seed=3, engine=0)) for p in prompts))  # type: ignore[attr-defined]

    def in_a_loop(connection: object, prompts: object) -> object:
        return asyncio.run(elsewhere(connection, prompts))

    prompts = prompts_of(tiny, 6)
    there = ray.remote(num_cpus=0)(in_a_loop).remote(two.connection, prompts)
    here = await ask(two, prompts, max_tokens=6, seed=3, engine=0)
    theirs = await asyncio.wait_for(there, END)
    assert [list(g.ids) for g in theirs] == [list(g.ids) for g in here]


async def test_when_one_of_two_dies_the_other_answers_and_it_comes_back_with_the_next_weights(
    tiny: Tiny, two: Engines, both: tuple[Engines, Learner], fresh: Learner, probe: Probe
) -> None:
    import ray

    await synchronize(fresh, two, probe, 1)
    hand, prompts = Hand(two), prompts_of(tiny, 8)
    await hand.hold()
    clients = client_of(two), new_client(two)
    asked = [
        asyncio.create_task(client.generate(prompt, Sampling(12, engine=0))) for client in clients for prompt in prompts
    ]
    await hand.until(lambda seen: len(seen.in_flight) == 16)
    await hand.step(3)
    ray.kill(two._engines[0].actor)
    said = await asyncio.wait_for(asyncio.gather(*asked), END)
    assert {version for g in said for version in g.versions} == {1}
    assert await gap(tiny, fresh, prompts, said[:8]) < TOLERANCE
    assert [replica.index for replica in two.replicas.live] == [1] and two.restarts == 1
    async with asyncio.timeout(END):
        while not two._engines[0].up:  # noqa: ASYNC110 - another process starts
            await asyncio.sleep(0.05)
    assert [replica.index for replica in two.replicas.live] == [1], "its weights are the folder's"
    await fresh.run(shake, 0.02, "")
    await synchronize(fresh, two, probe, 2)
    assert [(replica.index, replica.incarnation) for replica in two.replicas.live] == [(0, 1), (1, 0)]
    for engine in (0, 1):
        said = await ask(two, prompts, engine=engine)
        assert {version for g in said for version in g.versions} == {2}
        assert await gap(tiny, fresh, prompts, said) < TOLERANCE


async def test_hit_rates_say_what_the_caches_did(
    tiny: Tiny, two: Engines, both: tuple[Engines, Learner], fresh: Learner, probe: Probe
) -> None:
    await synchronize(fresh, two, probe, 3)
    prompts = [tiny.prompt([SHOTS[k]], k, before=300) for k in range(4)]  # longer than a block of the prefix cache
    for _ in range(3):
        await ask(two, prompts, engine=0)
    await synchronize(fresh, two, probe, 4)
    assert two.metrics["mm_cache_hit_rate"] > 0.5
    assert 0.3 < two.metrics["prefix_cache_hit_rate"] < 1
    # 12 prompts with four different frames, each computed once
    assert two.metrics["encoder_cache_hit_rate"] == pytest.approx(1 - 4 / 12)
    block = 128  # of vLLM's cache on CPUs, tokens
    assert two.metrics["sync_dropped_tokens"] >= 4 * block and two.metrics["sync_dropped_tokens"] % block == 0
