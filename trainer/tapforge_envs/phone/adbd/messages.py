"""adb's messages: 24 bytes of header, then the data. Pure, but for `read`.

- A message that announces more data than was agreed is refused before any of it is read.
- A header whose last word isn't the complement of its first is not a message: the connection can't be read any further.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Final

#: bytes of data in a message; what we announce
MAX_DATA: Final = 256 * 1024
#: what a host has to take at least
LEAST_DATA: Final = 4096
#: from this version on checksums are not checked
VERSION: Final = 0x01000001
OLD_VERSION: Final = 0x01000000

CNXN, AUTH, OPEN, OKAY, WRTE, CLSE = (
    int.from_bytes(name, "little") for name in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"WRTE", b"CLSE")
)
#: arg0 of AUTH
TOKEN, SIGNATURE, PUBLIC_KEY = 1, 2, 3

_HEADER: Final = struct.Struct("<6I")
_MASK: Final = 0xFFFFFFFF


class BadMessage(Exception):
    """What came is not a message of the protocol; the connection ends."""


@dataclass(frozen=True, slots=True)
class Message:
    command: int
    arg0: int = 0
    arg1: int = 0
    data: bytes = b""


def encode(message: Message, *, checksum: bool = True) -> bytes:
    check = sum(message.data) & _MASK if checksum else 0
    head = _HEADER.pack(message.command, message.arg0, message.arg1, len(message.data), check, message.command ^ _MASK)
    return head + message.data


def header(data: bytes) -> tuple[Message, int, int]:
    """(the message without its data, length of the data, checksum). Raises BadMessage."""
    command, arg0, arg1, length, check, magic = _HEADER.unpack(data)
    if command ^ _MASK != magic:
        raise BadMessage(f"header {data[:24].hex()} is none: its magic doesn't fit its command")
    if length > MAX_DATA:
        raise BadMessage(f"a message announces {length} bytes, at most {MAX_DATA} were agreed")
    return Message(command, arg0, arg1), length, check


async def read(reader: asyncio.StreamReader, *, checksum: bool) -> Message:
    """The next message. Raises BadMessage, and asyncio.IncompleteReadError at the end of the connection."""
    head, length, check = header(await reader.readexactly(_HEADER.size))
    data = await reader.readexactly(length) if length else b""
    if checksum and sum(data) & _MASK != check:
        raise BadMessage(f"a message of {length} bytes has checksum {sum(data) & _MASK}, announced was {check}")
    return Message(head.command, head.arg0, head.arg1, data)


def name_of(command: int) -> str:
    """For messages to people."""
    raw = command.to_bytes(4, "little")
    return raw.decode("ascii") if raw.isalnum() else raw.hex()
