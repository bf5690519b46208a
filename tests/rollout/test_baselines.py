"""A baseline is reproducible: it depends neither on the machine's speed nor on how many play at once."""

import pytest
from house import FEASIBLE, run
from phones import PATIENT, phones
from scripted import AGENT

from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.attempt import EpisodeLimits
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.rollout.baselines import baselines
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.run.assembly import RolloutSetup
from tapforge_trainer.run.evaluation import play


@pytest.mark.parametrize("name", ["random", "always_infeasible"])
def test_the_same_seed_plays_the_same_episodes_whatever_runs_beside_them(tmp_path, name):
    async def played(seed: int, concurrency: int) -> list[list[dict | None]]:
        async with phones(4) as server:
            slots = UrlSlots(parse_urls(server.urls, "phones"), PATIENT)
            await slots.start()
            worker = RolloutWorker(AGENT, baselines(AGENT))
            rollout_setup = RolloutSetup(
                slots, AGENT, worker, EpisodeLimits(), GroupLimits(), 99, concurrency, 100.0, Retention()
            )
            try:
                episodes = await play(
                    rollout_setup,
                    FEASIBLE[:4],
                    policy=name,
                    repeats=2,
                    temperature=1.0,
                    seed=seed,
                    folder=tmp_path / f"{seed}-{concurrency}",
                )
            finally:
                await slots.close()
                await worker.close()
            return [[step.action for step in e.steps] for e in episodes]

    async def go():
        one = await played(7, 1)
        assert one == await played(7, 4)
        if name == "random":
            assert one != await played(8, 4)
            assert one[0] != one[1], "repeats of a task are played differently"

    run(go())
