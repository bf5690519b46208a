"""Claims on a pool's phones: against a broker with a ledger of its own over TLS, and real phone servers."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from phones import PATIENT, TASKS, Phones, a_port, bounded, phones, put_forward, until
from small_broker import NAMESPACE, POOL, Authority, SmallBroker, loop_time

from tapforge_envs.protocol import EnvironmentFault, Home, Reason
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.claimed import HeldClaim
from tapforge_envs.slots.holdings import Pace
from tapforge_envs.slots.source import Lease, NoSlot, SlotError, Verdict

PACE = Pace(wait=1, answer=60, first=0.02, cap=0.2, close=60)
TASK = TASKS.sample(0, 0)


@dataclass
class Lab:
    broker: SmallBroker
    authority: Authority
    server: Phones

    def slots(self, count: int = 2, pool: str = POOL, **kw) -> BrokerSlots:
        access = kw.pop("access", None) or self.authority.access(self.broker.port)
        return BrokerSlots(pool, access, slots=count, **{"deadlines": PATIENT, "pace": PACE, "clock": loop_time, **kw})

    @asynccontextmanager
    async def claimed(self, count: int = 2, **kw) -> AsyncIterator[BrokerSlots]:
        """Phones that are claimed until the block ends; then none of them waits for its expiry."""
        slots = self.slots(count, **kw)
        await slots.start()
        try:
            yield slots
        finally:
            await slots.close()
        assert not self.broker.held
        assert not self.broker.broken


@asynccontextmanager
async def a_lab(folder: Path, count: int = 3, ttl: float = 120.0, *, up: bool = True) -> AsyncIterator[Lab]:
    """A broker that grants `count` phones for `ttl` seconds each."""
    with bounded(), a_port() as port:
        authority, broker = Authority(folder / "ca"), SmallBroker(ttl, port)
        async with phones(count) as server:
            await broker.put(*server.urls)
            lab = Lab(broker, authority, server)
            if not up:
                yield lab
                return
            async with broker.serving(authority):
                yield lab


async def play(lease: Lease, steps: int = 2) -> None:
    await lease.environment.reset(TASK)
    for index in range(steps):
        await lease.environment.step(Home(), index)


# --- claims ---


async def test_no_more_than_wanted_are_claimed_and_each_serves_one_episode_at_a_time(tmp_path):
    async with a_lab(tmp_path, 3) as lab, lab.claimed(2, priority=7) as slots:
        await until(lambda: slots.usable == 2)
        assert (slots.size, slots.counts().free, len(lab.broker.held)) == (2, 2, 2)
        assert lab.broker.acquires[0].priority == 7
        a, b = await slots.acquire(1), await slots.acquire(1)
        assert {a.slot, b.slot} == lab.broker.held
        waiting = asyncio.create_task(slots.acquire(30))
        await asyncio.gather(play(a), play(b))
        assert not waiting.done() and slots.counts().leased == 2
        await slots.release(a, Verdict.CLEAN)
        again = await waiting
        assert again.slot == a.slot and again.fence > a.fence
        with pytest.raises(SlotError, match="returned before"):
            await slots.release(a, Verdict.CLEAN)
        await slots.release(again, Verdict.CLEAN)
        await slots.release(b, Verdict.CLEAN)
        assert len(lab.broker.acquires) <= 2, "nothing more is asked for"


async def test_phones_are_taken_as_they_come_free_and_who_waits_in_vain_learns_why(tmp_path):
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1

    async with a_lab(tmp_path, 2) as lab:
        urls = [p.url for p in lab.broker.phones.values()]
        lab.broker.phones.clear()
        async with lab.claimed(2) as slots:
            stop_telling = slots.when_changed(tell)
            assert (slots.size, slots.usable) == (0, 0)
            with pytest.raises(NoSlot, match="0 of at most 2 phones of the pool 'phones'.*every phone is taken"):
                await slots.acquire(0.05)
            waiting = asyncio.create_task(slots.acquire(30))
            await lab.broker.put(urls[0])
            first = await waiting
            await play(first)
            assert (slots.size, slots.usable, told) == (1, 1, 1)
            stop_telling()
            await lab.broker.put(urls[1])
            assert (await slots.acquire(30)).slot == "slot-1"
            assert told == 1


async def test_recalled_phones_go_back_clean_at_the_end_of_their_episode_and_idle_ones_at_once(tmp_path):
    async with a_lab(tmp_path, 2) as lab, lab.claimed(2) as slots:
        await until(lambda: slots.usable == 2)
        lease = await slots.acquire(1)
        await play(lease)
        idle = next(iter(lab.broker.held - {lease.slot}))
        for slot in (lease.slot, idle):
            lab.broker.recall(slot)
        await lab.broker.hears()
        await until(lambda: lab.broker.given)
        assert [(g.id, g.verdict, g.episodes) for g in lab.broker.given] == [(f"{idle}-uid.1", "clean", 0)]
        await lease.environment.step(Home(), 2)  # the episode goes on
        assert lab.broker.phones[lease.slot].holder.fence == 1
        await slots.release(lease, Verdict.CLEAN)
        await until(lambda: len(lab.broker.given) == 2)
        given = lab.broker.given[1]
        assert (given.id, given.verdict, given.episodes) == (f"{lease.slot}-uid.1", "clean", 1)
        # They may be asked for again: under another claim.
        again = await slots.acquire(30)
        assert lab.broker.phones[again.slot].holder.fence == 2
        await play(again)


async def test_a_recall_that_is_taken_back_is_forgotten(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        lab.broker.recall(lease.slot)
        await lab.broker.hears()
        await until(lambda: lease.environment.claim.recalled)
        lab.broker.recalls.clear()
        await lab.broker.hears()
        await until(lambda: not lease.environment.claim.recalled)
        await slots.release(lease, Verdict.CLEAN)
        assert (await slots.acquire(30)).slot == lease.slot
        assert not lab.broker.given


async def test_claims_are_renewed_in_one_call_with_their_episodes(tmp_path):
    async with a_lab(tmp_path, 3) as lab, lab.claimed(3) as slots:
        await until(lambda: slots.usable == 3)
        for _ in range(2):
            lease = await slots.acquire(1, avoid=frozenset({"slot-1", "slot-2"}))
            await play(lease, 1)
            await slots.release(lease, Verdict.CLEAN)
        await lab.broker.hears()
        assert lab.broker.episodes.get("slot-0-uid.1") == 2
        before = len(lab.broker.renewals)
        for _ in range(2):
            await lab.broker.hears()
        assert all(len(r.claims) == 3 for r in lab.broker.renewals[before:])
        assert len(lab.broker.held) == 3


# --- lost claims ---


async def test_a_claim_lost_in_mid_episode_cuts_it_off_and_its_end_changes_nothing(tmp_path):
    async with a_lab(tmp_path, 2) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        await lease.environment.reset(TASK)
        await lab.server.set_faults(int(lease.slot[-1]), {"kind": "hung"})
        step = asyncio.create_task(lease.environment.step(Home(), 0))
        await until(lab.server.hung)
        lab.broker.end(lease.slot)
        await lab.broker.hears()
        with pytest.raises(EnvironmentFault, match="the claim on it is lost: it expired") as caught:
            await step
        assert caught.value.reason is Reason.LEASE_LOST
        other = await slots.acquire(30)
        assert other.slot != lease.slot
        for call in (lease.environment.evaluate(), lease.environment.close(), lease.environment.reset(TASK)):
            with pytest.raises(EnvironmentFault) as caught:
                await call
            assert caught.value.reason is Reason.LEASE_LOST
        await slots.release(lease, Verdict.CLEAN)
        assert (slots.size, slots.counts().leased) == (1, 1)
        await play(other)
        await slots.release(other, Verdict.CLEAN)
        assert not lab.broker.given, "a lost claim is not given back"


async def test_what_comes_after_the_end_of_a_claims_life_counts_for_nothing(tmp_path):
    """The machine slept: neither alarm nor renewal came in time, and the phone is somebody else's."""
    slept = 0.0

    def clock() -> float:
        return loop_time() + slept

    async with a_lab(tmp_path, 1) as lab, lab.claimed(1, clock=clock) as slots:
        lease = await slots.acquire(30)
        await lease.environment.reset(TASK)
        await lab.server.set_faults(0, {"kind": "slow", "medianSeconds": 0.3, "sigma": 0})
        step = asyncio.create_task(lease.environment.step(Home(), 0))
        await until(lambda: lab.server.slots[0].episode.results)  # it was done, and is not answered yet
        slept = 121.0
        with pytest.raises(EnvironmentFault, match="was not heard of for 120 s") as caught:
            await step
        assert caught.value.reason is Reason.LEASE_LOST
        with pytest.raises(EnvironmentFault):
            await lease.environment.evaluate()
        await slots.release(lease, Verdict.CLEAN)
        assert slots.usable == 0
        lab.broker.end(lease.slot)  # it slept too


async def test_a_phone_that_is_claimed_again_while_the_old_claim_is_thought_to_live(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(2) as slots:
        old = await slots.acquire(30)
        await old.environment.reset(TASK)
        async with lab.broker.changed:  # an external URL: ended, and granted again after its rest
            lab.broker.phones["slot-0"].holder = None
            lab.broker.changed.notify_all()
        new = await slots.acquire(30)
        assert new.slot == old.slot and new.fence > old.fence
        await play(new)
        with pytest.raises(EnvironmentFault, match="fence 2 after 1"):
            await old.environment.step(Home(), 0)
        await slots.release(old, Verdict.DIRTY)
        await new.environment.step(Home(), 2)
        await slots.release(new, Verdict.CLEAN)
        assert (slots.size, slots.counts().free) == (1, 1)


# --- a broker that is away ---


async def test_an_outage_shorter_than_the_claims_life_is_not_felt(tmp_path):
    async with a_lab(tmp_path, 2, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(2)
            await slots.start()
            lease = await slots.acquire(30)
            await lease.environment.reset(TASK)
        put_forward(41)  # a renewal is due
        await until(lambda: "can't be reached" in slots.describe())
        await lease.environment.step(Home(), 0)
        async with lab.broker.serving(lab.authority):
            before = len(lab.broker.renewals)
            await until(lambda: len(lab.broker.renewals) > before)
            await lease.environment.step(Home(), 1)
            await slots.release(lease, Verdict.CLEAN)
            await until(lambda: "can't" not in slots.describe())
            assert slots.usable == 2 and all(p.fence == 1 for p in lab.broker.phones.values())
            await slots.close()
            assert not lab.broker.held


async def test_after_a_longer_outage_every_claim_is_lost_before_the_broker_ends_it(tmp_path):
    async with a_lab(tmp_path, 4, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(2)
            await slots.start()
            lease = await slots.acquire(30)
            await lease.environment.reset(TASK)
        put_forward(120)
        await until(lambda: slots.size == 0)
        claim = lease.environment.claim
        assert claim.alive_until <= lab.broker.ends[claim.id]
        with pytest.raises(EnvironmentFault, match="was not heard of for 120 s") as caught:
            await lease.environment.step(Home(), 0)
        assert caught.value.reason is Reason.LEASE_LOST
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: "can't be reached" in slots.describe())
        with pytest.raises(NoSlot, match="0 of at most 2 phones.*can't be reached"):
            await slots.acquire(0.01)
        await until(lambda: not lab.broker.held)
        async with lab.broker.serving(lab.authority):
            await play(await slots.acquire(30))
            await slots.close()
            assert not lab.broker.held and not lab.broker.broken


@pytest.mark.parametrize("body", [b'{"reason": "NotLeader", "message": "another replica leads"}', b"<html>"])
async def test_a_broker_that_says_not_now_is_asked_again(tmp_path, body):
    async with a_lab(tmp_path, 1) as lab:
        for call in ("acquire", "renew", "release"):
            lab.broker.refusing[call] = (503, body)
        slots = lab.slots(1)
        starting = asyncio.create_task(slots.start())
        await until(lambda: lab.broker.calls.count("acquire") >= 3)
        lab.broker.refusing.clear()
        await starting
        lease = await slots.acquire(30)
        lab.broker.refusing["release"] = (503, body)
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: lab.broker.calls.count("release") >= 3)
        assert slots.size == 1, "not given back yet, so nothing else is asked for"
        lab.broker.refusing.clear()
        await until(lambda: lab.broker.given)
        await slots.close()
        assert not lab.broker.held


async def test_at_the_start_a_broker_that_stays_away_is_an_error(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_URL": "https://127.0.0.1:1"})
        slots = lab.slots(1, access=access, pace=replace(PACE, start=600))
        starting = asyncio.create_task(slots.start())
        await until(lambda: "can't be reached" in slots.describe())
        put_forward(600)
        with pytest.raises(SlotError, match="no phones within 600 s: the broker at .*:1/ can't be reached"):
            await starting


# --- lost answers ---


async def test_an_acquire_whose_answer_is_lost_is_asked_again_by_its_name(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        lab.broker.lost_answers = ["acquire", "acquire"]
        async with lab.claimed(2) as slots:
            await until(lambda: slots.usable == 2)
            assert len(lab.broker.held) == 2
            assert len({a.request for a in lab.broker.acquires[:3]}) == 1


async def test_lost_answers_to_renewals_and_releases(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        lab.broker.lost_answers = ["renew", "renew", "release"]
        async with lab.claimed(2) as slots:
            lease = await slots.acquire(30)
            await slots.release(lease, Verdict.DIRTY, "the test says so")
            await lab.broker.hears()
            await until(lambda: not lab.broker.lost_answers and slots.usable == 2)
            assert [g.id for g in lab.broker.given] == [f"{lease.slot}-uid.1"], "given back once, whatever was heard"


async def test_what_was_granted_in_the_moment_of_the_end_is_given_back_too(tmp_path):
    async with a_lab(tmp_path, 2) as lab:
        urls = [p.url for p in lab.broker.phones.values()]
        lab.broker.phones.clear()
        slots = lab.slots(2, pace=replace(PACE, wait=60))
        await slots.start()
        await until(lambda: lab.broker.calls.count("acquire") == 2)
        lab.broker.lost_answers = ["acquire"]
        await lab.broker.put(urls[0])
        await until(lambda: not lab.broker.lost_answers)
        assert lab.broker.held == {"slot-0"}
        await slots.close()
        assert not lab.broker.held and [g.verdict for g in lab.broker.given] == ["clean"]


# --- phones that are bad ---


async def test_dirty_and_broken_phones_are_exchanged(tmp_path, caplog):
    deadlines = replace(PATIENT, step=0.2)
    async with a_lab(tmp_path, 3) as lab, lab.claimed(1, deadlines=deadlines) as slots:
        dirty = await slots.acquire(30)
        await dirty.environment.reset(TASK)
        await slots.release(dirty, Verdict.DIRTY, "the task could not be undone")
        broken = await slots.acquire(30)
        assert broken.slot != dirty.slot
        await broken.environment.reset(TASK)
        await lab.server.set_faults(int(broken.slot[-1]), {"kind": "hung"})
        with pytest.raises(EnvironmentFault) as caught:
            await broken.environment.step(Home(), 0)
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
            await until(lambda: lab.broker.given)
            assert [(g.id, g.verdict, g.episodes) for g in lab.broker.given] == [("slot-1-uid.1", "broken", 0)]
            assert (slots.size, slots.usable) == (1, 1)


async def test_phones_that_were_never_reached_are_not_thrown_away(tmp_path):
    """A laptop without a way to the cluster's Pods must not use up the pool."""
    async with a_lab(tmp_path, 1) as lab:
        lab.broker.phones.clear()
        with a_port() as nobody:
            await lab.broker.put(f"http://127.0.0.1:{nobody}/slot/0")
            async with lab.claimed(1) as slots:
                await until(lambda: "nobody answers" in slots.describe())
                with pytest.raises(NoSlot, match="nobody answers.*is there a way to its Pods"):
                    await slots.acquire(0.05)
                await until(lambda: len(lab.broker.given) >= 2)
                assert {g.verdict for g in lab.broker.given} == {"clean"}


# --- the end ---


async def test_close_gives_all_back_in_one_call(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        slots = lab.slots(3)
        await slots.start()
        await until(lambda: slots.usable == 3)
        lease = await slots.acquire(1)
        await lease.environment.reset(TASK)
        waiting = asyncio.create_task(slots.acquire(30, avoid=frozenset({"slot-1", "slot-2"})))
        await asyncio.sleep(0)
        await slots.close()
        assert not lab.broker.held and lab.broker.calls.count("release") == 1
        verdicts = {g.id.split("-uid")[0]: g.verdict for g in lab.broker.given}
        assert verdicts == {"slot-0": "clean", "slot-1": "clean", "slot-2": "clean", lease.slot: "dirty"}
        if not waiting.done() or waiting.exception():
            with pytest.raises(SlotError, match="closed"):
                await waiting
        await slots.release(lease, Verdict.DIRTY)
        await slots.close()
        assert lab.broker.calls.count("release") == 1


async def test_close_ends_although_the_broker_is_away_and_says_what_is_left(tmp_path, caplog):
    async with a_lab(tmp_path, 1, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(1, pace=replace(PACE, close=0.5))
            await slots.start()
            await until(lambda: slots.usable == 1)
        await slots.close()
        assert "phones that could not be given back" in caplog.text and "slot-0" in caplog.text


# --- who asks ---


def environment(lab: Lab, folder: Path) -> dict[str, str]:
    access = lab.authority.access(lab.broker.port)
    return {
        "TAPFORGE_BROKER_URL": str(access.url),
        "TAPFORGE_BROKER_CA": str(lab.authority.ca),
        "TAPFORGE_BROKER_TOKEN_FILE": str(access.token),
        "TAPFORGE_NAMESPACE": NAMESPACE,
    }


async def test_a_rotated_token_is_read_again(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        lab.broker.tokens = {"second-token"}
        await lab.broker.put(lab.server.url(0))
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: "the token is not known" in slots.describe())
        lab.authority.access(lab.broker.port, "second-token")
        assert (await slots.acquire(30)).slot == "slot-1"


async def test_a_renewed_ca_is_read_again(tmp_path):
    async with a_lab(tmp_path, 2, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(1)
            await slots.start()
            await until(lambda: slots.usable == 1)
        newer = Authority(tmp_path / "newer")
        async with lab.broker.serving(newer):
            await slots.release(await slots.acquire(1), Verdict.DIRTY)
            await until(lambda: "doesn't vouch for" in slots.describe())
            lab.authority.ca.write_bytes(newer.ca.read_bytes())
            await until(lambda: lab.broker.given and slots.usable == 1)
            await slots.close()


async def test_a_broker_that_another_ca_vouches_for_is_refused(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        stranger = Authority(tmp_path / "stranger")
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_CA": str(stranger.ca)})
        with pytest.raises(SlotError, match="shows a certificate that .*stranger.* doesn't vouch for"):
            await lab.slots(1, access=access).start()
        assert not lab.broker.calls, "nothing was shown to it"


async def test_a_broker_under_another_name_than_its_certificates_is_refused(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        url = f"https://localhost:{lab.broker.port}"
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_URL": url})
        with pytest.raises(SlotError, match="doesn't vouch for.*localhost"):
            await lab.slots(1, access=access).start()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            401,
            b'{"reason": "Unauthorized", "message": "expired"}',
            ["401 Unauthorized: expired", "kubectl create token"],
        ),
        (403, b'{"reason": "Forbidden", "message": "not yours"}', ["403 Forbidden: not yours", "emulatorpools/claim"]),
        (404, b'{"reason": "PoolNotFound", "message": "no such"}', ["404 PoolNotFound", "get emulatorpools -n lab"]),
        (400, b'{"reason": "BadRequest", "message": "slots: too many"}', ["400 BadRequest: slots: too many"]),
        (404, b"<html>nothing here</html>", ["404: '<html>nothing here</html>'"]),
        (302, b"", ["302"]),
        (200, b"<html>a portal</html>", ["a portal", "is TAPFORGE_BROKER_URL the address"]),
        (200, b'{"claims": [{"id": "some-claim", "secret": "0123456789abcdef"}]}', ["claims.0.slot: Field required"]),
    ],
)
async def test_a_refusal_at_the_start_says_what_to_do(tmp_path, status, body, words):
    async with a_lab(tmp_path, 1) as lab:
        lab.broker.refusing["acquire"] = (status, body)
        with pytest.raises(SlotError) as caught:
            await lab.slots(1).start()
        for word in words:
            assert word in str(caught.value)
        assert "0123456789abcdef" not in str(caught.value), "secrets are not repeated"
        assert lab.broker.calls.count("acquire") <= 2, "a refusal is not asked again"


async def test_a_pool_that_is_not_there(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        with pytest.raises(SlotError, match="claims on the pool 'fones' in namespace 'lab'.*no pool fones"):
            await lab.slots(1, pool="fones").start()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "can't be read"), ("", "holds no token"), ("two words", "holds no token")]
)
async def test_a_bad_token_file_is_named(tmp_path, content, words):
    async with a_lab(tmp_path, 1) as lab:
        slots = lab.slots(1)
        path = lab.authority.folder / "token"
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(SlotError, match=f"the token file {path}.*{words}"):
            await slots.start()


async def test_a_bad_ca_file_is_named(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        for content in (None, "no certificate"):
            path = tmp_path / "other.crt"
            if content:
                path.write_text(content)
            access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_CA": str(path)})
            with pytest.raises(SlotError, match="other.crt .TAPFORGE_BROKER_CA. can't be used"):
                await lab.slots(1, access=access).start()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TAPFORGE_BROKER_URL": ""}, "spec.environment.source.pool needs .*\n  TAPFORGE_BROKER_URL: the address"),
        ({"TAPFORGE_BROKER_CA": ""}, "needs .*\n  TAPFORGE_BROKER_CA: the file"),
        ({"TAPFORGE_BROKER_TOKEN_FILE": ""}, "needs .*\n  TAPFORGE_BROKER_TOKEN_FILE: the file of a token"),
        ({"TAPFORGE_NAMESPACE": ""}, "needs .*\n  TAPFORGE_NAMESPACE: the namespace"),
        ({"TAPFORGE_NAMESPACE": "a/b"}, "name of a namespace, not 'a/b'"),
        ({"TAPFORGE_BROKER_URL": "http://broker:80"}, "to begin with https: 'http://broker:80' would show the token"),
        ({"TAPFORGE_BROKER_URL": "http://10.0.0.7:80"}, "to begin with https"),
        ({"TAPFORGE_BROKER_URL": "http://localhost.evil:80"}, "to begin with https"),
        ({"TAPFORGE_BROKER_URL": "broker:8443"}, "to be a URL such as"),
        ({"TAPFORGE_BROKER_URL": "https://user:word@broker"}, "to be a URL such as"),
        ({"TAPFORGE_BROKER_URL": "https://broker:99999"}, "to be a URL"),
    ],
)
def test_what_the_surroundings_lack_is_named(changes, words):
    whole = {
        "TAPFORGE_BROKER_URL": "https://broker",
        "TAPFORGE_BROKER_CA": "ca",
        "TAPFORGE_BROKER_TOKEN_FILE": "token",
        "TAPFORGE_NAMESPACE": "lab",
    }
    assert Access.of(whole).namespace == "lab"
    with pytest.raises(SlotError, match=words):
        Access.of({**whole, **changes})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_plain_http_is_for_this_machine(host):
    access = Access.of(
        {
            "TAPFORGE_BROKER_URL": f"http://{host}:8080/below",
            "TAPFORGE_BROKER_TOKEN_FILE": "token",
            "TAPFORGE_NAMESPACE": "lab",
        }
    )
    assert access.ca is None and access.url.path == "/below"


@pytest.mark.parametrize("failures", range(12))
def test_pauses_grow_to_a_cap_and_obey_the_broker(failures):
    pace = Pace(first=0.5, cap=30.0)
    grown = 0.0 if not failures else min(30.0, 0.5 * 2 ** (failures - 1))
    for _ in range(50):
        assert grown / 2 <= pace.pause(failures) <= grown
        assert pace.pause(failures, asked=7.0) >= 7.0
        assert pace.pause(failures, asked=1e9) == 30.0
        assert pace.pause(failures, cap=2.0) <= 2.0


# --- everything at once ---


@pytest.mark.parametrize("seed", [1, 2])
async def test_episodes_in_bad_weather(tmp_path, seed):
    """Answers get lost, phones are recalled, lost and dirty, the broker restarts: no phone ever has two episodes, no
    episode ends on a phone that was not its own, and in the end nothing is left behind."""
    dice = random.Random(seed)
    playing: set[str] = set()
    ended = {"clean": 0, "dirty": 0, "lost": 0}
    ends = [True] * 25

    async def rollout(slots: BrokerSlots, lab: Lab) -> None:
        for _ in range(12):
            lease = await slots.acquire(100)
            uid = lab.broker.phones[lease.slot]
            assert lease.slot not in playing
            playing.add(lease.slot)
            mine = lease.environment.claim.id
            verdict = Verdict.CLEAN
            try:
                for _ in range(dice.randint(1, 4)):
                    await play(lease, 1)
                    await asyncio.sleep(dice.random() * 0.1)
                await lease.environment.close()
                # All calls answered: then the broker can't have given it to anybody else yet.
                assert uid.holder is None or uid.holder.id == mine
                if dice.random() < 0.15:
                    verdict = Verdict.DIRTY
            except EnvironmentFault as fault:
                assert fault.reason is Reason.LEASE_LOST
                verdict = Verdict.DIRTY
            playing.discard(lease.slot)
            ended["lost" if lease.environment.claim.lost else verdict.value] += 1
            await slots.release(lease, verdict)

    async def weather(lab: Lab) -> None:
        while True:
            await asyncio.sleep(0.03)
            held = sorted(lab.broker.held)
            what = dice.random()
            if what < 0.3:
                lab.broker.lost_answers.append(dice.choice(["acquire", "renew", "release"]))
            elif held and what < 0.6:
                lab.broker.recall(dice.choice(held))
            elif held and what < 0.75 and ends:
                # However slow the episodes are, the weather doesn't use up the phones.
                ends.pop()
                lab.broker.end(dice.choice(held))
            await lab.broker.put(*dice.sample(lab.server.urls, 1))

    async with a_lab(tmp_path, 0, ttl=0.9) as lab, phones(80) as server:
        lab.server = server
        await lab.broker.put(*server.urls[:3])
        spare = iter(server.urls[3:])

        async def put(*_: str) -> None:
            if url := next(spare, None):
                await SmallBroker.put(lab.broker, url)

        lab.broker.put = put  # type: ignore[method-assign]
        slots = lab.slots(3)
        left: dict[str, HeldClaim] = {}

        def leaves(claim: HeldClaim) -> None:
            left[claim.id] = claim
            BrokerSlots.left(slots, claim)

        slots.left = leaves  # type: ignore[method-assign]
        await slots.start()
        storm = asyncio.create_task(weather(lab))
        try:
            await asyncio.gather(*(rollout(slots, lab) for _ in range(3)))
        finally:
            storm.cancel()
            lab.broker.lost_answers.clear()
            await slots.close()
        # What we counted as over for want of an answer, the broker ends by itself, a little later.
        holders = [lab.broker.phones[slot].holder.id for slot in lab.broker.held]
        assert all(left[holder].over(loop_time()) for holder in holders)
        await until(lambda: not lab.broker.held)
        assert not lab.broker.broken
        assert sum(ended.values()) == 36 and ended["clean"]
