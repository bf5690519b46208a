"""Workers of ZeroGUI's manager as slots, against a stub of it: made, replaced and ended, none left."""

import asyncio
import contextlib
import json
import logging
import random
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
from aiohttp import web
from hostile import cut_off, endless, mangled, redirect, says, serving
from leased import hang_up, on
from osworld_stub import WRITE, ManagerStub, WorkerStub
from phones import PATIENT, until

from tapforge_api import load
from tapforge_envs import protocol as p
from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.manager import Manager, Patience
from tapforge_envs.clients.osworld import DIALECT
from tapforge_envs.clients.phones import PhoneClients
from tapforge_envs.protocol import EnvironmentFault, Task
from tapforge_envs.slots.managed import ManagedSlots
from tapforge_envs.slots.source import SlotError, Verdict
from tapforge_envs.slots.table import Backoff
from tapforge_envs.slots.urls import parse_urls
from tapforge_trainer.run import assembly
from tapforge_trainer.run.plan import plan

TASK = Task(suite="osworld", template=WRITE)
QUICK = Patience(create=100, ready=100, start=100, terminate=100, apart=0.0, poll=0.01)


class Clock:
    """Of manager and client: it goes on by two seconds whenever it is looked at."""

    def __init__(self, at: datetime):
        self.at = at

    def __call__(self) -> datetime:
        self.at += timedelta(seconds=2)
        return self.at


def a_stub() -> ManagerStub:
    return ManagerStub(now=Clock(datetime.fromisoformat("2026-03-04T23:59:50")))


@asynccontextmanager
async def slots_of(*lines: str, patience: Patience = QUICK, **named):
    addresses = parse_urls(lines, "hosts", "osworld")
    slots = ManagedSlots(
        addresses, "osworld", DIALECT, PATIENT, Backoff(first=0.01, cap=0.05), patience=patience, **named
    )
    try:
        yield slots
    finally:
        await hang_up()
        await slots.close()


@pytest.mark.parametrize(
    ("lines", "slots"),
    [
        (["10.0.0.7:10001?workers=2"], ["http://10.0.0.7:10001#1", "http://10.0.0.7:10001#2"]),
        (["http://10.0.0.7:10010  # mine"], ["http://10.0.0.7:10010"]),
        (["a:1?workers=1, b:1?workers=1,c:2"], ["http://a:1#1", "http://b:1#1", "http://c:2"]),
    ],
)
def test_hosts_and_their_workers(lines, slots):
    assert [a.url for a in parse_urls(lines, "hosts", "osworld")] == slots


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("http://a:1?workers=0", "1 to 32"),
        ("http://a:1?workers=33", "1 to 32"),
        ("http://a:1?workers=99999999999999", "1 to 32"),
        ("http://a:1?workers=two", "1 to 32"),
        ("http://a:1?workers=0000320000000", "1 to 32"),
        ("http://a:1?workers=2&x=1", "1 to 32"),
        ("http://a:1?x=1", "ends with its path"),
        ("http://a:1?workers=2,http://a:1?workers=3", "both name http://a:1#1"),
        ("a:1,", "not an http"),
    ],
)
def test_hosts_that_are_none(line, words):
    with pytest.raises(SlotError, match=words):
        parse_urls([line], "hosts", "osworld")


def test_other_protocols_have_no_workers():
    with pytest.raises(SlotError, match="ends with its path"):
        parse_urls(["http://a:1?workers=2"], "hosts", "androidworld")


async def test_every_worker_that_is_made_is_ended():
    one, two = a_stub(), a_stub()
    async with serving(one.application()) as a, serving(two.application()) as b:
        async with slots_of(f"{a}?workers=3,{b}?workers=1") as slots:
            await slots.start()
            assert (len(one.workers), len(two.workers), slots.size, slots.usable) == (3, 1, 4, 4)
            assert one.most_at_once == 1
            # each has one machine before anybody plays on it
            assert all(len(worker.starts) == 1 for worker, _ in one.workers.values())
            lease = await slots.acquire(deadline=60)
            phone = on(lease)
            assert (await phone.reset(TASK)).goal == "Write hello."
            await phone.step(p.Type(text="hello"), 0)
            await phone.step(p.Terminate(status="success"), 1)
            assert (await phone.evaluate()).value == 1
            await slots.release(lease, Verdict.CLEAN)
        assert not one.workers and not two.workers
        assert (len(one.made), len(two.made)) == (3, 1)


async def test_a_worker_on_which_an_episode_broke_is_replaced():
    stub = a_stub()
    async with serving(stub.application()) as url, slots_of(f"{url}?workers=1") as slots:
        await slots.start()
        lease = await slots.acquire(deadline=60)
        before = lease.phone.url
        await slots.release(lease, Verdict.DIRTY, "step 3: no answer")
        lease = await slots.acquire(deadline=60)
        assert lease.phone.url != before
        assert len(stub.made) == 2 and list(stub.workers) == stub.made[1:]
        await on(lease).reset(TASK)
        await slots.release(lease, Verdict.CLEAN)


async def test_a_worker_of_somebody_else_is_stopped_and_never_ended():
    worker = WorkerStub()
    async with serving(worker.application()) as url, slots_of(url) as slots:
        await slots.start()
        lease = await slots.acquire(deadline=60)
        await on(lease).reset(TASK)
        await slots.release(lease, Verdict.DIRTY, "it hangs")
        lease = await slots.acquire(deadline=60)
        assert worker.closed == 1 and worker.lost == 0
        await slots.release(lease, Verdict.CLEAN)
    assert worker.closed == 1


async def test_a_worker_whose_machine_does_not_start_is_replaced():
    stub, broken = a_stub(), []

    def fresh() -> WorkerStub:
        worker = WorkerStub()
        if len(broken) < 2:
            broken.append(worker)
            worker.rough.plan["/start"] = [says('{"success": false, "message": "no KVM"}')]
        return worker

    stub.fresh = fresh
    async with serving(stub.application()) as url, slots_of(f"{url}?workers=1") as slots:
        with pytest.raises(SlotError, match="the worker failed: no KVM"):
            await slots.start()
    assert not stub.workers and len(stub.made) == 1


async def test_a_manager_without_room_is_named():
    stub = a_stub()
    stub.rough.plan["/create_env_api"] = [says('{"success": false, "message": "exceed maximum number of env"}')]
    async with serving(stub.application()) as url, slots_of(f"{url}?workers=1") as slots:
        with pytest.raises(SlotError, match="exceed maximum number of env"):
            await slots.start()


async def test_a_start_that_is_given_up_leaves_no_worker():
    stub, wait = a_stub(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await wait.wait()
        return await stub._create(request)

    stub.rough.plan["/create_env_api"] = [slow]
    async with serving(stub.application()) as url:
        async with slots_of(f"{url}?workers=4") as slots:
            starting = asyncio.ensure_future(slots.start())
            await until(lambda: any("create" in line for line in stub.rough.seen))
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            asyncio.get_running_loop().call_later(0.05, wait.set)
        # the one under way was made, and ended; the three behind it were not made any more
        assert len(stub.made) == 1 and not stub.workers


async def test_a_close_that_is_cut_off_names_what_may_be_left(caplog):
    caplog.set_level(logging.WARNING)
    stub = a_stub()
    async with serving(stub.application()) as url:
        slots = ManagedSlots(parse_urls([f"{url}?workers=2"], "hosts", "osworld"), "osworld", DIALECT, patience=QUICK)
        await slots.start()
        names = list(stub.workers)
        stub.rough.plan["/terminate_env_api"] = [stub.rough.hang] * 2
        closing = asyncio.ensure_future(slots.close())
        await until(lambda: stub.rough.hung() == 2)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
    assert all(f"worker {name} of {url} may still run" in caplog.text for name in names)


async def test_a_create_without_an_answer_is_found_and_ended():
    stub = a_stub()
    ours = Clock(datetime.fromisoformat("2026-03-04T15:59:41"))
    async with serving(stub.application()) as url, new_session() as session:
        manager = Manager(url, session, QUICK, now=ours)
        first = await manager.create()  # by it the manager's clock is known

        async def lost(request: web.Request) -> web.StreamResponse:
            await stub._create(request)
            return await cut_off(request)

        stub.rough.plan["/create_env_api"] = [lost]
        with pytest.raises(EnvironmentFault, match="connection broke"):
            await manager.create()
        assert len(stub.made) == 2 and list(stub.workers) == [first.env_id]
        # what did not happen at all is not looked for
        stub.rough.seen.clear()
        stub.rough.plan["/create_env_api"] = [cut_off]
        with pytest.raises(EnvironmentFault, match="connection broke"):
            await manager.create()
        assert not any("terminate" in line for line in stub.rough.seen)
        await manager.terminate(first)
        assert not stub.workers


async def test_nothing_is_searched_for_when_the_manager_says_no_or_says_nothing():
    stub = a_stub()
    async with serving(stub.application()) as url, new_session() as session:
        manager = Manager(url, session, QUICK, now=Clock(datetime.fromisoformat("2026-03-04T15:59:41")))
        await manager.terminate(await manager.create())
        stub.rough.seen.clear()

        async def full(request: web.Request) -> web.StreamResponse:
            await stub._create(request)  # by somebody else, at the same time
            return await says('{"success": false, "message": "exceed maximum number of env"}')(request)

        stub.rough.plan["/create_env_api"] = [full]
        with pytest.raises(EnvironmentFault, match="refused: exceed maximum"):
            await manager.create()
        assert len(stub.workers) == 1 and not any("terminate" in line for line in stub.rough.seen)

        async def lost(request: web.Request) -> web.StreamResponse:
            await stub._create(request)
            return await cut_off(request)

        stub.rough.plan["/create_env_api"] = [lost]
        stub.rough.plan["/terminate_env_api"] = [cut_off] * 100
        with pytest.raises(EnvironmentFault, match="create: connection broke"):
            await manager.create()
        assert len(stub.rough.plan["/terminate_env_api"]) == 99


async def test_what_can_not_be_found_or_ended_is_named(caplog):
    stub = a_stub()
    caplog.set_level(logging.WARNING)
    async with serving(stub.application()) as url, new_session() as session:
        manager = Manager(url, session, QUICK, now=Clock(datetime.fromisoformat("2026-03-04")))

        async def lost(request: web.Request) -> web.StreamResponse:
            await stub._create(request)
            return await cut_off(request)

        stub.rough.plan["/create_env_api"] = [lost]
        with pytest.raises(EnvironmentFault):
            await manager.create()
        assert "made a worker and did not say which" in caplog.text and "end it on that host" in caplog.text
        worker = await manager.create()
        stub.rough.plan["/terminate_env_api"] = [says('{"success": false, "message": "terminate failed, 5 tries"}')]
        await manager.terminate(worker)
        assert f"worker {worker.env_id} of {url} may still run" in caplog.text


async def test_two_workers_of_one_name_are_a_fault():
    stub = ManagerStub(now=lambda: datetime.fromisoformat("2026-03-04"))
    async with serving(stub.application()) as url, new_session() as session:
        manager = Manager(url, session, QUICK)
        await manager.create()
        with pytest.raises(EnvironmentFault, match="two workers are called 20260304000000"):
            await manager.create()


@pytest.mark.parametrize("path", ["/get_pid", "/create_env_api"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "longer than"),
        (redirect("http://127.0.0.1:1/"), "answered 307"),
        (says("[" * 100_000), "not JSON"),
        (says('{"success": true}'), "'pid' must be a list|without a name"),
        (says('{"success": true, "env_id": "7", "port": 0}'), "'pid' must be a list|no port"),
        (says('{"success": true, "env_id": "7", "port": 70000}'), "'pid' must be a list|no port"),
        (says('{"success": true, "env_id": "7", "port": "80"}'), "'pid' must be a list|no port"),
        (says('{"success": true, "env_id": 7, "port": 80}'), "'pid' must be a list|without a name"),
    ],
)
async def test_a_manager_that_answers_nonsense_is_named(path, answer, words):
    stub = a_stub()
    stub.rough.plan[path] = [answer]
    async with serving(stub.application()) as url, new_session() as session:
        with pytest.raises(EnvironmentFault, match=words):
            await Manager(url, session, QUICK).create()
        assert [line for line in stub.rough.seen if "create" in line] == ["POST /create_env_api"][: path != "/get_pid"]


async def fuzzed(seed: int, count: int) -> int:
    rng, wrong = random.Random(seed), 0
    stub = a_stub()

    def mangle(path: str, body: bytes):
        nonlocal wrong
        if rng.random() < 0.5:
            return None
        wrong += 1
        return web.Response(body=mangled(rng, body), status=rng.choice((200, 200, 200, 404, 500)))

    stub.rough.mangle = mangle
    async with serving(stub.application()) as url, new_session() as session:
        manager = Manager(url, session, QUICK, now=Clock(datetime.fromisoformat("2026-03-04")))
        while wrong < count:
            try:
                worker = await manager.create()
            except EnvironmentFault as fault:
                assert len(str(fault)) < 1000
                continue
            assert isinstance(json.dumps(worker.env_id), str) and worker.url.startswith("http://127.0.0.1:")
            await manager.terminate(worker)
    return wrong


async def test_wrong_answers_of_a_manager_are_named_faults(caplog):
    caplog.set_level(logging.ERROR)
    assert await fuzzed(seed=1, count=300) >= 300


RUN = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: desktop}
spec:
  environment:
    protocol: PROTOCOL
    source: {urls: {list: ["URL?workers=2"]}}
  tasks: {file: tasks.jsonl}
  stop: {maxUpdates: 1}
"""


@pytest.mark.parametrize("protocol", ["osworld", "androidlab"])
async def test_a_run_plays_on_workers_that_are_made_for_it(protocol):
    stub, clients = a_stub(), PhoneClients()
    async with serving(stub.application()) as url:
        run = load(RUN.replace("PROTOCOL", protocol).replace("URL", url))
        assert plan(run).slots == 2
        slots = assembly.slots_of(run, clients.health)
        try:
            assert isinstance(slots, ManagedSlots) and slots.size == 2
            assert slots.address(f"{url}#1").protocol == protocol
        finally:
            await slots.close()
            await clients.close()
