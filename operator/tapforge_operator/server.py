"""Where the operator's servers listen, and how many connections they take.

1. A port keeps at most `most` connections, and of one address at most `per_address`. From the moment that it is
   accepted a connection counts, and its TLS handshake has begun with it.
2. Where all places are taken, one is given up for the next connection: by the address that has the most of those that
   have sent no headers yet or wait for no answer, one without headers first; where no address has several of them, by
   the address that has the most that wait for another operator's answer. Of equal ones the oldest goes. An address that
   has its own limit gives up its own. An address with few connections loses none to one with many.
3. A caller that waits for what it has proved a right to (`keep`) is never given up. Where nothing else is left, the new
   connection is closed: the caller of `keep` has to bound how many wait so, below `most`.
4. A connection whose first headers did not arrive within `HEADERS` seconds of its accept ends; so does one that does
   not read what it is sent for `UNREAD` seconds. After `IDLE` seconds without a request it is closed: later than
   callers close their own.
5. A process that runs out of descriptors takes fewer connections for a minute, so others that it opens don't fail.

Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import chain
from typing import Final, cast

from aiohttp import web

log = logging.getLogger(__name__)

#: every address of the machine, of IPv6 and of IPv4, whichever it has
EVERYWHERE: Final = "::"
#: the machine knows no IPv6, or has it disabled
_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

HEADERS: Final = 10.0
UNREAD: Final = 30.0
#: callers in Python and Go keep theirs for 15 to 60 seconds
IDLE: Final = 75.0
#: of the port of health and metrics: the kubelet's probes and some Prometheuses
HEALTH_CONNECTIONS: Final = 128
#: open files that are not connections of callers: to the API server, watches, sockets, modules that are being read
RESERVED_FILES: Final = 640
#: more are of no use to a process with one event loop
_MOST_FILES: Final = 65_536
#: new connections that are taken before those that are there have their turn. A handshake costs as much as half a
#: claim, and callers that wait open more of them: a port that took all at once would fall behind further and further
_AT_ONCE: Final = 4
_BACKLOG: Final = 1024
#: what accept says when there are no descriptors, or no memory for one
_USED_UP: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: until the next attempt
_PAUSE: Final = 0.2
#: places that are given up when descriptors are used up, if there are more
_GIVE_UP: Final = 32
#: for how long there are fewer then, seconds: it may be the machine that has none left, and not for ever
SHRUNK: Final = 60.0


def raise_file_limit() -> int:
    """Raises the soft limit of open files, which container runtimes leave at 1,024, as far as the hard one lets it.
    Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def fitting(wanted: int, files: int) -> int:
    """Connections of callers that a process with so many open files can take: a standby needs a second one for each,
    to the leader. Pure."""
    most = max(1, (files - RESERVED_FILES - HEALTH_CONNECTIONS) // 2)
    if wanted > most:
        log.warning(
            "%d connections of callers are taken instead of %d: at most %d files may be open; raise the limit of open "
            "files (RLIMIT_NOFILE, the hard one) to %d",
            most, wanted, files, 2 * wanted + RESERVED_FILES + HEALTH_CONNECTIONS,
        )  # fmt: skip
    return min(wanted, most)


# --- one connection ---------------------------------------------------------------------------------------------------


class Stage(IntEnum):
    """In the order in which connections are given up."""

    SILENT = 0
    IDLE = 1
    #: waits for the answer of another operator, which alone knows what it has proved
    PASSED_ON = 2
    KEPT = 3


#: the address with the most of the first ones gives up one of them; the others only where no address has several
_GIVEN_UP: Final = ((Stage.SILENT, Stage.IDLE), (Stage.PASSED_ON,))


class Connection(asyncio.Protocol):
    """Stands between the transport and aiohttp's protocol."""

    def __init__(self, connections: Connections, peer: str, socket: socket.socket):
        self.peer = peer
        self.stage = Stage.SILENT
        self.kept = 0
        self._connections = connections
        self._socket = socket
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        #: the end of what came, until the first headers are complete
        self._tail = b""
        loop = asyncio.get_running_loop()
        self._silence: asyncio.TimerHandle | None = loop.call_later(HEADERS, self.abort)
        self._unread: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None

    def begin(self, server: web.Server, context: ssl.SSLContext | None) -> None:
        self._inner = cast(asyncio.Protocol, server())
        self._handshake = asyncio.get_running_loop().create_task(self._begin(context))
        self._handshake.add_done_callback(self._begun)

    async def _begin(self, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        if context is None:
            await loop.connect_accepted_socket(lambda: self, self._socket)
        else:
            await loop.connect_accepted_socket(lambda: self, self._socket, ssl=context, ssl_handshake_timeout=HEADERS)

    def _begun(self, task: asyncio.Task[None]) -> None:
        """The TLS handshake is over, one way or the other; perhaps it was given up before it had begun."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._ended()
            self._socket.close()
        if error is not None and not isinstance(error, OSError):  # it went away, or speaks no TLS
            log.error("a connection from %s could not be served", self.peer, exc_info=error)

    def refuse(self) -> None:
        """It never became one of them."""
        self._ended()
        self._socket.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()
        self._ended()

    def _ended(self) -> None:
        for timer in (self._silence, self._unread):
            if timer is not None:
                timer.cancel()
        self._connections.drop(self)

    def move(self, stage: Stage) -> None:
        self._connections.move(self, stage)

    # --- as the transport's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._inner is not None
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        assert self._inner is not None
        if self._silence is not None:
            if b"\r\n\r\n" in self._tail + data:
                self._silence.cancel()
                self._silence, self._tail = None, b""
                self.move(Stage.IDLE)
            else:
                self._tail = (self._tail + data)[-3:]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        assert self._inner is not None
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        assert self._inner is not None
        self._ended()
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        assert self._inner is not None
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(UNREAD, self.abort)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        assert self._inner is not None
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._inner.resume_writing()


@contextmanager
def keep(request: web.Request, stage: Stage = Stage.KEPT) -> Iterator[None]:
    """The request's connection is in that stage meanwhile: by default it is not given up."""
    transport = request.transport
    found = transport.get_protocol() if transport is not None else None
    if not isinstance(found, Connection):
        yield
        return
    found.kept += 1
    found.move(stage)
    try:
        yield
    finally:
        found.kept -= 1
        if not found.kept:
            found.move(Stage.IDLE)


# --- all of a port ----------------------------------------------------------------------------------------------------


class Connections:
    """Those that a port has."""

    def __init__(self, most: int, per_address: int = 0, clock: Callable[[], float] = time.monotonic):
        """`per_address` 0: one address may have half of all."""
        self.most = most
        self._clock = clock
        #: places while descriptors are short, and since when
        self._short: tuple[int, float] | None = None
        self.per_address = per_address or max(1, most // 2)
        self._peers: dict[str, dict[Stage, dict[Connection, None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, peer: str) -> int:
        return sum(map(len, self._peers[peer].values())) if peer in self._peers else 0

    def add(self, connection: Connection) -> bool:
        """False: there is no place for it, and none that could be given up."""
        peer = connection.peer
        if self.of(peer) >= self.per_address and not self._give_up(peer):
            return False
        if self._count >= self.places and not self._give_up(self._largest(peer)):
            return False
        self._of(peer)[connection.stage][connection] = None
        self._count += 1
        return True

    def move(self, connection: Connection, stage: Stage) -> None:
        stages = self._peers.get(connection.peer)
        if stages is not None and connection in stages[connection.stage]:
            del stages[connection.stage][connection]
            stages[stage][connection] = None
            connection.stage = stage

    def drop(self, connection: Connection) -> None:
        """May be called again."""
        stages = self._peers.get(connection.peer)
        if stages is None or connection not in stages[connection.stage]:
            return
        del stages[connection.stage][connection]
        self._count -= 1
        if not any(stages.values()):
            del self._peers[connection.peer]

    @property
    def places(self) -> int:
        if self._short is not None and self._clock() - self._short[1] > SHRUNK:
            self._short = None
        return self.most if self._short is None else min(self.most, self._short[0])

    def shrink(self) -> None:
        """There are descriptors for fewer than there are now. A port that has few is not what uses them up."""
        if self._count <= _GIVE_UP:
            return
        self._short = max(_GIVE_UP, self._count - _GIVE_UP), self._clock()
        while self._count > self.places and any(self._give_up(peer) for peer in self._by_what_can_be_given_up()):
            pass

    def close(self) -> None:
        """Those whose handshake is not over; what aiohttp knows it closes itself."""
        for stages in list(self._peers.values()):
            for connection in list(stages[Stage.SILENT]):
                connection.abort()

    def _of(self, peer: str) -> dict[Stage, dict[Connection, None]]:
        return self._peers.setdefault(peer, {stage: {} for stage in Stage})

    def _largest(self, newcomer: str) -> str:
        """The address that gives up one, if there is any: what it keeps doesn't count, since it can't be given up."""
        for given_up in _GIVEN_UP:
            counts = Counter({peer: sum(len(held[s]) for s in given_up) for peer, held in self._peers.items()})
            own = counts.pop(newcomer, 0)
            for found, count in counts.most_common(1):
                if count > own + 1:
                    return found
            if own:
                break
        return newcomer

    def _by_what_can_be_given_up(self) -> list[str]:
        """Addresses, those first that have the most of it."""
        return sorted(self._peers, key=lambda peer: -sum(len(self._peers[peer][s]) for s in chain(*_GIVEN_UP)))

    def _give_up(self, peer: str) -> bool:
        stages = self._peers.get(peer, {})
        for stage in chain.from_iterable(_GIVEN_UP):
            oldest = next(iter(stages.get(stage, ())), None)
            if oldest is not None:
                oldest.abort()
                return True
        return False


class _Listener:
    """Accepts as long as it is open. Of a server of asyncio's it has what aiohttp asks for: `sockets` and `close`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        server: web.Server,
        connections: Connections,
        context: ssl.SSLContext | None,
    ):
        self.sockets = sockets
        self._server = server
        self._connections = connections
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._closed = False
        for one in sockets:
            one.listen(_BACKLOG)
            one.setblocking(False)
            self._begin(one)

    def close(self) -> None:
        self._closed = True
        for one in self.sockets:
            self._loop.remove_reader(one)
            one.close()
        self._connections.close()

    def _begin(self, listening: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _USED_UP:
                    raise
                self._connections.shrink()
                log.error(
                    "a connection could not be taken: %s; at most %d are kept now", error, self._connections.places
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE, self._begin, listening)
                return
            if not self._take(accepted, address[0]):
                return  # what was given up for it is closed first

    def _take(self, accepted: socket.socket, peer: str) -> bool:
        """False: all places were taken."""
        full = len(self._connections) >= self._connections.places
        connection = Connection(self._connections, peer, accepted)
        if self._connections.add(connection):
            accepted.setblocking(False)
            connection.begin(self._server, self._context)
        else:
            connection.refuse()
        return not full


class _Site(web.BaseSite):
    """aiohttp's shutdown closes it with the others."""

    def __init__(
        self,
        runner: web.BaseRunner,
        sockets: list[socket.socket],
        connections: Connections,
        context: ssl.SSLContext | None,
    ):
        super().__init__(runner, ssl_context=context)
        self._sockets = sockets
        self._connections = connections

    @property
    def name(self) -> str:
        return ", ".join(str(one.getsockname()) for one in self._sockets)

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        listener = _Listener(self._sockets, server, self._connections, self._ssl_context)
        self._server = cast(asyncio.AbstractServer, listener)


async def listen(
    runner: web.BaseRunner,
    host: str,
    port: int,
    context: ssl.SSLContext | None = None,
    *,
    connections: Connections,
) -> None:
    """Raises OSError."""
    sockets = [_everywhere(port)] if host == EVERYWHERE else await _bound(host, port)
    await _Site(runner, sockets, connections, context).start()


def _everywhere(port: int) -> socket.socket:
    """One socket for both: asyncio would take two, and two ports where any will do."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server((EVERYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return socket.create_server(("", port))


async def _bound(host: str, port: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    where = dict.fromkeys((family, address[:2]) for family, _, _, _, address in found)
    return [socket.create_server((str(address[0]), port), family=family) for family, address in where]
