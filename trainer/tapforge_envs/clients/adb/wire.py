"""The adb server's socket: what the `adb` command speaks to it, without a process per call.

A request is four hexadecimal digits (its length in bytes) and its text; the server answers OKAY, or FAIL with a reason.
`host:` requests are the server's own. After `host:transport:SERIAL` the connection belongs to a phone: the next request
names a service of its adbd, and what follows OKAY is that service's stream.

Promises:
1. No server is ever started or stopped: a workstation's belongs to its user.
2. Every answer has a limit in bytes; past it the call is an `AdbError`, and the connection is cut. Deadlines are the
   caller's: a call that is cancelled cuts its connection, by which the phone ends the service.
3. `exec:` says nothing about how the command ended, and mixes its errors into its output; `shell` (the service
   shell,v2 of Android 7 and later) keeps both apart and returns the exit status. A stream that ends without one is an
   error, never a result.
4. Nothing is repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

#: longest request, bytes: its length is four hexadecimal digits
MAX_REQUEST = 0xFFFF
#: output of a command that is read, bytes
MAX_OUTPUT = 8 * 1024 * 1024
_DEFAULT_PORT = 5037
#: a line of `host:devices-l`: the serial, and the state
_ATTACHED = re.compile(r"(\S+(?: \([0-9]+\)\S*)?)\s+(no permissions|\S+)")
_STDOUT, _STDERR, _EXIT = 1, 2, 3

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Trouble(StrEnum):
    """What is wrong, as far as the server tells."""

    NO_SERVER = "no server"
    NO_DEVICE = "no device"
    UNAUTHORIZED = "unauthorized"
    OFFLINE = "offline"
    #: the server or the phone refused, for another reason
    REFUSED = "refused"
    #: the connection ended too early, or what came was not the protocol
    BROKEN = "broken"
    TOO_LONG = "too long"


class AdbError(Exception):
    def __init__(self, message: str, trouble: Trouble):
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class ServerAddress:
    host: str = "127.0.0.1"
    port: int = _DEFAULT_PORT
    #: of a Unix socket, instead of host and port
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @property
    def start_command(self) -> str:
        """What its user types to have one there."""
        return "adb start-server" if self == ServerAddress() else f"adb -L {self._socket} start-server"

    @property
    def _socket(self) -> str:
        return f"localfilesystem:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Attached:
    """A line of `adb devices -l`."""

    serial: str
    #: device, unauthorized, offline, authorizing, connecting, recovery, sideload, no permissions...
    state: str


@dataclass(frozen=True, slots=True)
class ShellResult:
    stdout: bytes
    stderr: bytes
    status: int

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    def words(self) -> str:
        """What it said, errors first; for messages."""
        return short(self.stderr.strip() or self.stdout.strip())


def server_address(environ: Mapping[str, str]) -> ServerAddress:
    """Where `adb` itself would look: ADB_SERVER_SOCKET, or ANDROID_ADB_SERVER_ADDRESS and _PORT. Raises ValueError."""
    if socket := environ.get("ADB_SERVER_SOCKET"):
        kind, _, rest = socket.partition(":")
        if kind in ("localfilesystem", "local") and rest:
            return ServerAddress(path=rest)
        host, _, port = rest.rpartition(":")
        if kind != "tcp" or not rest:
            raise ValueError(f"ADB_SERVER_SOCKET={socket!r}: expected tcp:PORT, tcp:HOST:PORT or localfilesystem:PATH")
        return ServerAddress(host.strip("[]") or "127.0.0.1", _port(port, "ADB_SERVER_SOCKET"))
    host = environ.get("ANDROID_ADB_SERVER_ADDRESS") or "127.0.0.1"
    port = environ.get("ANDROID_ADB_SERVER_PORT") or str(_DEFAULT_PORT)
    return ServerAddress(host, _port(port, "ANDROID_ADB_SERVER_PORT"))


def _port(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{name}: {text!r} is not a port (1 to 65535)")
    return int(text)


class AdbServer:
    """Holds no connection: each call has its own."""

    def __init__(self, address: ServerAddress):
        self.address = address

    async def version(self) -> int:
        text = await self._asked("host:version")
        try:
            return int(text, 16)
        except ValueError:
            raise _broken(f"answered host:version with {short(text)}") from None

    async def devices(self) -> list[Attached]:
        return read_devices(await self._asked("host:devices-l"))

    async def connect(self, endpoint: str) -> None:
        """Has the server connect to adbd at `endpoint` (HOST:PORT), whose serial that is from then on. Connected
        already is fine. Raises AdbError in the server's words."""
        answer = await self._asked(f"host:connect:{endpoint}")
        if not answer.startswith(("connected to ", "already connected to ")):
            trouble = Trouble.UNAUTHORIZED if "authenticat" in answer else Trouble.NO_DEVICE
            raise AdbError(short(answer) or f"connecting to {endpoint} failed without a reason", trouble)

    async def disconnect(self, endpoint: str) -> None:
        """No connection there is fine."""
        try:
            await self._asked(f"host:disconnect:{endpoint}")
        except AdbError as error:
            if error.trouble is not Trouble.NO_DEVICE:
                raise

    async def exec_out(self, serial: str, command: str, limit: int = MAX_OUTPUT) -> bytes:
        """All that `command` writes, errors among it, until it ends or the phone is gone: that looks the same."""
        async with self._service(serial, f"exec:{command}") as (reader, _):
            data = bytearray()
            while chunk := await _read(reader, 1 << 18):
                data += chunk
                if len(data) > limit:
                    raise AdbError(f"wrote more than {limit} bytes", Trouble.TOO_LONG)
            return bytes(data)

    async def shell(self, serial: str, command: str, limit: int = MAX_OUTPUT) -> ShellResult:
        async with self._service(serial, f"shell,v2,raw:{command}") as (reader, _):
            streams = {_STDOUT: bytearray(), _STDERR: bytearray()}
            left = limit
            while True:
                head = await _exactly(reader, 5, "the command's exit status")
                kind, length = head[0], int.from_bytes(head[1:], "little")
                if kind not in (_STDOUT, _STDERR, _EXIT):
                    raise _broken(f"sent a packet of unknown kind {kind}")
                if kind == _EXIT and length != 1:
                    raise _broken(f"sent an exit status of {length} bytes")
                # Empty packets count too: a stream of them ends as well.
                left -= 5 + length
                if left < 0:
                    raise AdbError(f"wrote more than {limit} bytes", Trouble.TOO_LONG)
                payload = await _exactly(reader, length, "the rest of its output")
                if kind == _EXIT:
                    return ShellResult(bytes(streams[_STDOUT]), bytes(streams[_STDERR]), payload[0])
                streams[kind] += payload

    async def _asked(self, request: str) -> str:
        """The server's own answer, which says how long it is."""
        async with self._connection() as (reader, writer):
            await _request(reader, writer, request)
            return await _counted(reader)

    @asynccontextmanager
    async def _service(self, serial: str, service: str) -> AsyncIterator[_Streams]:
        async with self._connection() as (reader, writer):
            await _request(reader, writer, f"host:transport:{serial}")
            await _request(reader, writer, service)
            yield reader, writer

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[_Streams]:
        address = self.address
        try:
            if address.path:
                reader, writer = await asyncio.open_unix_connection(address.path)
            else:
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            remedy = f"start one there with `{address.start_command}`"
            raise AdbError(
                f"no adb server at {address} ({error.strerror or error}): {remedy}", Trouble.NO_SERVER
            ) from error
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def read_devices(text: str) -> list[Attached]:
    """Of `host:devices-l`. A serial that mDNS found twice has a blank before its number in parentheses. A phone whose
    USB device can't be opened may have none: that line begins with blanks or question marks and is left out, as nothing
    can be asked of it."""
    found = []
    for line in text.splitlines():
        match = _ATTACHED.match(line)
        if match is None or set(match[1]) == {"?"}:
            continue
        found.append(Attached(match[1], match[2]))
    return found


def trouble_of(reason: str) -> Trouble:
    """What the server's FAIL means."""
    text = reason.lower()
    if "unauthorized" in text or "authorizing" in text:
        return Trouble.UNAUTHORIZED
    if "offline" in text or "still connecting" in text:
        return Trouble.OFFLINE
    if "not found" in text or "no devices" in text or "no such device" in text:
        return Trouble.NO_DEVICE
    return Trouble.REFUSED


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: str) -> None:
    data = request.encode("utf-8", "surrogatepass")
    if len(data) > MAX_REQUEST:
        raise AdbError(f"a request of {len(data)} bytes: adb takes at most {MAX_REQUEST}", Trouble.REFUSED)
    try:
        writer.write(b"%04x" % len(data) + data)
        await writer.drain()
    except OSError as error:
        raise _broken(f"closed the connection: {error}") from error
    answer = await _exactly(reader, 4, "an answer")
    if answer == b"FAIL":
        reason = await _counted(reader)
        raise AdbError(short(reason) or "refused without a reason", trouble_of(reason))
    if answer != b"OKAY":
        raise _broken(f"answered {answer!r}, expected OKAY or FAIL: is that an adb server?")


async def _counted(reader: asyncio.StreamReader) -> str:
    digits = await _exactly(reader, 4, "the length of its answer")
    try:
        length = int(digits.decode("ascii"), 16) if digits.isalnum() else -1
    except ValueError:
        length = -1
    if length < 0:
        raise _broken(f"announced an answer of {digits!r} bytes, expected four hexadecimal digits")
    return (await _exactly(reader, length, "its whole answer")).decode("utf-8", "replace")


async def _exactly(reader: asyncio.StreamReader, size: int, what: str) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise _broken(f"closed the connection before {what}, after {len(error.partial)} of {size} bytes") from error
    except OSError as error:
        raise _broken(f"the connection broke before {what}: {error}") from error


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.read(size)
    except OSError as error:
        raise _broken(f"the connection broke: {error}") from error


def _broken(what: str) -> AdbError:
    return AdbError(what, Trouble.BROKEN)


def short(text: str | bytes, limit: int = 300) -> str:
    """For messages."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."
