"""An episode asks one engine: the live one with the fewest episodes when it begins."""

from house import POOL, a_house, run
from hypothesis import given
from hypothesis import strategies as st
from scripted import Demonstrator

from tapforge_trainer.attempt import seed_of
from tapforge_trainer.engine.choice import choose_engine, engine_of_new_episode
from tapforge_trainer.rollout.groups import GroupLimits

ENGINES = st.integers(0, 5)


@given(st.dictionaries(ENGINES, st.integers(0, 9)), st.none() | ENGINES)
def test_the_wanted_engine_is_chosen_while_it_lives_and_else_the_idlest(load, wanted):
    chosen = choose_engine(wanted, load)
    if wanted in load:
        assert chosen == wanted
    elif load:
        assert load[chosen] == min(load.values())
    else:
        assert chosen is None


@given(st.sets(ENGINES), st.lists(st.none() | ENGINES, max_size=20))
def test_a_new_episode_gets_the_live_engine_with_the_fewest(live, episodes):
    chosen = engine_of_new_episode(sorted(live), episodes)
    if not live:
        assert chosen is None
    else:
        assert chosen in live
        assert episodes.count(chosen) == min(episodes.count(engine) for engine in live)


def test_all_answers_of_an_episode_come_from_one_engine_and_engines_share_the_episodes():
    async def go():
        asked, live = {}, [0, 1]

        class Watched(Demonstrator):
            async def generate(self, prompt, sampling):
                asked[sampling.seed] = sampling.engine
                return await super().generate(prompt, sampling)

        def engines_of(groups):
            episodes = [episode for group in groups for episode in group.episodes]
            found = [{asked[seed_of(e.seed, step)] for step in range(len(e.steps))} for e in episodes]
            assert all(len(engines) == 1 for engines in found)
            return {engine for engines in found for engine in engines}

        async with a_house(Watched(POOL), limits=GroupLimits(4, 1, 0), engines=lambda: live) as house:
            assert engines_of(await house.scheduler.next_batch()) == {0, 1}
            live.remove(0)
            house.scheduler.set_version(1)
            assert engines_of(await house.scheduler.next_batch()) == {1}

    run(go())
