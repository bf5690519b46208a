"""A reflector beside a server that cuts connections, forgets versions, refuses, or knows the kind only later. What
slots, RayJobs, heads and the leader's Lease make of it is tested beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from watch_server import Server, connected

from tapforge_operator.kube import reflector
from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.objectmeta import Unreadable
from tapforge_operator.kube.reflector import Kind, Reflector

PODS = Kind("Pods", "pods", "pool")


class Story:
    """What was reported, in this order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def saw(self, thing: Mapping[str, Any], deleted: bool) -> None:
        self.words.append(("-" if deleted else "+") + thing["metadata"]["uid"])

    def listed(self, space: str, uids: set[str], as_of: str) -> None:
        self.words.append(f"{space or 'all'} at {as_of}: {' '.join(sorted(uids))}".strip())

    def missing(self, space: str, error: ApiError) -> None:
        self.words.append(f"{space or 'all'}: {error.status}")

    async def until(self, *words: str) -> None:
        """All these, in this order; and nothing else."""
        await until(lambda: len(self.words) >= len(words))
        assert self.words == list(words)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def followed(make: Callable[[Client], Reflector], server: Server) -> AsyncIterator[None]:
    async with connected(server) as client:
        task = asyncio.create_task(make(client).run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})


def no(status: int) -> web.Response:
    return web.json_response({"kind": "Status", "reason": "Because", "message": "no"}, status=status)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(reflector, "_MISSING_SECONDS", 0.01)


async def test_the_list_is_reported_with_its_version_and_then_what_happens():
    server, story = Server(), Story()
    await server.change("ADDED", "a")
    await server.change("ADDED", "b")
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw, story.listed), server):
        await story.until("+a", "+b", "all at 2: a b")
        await server.listened_to(1)
        await server.change("MODIFIED", "a")
        await server.change("BOOKMARK", "")
        await server.change("DELETED", "b")
        await story.until("+a", "+b", "all at 2: a b", "+a", "-b")
        server.cut()
        await server.change("ADDED", "c")
        await story.until("+a", "+b", "all at 2: a b", "+a", "-b", "+c")
        assert server.asked == ["list", "watch 2", "watch 5"], "a lost connection is no reason for a list"


async def test_an_object_that_makes_no_sense_is_named_and_the_others_are_followed(caplog: pytest.LogCaptureFixture):
    server, story = Server(), Story()

    def saw(thing: Mapping[str, Any], deleted: bool) -> None:
        if thing["metadata"]["uid"] == "bad":
            raise Unreadable("no number: 'x'")
        story.saw(thing, deleted)

    await server.change("ADDED", "bad")
    await server.change("ADDED", "a")
    counted: list[None] = []
    passed_over = lambda: counted.append(None)  # noqa: E731
    make = lambda client: Reflector(client, PODS, ("",), saw, story.listed, passed_over=passed_over)  # noqa: E731
    async with followed(make, server):
        await story.until("+a", "all at 2: a bad")
        await server.listened_to(1)
        await server.change("MODIFIED", "bad")
        await server.change("ADDED", "b")
        await story.until("+a", "all at 2: a bad", "+b")
    assert len(counted) == 2, "by the list and by the watch"
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2 and all("a/bad of /api/v1/pods can't be understood" in r.getMessage() for r in said)
    assert all(getattr(r, "ref", {})["name"] == "bad" and "no number" in caplog.text for r in said)


@pytest.mark.parametrize("of", ["list", "watch", "whole list"])
async def test_what_somebody_who_is_told_breaks_on_is_reported_and_the_others_are_told(of: str):
    """A mistake of this program is none of the object."""
    server, story, broken = Server(), Story(), list[Exception]()

    def saw(thing: Mapping[str, Any], deleted: bool) -> None:
        if thing["metadata"]["uid"] == "a":
            raise KeyError("a bug")
        story.saw(thing, deleted)

    def listed(space: str, uids: set[str], as_of: str) -> None:
        if of == "whole list":
            raise KeyError("a bug")

    if of == "list":
        await server.change("ADDED", "a")

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("",), saw, listed, broken=broken.append)

    async with followed(make, server):
        await server.listened_to(1)
        await server.change("ADDED", "a" if of == "watch" else "b")
        await server.change("ADDED", "c")
        await until(lambda: "+c" in story.words)
    assert [repr(error) for error in broken] == ["KeyError('a bug')"]


@pytest.mark.parametrize("of", ["watch", "whole list"])
async def test_without_anybody_to_report_to_it_ends_the_reflector(of: str):
    server = Server()

    def breaks(*_: object) -> None:
        raise KeyError("a bug")

    def fine(*_: object) -> None:
        pass

    async with connected(server) as client:
        one = Reflector(client, PODS, ("",), breaks, breaks if of == "whole list" else fine)
        task = asyncio.create_task(one.run())
        if of == "watch":
            await server.listened_to(1)
            await server.change("ADDED", "a")
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(task, 60)
    assert ended.group_contains(KeyError)


async def test_after_410_the_list_says_what_vanished():
    server, story = Server(), Story()
    await server.change("ADDED", "a")
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw, story.listed), server):
        await server.listened_to(1)
        server.cut()
        await server.change("DELETED", "a")
        await server.change("ADDED", "b")
        server.events, server.oldest = [], server.version
        await story.until("+a", "all at 1: a", "+b", "all at 3: b")


async def test_without_lists_each_watch_begins_with_what_is_there():
    server, story = Server(), Story()
    await server.change("ADDED", "a")
    async with followed(lambda client: Reflector(client, PODS, ("a",), story.saw), server):
        await story.until("+a")
        server.cut()
        await server.listened_to(2)
        await server.change("ADDED", "b")
        await story.until("+a", "+b")
        server.troubles = [no(403)]
        server.cut()
        await story.until("+a", "+b", "+a", "+b")
        assert server.asked == ["watch 0", "watch 1", "watch 2", "watch 0"]


async def test_a_kind_that_is_missing_is_asked_for_until_it_is_there():
    server, story = Server(), Story()
    server.troubles = [no(404), no(403)]

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("a",), story.saw, story.listed, missing=story.missing)

    async with followed(make, server):
        await story.until("a: 404", "a: 403", "a at 0:")
        await server.listened_to(1)
        # It goes in the middle of a watch, and comes back.
        server.troubles = [no(404), no(404)]
        server.cut()
        await story.until("a: 404", "a: 403", "a at 0:", "a: 404", "a at 0:")
        assert server.asked[3:6] == ["watch 0", "watch 0", "list"]


async def test_what_is_refused_and_not_absent_is_asked_for_again_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reflector, "_MISSING_SECONDS", 3600.0)
    server, story = Server(), Story()
    server.troubles = [no(403), no(403)]

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("a",), story.saw, story.listed, missing=story.missing, absent=(404,))

    async with followed(make, server):
        await story.until("a: 403", "a: 403", "a at 0:")


async def test_a_namespace_that_is_missing_holds_no_other_one_up():
    server, story = Server(), Story()
    await server.change("ADDED", "theirs", "b")
    server.troubles = [no(404)]
    async with connected(server) as client:
        both = Reflector(client, PODS, ("a", "b"), story.saw, story.listed, missing=story.missing)
        await both.sync()
        await story.until("a: 404", "+theirs", "b at 1: theirs")


async def test_a_kind_that_one_namespace_is_found_to_have_is_asked_for_in_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    server, story = Server(), Story()
    server.troubles = [no(404), no(404)]

    def missing(space: str, error: ApiError) -> None:
        monkeypatch.setattr(reflector, "_MISSING_SECONDS", 2.0 if space == "a" else 3600.0)
        story.missing(space, error)

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("a", "b"), story.saw, story.listed, missing=missing)

    async with followed(make, server):
        await until(lambda: len(story.words) >= 4)
        assert sorted(story.words[:2]) == ["a: 404", "b: 404"] and story.words[2:] == ["a at 0:", "b at 0:"]


async def test_a_kind_that_appears_while_a_namespace_is_asked_is_not_missed(monkeypatch: pytest.MonkeyPatch):
    """Its refusal is from before."""
    story, there = Story(), asyncio.Event()

    class Late(Server):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            if "/namespaces/b/" in request.path and not there.is_set():
                await there.wait()
                return no(404)
            return await super().answer(request)

    server = Late()
    server.troubles = [no(404)]

    def missing(space: str, error: ApiError) -> None:
        monkeypatch.setattr(reflector, "_MISSING_SECONDS", 0.01 if space == "a" else 3600.0)
        story.missing(space, error)

    def listed(space: str, uids: set[str], as_of: str) -> None:
        story.listed(space, uids, as_of)
        there.set()

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("a", "b"), story.saw, listed, missing=missing)

    async with followed(make, server):
        await story.until("a: 404", "a at 0:", "b: 404", "b at 0:")


async def test_who_reads_once_hears_of_what_can_not_be_read():
    for status, missing in ((403, None), (410, Story().missing)):
        server, story = Server(), Story()
        server.troubles = [no(status)]
        async with connected(server) as client:
            with pytest.raises(ApiError) as refused:
                await Reflector(client, PODS, ("",), story.saw, story.listed, missing=missing).sync()
        assert refused.value.status == status and not story.words


async def test_a_watch_that_says_nothing_is_begun_again():
    server, story = Server(), Story()

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("",), story.saw, story.listed, silence=0.05)

    async with followed(make, server):
        await until(lambda: server.begun >= 3)
        assert story.words == ["all at 0:"]


async def test_it_is_said_that_something_was_heard_before_what_it_was():
    """After a gap everything counts as seen just now: also what ended the gap."""
    server, story = Server(), Story()
    await server.change("ADDED", "a")

    def make(client: Client) -> Reflector:
        return Reflector(client, PODS, ("",), story.saw, story.listed, on_event=lambda: story.words.append("heard"))

    async with followed(make, server):
        await server.listened_to(1)
        await server.change("BOOKMARK", "")
        await server.change("DELETED", "a")
        await story.until("heard", "+a", "all at 1: a", "heard", "heard", "-a")


async def test_a_thousand_events_at_once_leave_others_their_turn():
    server, story = Server(), Story()
    for number in range(1000):
        await server.change("ADDED", str(number))
    most = before = 0
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw), server):
        async with asyncio.timeout(60):
            while len(story.words) < 1000:
                before = len(story.words)
                await asyncio.sleep(0)
                most = max(most, len(story.words) - before)
    assert 0 < most <= 20


@pytest.mark.parametrize("text", ["<html>gateway</html>", "{}", "[1]"])
@pytest.mark.parametrize("of", ["list", "watch"])
async def test_an_answer_of_something_in_between_ends_nothing(text, of):
    server, story = Server(), Story()
    await server.change("ADDED", "a")
    if of == "list":
        server.troubles = [web.Response(text=text)]
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw, story.listed), server):
        await server.listened_to(1)
        if of == "watch":
            server.troubles = [web.Response(text=f"{text}\n")]
            server.cut()
            await server.listened_to(2)
        await server.change("ADDED", "b")
        await story.until("+a", "all at 1: a", "+b")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """All that the reflector makes; none of them takes any time."""
    made: list[float] = []

    class Asyncio:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            made.extend([seconds] if seconds else [])
            await asyncio.sleep(0)

    monkeypatch.setattr(reflector, "asyncio", Asyncio())
    return made


async def test_watches_that_are_cut_after_a_while_begin_again_soon(pauses: list[float]):
    server, story = Server(), Story()
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw, story.listed), server):
        for number in range(6):
            await server.listened_to(number + 1)
            await server.change("ADDED", str(number))
            await until(lambda word=f"+{number}": word in story.words)
            server.cut()
    assert set(pauses) <= {0.1, 0.01}


@pytest.mark.parametrize("status", [403, 410])
async def test_lists_that_are_refused_are_asked_for_less_and_less_often_also_after_a_watch_that_worked(
    status: int, pauses: list[float]
):
    server, story = Server(), Story()
    async with followed(lambda client: Reflector(client, PODS, ("",), story.saw, story.listed), server):
        await server.listened_to(1)
        await server.change("ADDED", "a")
        await until(lambda: "+a" in story.words)
        server.troubles = [no(status) for _ in range(6)]
        await server.change("ERROR", "")
        await server.listened_to(2)
    assert pauses[:5] == [0.01, 0.02, 0.04, 0.08, 0.16]
