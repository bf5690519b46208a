"""Bad phones are exchanged, and those that were never reached are not thrown away."""

from dataclasses import replace

import pytest
from broker_lab import TASK, a_lab
from leased import on
from phones import PATIENT, a_port, until

from tapforge_envs.protocol import EnvironmentFault, Home, Reason
from tapforge_envs.slots.source import NoSlot, Verdict


async def test_dirty_and_broken_phones_are_exchanged(tmp_path, caplog):
    deadlines = replace(PATIENT, step=0.2)
    async with a_lab(tmp_path, 3) as lab, lab.claimed(1, deadlines=deadlines) as slots:
        dirty = await slots.acquire(30)
        await on(dirty).reset(TASK)
        await slots.release(dirty, Verdict.DIRTY, "the task could not be undone")
        broken = await slots.acquire(30)
        assert broken.slot != dirty.slot
        await on(broken).reset(TASK)
        await lab.server.set_faults(int(broken.slot[-1]), {"kind": "hung"})
        with pytest.raises(EnvironmentFault) as caught:
            await on(broken).step(Home(), 0)
        assert caught.value.reason is Reason.DEADLINE, "a claim that lives changes no reason"
        await slots.release(broken, Verdict.DIRTY, str(caught.value))
        last = await slots.acquire(30)
        assert last.slot not in (dirty.slot, broken.slot)
        told = {g.id: (g.verdict, g.episodes) for g in lab.broker.given}
        assert told == {f"{dirty.slot}-uid.1": ("dirty", 1), f"{broken.slot}-uid.1": ("broken", 1)}
        assert "the task could not be undone" in caplog.text
        assert "the last bad phone: slot-" in slots.describe()
        assert (slots.size, slots.counts().sick) == (1, 0)


async def test_a_new_phone_that_does_not_answer_is_exchanged_before_anybody_waits_on_it(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(2) as slots:
        with a_port() as nobody:
            await until(lambda: slots.usable == 1)
            await lab.broker.put(f"http://127.0.0.1:{nobody}/slot/0")
            await until(lambda: lab.broker.given and (slots.size, slots.usable) == (1, 1))
            assert [(g.id, g.verdict, g.episodes) for g in lab.broker.given] == [("slot-1-uid.1", "broken", 0)]


async def test_phones_that_were_never_reached_are_not_thrown_away(tmp_path):
    """A laptop without a way to the cluster's Pods must not use up the pool."""
    async with a_lab(tmp_path, 1) as lab:
        lab.broker.phones.clear()
        with a_port() as nobody:
            await lab.broker.put(f"http://127.0.0.1:{nobody}/slot/0")
            async with lab.claimed(1) as slots:
                await until(lambda: "no server answers" in slots.describe())
                with pytest.raises(NoSlot, match="no server answers.*is there a way to its Pods"):
                    await slots.acquire(0.05)
                await until(lambda: len(lab.broker.given) >= 2)
                assert {g.verdict for g in lab.broker.given} == {"clean"}
