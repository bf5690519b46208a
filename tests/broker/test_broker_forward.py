"""A broker that stands by passes its callers on to the leader: once, and with all that a caller may rely on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import web
from broker_house import CLAIMS, NAME, House, own_material
from claim_cluster import Lab, until

from tapforge_api.claims import Acquired, Refusal, Released, RenewedAll
from tapforge_operator import labels
from tapforge_operator.broker import tls
from tapforge_operator.broker.http import FORWARDED, MAX_BODY


@dataclass
class Pair:
    leader: House
    standby: House
    material: tls.Material
    #: what the standby believes
    where: str


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    leader, standby = House(Lab(2)), House(Lab(0), leading=False)
    pair = Pair(leader, standby, await leader.open(), leader.address)
    await standby.open(pair.material, lambda: pair.where)
    standby.token = leader.token
    yield pair
    await standby.close()
    await leader.close()


async def test_claims_are_asked_for_renewed_and_given_back_at_whichever_replica_answers(pair: Pair) -> None:
    status, answer, _ = await pair.standby.post(CLAIMS, {"request": "request-1", "slots": 2})
    assert status == 200
    claims = Acquired.model_validate(answer).claims
    assert len(claims) == 2
    assert pair.leader.lab.pod("phone-0")["metadata"]["labels"][labels.RUN] == "train"
    held = [{"id": c.id, "secret": c.secret, "episodes": 1} for c in claims]
    _, answer, _ = await pair.standby.post("/v1/claims/renew", {"claims": held}, token="")
    assert [c.state for c in RenewedAll.model_validate(answer).claims] == ["held", "held"]
    _, answer, _ = await pair.standby.post("/v1/claims/release", {"claims": held}, token="")
    assert [c.state for c in Released.model_validate(answer).claims] == ["lost", "lost"]
    assert pair.standby.passed_on == [True] * 3


async def test_the_leaders_refusals_arrive_as_they_are(pair: Pair) -> None:
    status, answer, headers = await pair.standby.post(CLAIMS, {"request": "request-1"}, token="forged")
    assert (status, answer["reason"], headers["WWW-Authenticate"]) == (401, "Unauthorized", "Bearer")
    assert "slots" in await pair.standby.refused(CLAIMS, {"request": "request-1", "slots": 0}, 400, "Invalid")
    # What is no call of the broker's, or too large, goes nowhere.
    sent = len(pair.standby.passed_on)
    await pair.standby.refused("/v1/claims/renwe", {}, 404, "NotFound")
    await pair.standby.refused("/v1/claims/renew", b"x" * (MAX_BODY + 1), 413, "BodyTooLarge")
    await pair.standby.refused("/v1/claims/renew", b"x" * MAX_BODY, 403, "Unproved")
    assert len(pair.standby.passed_on) == sent


async def test_there_is_one_hop(pair: Pair) -> None:
    """Two that each take the other for the leader: the caller is told, and nothing goes round."""
    third = House(Lab(0), leading=False)
    await third.open(pair.material, lambda: pair.standby.address)
    pair.where = third.address
    for path in (CLAIMS, "/v1/claims/renew", "/v1/claims/release"):
        status, answer, headers = await pair.standby.post(path, {"request": "request-1"})
        assert (status, answer["reason"], headers["Retry-After"]) == (503, "NotLeader", "1")
    assert third.passed_on == [] and pair.standby.passed_on == [True] * 3
    status, answer, _ = await pair.standby.post(CLAIMS, {"request": "request-1"}, headers={FORWARDED: "somebody"})
    assert (status, answer["reason"]) == (503, "NotLeader")
    await third.close()


async def test_a_leader_answers_what_was_passed_on_to_it(pair: Pair) -> None:
    status, *_ = await pair.leader.post(CLAIMS, {"request": "request-1"}, headers={FORWARDED: "standby"})
    assert status == 200


async def test_who_was_passed_on_keeps_its_connection_while_others_are_silent(pair: Pair) -> None:
    lab, claims, connections = pair.leader.lab, pair.leader.broker.claims, pair.standby.connections
    await pair.leader.post(CLAIMS, {"request": "request-0", "slots": 2})
    waits = [{"request": f"request-{k}", "waitSeconds": 600} for k in (1, 2, 3)]
    calls = [asyncio.create_task(pair.standby.post(CLAIMS, ask)) for ask in waits]
    await until(lambda: claims.waiting(lab.pool_uid) == 3)
    connections.most = 5
    host, port = pair.standby.address.split(":")
    silent = [await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0)) for _ in range(2)]
    await until(lambda: connections.of("127.0.0.2") == 2)
    async with pair.standby.caller("127.0.0.3") as other:
        await pair.standby.post("/v1/claims/renew", {"claims": []}, session=other)
    assert (connections.of("127.0.0.1"), connections.of("127.0.0.2"), claims.waiting(lab.pool_uid)) == (3, 1, 3)
    for _, writer in silent:
        writer.transport.abort()
    for call in calls:
        call.cancel()


async def test_who_disconnects_from_the_standby_leaves_nothing_at_the_leader(pair: Pair) -> None:
    lab, claims = pair.leader.lab, pair.leader.broker.claims
    await pair.leader.post(CLAIMS, {"request": "request-1", "slots": 2})
    call = asyncio.create_task(pair.standby.post(CLAIMS, {"request": "request-2", "waitSeconds": 600}))
    await until(lambda: claims.waiting(lab.pool_uid) == 1)
    call.cancel()
    await until(lambda: claims.waiting(lab.pool_uid) == 0)
    lab.add_slot(7)
    await asyncio.sleep(0.05)
    assert labels.CLAIM not in str(lab.pod("phone-7"))


@pytest.mark.parametrize("where", ["", "127.0.0.1:1"], ids=["unknown", "gone"])
async def test_without_a_leader_the_caller_is_told_to_ask_again(pair: Pair, where: str) -> None:
    pair.where = where
    status, answer, headers = await pair.standby.post(CLAIMS, {"request": "request-1", "waitSeconds": 60})
    assert (status, Refusal.model_validate(answer).reason, headers["Retry-After"]) == (503, "NotLeader", "1")


async def test_who_waits_at_a_leader_that_is_none_any_more_is_sent_on(pair: Pair) -> None:
    await pair.leader.post(CLAIMS, {"request": "request-1", "slots": 2})
    call = asyncio.create_task(pair.standby.post(CLAIMS, {"request": "request-2", "waitSeconds": 600}))
    await until(lambda: pair.leader.broker.claims.waiting(pair.leader.lab.pool_uid) == 1)
    pair.where = "127.0.0.1:1"
    status, answer, _ = await call
    assert (status, answer["reason"]) == (503, "NotLeader")
    await until(lambda: pair.leader.broker.claims.waiting(pair.leader.lab.pool_uid) == 0)


async def test_nobody_but_a_broker_of_ours_is_shown_a_token(pair: Pair) -> None:
    shown: list[str] = []

    async def listen(request: web.Request) -> web.Response:
        shown.append(request.headers["Authorization"])
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", listen)
    runner = web.AppRunner(app)
    await runner.setup()
    context: ssl.SSLContext = tls.context(await own_material([NAME, "127.0.0.1"]))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    pair.where = f"127.0.0.1:{runner.addresses[0][1]}"
    status, answer, _ = await pair.standby.post(CLAIMS, {"request": "request-1"})
    assert (status, answer["reason"], shown) == (503, "NotLeader", [])
    await runner.cleanup()
