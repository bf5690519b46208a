"""Follows the objects of a kind: a list and then one watch per namespace, which begins again where it was cut.

Promises:
1. Each object that a list or a watch has is reported (`observe`); bookmarks only move the place to begin at.
2. After a whole list it is reported which objects there are (`listed`): nothing else reports what vanished meanwhile.
3. A watch that ended, or whose connection was lost, begins again where it was. After any refusal everything is listed
   again: at once after the first "410 Gone" (the server remembers some minutes only), else after a pause that doubles
   from refusal to refusal.
4. Whatever the API server answers, or doesn't, it goes on. Namespaces don't wait for each other. A kind that one of
   them is found to have at last is asked for in the others at once. Of a kind that may be unavailable (`missing`) each
   list that fails is reported, and `begin` waits for it no longer than its caller allows.
5. An object that can't be understood (`Unreadable`) is logged, counted (`passed_over`) and passed over until it
   changes: any client may write nonsense into one, and the others are followed nevertheless. Whatever else breaks on an
   event is a mistake of this program, and an observer has missed what happened: it is reported (`broken`) and the watch
   goes on, or it ends the reflector.
6. Thousands of objects at once block no other task: others get a turn every few of them.

Without `listed` nothing is listed: a watch begins with what is there, which is enough where no observer needs what
vanished. Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, ParamSpec

from tapforge_operator.kube.client import ApiError, Client, path
from tapforge_operator.kube.objectmeta import Unreadable

log = logging.getLogger(__name__)

#: between two watches, the first of which ended as it should: nothing is missed meanwhile
_AGAIN: Final = 0.1
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
#: until a kind that the cluster doesn't know, or that may not be read, is asked for again
_MISSING_SECONDS: Final = 15.0
#: events after which others get a turn, when the next ones are there already
_TURN: Final = 20
#: where a watch begins that first reports what is there
_NOW: Final = "0"
#: that a page of a list may take
LIST_SECONDS: Final = 60.0
#: part of the time for a first list in which the server has to answer
_ANSWERED: Final = 0.75

#: called with an object, and whether it was deleted
Observe = Callable[[Mapping[str, Any], bool], object]
#: called with what broke
Broken = Callable[[Exception], object]


P = ParamSpec("P")


def ignore() -> None:
    pass


def _unreported(space: str, error: ApiError) -> None:
    log.warning("%s can't be read for now: %s", space or "all namespaces", error)


@dataclass(frozen=True, slots=True)
class Kind:
    """`name` is for people; `plural`, `group` and `selector` are those of the API."""

    name: str
    plural: str
    selector: str = ""
    group: str = ""

    def path(self, space: str) -> str:
        return path(self.plural, space, group=self.group)


class Reflector:
    def __init__(
        self,
        client: Client,
        kind: Kind,
        spaces: tuple[str, ...],
        observe: Observe,
        listed: Callable[[str, set[str], str], object] | None = None,
        *,
        on_event: Callable[[], None] = ignore,
        missing: Callable[[str, ApiError], None] | None = None,
        absent: tuple[int, ...] = (403, 404),
        broken: Broken | None = None,
        passed_over: Callable[[], None] = ignore,
        silence: float = 100.0,
    ):
        """`spaces`: namespaces, "" for all of them. `listed` is called with one of them, the UIDs of all its objects
        and the version of the list; `on_event` with every page and event, before what is in it is reported. `missing`
        is for a kind that the cluster may not know, not let be read, or not answer for (its conversion webhook is
        away): it is called with a namespace and what was answered instead of its list, each time. After an answer of
        `absent` it is asked for again every `_MISSING_SECONDS`, after another one as after any. A watch that says
        nothing for `silence` is dead. `broken` is called with what breaks `observe` or `listed`; without it `run` ends.
        `passed_over` is called for each object that can't be understood, with every event of it."""
        self._client = client
        self._kind = kind
        self._observe = observe if broken is None else _reported(observe, broken)
        self._listed = listed if broken is None or listed is None else _reported(listed, broken)
        self._on_event = on_event
        self._missing = missing
        self._absent = absent
        self._passed_over = passed_over
        self._silence = silence
        self._start = "" if listed is not None else _NOW
        #: version up to which everything of a namespace was reported; "" before its list
        self._since = dict.fromkeys(spaces, self._start)
        #: namespaces whose watch has said something since anything failed there
        self._reported: set[str] = set()
        #: namespaces that were without the kind, by their last list that was answered
        self._without: set[str] = set()
        #: set when one of them has it; then there is another one
        self._appeared = asyncio.Event()

    async def sync(self) -> None:
        """Lists everything once. Raises ApiError, but for what the cluster doesn't know or let be read and is
        `missing`."""
        for space in self._since:
            await self._list(space)

    async def begin(self, seconds: float) -> None:
        """Lists everything once, but for what can't be had within that time: it is reported as `missing`, and `run`
        asks for it again."""
        await asyncio.gather(*(self._begin(space, seconds) for space in self._since))

    async def _begin(self, space: str, seconds: float) -> None:
        report = self._missing or _unreported
        try:
            async with asyncio.timeout(seconds):
                # Shorter, so that what the server answered last is known, and not only that time was up.
                await self._list(space, seconds * _ANSWERED)
        except TimeoutError:
            report(space, ApiError(f"LIST {self._kind.path(space)}", 0, "Timeout", f"no list within {seconds:g} s"))
        except ApiError as error:
            if error.status == 410 or self._missing is None:
                report(space, error)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for space in self._since:
                name = f"{self._kind.name} of {space or 'all namespaces'}"
                group.create_task(self._follow(space), name=name)

    async def _follow(self, space: str) -> NoReturn:
        pause, at_once = _FIRST_PAUSE, True
        while True:
            try:
                appeared = self._appeared
                if not self._since[space]:
                    await self._list(space)
                if not self._since[space]:
                    await _wait_for(appeared)
                    continue
                await self._watch(space)
                pause, at_once = _FIRST_PAUSE, True
                await asyncio.sleep(_AGAIN)
            except ApiError as error:
                if space in self._reported:  # it was no refusal: what worked for a while was cut
                    self._reported.discard(space)
                    pause, at_once = _FIRST_PAUSE, True
                if error.status != 0:  # what was reported last may be no place to go on from
                    self._since[space] = self._start
                if error.status == 410 and at_once:
                    at_once = False
                    continue
                log.warning("%s can't be watched for now: %s", self._kind.name, error)
                await asyncio.sleep(max(pause, error.retry_after))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _watch(self, space: str) -> None:
        where, since = self._kind.path(space), self._since[space]
        events = 0
        async for event in self._client.watch(where, self._kind.selector, since=since, silence=self._silence):
            thing = event["object"]
            self._on_event()
            if event["type"] != "BOOKMARK":
                _report(self._observe, where, thing, event["type"] == "DELETED", self._passed_over)
            self._since[space] = thing["metadata"]["resourceVersion"]
            self._reported.add(space)
            events += 1
            if events % _TURN == 0:
                await asyncio.sleep(0)

    async def _list(self, space: str, deadline: float = LIST_SECONDS) -> None:
        if self._listed is None:
            return
        where, selector = self._kind.path(space), self._kind.selector
        try:
            uids, as_of = await read(
                self._client, where, selector, self._observe, self._on_event, self._passed_over, deadline
            )
        except ApiError as error:
            if self._missing is None or error.status == 410:
                raise
            if error.status in self._absent:
                self._since[space] = ""
                self._without.add(space)
            self._missing(space, error)
            if error.status not in self._absent:
                raise
        else:
            self._listed(space, uids, as_of)
            self._since[space] = as_of
            if space in self._without:
                self._without.discard(space)
                self._appeared.set()
                self._appeared = asyncio.Event()


async def _wait_for(appeared: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_MISSING_SECONDS):
            await appeared.wait()


async def read(
    client: Client,
    where: str,
    selector: str,
    observe: Observe,
    on_event: Callable[[], None] = ignore,
    passed_over: Callable[[], None] = ignore,
    deadline: float = LIST_SECONDS,
) -> tuple[set[str], str]:
    """One whole list, page by page: the UIDs of its objects and its version. `on_event` is called with each page, which
    has the deadline, `passed_over` for each object that can't be understood. Raises ApiError."""
    uids: set[str] = set()
    as_of = ""
    async for page, version in client.pages(where, selector, deadline=deadline):
        as_of = version
        on_event()
        for thing in page:
            uids.add(thing["metadata"]["uid"])
            _report(observe, where, thing, False, passed_over)
        await asyncio.sleep(0)
    return uids, as_of


def _reported(told: Callable[P, object], broken: Broken) -> Callable[P, None]:
    def report(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            told(*args, **kwargs)
        except Unreadable:
            raise
        except Exception as error:
            log.exception("an observer failed on an event of a watch and missed it")
            broken(error)

    return report


def _report(
    observe: Observe, where: str, thing: Mapping[str, Any], deleted: bool, passed_over: Callable[[], None]
) -> None:
    try:
        observe(thing, deleted)
    except Unreadable:
        passed_over()
        about = {key: thing["metadata"].get(key, "") for key in ("namespace", "name", "uid")}
        what = "%s/%s of %s can't be understood; it is passed over until it changes"
        log.exception(what, about["namespace"], about["name"], where, extra={"ref": about})
