"""The client: every call ends in time; a lost answer is asked for again without doing anything twice; damaged, foreign
or stale answers are faults with the right reason."""

import asyncio
import json
import math
from contextlib import asynccontextmanager

import pytest
from phones import PATIENT, TASKS, a_port, impatient, phones
from rough_network import rough_network

from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.pictures import check_frame
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.phone import catalog
from tapforge_envs.phone.faults import NO_SCORES, Fault
from tapforge_envs.protocol import EnvironmentFault, Frame, Home, Observation, Reason, StepResult, Tap
from tapforge_envs.wire import Fence, decode_step, encode_step

TASK = TASKS.sample(0, 0)


def opening_tap() -> Tap:
    """A tap that changes the first screen."""
    phone = catalog.phone_for("quickstart", 96, 160)
    phone.reset(TASK.seed, catalog.rules_of(TASK))
    x, y, wide, high = phone.screen().widgets[0].box
    return Tap(x=x + wide / 2, y=y + high / 2)


@asynccontextmanager
async def a_phone():
    async with phones() as server, new_session() as session:
        yield server, TapforgeClient(server.url(), session, PATIENT)


@asynccontextmanager
async def a_far_phone():
    async with phones() as server, rough_network(server.port) as network, new_session() as session:
        yield server, network, TapforgeClient(network.url(), session, PATIENT, "far")


def test_an_episode_from_reset_to_verdict():
    async def run():
        async with a_phone() as (server, client):
            first = await client.reset(TASK)
            result = await client.step(opening_tap(), 0)
            assert result.observation.frame.sha256 != first.frame.sha256
            assert (first.frame.width, first.frame.height) == (96, 160)
            assert first.state_key and result.observation.app
            score = await client.evaluate()
            assert 0 <= score.value <= 1
            await client.close()
            assert server.slots[0].episode is None

    asyncio.run(run())


def test_one_connection_serves_a_whole_episode():
    async def run():
        async with a_far_phone() as (_, network, client):
            await client.reset(TASK)
            for index in range(5):
                await client.step(Home(), index)
            await client.close()
            assert len(network.seen) == 7
            assert network.connections == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["late", "hang", "drop_answer", "refuse", "half_answer"])
def test_a_lost_step_is_sent_once_more_and_done_once(fault):
    async def run():
        async with a_far_phone() as (server, network, client):
            await client.reset(TASK)
            network.plan.append(("/step", fault))
            result = await impatient(client.step(opening_tap(), 0), lambda: network.hung)
            assert network.seen.count("/slot/0/step") == 2
            assert len(server.slots[0].episode.results) == 1
            assert result == server.slots[0].episode.results[0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "faults", "reason", "words"),
    [
        ("/step", ["late", "late"], Reason.DEADLINE, "far: step 0 (home): no answer twice within 100 s"),
        ("/step", ["late", "hang"], Reason.DEADLINE, "no answer twice"),
        ("/step", ["refuse", "refuse"], Reason.ENV_ERROR, "connection broke"),
        ("/step", ["half_answer", "half_answer"], Reason.ENV_ERROR, "connection broke"),
        ("/step", ["garbage", "garbage"], Reason.ENV_ERROR, "connection broke"),
        ("/reset", ["hang"], Reason.DEADLINE, "far: reset: no answer within 100 s"),
        ("/evaluate", ["hang"], Reason.DEADLINE, "far: evaluate: no answer"),
        ("/close", ["hang"], Reason.DEADLINE, "far: close: no answer"),
    ],
)
def test_what_stays_lost_is_a_fault(call, faults, reason, words):
    async def run():
        async with a_far_phone() as (_, network, client):
            network.plan.extend((call, f) for f in faults)

            async def an_episode() -> None:
                await client.reset(TASK)
                await client.step(Home(), 0)
                await client.evaluate()
                await client.close()

            with pytest.raises(EnvironmentFault) as caught:
                await impatient(an_episode(), lambda: network.hung)
            assert caught.value.reason is reason
            assert words in str(caught.value)
            assert not network.plan

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("corrupt", "cut off or corrupted"),
        ("half", "half a PNG"),
        ("wrong_size", "announced was"),
        ("lost_task", "the task is lost"),
        ("error", "answered 500"),
        ("lying_health", "answered 503"),
    ],
)
def test_a_sick_phone_is_a_fault_that_names_slot_and_call(kind, words):
    async def run():
        async with a_phone() as (server, client):
            await client.reset(TASK)
            await server.set_faults(0, {"kind": kind})
            await client.health()
            with pytest.raises(EnvironmentFault) as caught:
                await client.step(Home(), 0)
            assert caught.value.reason is Reason.ENV_ERROR
            assert words in str(caught.value)
            assert server.url() in str(caught.value)
            assert "step 0" in str(caught.value)

    asyncio.run(run())


async def an_episode(client: TapforgeClient) -> None:
    await client.reset(TASK)
    await client.step(Home(), 0)
    await client.step(Home(), 1)
    await client.evaluate()
    await client.close()


@pytest.mark.parametrize("kind", ["stale", "foreign"])
@pytest.mark.parametrize("call", ["reset", "step", "evaluate"])
async def test_an_answer_to_another_call_is_a_fault(kind, call):
    async with phones(2) as server, new_session() as session:
        clients = [TapforgeClient(url, session, PATIENT, url) for url in server.urls]
        for client in clients:
            await an_episode(client)
        await server.set_faults(0, {"kind": kind, "calls": [call]})
        with pytest.raises(EnvironmentFault, match=f"slot/0: {call}.* answered with Tapforge-Answers .* instead of"):
            await an_episode(clients[0])
        await server.set_faults(0)
        await an_episode(clients[0])


@pytest.mark.parametrize("body", NO_SCORES)
async def test_what_is_no_verdict_is_a_fault_and_never_a_default_one(body, monkeypatch):
    monkeypatch.setattr(Fault, "no_score", lambda fault, episode: body.encode())
    async with a_phone() as (server, client):
        await client.reset(TASK)
        await server.set_faults(0, {"kind": "bad_score"})
        with pytest.raises(EnvironmentFault, match="evaluate: "):
            await client.evaluate()


@pytest.mark.parametrize("effects", [7, "Wi-Fi", {"wifi": "off"}])
async def test_side_effects_that_are_no_list_are_a_fault(effects, monkeypatch):
    body = json.dumps({"value": 1.0, "side_effects": effects}).encode()
    monkeypatch.setattr(Fault, "no_score", lambda fault, episode: body)
    async with a_phone() as (server, client):
        await client.reset(TASK)
        await server.set_faults(0, {"kind": "bad_score"})
        with pytest.raises(EnvironmentFault, match="'side_effects' must be a list"):
            await client.evaluate()


async def test_a_server_that_does_not_say_what_it_answers_is_believed(monkeypatch):
    monkeypatch.setattr("tapforge_envs.phone.server.answers", lambda *call: {})
    async with a_phone() as (_, client):
        await an_episode(client)


def test_a_hung_phone_runs_into_the_deadline_and_says_so_to_its_health_check():
    async def run():
        async with a_phone() as (server, client):
            await client.reset(TASK)
            await server.set_faults(0, {"kind": "hung"})
            with pytest.raises(EnvironmentFault) as caught:
                await impatient(client.step(Home(), 0), server.hung)
            assert caught.value.reason is Reason.DEADLINE
            with pytest.raises(EnvironmentFault, match="answered 503"):
                await client.health()

    asyncio.run(run())


def test_somebody_else_on_the_phone_is_a_lost_lease():
    async def run():
        async with a_phone() as (server, client), new_session() as session:
            await client.reset(TASK)
            await client.step(Home(), 0)
            await TapforgeClient(server.url(), session, PATIENT).reset(TASK)
            with pytest.raises(EnvironmentFault, match="another client uses this phone") as caught:
                await client.step(Home(), 1)
            assert caught.value.reason is Reason.LEASE_LOST

    asyncio.run(run())


def test_a_phone_with_a_newer_holder_is_a_lost_lease():
    async def run():
        async with phones() as server, new_session() as session:
            old = TapforgeClient(server.url(), session, PATIENT, "phone-0", Fence("uid-0", 7))
            new = TapforgeClient(server.url(), session, PATIENT, "phone-0", Fence("uid-0", 8))
            await old.reset(TASK)
            await new.reset(TASK)
            for call in (old.step(Home(), 0), old.evaluate(), old.close(), old.reset(TASK)):
                with pytest.raises(EnvironmentFault, match="phone-0: .*fence 7 is over.*fence 8") as caught:
                    await call
                assert caught.value.reason is Reason.LEASE_LOST
            await new.step(Home(), 0)

    asyncio.run(run())


def test_another_slot_at_the_address_is_a_lost_lease():
    """The Pod is gone, and its address was used again."""

    async def run():
        async with phones() as server, new_session() as session:
            client = TapforgeClient(server.url(), session, PATIENT, "phone-0", Fence("uid-0", 7))
            server.slots[0].claims.uid = "uid-1"
            for call in (client.health(), client.reset(TASK)):
                with pytest.raises(EnvironmentFault, match="phone-0: .*'uid-1'.*'uid-0'") as caught:
                    await call
                assert caught.value.reason is Reason.LEASE_LOST
            server.slots[0].claims.uid = "uid-0"
            await client.health()
            await client.reset(TASK)

    asyncio.run(run())


def test_a_restarted_phone_has_lost_the_task():
    async def run():
        async with a_phone() as (server, client):
            await client.reset(TASK)
            server.slots[0].restart()
            with pytest.raises(EnvironmentFault, match="the task is lost") as caught:
                await client.step(Home(), 0)
            assert caught.value.reason is Reason.ENV_ERROR

    asyncio.run(run())


def test_nobody_there():
    async def run():
        with a_port() as port:
            async with new_session() as session:
                with pytest.raises(EnvironmentFault, match="no server answers") as caught:
                    await TapforgeClient(f"http://127.0.0.1:{port}/slot/0", session, PATIENT).reset(TASK)
            assert caught.value.reason is Reason.ENV_ERROR

    asyncio.run(run())


def test_an_unknown_task_is_refused_in_the_servers_words():
    async def run():
        async with a_phone() as (_, client):
            with pytest.raises(EnvironmentFault, match="answered 404.*quickstart"):
                await client.reset(TASK.model_copy(update={"suite": "quickstrat"}))

    asyncio.run(run())


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308])
def test_a_reward_that_no_sum_can_hold_is_refused(reward):
    frame = Frame.of(b"x", 10, 10)
    body = encode_step(StepResult(Observation(frame)), "i")
    head, _, data = body.partition(b"\n")
    with pytest.raises(EnvironmentFault, match="reward"):
        decode_step(json.dumps({**json.loads(head), "reward": reward}).encode() + b"\n" + data)


async def test_a_token_and_a_user_in_the_url_are_one_too_many():
    async with new_session() as session:
        with pytest.raises(EnvironmentFault, match="has a user and TAPFORGE_PHONE_TOKEN is set"):
            TapforgeClient("http://me:pw@127.0.0.1:1", session, token="t" * 32)


def test_other_image_types_are_left_to_their_decoder():
    check_frame(Frame.of(b"\xff\xd8 a jpeg", 10, 10, "image/jpeg"))
    with pytest.raises(EnvironmentFault, match="do not begin like a PNG"):
        check_frame(Frame.of(b"\xff\xd8 a jpeg", 10, 10))


def test_what_a_server_knows_of_its_task_travels_with_the_first_frame():
    first = Observation(Frame.of(b"a frame", 1, 1), goal="Tap twice.", feasible=False)
    assert decode_step(encode_step(StepResult(first)))[0].observation == first
