"""The bridge on the wire, in front of a simulated phone: it conforms, passes on what the phone says, executes nothing
twice over a bad network, and drives no phone for whoever may not."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web
from phones import PATIENT, TASKS, impatient, phones
from rough_network import rough_network

from tapforge_envs.bridge.server import Bridge, application, read_token, refusal_to_listen
from tapforge_envs.check import check
from tapforge_envs.clients.http import Deadlines, new_session
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import EnvironmentFault, Home, Reason, Tap, Task, UnknownTask
from tapforge_envs.wire import Fence

TASK = TASKS.sample(0, 0)
TOKEN = "0123456789abcdef"
STEP = {"episode": "a", "index": 0, "action": {"type": "home"}}


@asynccontextmanager
async def bridge_to(*urls: str, **served):
    """Its port."""
    deadlines = served.pop("deadlines", PATIENT)
    clients = PhoneClients()
    addresses = [PhoneAddress(f"phone-{i}", url, deadlines) for i, url in enumerate(urls)]
    app, slots = application(Bridge(addresses, **served), clients)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        for slot in slots:
            await slot.stop(1)
        await runner.cleanup()
        await clients.close()


def at(port: int, slot: int = 0) -> str:
    return f"http://127.0.0.1:{port}/slot/{slot}"


async def asked(url, method="POST", body=None, **headers):
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer,
    ):
        data = await answer.read()
        with suppress(ValueError):
            return answer.status, json.loads(data)
        return answer.status, data


async def test_a_bridge_in_front_of_a_simulated_phone_conforms_at_every_slot():
    async with phones(2) as behind, bridge_to(*behind.urls) as port:
        assert [await check(at(port, slot), 100) for slot in (0, 1)] == [[], []]
        assert await check(f"http://127.0.0.1:{port}", 100) == []


async def test_a_bridge_that_knows_its_slot_conforms_and_refuses_another_ones_claim():
    async with phones() as behind, bridge_to(behind.url(), uid="uid-1") as port:
        assert await check(at(port), 100) == []
        claim = {"Tapforge_Slot": "another", "Tapforge_Fence": "9"}
        status, answer = await asked(f"{at(port)}/step", body=STEP, **claim)
        assert (status, answer["reason"]) == (409, "wrong_slot")


async def test_an_older_claim_is_refused_also_in_the_middle_of_a_newer_ones_episode():
    async with phones() as behind, bridge_to(behind.url()) as port, new_session() as session:
        old, new = (TapforgeClient(at(port), session, PATIENT, fence=Fence("uid-1", n)) for n in (1, 2))
        await old.reset(TASK)
        await new.reset(TASK)
        with pytest.raises(EnvironmentFault, match="stale_fence") as fault:
            await old.step(Home(), 0)
        assert fault.value.reason is Reason.LEASE_LOST
        await new.step(Home(), 0)


async def test_what_the_phone_says_comes_through_unchanged():
    async with phones() as behind, bridge_to(behind.url()) as port, new_session() as session:
        direct, through = (TapforgeClient(url, session, PATIENT) for url in (behind.url(), at(port)))
        taps = [Tap(x=0.5, y=y) for y in (0.1, 0.4, 0.9)]
        seen = []
        for client in (direct, through):
            results = [await client.reset(TASK), *[await client.step(tap, i) for i, tap in enumerate(taps)]]
            seen.append((results, await client.evaluate()))
            await client.close()
        assert seen[0] == seen[1]
        assert behind.slots[0].episode is None


@pytest.mark.parametrize(
    ("call", "what"),
    [
        *((call, what) for call in ("reset", "step", "evaluate", "close") for what in ("drop_answer", "half_answer")),
        ("step", "late"),
    ],
)
async def test_a_lost_answer_is_given_again_and_the_phone_executes_nothing_twice(call, what):
    """The network is between the trainer and the bridge."""
    async with (
        phones() as behind,
        rough_network(behind.port) as inner,
        bridge_to(inner.url()) as port,
        rough_network(port) as outer,
        new_session() as session,
    ):
        client = TapforgeClient(outer.url(), session, PATIENT)
        outer.plan.append((f"/{call}", what))

        async def episode():
            await client.reset(TASK)
            await client.step(Home(), 0)
            await client.evaluate()
            await client.close()

        await impatient(episode(), lambda: outer.hung)
        assert outer.plan == []
        assert [path for path in outer.seen if path.endswith(call)] == [f"/slot/0/{call}"] * 2
        assert [path for path in inner.seen if path.endswith(call)] == [f"/slot/0/{call}"]


async def test_each_answer_says_which_call_it_answers():
    async with phones() as behind, bridge_to(behind.url()) as port, aiohttp.ClientSession() as session:
        calls = [("reset", {"episode": "a", "task": TASK.model_dump()}), ("step", STEP), ("evaluate", {"episode": "a"})]
        said = []
        for call, body in calls:
            async with session.post(f"{at(port)}/{call}", json=body) as answer:
                said.append(answer.headers["Tapforge-Answers"])
        assert said == ["a/reset", "a/step/0", "a/evaluate"]


async def test_a_phone_that_is_late_is_a_deadline_for_the_trainer_too():
    """The bridge's client gives up, the trainer's client waits longer."""
    short = Deadlines(health=100, reset=100, step=1, evaluate=100, close=100)
    async with phones() as behind, bridge_to(behind.url(), deadlines=short) as port, new_session() as session:
        client = TapforgeClient(at(port), session, PATIENT)
        await client.reset(TASK)
        await behind.set_faults(0, {"kind": "hung", "atStep": 0})
        with pytest.raises(EnvironmentFault, match="no answer twice within 1 s") as fault:
            await client.step(Home(), 0)
        assert fault.value.reason is Reason.DEADLINE
        with pytest.raises(EnvironmentFault, match="is over, start another"):
            await client.step(Home(), 1)
        await behind.set_faults(0)
        await client.reset(TASK)
        await client.step(Home(), 0)


async def test_an_unknown_task_is_named_and_the_phone_is_well():
    async with phones() as behind, bridge_to(behind.url()) as port, new_session() as session:
        client = TapforgeClient(at(port), session, PATIENT)
        with pytest.raises(UnknownTask, match="no-such-suite"):
            await client.reset(Task(suite="no-such-suite", template="x"))
        assert await client.health()
        await client.reset(TASK)


async def test_a_phone_that_was_replaced_is_another_instance_and_the_episode_is_over():
    async with phones() as behind, bridge_to(behind.url()) as port, new_session() as session:
        client = TapforgeClient(at(port), session, PATIENT)
        before = await client.health()
        await client.reset(TASK)
        behind.slots[0].restart()
        assert await client.health() != before
        with pytest.raises(EnvironmentFault, match="the episode is lost"):
            await client.step(Home(), 0)
        await client.reset(TASK)


async def test_health_says_what_is_wrong_with_the_phone():
    async with phones() as behind, bridge_to(behind.url(), "http://127.0.0.1:1") as port:
        status, answer = await asked(f"{at(port)}/health", "GET")
        assert (status, answer["status"], answer["behind"]) == (200, "ok", {"protocol": "tapforge", "phone": "phone-0"})
        status, answer = await asked(f"{at(port, 1)}/health", "GET")
        assert status == 503 and "phone-1: health: no server answers" in answer["status"]
        assert (await asked(f"{at(port, 2)}/health", "GET"))[0] == 404


async def test_tasks_are_those_that_it_was_given_else_the_phones():
    mine = [Task(suite="mine", template=f"t{i}") for i in range(3)]
    async with phones() as behind, bridge_to(behind.url()) as port, bridge_to(behind.url(), tasks=mine) as other:
        status, answer = await asked(f"{at(port)}/tasks?limit=2", "GET")
        assert status == 200 and [t["suite"] for t in answer["tasks"]] == ["quickstart"] * 2
        status, answer = await asked(f"{at(other)}/tasks?suite=mine&limit=2", "GET")
        assert [t["template"] for t in answer["tasks"]] == ["t0", "t1"]
        assert (await asked(f"{at(other)}/tasks?suite=quickstart", "GET"))[0] == 404
        for limit in ("0", "1001", "x", "-1", "9" * 40):
            assert (await asked(f"{at(other)}/tasks?limit={limit}", "GET"))[0] == 400


async def test_with_a_token_nobody_else_is_served_but_health(monkeypatch):
    async with phones() as behind, bridge_to(behind.url(), token=TOKEN) as port:
        reset = {"episode": "a", "task": TASK.model_dump()}
        for given in ({}, {"Authorization": "Bearer 0123456789abcdeX"}, {"Authorization": TOKEN}):
            status, answer = await asked(f"{at(port)}/reset", body=reset, **given)
            assert status == 401 and "Authorization: Bearer" in answer["error"]
            assert (await asked(f"{at(port)}/tasks", "GET", **given))[0] == 401
        assert (await asked(f"{at(port)}/health", "GET"))[0] == 200
        assert behind.slots[0].episode is None
        phone, clients = PhoneAddress("p", at(port), PATIENT), PhoneClients()
        with pytest.raises(EnvironmentFault, match="answered 401"):
            await clients.open(phone).reset(TASK)
        monkeypatch.setenv("TAPFORGE_PHONE_TOKEN", TOKEN)
        await clients.open(phone).reset(TASK)
        await clients.close()


async def test_a_page_in_a_browser_drives_no_phone():
    async with phones() as behind, bridge_to(behind.url()) as port:
        reset = {"episode": "a", "task": TASK.model_dump()}
        status, answer = await asked(f"{at(port)}/reset", body=reset, Origin=f"http://127.0.0.1:{port}")
        assert status == 403 and "browser" in answer["error"]
        assert behind.slots[0].episode is None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/reset", b"x" * (1024 * 1024 + 1), 413),
        ("/reset", b"{", 400),
        ("/reset", b"\xff\xfe", 400),
        ("/reset", b"[" * 100_000, 400),
        ("/reset", json.dumps({"episode": "a" * 201, "task": TASK.model_dump()}).encode(), 400),
        ("/step", json.dumps({**STEP, "index": 10**30}).encode(), 409),
        ("/step", json.dumps({**STEP, "index": 1.5}).encode(), 400),
        ("/step", json.dumps({**STEP, "action": {"type": "tap", "x": float("nan"), "y": 0}}).encode(), 400),
        ("/step", json.dumps({**STEP, "more": 1}).encode(), 400),
        ("/evaluate", b"null", 400),
        ("/no-such-call", b"{}", 404),
    ],
)
async def test_bad_requests_are_refused_with_words_and_change_nothing(path, body, status):
    async with phones() as behind, bridge_to(behind.url()) as port, aiohttp.ClientSession() as session:
        reset = {"episode": "a", "task": TASK.model_dump()}
        assert (await asked(f"{at(port)}/reset", body=reset))[0] == 200
        async with session.post(at(port) + path, data=body) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]
        assert len(behind.slots[0].episode.results) == 0
        assert (await asked(f"{at(port)}/step", body=STEP))[0] == 200


async def test_ten_phones_of_one_bridge_are_independent():
    async with phones(10) as behind, bridge_to(*behind.urls) as port, new_session() as session:
        await behind.set_faults(3, {"kind": "error", "atStep": 0})

        async def episode(slot: int) -> str:
            client = TapforgeClient(at(port, slot), session, PATIENT)
            task = catalog.tasks("quickstart", "train").sample(7, slot)
            await client.reset(task)
            try:
                for index in range(3):
                    await client.step(Home(), index)
            except EnvironmentFault as fault:
                return str(fault)
            finally:
                await client.close()
            return "well"

        said = await asyncio.gather(*(episode(slot) for slot in range(10)))
        assert [i for i, words in enumerate(said) if words != "well"] == [3]
        assert "fault on demand: error at step 0" in said[3]


@pytest.mark.parametrize(
    ("host", "token", "fine"),
    [
        ("127.0.0.1", "", True),
        ("127.1.2.3", "", True),
        ("::1", "", True),
        ("localhost", "", True),
        ("0.0.0.0", "", False),
        ("::", "", False),
        ("workstation", "", False),
        ("", "", False),
        ("0.0.0.0", TOKEN, True),
    ],
)
def test_without_a_token_it_listens_on_this_machine_alone(host, token, fine):
    assert (refusal_to_listen(host, token) == "") is fine


@pytest.mark.parametrize("text", ["", "short", "with a space in the middle", "über-geheim-und-lang", "a" * 5000])
def test_a_token_that_can_not_be_sent_is_refused(text):
    with pytest.raises(ValueError, match="file holds no token"):
        read_token(text, "file")


def test_a_token_is_read_without_the_end_of_its_line():
    assert read_token(TOKEN + "\n", "file") == TOKEN
