"""AUTH: a host proves by an RSA signature that it has a key which this phone has accepted.

A host signs a token of 20 bytes with each of its keys; when none is accepted, it sends a public key, and the phone asks
its owner. The connection stays open meanwhile (adb calls the device "unauthorized") and becomes usable at the moment at
which the key is accepted. Keys are written as adb writes them: base64 of Android's format of RSA-2048, a blank, a name.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import struct
from pathlib import Path
from typing import Final

TOKEN_BYTES: Final = 20
_WORDS: Final = 64
_BYTES: Final = 4 * _WORDS
_KEY: Final = struct.Struct(f"<II{_BYTES}s{_BYTES}sI")
#: PKCS#1 v1.5 before the digest: the token stands where a SHA-1 digest would
_SHA1_PREFIX: Final = bytes.fromhex("3021300906052b0e03021a05000414")
#: keys that wait for their owner's answer; the oldest goes first
_MAX_ASKED: Final = 16


def public_key(line: bytes) -> tuple[int, int]:
    """(modulus, exponent) of a line of adb's. Raises ValueError."""
    try:
        raw = base64.b64decode(line.rstrip(b"\0\n").split(b" ")[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from error
    if len(raw) != _KEY.size:
        raise ValueError(f"a key of {len(raw)} bytes; RSA-2048 in Android's format has {_KEY.size}")
    words, _, modulus, _, exponent = _KEY.unpack(raw)
    if words != _WORDS or exponent not in (3, 65537):
        raise ValueError(f"a key of {words} words with exponent {exponent}; must be {_WORDS} words and 3 or 65537")
    return int.from_bytes(modulus, "little"), exponent


def signed(token: bytes, signature: bytes, line: bytes) -> bool:
    """Whether the owner of this public key signed the token."""
    if len(signature) != _BYTES:
        return False
    try:
        modulus, exponent = public_key(line)
    except ValueError:
        return False
    if modulus < 3:
        return False
    wanted = b"\x00\x01" + b"\xff" * (_BYTES - len(_SHA1_PREFIX) - TOKEN_BYTES - 3) + b"\x00" + _SHA1_PREFIX + token
    return pow(int.from_bytes(signature, "big"), exponent, modulus).to_bytes(_BYTES, "big") == wanted


class Keys:
    """Which hosts' keys a phone has accepted, and which ones wait for an answer.

    `file` holds accepted keys, one a line as in Android's adb_keys; it is read again at each handshake and while a key
    waits, so writing a key into it accepts it.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._accepted: set[bytes] = set()
        #: in the order in which they were offered
        self.asked: list[bytes] = []
        self._changed = asyncio.Event()

    def accepted(self) -> set[bytes]:
        lines = self._file.read_bytes().splitlines() if self._file is not None and self._file.exists() else []
        return self._accepted | {_key(line) for line in lines if line.strip()}

    def signs(self, token: bytes, signature: bytes) -> bool:
        return any(signed(token, signature, key) for key in self.accepted())

    def accept(self, line: bytes) -> None:
        """Raises ValueError for what is not a key."""
        public_key(line)
        self._accepted.add(_key(line))
        self._changed.set()

    async def ask(self, line: bytes, every: float = 0.5) -> None:
        """Returns when the key was accepted, however long that takes. Raises ValueError for what is not a key."""
        public_key(line)
        key = _key(line)
        if key not in self.asked:
            self.asked = [*self.asked, key][-_MAX_ASKED:]
        while key not in self.accepted():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._changed.wait()
        self.asked = [other for other in self.asked if other != key]


def _key(line: bytes) -> bytes:
    return line.rstrip(b"\0\n").split(b" ")[0]
