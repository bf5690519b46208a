"""The broker over HTTPS: what good and bad callers get back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from broker_house import CLAIMS, House
from claim_cluster import KEYS, Lab, until

from tapforge_api.claims import Acquired, Refusal, Released, RenewedAll
from tapforge_operator import labels
from tapforge_operator.broker.http import MAX_BODY


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House(Lab(2))
    await house.open()
    yield house
    await house.close()


async def test_a_claim_from_its_question_to_its_end(house):
    status, answer, _ = await house.post(CLAIMS, {"request": "request-1", "slots": 5, "ttlSeconds": 20})
    assert status == 200
    claims = Acquired.model_validate(answer).claims
    assert len(claims) == 2
    assert set(answer["claims"][0]) == {"id", "secret", "slot", "url", "fence", "ttlSeconds", "holdSeconds"}
    assert house.lab.pod("phone-0")["metadata"]["labels"][labels.RUN] == "train"
    held = [{"id": c.id, "secret": c.secret, "episodes": 1} for c in claims]
    # Renewals and releases need no token.
    status, answer, _ = await house.post("/v1/claims/renew", {"claims": held}, token="")
    assert status == 200
    assert [c.state for c in RenewedAll.model_validate(answer).claims] == ["held", "held"]
    given = [{**one, "verdict": verdict} for one, verdict in zip(held, ["clean", "broken"], strict=True)]
    status, answer, _ = await house.post("/v1/claims/release", {"claims": given})
    assert status == 200
    assert [c.state for c in Released.model_validate(answer).claims] == ["lost", "lost"]
    status, answer, _ = await house.post(CLAIMS, {"request": "request-2", "slots": 5})
    assert len(answer["claims"]) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{nonsense", "JSON"),
        (b"[]", "object"),
        (b"\xff\xfe", "JSON"),
        ({}, "request: is required"),
        ({"request": "short"}, "request"),
        ({"request": "request-1", "slots": 0}, "slots"),
        ({"request": "request-1", "slots": 257}, "257"),
        ({"request": "request-1", "slots": "2"}, "slots"),
        ({"request": "request-1", "slots": True}, "slots"),
        ({"request": "request-1", "waitSeconds": "1"}, "waitSeconds"),
        ({"request": "request-1", "waitSeconds": 1e9}, "waitSeconds"),
        ({"request": "request-1", "ttlSeconds": 1}, "ttlSeconds"),
        ({"request": "request-1", "priority": "high"}, "'high'|high"),
        ({"request": "a/b/../c-d"}, "request"),
    ],
)
async def test_a_wrong_question_is_answered_with_what_is_wrong(house, body, words):
    import re

    message = await house.refused(CLAIMS, body, 400, "Invalid")
    assert re.search(words, message), message


async def test_a_caller_of_a_later_release_may_say_more(house):
    status, answer, _ = await house.post(CLAIMS, {"request": "request-1", "waitSeconds": 0, "later": {"a": 1}})
    assert (status, len(answer["claims"])) == (200, 1)
    held = {"id": answer["claims"][0]["id"], "secret": answer["claims"][0]["secret"], "later": 1}
    status, answer, _ = await house.post("/v1/claims/renew", {"claims": [held], "later": 1})
    assert (status, answer["claims"][0]["state"]) == (200, "held")
    status, answer, _ = await house.post("/v1/claims/release", {"claims": [{**held, "verdict": "worn"}]})
    assert (status, answer["claims"][0]["state"]) == (200, "lost")


async def test_wrong_renewals_name_the_claim_that_is_wrong(house):
    message = await house.refused("/v1/claims/renew", {"claims": []}, 400, "Invalid")
    assert "claims" in message
    bad = [{"id": "some-claim.1", "secret": "s" * 20}] * 3 + [{"id": "some-claim.1", "secret": "s"}]
    assert "claims[3].secret" in await house.refused("/v1/claims/renew", {"claims": bad}, 400, "Invalid")
    mine = {"id": "some-claim.1", "secret": KEYS.secret("some-claim.1")}
    many = [mine] * 4097
    assert "4096" in await house.refused("/v1/claims/renew", {"claims": many}, 400, "Invalid")
    worst = [mine, *[{"id": "x"}] * 4000]
    assert "more" in await house.refused("/v1/claims/release", {"claims": worst}, 400, "Invalid")


async def test_who_is_nobody_gets_nothing(house):
    ask = {"request": "request-1"}
    await house.refused(CLAIMS, ask, 401, "Unauthorized", token="forged")
    async with house.session.post(house.url + CLAIMS, json=ask) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert "Authorization" in Refusal.model_validate(await response.json()).message
    async with house.session.post(house.url + CLAIMS, json=ask, headers={"Authorization": "Basic eA=="}) as response:
        assert response.status == 401
    ann = house.callers.token_for("ann")
    await house.refused(CLAIMS, ask, 403, "Forbidden", token=ann)
    await house.refused("/v1/namespaces/lab/pools/others/claims", ask, 403, "Forbidden")
    house.callers.allowed.add(("bob", "lab", "others"))
    bob = house.callers.token_for("bob")
    message = await house.refused("/v1/namespaces/lab/pools/others/claims", ask, 404, "PoolNotFound", token=bob)
    assert "others" in message
    house.callers.down = True
    await house.refused(CLAIMS, ask, 503, "CannotAuthenticate", token="unknown so far")


async def test_wrong_paths_methods_and_sizes(house):
    assert "/v1/claims/renew" in await house.refused("/v1/claims/renwe", {}, 404, "NotFound")
    async with house.session.get(house.url + "/v1/claims/renew") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert Refusal.model_validate(await response.json()).reason == "MethodNotAllowed"
    await house.refused("/v1/claims/renew", b"x" * (MAX_BODY + 1), 413, "BodyTooLarge")
    # The largest batch that is allowed fits.
    ids = [f"{'u' * 36}.{2**40 + k}" for k in range(4096)]
    batch = [{"id": i, "secret": KEYS.secret(i), "episodes": 100, "verdict": "broken"} for i in ids]
    status, answer, _ = await house.post("/v1/claims/release", {"claims": batch})
    assert (status, len(answer["claims"])) == (200, 4096)


async def test_what_nobody_foresaw_is_a_reason_too_and_is_logged_once(house, monkeypatch, caplog):
    async def breaks(*_):
        raise KeyError("uid-of-a-bug")

    monkeypatch.setattr(house.broker.claims, "acquire", breaks)
    monkeypatch.setattr(house.broker.claims, "renew", breaks)
    await house.refused(CLAIMS, {"request": "request-1"}, 500, "InternalError")
    [said] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "uid-of-a-bug" in said.exc_text
    assert (said.ref["kind"], said.ref["namespace"], said.ref["name"]) == ("EmulatorPool", "lab", "phones")
    ask = {"claims": [{"id": "a-claim.1", "secret": "s" * 20}]}
    message = await house.refused("/v1/claims/renew", ask, 500, "InternalError")
    assert "uid-of-a-bug" not in message
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


@pytest.mark.parametrize("rest", [b"5\r\n{", b""])
async def test_a_body_that_breaks_off_is_no_fault(house, rest, caplog):
    port = house.runner.addresses[0][1]
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=house.trust, server_hostname="localhost")
    writer.write(b"POST /v1/claims/renew HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + rest)
    await writer.drain()
    writer.transport.abort()
    status, *_ = await house.post(CLAIMS, {"request": "request-1", "slots": 1})
    assert status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_who_does_not_lead_says_so(house):
    house.broker.leading = False
    for path in (CLAIMS, "/v1/claims/renew", "/v1/claims/release"):
        status, answer, headers = await house.post(path, {"request": "request-1"})
        assert (status, answer["reason"]) == (503, "NotLeader")
        assert int(headers["Retry-After"]) >= 1


async def test_a_caller_that_disconnects_leaves_nothing_behind(house):
    lab, claims = house.lab, house.broker.claims
    await house.post(CLAIMS, {"request": "request-1", "slots": 2})
    call = asyncio.create_task(house.post(CLAIMS, {"request": "request-2", "waitSeconds": 60}))
    await until(lambda: claims.waiting(lab.pool_uid) == 1)
    call.cancel()
    await until(lambda: claims.waiting(lab.pool_uid) == 0)
    lab.add_slot(7)
    await asyncio.sleep(0.05)
    assert labels.CLAIM not in str(lab.pod("phone-7"))


async def test_one_caller_cannot_take_all_places(house):
    house.room.limits = house.room.limits._replace(holder=3)
    await house.post(CLAIMS, {"request": "request-0", "slots": 2})
    calls = [
        asyncio.create_task(house.post(CLAIMS, {"request": f"request-{k}", "waitSeconds": 60})) for k in range(1, 4)
    ]
    await until(lambda: house.broker.claims.waiting(house.lab.pool_uid) == 3)
    message = await house.refused(CLAIMS, {"request": "request-9"}, 429, "TooManyWaiters")
    assert "at most 3" in message
    house.callers.allowed.add(("ann", "lab", "phones"))
    ann = house.callers.token_for("ann")
    status, *_ = await house.post(CLAIMS, {"request": "request-1", "waitSeconds": 0}, token=ann)
    assert status == 200
    calls[0].cancel()
    await until(lambda: house.broker.claims.waiting(house.lab.pool_uid) == 2)
    status, *_ = await house.post(CLAIMS, {"request": "request-9", "waitSeconds": 0})
    assert status == 200
    for call in calls:
        call.cancel()


async def test_who_gives_up_its_place_to_another_namespace_leaves_nothing_behind(house):
    house.room.limits = house.room.limits._replace(all=2)
    await house.post(CLAIMS, {"request": "request-0", "slots": 2})
    calls = [asyncio.create_task(house.post(CLAIMS, {"request": f"request-{k}", "waitSeconds": 60})) for k in (1, 2)]
    await until(lambda: house.broker.claims.waiting(house.lab.pool_uid) == 2)
    house.callers.allowed.add(("ann", "lab", "phones"))
    ann = house.callers.token_for("ann")
    status, *_ = await house.post(CLAIMS, {"request": "request-1", "waitSeconds": 0}, token=ann)
    assert status == 200
    done, (waits,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    status, answer, headers = done.pop().result()
    assert (status, answer["reason"], headers["Retry-After"]) == (429, "TooManyWaiters", "1")
    assert house.broker.claims.waiting(house.lab.pool_uid) == 1
    waits.cancel()


async def test_only_the_right_authority_is_believed(house):
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        async with aiohttp.ClientSession() as session, session.post(house.url + CLAIMS):
            pass


async def test_the_end_of_a_leadership_sends_waiting_callers_on(house):
    await house.post(CLAIMS, {"request": "request-1", "slots": 2})
    call = asyncio.create_task(house.post(CLAIMS, {"request": "request-2", "waitSeconds": 60}))
    await until(lambda: house.broker.claims.waiting(house.lab.pool_uid) == 1)
    house.broker.leading = False
    await house.broker.claims.end()
    status, answer, _ = await call
    assert (status, answer["reason"]) == (503, "NotLeader")


@pytest.mark.parametrize("pool", ["phones", "other"], ids=["its pool", "a pool that may be its own"])
async def test_who_is_being_checked_when_a_leadership_ends_is_sent_on(house, monkeypatch, pool):
    """Whoever does not lead any more knows of no pool: that is no word on whether there is one, nor on whose it is."""
    checked, answered, create = asyncio.Event(), asyncio.Event(), house.callers.create

    async def slowly(path, body):
        checked.set()
        await answered.wait()
        return await create(path, body)

    monkeypatch.setattr(house.callers, "create", slowly)
    call = asyncio.create_task(house.post(CLAIMS.replace("phones", pool), {"request": "request-1"}))
    await checked.wait()
    house.broker.leading = False
    await house.broker.claims.end()
    answered.set()
    status, answer, _ = await call
    assert (status, answer["reason"]) == (503, "NotLeader")
