"""A second look at slots of which this leader may not know the newest: another leader was at work until just now, and
the watch is a moment behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from .ledger import Ledger
from .records import SlotView


class Behind(Exception):
    """What this broker knows is not the newest, and it could not look in time."""


async def look_again(
    look: Callable[[SlotView], Awaitable[SlotView | None]],
    ledger: Ledger,
    views: Sequence[SlotView],
    now: Callable[[], float],
    deadline: float,
) -> None:
    """Tells the ledger what the slots are at this moment, by `Writer.look` or `Writer.confirm`. Raises Behind after
    `deadline` seconds."""
    try:
        async with asyncio.timeout(deadline):
            found = await asyncio.gather(*(look(view) for view in views))
    except TimeoutError as error:
        names = ", ".join(f"{view.namespace}/{view.name}" for view in views[:5])
        raise Behind(f"this broker began to lead a moment ago and could not read {names}; ask again") from error
    for view, seen in zip(views, found, strict=True):
        if seen is not None:
            ledger.observe(seen, now())
        elif not view.lasting:
            ledger.forget(view.uid, now())
