"""What a caller that proves nothing gets of the broker's time: not more than its share, and nobody else's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from broker_house import CLAIMS, House
from claim_cluster import KEYS, Lab
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api.claims import Given, Held, Release, Renew
from tapforge_operator.broker import http
from tapforge_operator.broker.auth import Denied
from tapforge_operator.broker.http import FORWARDED, FORWARDED_FOR, HEAD, MAX_BODY, first_claims

RENEW = "/v1/claims/renew"
BAD, GOOD = "127.0.0.2", "127.0.0.3"


def proved(head: bytes) -> bool:
    return any(KEYS.secret(claim) == secret for claim, secret in first_claims(head))


@given(st.integers(1, 4096), st.sampled_from([Renew, Release]))
def test_every_batch_of_a_holder_is_proved_by_its_beginning(count: int, kind: type[Renew | Release]) -> None:
    one: type[Held] = Given if kind is Release else Held
    # As long as they may be: the id of an external device's claim is the longest.
    ids = [f"{'a' * 100}.{2**60 + k}" for k in range(count)]
    claims = tuple(one(id=i, secret=KEYS.secret(i), episodes=2**31 - 1) for i in ids)
    assert proved(kind(claims=claims).model_dump_json(by_alias=True).encode()[:HEAD])


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"", []),
        (b"{" * HEAD, []),
        (
            b'{"claims": [{"id": "a", "secret": "b"}, {"secret": "d", "episodes": 1, "id": "c"}',
            [("a", "b"), ("c", "d")],
        ),
        (b'{"claims": [{"id": "a\\u0062", "secret": "c"}, {"id": "d", "sec', [("ab", "c")]),
        (b'{"claims": [{"id": 1, "secret": "b"}, {"id": "a"}, {nonsense}, {"id": "c", "secret": "d"}]}', [("c", "d")]),
        (b"{" + b"[" * (HEAD - 2) + b"}", []),
        (b"\xff{}" * 100, []),
    ],
)
def test_claims_are_found_at_the_beginning_of_whatever_comes(head: bytes, found: list[tuple[str, str]]) -> None:
    assert first_claims(head) == found


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House(Lab(2))
    await house.open()
    yield house
    await house.close()


class Wire:
    """A connection of somebody who sends what it likes."""

    def __init__(self, house: House, address: str = BAD):
        self._house, self._from = house, address

    async def send(self, rest: bytes, length: int = MAX_BODY, path: str = RENEW, headers: str = "") -> None:
        host, port = self._house.address.split(":")
        tls = {"ssl": self._house.trust, "server_hostname": "localhost"}
        self._reader, self._writer = await asyncio.open_connection(host, int(port), local_addr=(self._from, 0), **tls)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n{headers}\r\n"
        self._writer.write(head.encode() + rest)
        await self._writer.drain()

    async def answer(self) -> tuple[int, str]:
        """Status and reason."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 60)
        length = next(int(line.split()[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
        said = json.loads(await self._reader.readexactly(length))
        return int(head.split()[1]), said["reason"]

    def close(self) -> None:
        self._writer.transport.abort()


async def test_what_nobody_proves_is_refused_before_it_was_sent(house: House) -> None:
    """The rest of its megabyte never comes: nobody could have parsed it."""
    forged = json.dumps({"claims": [{"id": f"a-claim.{k}", "secret": "s" * 43} for k in range(100)]}).encode()
    for garbage in (b"x" * 2 * HEAD, forged):
        wire = Wire(house)
        await wire.send(garbage)
        assert await wire.answer() == (403, "Unproved")
        wire.close()


async def test_a_whole_batch_is_read_for_whoever_has_one_of_its_first_claims(house: House) -> None:
    """Some may be of a time when the broker had another key; each of them is answered for itself."""
    _, answer, _ = await house.post(CLAIMS, {"request": "request-1"})
    (claim,) = answer["claims"]
    others = [{"id": f"{'u' * 36}.{k}", "secret": "s" * 43} for k in range(4000)]
    batch = [*others[:3], {"id": claim["id"], "secret": claim["secret"]}, *others[3:]]
    status, answer, _ = await house.post(RENEW, {"claims": batch})
    assert status == 200
    assert [said["state"] for said in answer["claims"]] == ["lost"] * 3 + ["held"] + ["lost"] * 3997


async def held(house: House, **more) -> dict[str, list[dict[str, str]]]:
    """A claim, as its holder renews it."""
    _, answer, _ = await house.post(CLAIMS, {"request": "request-1"}, **more)
    (claim,) = answer["claims"]
    return {"claims": [{"id": claim["id"], "secret": claim["secret"]}]}


async def crowd(house: House, headers: str = "", count: int = http.CHECKED_AT_ONCE) -> list[Wire]:
    """So many bodies that never end."""
    wires = [Wire(house) for _ in range(count)]
    for wire in wires:
        await wire.send(b"{", headers=headers)
    return wires


async def renew(house: House, session: aiohttp.ClientSession, ask, **more) -> str:
    """What the holder is told: the state of its claim, or why it was refused."""
    _, answer, _ = await house.post(RENEW, ask, session=session, **more)
    return str(answer["claims"][0]["state"] if "claims" in answer else answer["reason"])


async def refusals(house: House, ask, **more) -> list[str]:
    """What more calls of the bad caller are told, until one is not let in."""
    async with house.caller(BAD) as session, asyncio.TaskGroup() as group:
        said: list[str] = []

        async def call() -> None:
            said.append(await renew(house, session, ask, **more))
            if said[-1] == "TooManyCalls":
                for task in calls:
                    if task is not asyncio.current_task():
                        task.cancel()

        calls = [group.create_task(call()) for _ in range(http.QUEUED + 1)]
    return said


async def test_a_crowd_is_kept_waiting_and_then_refused_and_a_good_caller_is_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "QUEUED", 8)
    ask = await held(house)
    wires = await crowd(house)
    assert await refusals(house, ask) == ["TooManyCalls"], "also with a claim of its own, which it may renew later"
    async with house.caller(GOOD) as session:
        assert [await renew(house, session, ask) for _ in range(20)] == ["held"] * 20
    for wire in wires:
        wire.close()
    async with house.caller(BAD) as session:
        assert await renew(house, session, ask) == "held", "its turn comes when the others are gone"


async def test_who_was_known_lately_waits_behind_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token may be looked at once more, which nobody's garbage of the same address holds up."""
    monkeypatch.setattr(http, "QUEUED", 0)
    await house.post(CLAIMS, {"request": "request-1"})
    wires = await crowd(house)
    async with house.caller(BAD) as session:
        ask = {"request": "request-2", "waitSeconds": 0}
        status, answer, _ = await house.post(CLAIMS, ask, token="forged", session=session)
        assert (status, answer["reason"]) == (429, "TooManyCalls")
        status, answer, _ = await house.post(CLAIMS, ask, session=session)
        assert (status, len(answer["claims"])) == (200, 1)
    for wire in wires:
        wire.close()


async def test_a_turn_that_does_not_come_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TURN_WAIT", 0.01)
    monkeypatch.setattr(http, "CHECKED_AT_ONCE", 1)
    these = http.Turns()
    async with these.turn("a"):
        with pytest.raises(Denied, match="were being checked for 0.01 s") as refusal:
            async with these.turn("a"):
                pass
        async with these.turn("b"):
            pass
    assert refusal.value.status == 429
    async with these.turn("a"):
        pass


async def test_bad_callers_of_a_standby_do_not_cost_its_good_ones(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share its address; the standby names them."""
    standby = House(Lab(0), leading=False)
    material = house.material
    await standby.open(material, lambda: house.address)
    monkeypatch.setattr(http, "QUEUED", 8)
    ask = await held(standby, token=house.token)
    wires = await crowd(standby)
    assert await refusals(standby, ask) == ["TooManyCalls"]
    async with standby.caller(GOOD) as session:
        assert [await renew(standby, session, ask) for _ in range(20)] == ["held"] * 20
    for wire in wires:
        wire.close()
    await standby.close()


async def test_who_only_pretends_to_pass_others_on_takes_no_place_of_theirs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call for another name: they share the room of the one address that they come from."""
    monkeypatch.setattr(http, "QUEUED", 0)
    ask = await held(house)
    wires: list[Wire] = []
    for k in range(http.FORWARDED_ROOM):
        wires += await crowd(house, f"{FORWARDED}: me\r\n{FORWARDED_FOR}: 10.0.0.{k}\r\n")
    more = {"headers": {FORWARDED: "me", FORWARDED_FOR: "10.0.1.1"}}
    async with house.caller(BAD) as session:
        assert await renew(house, session, ask, **more) == "TooManyCalls"
    async with house.caller(GOOD) as session:
        assert await renew(house, session, ask, **more) == "held"
        assert await renew(house, session, ask) == "held"
    for wire in wires:
        wire.close()
