"""What a command waits for while it starts, in words: each time that it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


def in_words(waiting: list[str]) -> str:
    """Equal ones are counted."""
    counted = dict.fromkeys(waiting)
    parts = [part if (n := waiting.count(part)) == 1 else f"{n} times {part}" for part in counted]
    return f"waiting for {', '.join(parts)}" if parts else ""


@asynccontextmanager
async def waiting_shown(
    report: Callable[[str], None], waiting: Callable[[], Awaitable[list[str]]], seconds: float = _LOOK_SECONDS
) -> AsyncIterator[None]:
    """Until the block ends; `report` gets it in words. `waiting` answers what is not there yet; it is asked every
    `seconds`, and must answer itself within its own deadline."""
    watching = asyncio.create_task(_watch(report, waiting, seconds))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(report: Callable[[str], None], waiting: Callable[[], Awaitable[list[str]]], seconds: float) -> None:
    shown = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            text = in_words(await waiting())
        except Exception as error:  # noqa: BLE001 - what is waited for says by itself why it failed
            log.debug("what the start waits for is not known: %s", error)
            continue
        if text and text != shown:
            report(text)
            shown = text
