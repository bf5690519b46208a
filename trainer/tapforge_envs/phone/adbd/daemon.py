"""adbd over TCP: connections, their handshake, and the streams in them.

- A connection begins with CNXN; with keys it has to prove one (`keys`), and nothing is opened before.
- A stream has one write in flight in each direction: the next one is sent when the other side has said OKAY.
- A stream belongs to one service (`services.py`); it ends with the service, with CLSE, or with the connection.
- A host that breaks the protocol loses the connection, and no other notices. Bounded are the size of a message (by
  `messages`), streams of a connection, connections, and the time that a host takes for its part of a handshake, to take
  bytes from the socket and to acknowledge a write.
- The port is none of 5555 to 5585: an adb server on the same machine would list the phone a second time as an emulator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ...serving.http import name_in_url, socket_of_both
from . import messages as m
from .android import Android
from .keys import TOKEN_BYTES, Keys

log = logging.getLogger(__name__)

FEATURES: Final = "shell_v2,stat_v2,ls_v2"
EMULATOR_PORTS: Final = range(5555, 5586)
MAX_STREAMS: Final = 64
MAX_CONNECTIONS: Final = 64
#: signatures that a host may try, one for each of its keys
_MAX_SIGNATURES: Final = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a host gets."""

    #: for its next message of the handshake
    handshake: float = 30.0
    #: to take what was written to the socket
    write: float = 60.0
    #: to acknowledge a write of a stream
    acknowledge: float = 120.0


class BadPort(ValueError):
    """adb servers take a phone at this port for an emulator of their own."""


class StreamClosed(Exception):
    """The other side closed the stream, or it stopped to acknowledge."""


class Stream:
    """One stream as its service sees it."""

    def __init__(self, connection: Connection, local: int, remote: int):
        self._connection = connection
        self.local = local
        self.remote = remote
        self._arrived: bytes | None = None
        self._news = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._held = bytearray()

    # --- for the service ---

    async def read(self) -> bytes:
        """Some bytes. Raises StreamClosed at the end: a stream ends as a whole."""
        if self._held:
            data, self._held = bytes(self._held), bytearray()
            return data
        while self._arrived is None:
            self._news.clear()
            await self._news.wait()
        data, self._arrived = self._arrived, None
        await self._connection.send(m.OKAY, self.local, self.remote)
        return data

    async def exactly(self, count: int) -> bytes:
        while len(self._held) < count:
            held, self._held = self._held, bytearray()
            held += await self.read()
            self._held = held
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    async def write(self, data: bytes) -> None:
        """Returns when the host has acknowledged every byte. Raises StreamClosed."""
        size = self._connection.max_data
        for at in range(0, len(data), size):
            self._acknowledged.clear()
            await self._connection.send(m.WRTE, self.local, self.remote, data[at : at + size])
            try:
                # Not wait_for: it loses a cancellation that comes together with the OKAY, as the OKAY and CLSE of a
                # host that went away do, and the stream would go on writing without a reader.
                async with asyncio.timeout(self._connection.limits.acknowledge):
                    await self._acknowledged.wait()
            except TimeoutError as error:
                raise StreamClosed("a write was not acknowledged in time") from error

    # --- for the connection ---

    def arrive(self, data: bytes) -> bool:
        """False when the host did not wait for its OKAY."""
        if self._arrived is not None:
            return False
        self._arrived = data
        self._news.set()
        return True

    def acknowledge(self) -> None:
        self._acknowledged.set()


#: (phone, stream) -> runs the service until it is done; None for one that there is none of
Service = Callable[[Android, Stream], Awaitable[None]]
Services = Callable[[str], Service | None]


class Connection:
    def __init__(
        self,
        android: Android,
        services: Services,
        keys: Keys | None,
        limits: Limits,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self.limits = limits
        self.max_data = m.LEAST_DATA
        self._android = android
        self._services = services
        self._keys = keys
        self._reader = reader
        self._writer = writer
        self._writing = asyncio.Lock()
        self._checksum = True
        self._streams: dict[int, tuple[Stream, asyncio.Task[None]]] = {}
        #: services, also of streams that are closed and whose service hasn't ended yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0

    async def run(self) -> None:
        """Until the host goes away. Raises m.BadMessage, OSError, EOFError and TimeoutError for what ended it."""
        try:
            await self._handshake()
            while True:
                await self._handle(await m.read(self._reader, checksum=self._checksum))
        finally:
            self._streams.clear()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send(self, command: int, arg0: int, arg1: int, data: bytes = b"") -> None:
        """Raises OSError when the host is gone or takes nothing; the connection is over then."""
        async with self._writing:
            try:
                async with asyncio.timeout(self.limits.write):
                    self._writer.write(m.encode(m.Message(command, arg0, arg1, data), checksum=self._checksum))
                    await self._writer.drain()
            except TimeoutError as error:
                self._writer.transport.abort()
                raise ConnectionAbortedError(f"the host took nothing for {self.limits.write} s") from error

    # --- handshake ---

    async def _handshake(self) -> None:
        hello = await self._next()
        if hello.command != m.CNXN:
            raise m.BadMessage(f"a connection begins with {m.name_of(hello.command)} instead of CNXN")
        if self._keys is not None:
            await self._authenticate(self._keys)
        # Only now: everything before carries a checksum, whatever the host's version is.
        await self._welcome(hello)

    async def _next(self) -> m.Message:
        async with asyncio.timeout(self.limits.handshake):
            return await m.read(self._reader, checksum=False)

    async def _authenticate(self, keys: Keys) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        await self.send(m.AUTH, m.TOKEN, 0, token)
        for _ in range(_MAX_SIGNATURES):
            answer = await self._next()
            if answer.command != m.AUTH:
                raise m.BadMessage(f"{m.name_of(answer.command)} came before the host has proved a key")
            if answer.arg0 == m.SIGNATURE:
                if keys.signs(token, answer.data):
                    return
                token = secrets.token_bytes(TOKEN_BYTES)
                await self.send(m.AUTH, m.TOKEN, 0, token)
            elif answer.arg0 == m.PUBLIC_KEY:
                await self._asked(keys, answer.data)
                return
            else:
                raise m.BadMessage(f"AUTH of kind {answer.arg0}")
        raise m.BadMessage(f"{_MAX_SIGNATURES} signatures by keys that are not accepted")

    async def _asked(self, keys: Keys, line: bytes) -> None:
        """Until the key is accepted. A host that goes away meanwhile is noticed; one that speaks is out of turn."""
        asking = asyncio.ensure_future(keys.ask(line))
        hearing = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait((asking, hearing), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                try:
                    await asking
                except ValueError as error:
                    raise m.BadMessage(f"a public key that can't be read: {error}") from error
            elif hearing.result():
                raise m.BadMessage("the host spoke before its key was accepted")
            else:
                raise EOFError("the host went away before its key was accepted")
        finally:
            asking.cancel()
            hearing.cancel()
            await asyncio.gather(asking, hearing, return_exceptions=True)

    async def _welcome(self, hello: m.Message) -> None:
        version = min(max(hello.arg0, m.OLD_VERSION), m.VERSION)
        phone = self._android.phone
        name = f"ro.product.name=tapforge;ro.product.model={phone.image.name};ro.product.device=tapforge;"
        await self.send(m.CNXN, version, m.MAX_DATA, f"device::{name}features={FEATURES}".encode())
        self.max_data = min(max(hello.arg1, m.LEAST_DATA), m.MAX_DATA)
        self._checksum = version < m.VERSION

    # --- streams ---

    async def _handle(self, message: m.Message) -> None:
        match message.command:
            case m.OPEN:
                await self._open(message)
            case m.OKAY:
                if (found := self._find(message)) is not None:
                    found.acknowledge()
            case m.WRTE:
                await self._write(message)
            case m.CLSE:
                if (found := self._find(message)) is not None:
                    await self._close(found)
            case m.CNXN | m.AUTH:
                raise m.BadMessage(f"{m.name_of(message.command)} in the middle of a connection")
            case _:
                log.debug("adb: %s is unknown, and ignored", m.name_of(message.command))

    def _find(self, message: m.Message) -> Stream | None:
        """The stream of a message whose ids fit; others are ignored, as late ones of a closed stream are."""
        stream, _ = self._streams.get(message.arg1, (None, None))
        return stream if stream is not None and stream.remote == message.arg0 else None

    async def _open(self, message: m.Message) -> None:
        remote = message.arg0
        name = message.data.rstrip(b"\0").decode(errors="replace")
        service = self._services(name)
        if remote == 0 or service is None or len(self._tasks) >= MAX_STREAMS:
            await self.send(m.CLSE, 0, remote)
            return
        self._last += 1
        stream = Stream(self, self._last, remote)
        await self.send(m.OKAY, stream.local, remote)
        task = asyncio.create_task(self._serve(service, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._streams[stream.local] = stream, task

    async def _serve(self, service: Service, stream: Stream) -> None:
        try:
            with contextlib.suppress(StreamClosed, OSError):
                await service(self._android, stream)
        finally:
            # The side that closed it has said so already.
            if self._streams.pop(stream.local, None) is not None:
                with contextlib.suppress(OSError):
                    await self.send(m.CLSE, stream.local, stream.remote)

    async def _write(self, message: m.Message) -> None:
        stream = self._find(message)
        if stream is not None and not stream.arrive(message.data):
            await self._close(stream)

    async def _close(self, stream: Stream) -> None:
        _, task = self._streams.pop(stream.local)
        # Not waited for: what comes next on the connection is none of its business.
        task.cancel()
        await self.send(m.CLSE, stream.local, stream.remote)


@dataclass
class Daemon:
    """One phone at one port. `keys` None: every host is let in."""

    android: Android
    services: Services
    keys: Keys | None = None
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    #: 0 takes a free one; afterwards the one it has
    port: int = 0

    def __post_init__(self) -> None:
        if self.port in EMULATOR_PORTS:
            raise BadPort(
                f"port {self.port}: adb servers on this machine look for emulators at {EMULATOR_PORTS.start} to "
                f"{EMULATOR_PORTS.stop - 1} and would list this phone twice; take another, or 0 for a free one"
            )
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """From then on `address` is what `adb connect` of this machine takes. Raises OSError when the port can't be
        had."""
        both = socket_of_both(self.host, self.port)
        where: dict[str, Any] = {"host": self.host, "port": self.port} if both is None else {"sock": both}
        self._server = await asyncio.start_server(self._connected, limit=2 * m.MAX_DATA, **where)
        at, self.port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{name_in_url(self.host, at)}:{self.port}"
        if self.android.serial == "tapforge":
            self.android.serial = f"TAPFORGE{self.port}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.drop()
        if self._server is not None:
            await self._server.wait_closed()

    async def drop(self) -> None:
        """Ends every connection, as a cable that is pulled does; hosts may connect again."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        connection = Connection(self.android, self.services, self.keys, self.limits, reader, writer)
        try:
            await connection.run()
        except (m.BadMessage, OSError, EOFError, TimeoutError) as error:
            log.debug("adb: a connection ended: %s", error)
        except asyncio.CancelledError:
            log.debug("adb: a connection was dropped")
        finally:
            self._connections.discard(task)
            writer.transport.abort()
