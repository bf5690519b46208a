"""Lists of servers: every problem names its line; dead and twice-listed ones are found; leases are exclusive and wait
in order; sick slots come back when they are healthy."""

import asyncio
import random
import time

import pytest
from leased import on
from phones import PATIENT, TASKS, a_port, impatient, phones, put_forward, until

from tapforge_envs.protocol import EnvironmentFault, Home
from tapforge_envs.slots.source import NoSlot, SlotError, Verdict
from tapforge_envs.slots.table import Backoff
from tapforge_envs.slots.urls import Address, UrlSlots, parse_urls, read_urls

SOON = Backoff(first=0.01, cap=0.05, strikes=3, quarantine=0.2)


def addresses(*urls: str) -> list[Address]:
    return parse_urls(urls, "phones.txt")


def test_comments_blank_lines_and_missing_schemes():
    lines = ["# the lab", "", "10.0.0.7:8000  # by the window", "https://phones.example/slot/3/", "  HTTP://Ten:80  "]
    assert [(a.url, a.origin) for a in parse_urls(lines, "lab.txt")] == [
        ("http://10.0.0.7:8000", "lab.txt:3"),
        ("https://phones.example/slot/3", "lab.txt:4"),
        ("http://ten", "lab.txt:5"),
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a:1", "b:1", "http://a:1/"], "phones.txt:1 and phones.txt:3 both name http://a:1"),
        (["http://ten", "ten:80"], "phones.txt:1 and phones.txt:2 both name http://ten"),
        (["a:1", "ftp://b"], "phones.txt:2: 'ftp://b' is not an http"),
        (["a:1", "b:99999"], "phones.txt:2: 'b:99999'"),
        (["two words"], "phones.txt:1: 'two words'"),
        (["http://"], "phones.txt:1: 'http://'"),
        (["a:1/?x=1"], "phones.txt:1: 'a:1/?x=1': a phone's URL ends with its path"),
        (["# nothing"], "phones.txt names no server"),
        ([], "phones.txt names no server"),
    ],
)
def test_a_bad_list_is_an_error_that_names_the_line(lines, words):
    with pytest.raises(SlotError) as caught:
        parse_urls(lines, "phones.txt")
    assert words in str(caught.value)


def test_phones_behind_one_mobileworld_server_are_named_by_their_serial():
    found = parse_urls(["10.0.0.7:7000?device=a", "10.0.0.7:7000/?device=192.168.1.5:5555"], "x", "mobileworld")
    assert [a.url for a in found] == ["http://10.0.0.7:7000?device=a", "http://10.0.0.7:7000?device=192.168.1.5:5555"]
    for lines, words in (
        (["a:1?device=x", "a:1/?device=x"], "x:1 and x:2 both name http://a:1.device=x"),
        (["a:1?device=x", "a:1"], "x:1 .http://a:1.device=x. and x:2 .http://a:1. are phones of one server"),
        (["a:1?device="], "without '.' or '#'; with protocol mobileworld .device=SERIAL"),
        (["a:1?device=x&y=z"], "without"),
        (["a:1?serial=x"], "without"),
    ):
        with pytest.raises(SlotError, match=words):
            parse_urls(lines, "x", "mobileworld")
    with pytest.raises(SlotError, match="without"):
        parse_urls(["a:1?device=x"], "x")


def test_a_file(tmp_path):
    path = tmp_path / "phones.txt"
    path.write_text("\ufeffa:1\r\n# b\nc:2\n", encoding="utf-8", newline="")
    assert [a.url for a in read_urls(path)] == ["http://a:1", "http://c:2"]
    with pytest.raises(SlotError, match="missing.txt can't be read"):
        read_urls(tmp_path / "missing.txt")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SlotError, match="can't be read"):
        read_urls(path)


def test_when_all_are_dead_the_start_fails_and_names_each():
    async def run():
        with a_port() as port:
            urls = [f"http://127.0.0.1:{port}/slot/{i}" for i in range(2)]
            slots = UrlSlots(addresses(*urls), PATIENT, SOON)
            with pytest.raises(SlotError) as caught:
                await slots.start()
        for number, url in enumerate(urls, start=1):
            assert f"phones.txt:{number}: {url}: health: no server answers" in str(caught.value)

    asyncio.run(run())


def test_one_dead_server_is_named_and_taken_in_when_it_comes_up(caplog):
    async def run():
        with a_port() as later:
            url = f"http://127.0.0.1:{later}/slot/0"
            await go(url, later)

    async def go(url, later):
        async with phones() as server:
            slots = UrlSlots(addresses(server.url(), url), PATIENT, SOON)
            await slots.start()
            try:
                assert f"phones.txt:2: {url}: health: no server answers" in caplog.text
                first = await slots.acquire(1)
                assert first.slot == server.url()
                async with phones(port=later):
                    second = await slots.acquire(60)
                    assert second.slot == url
                    await on(second).reset(TASKS.sample(0, 0))
            finally:
                await slots.close()

    asyncio.run(run())


def test_one_server_under_two_names_is_an_error():
    async def run():
        async with phones(2) as server:
            other = server.url(1).replace("127.0.0.1", "localhost")
            slots = UrlSlots(addresses(*server.urls, other), PATIENT, SOON)
            with pytest.raises(SlotError) as caught:
                await slots.start()
            assert "phones.txt:2" in str(caught.value) and "phones.txt:3" in str(caught.value)
            assert "same server" in str(caught.value)

    asyncio.run(run())


async def test_one_server_under_two_names_is_found_also_when_it_comes_up_later():
    with a_port() as later:
        urls = [f"http://{host}:{later}/slot/0" for host in ("127.0.0.1", "localhost")]
        async with phones() as server:
            slots = UrlSlots(addresses(server.url(), *urls), PATIENT, SOON)
            await slots.start()
            try:
                async with phones(port=later):
                    held = [await slots.acquire(60), await slots.acquire(60)]
                    assert len({lease.slot for lease in held} & set(urls)) == 1
                    await until(lambda: "is the same phone as" in slots.describe())
                    assert slots.counts().free == 0, "nobody gets the second name"
            finally:
                await slots.close()


async def test_where_all_phones_are_in_quarantine_no_cooldown_outlasts_those_who_wait():
    """Something that all of them use was away for a while. Their cooldown would last for hours."""
    async with phones(2) as server:
        slots = await started(server, backoff=Backoff(first=0.01, cap=0.01, strikes=2, quarantine=1e4))
        leases = [await slots.acquire(1) for _ in range(2)]
        while slots.usable:
            for lease in leases:
                await slots.release(lease, Verdict.DIRTY, "the network was away")
            leases = [await slots.acquire(60) for _ in range(slots.usable)]
        trial = await slots.acquire(4)
        assert slots.counts().trials == 1
        await slots.release(trial, Verdict.CLEAN)
        await slots.close()


async def started(server, **kw) -> UrlSlots:
    slots = UrlSlots(addresses(*server.urls), PATIENT, kw.pop("backoff", SOON))
    await slots.start()
    return slots


def test_those_who_wait_are_served_in_their_order_and_never_two_at_once():
    async def run():
        async with phones(2) as server:
            slots = await started(server)
            held: set[str] = set()
            order: list[int] = []
            dice = random.Random(1)

            async def hold(number: int) -> None:
                lease = await slots.acquire(100)
                order.append(number)
                assert lease.slot not in held
                held.add(lease.slot)
                await asyncio.sleep(dice.random() * 0.002)
                held.discard(lease.slot)
                await slots.release(lease, Verdict.CLEAN)

            await asyncio.gather(*(hold(n) for n in range(50)))
            assert order == sorted(order)
            assert slots.counts().free == 2
            await slots.close()

    asyncio.run(run())


def test_waiters_that_give_up_or_are_cancelled_lose_no_slot():
    async def run():
        async with phones(1) as server:
            slots = await started(server)
            dice = random.Random(2)

            async def hold() -> None:
                lease = await slots.acquire(0.0005 + dice.random() * 0.004)
                try:
                    await asyncio.sleep(dice.random() * 0.002)
                finally:
                    await slots.release(lease, Verdict.CLEAN)

            tasks = [asyncio.create_task(hold()) for _ in range(200)]
            for task in tasks:
                await asyncio.sleep(dice.random() * 0.0005)
                if dice.random() < 0.5:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(r) for r in results} <= {type(None), NoSlot, asyncio.CancelledError}
            assert slots.counts().free == 1
            assert (await slots.acquire(1)).slot == server.url()
            await slots.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_waiter_that_goes_away_in_the_moment_it_is_served_gives_the_slot_back(how):
    async def run():
        async with phones(1) as server:
            slots = await started(server)
            first = await slots.acquire(1)
            waiting = asyncio.create_task(slots.acquire(0.05 if how == "deadline" else 60))
            await asyncio.sleep(0)
            if how == "deadline":
                # The loop is held until the deadline has passed: alarm and lease are served in the same round.
                time.sleep(0.06)  # noqa: ASYNC251
            await slots.release(first, Verdict.CLEAN)
            if how == "cancel":
                waiting.cancel()
            await asyncio.wait([waiting])
            if waiting.cancelled() or waiting.exception():
                assert (slots.counts().free, slots.counts().leased) == (1, 0)
            else:
                await slots.release(waiting.result(), Verdict.CLEAN)
            assert how == "deadline" or waiting.cancelled()
            assert (await slots.acquire(1)).slot == server.url()
            await slots.close()

    asyncio.run(run())


def test_a_dirty_slot_waits_for_a_healthy_probe():
    async def run():
        async with phones(1) as server:
            slots = await started(server)
            lease = await slots.acquire(1)
            await server.set_faults(0, {"kind": "hung"})
            await on(lease).reset(TASKS.sample(0, 0))
            with pytest.raises(EnvironmentFault):
                await impatient(on(lease).step(Home(), 0), server.hung)
            await slots.release(lease, Verdict.DIRTY, "it hung")
            with pytest.raises(NoSlot) as caught:
                await slots.acquire(0.05)
            assert server.url() in str(caught.value)
            await server.set_faults(0)
            assert (await slots.acquire(60)).slot == server.url()
            await slots.close()

    asyncio.run(run())


def test_repeated_failures_end_in_quarantine_and_a_repaired_phone_leaves_it():
    async def run():
        async with phones(2) as server:
            slots = await started(server)
            bad = await slots.acquire(1)
            for _ in range(SOON.strikes):
                await slots.release(bad, Verdict.DIRTY, "the episode broke")
                if slots.usable == 2:
                    other = await slots.acquire(1)
                    bad = await slots.acquire(60, avoid=frozenset({other.slot}))
                    await slots.release(other, Verdict.CLEAN)
            assert (slots.usable, slots.size, slots.counts().quarantines) == (1, 2, 1)
            assert "the episode broke" in slots.describe()
            # Only the other slot is left: it is granted although it is to be avoided.
            left = await slots.acquire(1, avoid=frozenset({other.slot}))
            assert left.slot == other.slot
            # Back on probation, it is for an episode that may be lost; a clean one lets it serve everybody again.
            careful = asyncio.create_task(slots.acquire(60))
            trial = await slots.acquire(60, trial=True)
            assert (trial.slot, slots.counts().trials) == (bad.slot, 1) and not careful.done()
            await slots.release(trial, Verdict.CLEAN)
            assert (await careful).slot == bad.slot
            assert slots.counts().recoveries == 1
            await slots.close()

    asyncio.run(run())


async def test_what_is_known_of_each_phone_can_be_looked_at():
    async with phones(2) as server:
        slots = await started(server, backoff=Backoff(first=1e6, cap=1e6))
        sick, well = await slots.acquire(1), await slots.acquire(1)
        await slots.release(sick, Verdict.DIRTY, "it hung")
        await slots.release(well, Verdict.CLEAN, pace=0.25)
        await asyncio.sleep(0)
        found = {view.name: view for view in slots.views()}
        ill, fine = found[sick.slot], found[well.slot]
        assert (ill.state, ill.strikes, ill.clean, ill.dirty, ill.why) == ("sick", 1, 0, 1, "it hung")
        assert ill.again is not None and ill.again > time.time() + 1e5
        assert (fine.state, fine.strikes, fine.clean, fine.dirty, fine.pace) == ("free", 0, 1, 0, 0.25)
        assert (fine.why, fine.again) == ("", None)
        await slots.close()


async def test_a_slow_phone_says_so():
    async with phones(6) as server:
        slots = await started(server)
        leases = [await slots.acquire(1) for _ in range(6)]
        for lease in leases[1:]:
            await slots.release(lease, Verdict.CLEAN, pace=1.0)
        await slots.release(leases[0], Verdict.CLEAN, pace=9.0)
        assert slots.usable == 5
        assert "calls took 9.0 s on average, more than 5 times those of the others" in slots.describe()
        await slots.close()


def test_a_slot_to_avoid_is_not_granted_while_another_may_come_free():
    async def run():
        async with phones(2) as server:
            slots = await started(server)
            first = await slots.acquire(1)
            waiting = asyncio.create_task(slots.acquire(60, avoid=frozenset(server.urls) - {first.slot}))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await slots.release(first, Verdict.CLEAN)
            assert (await waiting).slot == first.slot
            await slots.close()

    asyncio.run(run())


def test_a_wait_lasts_as_long_as_a_slot_is_in_use():
    async def run():
        async with phones(2) as server:
            slots = await started(server)
            first, second = await slots.acquire(1), await slots.acquire(1)
            waiting = asyncio.create_task(slots.acquire(60))
            await asyncio.sleep(0)
            for _ in range(3):
                put_forward(61)
                await asyncio.sleep(0.01)
                assert not waiting.done()
            await slots.release(first, Verdict.CLEAN)
            assert (await waiting).slot == first.slot
            await slots.release(second, Verdict.CLEAN)
            await slots.close()

    asyncio.run(run())


def test_a_slot_to_avoid_is_better_than_none_for_the_whole_deadline():
    async def run():
        async with phones(2) as server:
            slots = await started(server, backoff=Backoff(first=1e6, cap=1e6))
            sick = await slots.acquire(1)
            await slots.release(sick, Verdict.DIRTY, "it hung")  # and is not asked again for days
            (other,) = set(server.urls) - {sick.slot}
            waiting = asyncio.create_task(slots.acquire(60, avoid=frozenset({other})))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            put_forward(61)
            assert (await waiting).slot == other
            await slots.close()

    asyncio.run(run())


def test_close_ends_those_who_wait():
    async def run():
        async with phones(1) as server:
            slots = await started(server)
            await slots.acquire(1)
            waiting = asyncio.create_task(slots.acquire(60))
            await asyncio.sleep(0)
            await slots.close()
            with pytest.raises(SlotError, match="closed"):
                await waiting

    asyncio.run(run())


# --- phones over adb --------------------------------------------------------------------------------------------------


def test_devices_of_adb_by_serial_and_endpoint():
    lines = ["R58M123ABC  # by the window", "10.0.0.7:5555", "[fe80::1]:5555", "emulator-5554", "auto"]
    assert [a.url for a in parse_urls(lines, "phones.txt", "adb")] == [
        "R58M123ABC", "10.0.0.7:5555", "[fe80::1]:5555", "emulator-5554", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["R58", "R58"], "phones.txt:1 and phones.txt:2 both name R58"),
        (["emulator-5554", "127.0.0.1:5555"], "phones.txt:1 and phones.txt:2 both name 127.0.0.1:5555"),
        (["emulator-5556", "localhost:5557"], "both name localhost:5557"),
        (["http://10.0.0.7:5555"], "phones.txt:1: 'http://10.0.0.7:5555' is neither a serial"),
        (["two words"], "phones.txt:1: 'two words'"),
        (["-s"], "phones.txt:1: '-s'"),
        ([""], "phones.txt names no phone: write one serial"),
    ],
)
def test_a_bad_list_of_devices_is_an_error_that_names_the_line(lines, words):
    with pytest.raises(SlotError) as caught:
        parse_urls(lines, "phones.txt", "adb")
    assert words in str(caught.value)
