"""The body of a request, as much of it as its caller has deserved.

1. It has at most `limit` bytes and `READ` seconds to arrive; more is refused before it was read.
2. A batch of claims that is larger than `HEAD` bytes is read on only when one of the first claims in it is proved by
   its secret. That is looked for in the first `HEAD` bytes alone, and costs some microseconds: whoever has no claim
   makes nobody parse thousands of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from itertools import islice
from typing import Final

from aiohttp import web

from .auth import Denied

#: of a batch of claims, bytes
MAX_BODY: Final = 1 << 20
#: of everything else
SMALL: Final = 65_536
#: of a batch before anything in it is proved: some dozens of claims
HEAD: Final = 4096
READ: Final = 15.0
#: claims that are looked at: some may be of a time when the broker had another key
_TRIED: Final = 16
#: a claim is an object without objects in it
_OBJECT: Final = re.compile(rb"\{[^{}]*\}")

#: whether a claim's secret, the second, is that of the claim with that id
Proof = Callable[[str, str], bool]


async def read_body(request: web.Request, limit: int = SMALL, proof: Proof | None = None) -> bytes:
    """Raises Denied."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body, proved = bytearray(), proof is None
    try:
        async with asyncio.timeout(READ):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
                if not proved and len(body) > HEAD:
                    if proof is not None and not any(proof(*claim) for claim in first_claims(bytes(body[:HEAD]))):
                        raise Denied(
                            403,
                            "Unproved",
                            f"none of the first {_TRIED} claims of this batch has the secret that proves it; of claims "
                            f"that nobody proves at most {HEAD} bytes are read",
                        )
                    proved = True
    except TimeoutError as error:
        raise Denied(408, "BodyTimeout", f"the body did not arrive within {READ:g} s") from error
    return bytes(body)


def first_claims(head: bytes) -> list[tuple[str, str]]:
    """Ids and secrets of the first claims of a batch, of which this is the beginning. Pure."""
    found = []
    for match in islice(_OBJECT.finditer(head), _TRIED):
        try:
            claim = json.loads(match[0])
        except (ValueError, RecursionError):
            continue
        if isinstance(claim.get("id"), str) and isinstance(claim.get("secret"), str):
            found.append((claim["id"], claim["secret"]))
    return found


def _too_large(limit: int) -> Denied:
    return Denied(413, "BodyTooLarge", f"the body has more than {limit} bytes; send it in parts")
