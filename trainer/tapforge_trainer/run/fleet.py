"""The phones of a run as they are now: the driver writes them down, `tapforge top` shows them.

The driver replaces `phones.json` in the run's folder every `EVERY` seconds; that it can't be written ends no run. A
reader needs nothing but the folder, also beside the driver in its Pod, or after its end. Phones that are ill come
first, then the others by name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tapforge_envs.slots.source import SlotCounts, SlotSource, SlotView

log = logging.getLogger(__name__)

PHONES = "phones.json"
#: seconds between two writes; after how many of them without one a driver is taken for gone
EVERY, MISSED = 2.0, 5
#: of the words about what is wrong with a phone
_WORDS = 200
_ORDER = ("quarantined", "sick", "probation", "leased", "free")
_STYLES = {"quarantined": "red", "sick": "yellow", "probation": "magenta", "leased": "green", "free": "dim"}


class FleetError(Exception):
    """There is nothing to show. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Fleet:
    #: unix seconds
    at: float
    counts: SlotCounts
    phones: tuple[SlotView, ...]


def as_json(fleet: Fleet) -> str:
    phones = [{name: value for name, value in asdict(phone).items() if value is not None} for phone in fleet.phones]
    return json.dumps({"at": round(fleet.at, 3), "counts": asdict(fleet.counts), "phones": phones}) + "\n"


def read_fleet(folder: Path) -> Fleet:
    """Raises FleetError where no driver wrote it."""
    path = folder / PHONES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        phones = tuple(SlotView(**{"pace": None, **_known(SlotView, phone)}) for phone in found["phones"])
        return Fleet(float(found["at"]), SlotCounts(**_known(SlotCounts, found["counts"])), phones)
    except OSError as error:
        raise FleetError(
            f"{path} can't be read ({error.strerror}): name the folder of a run whose phones are there by now"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FleetError(f"{path} is not a list of phones: {error!r}") from error


def _known(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    """What a later version adds is left out."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in found.items() if name in names}


def fleet_of(slots: SlotSource, now: float) -> Fleet:
    return Fleet(now, slots.counts(), tuple(slots.views()))


@asynccontextmanager
async def written(slots: SlotSource, folder: Path, every: float = EVERY) -> AsyncIterator[None]:
    """Writes the phones down until the block ends, and once at its end."""
    writing = asyncio.get_running_loop().create_task(_write_again(slots, folder, every), name="phones.json")
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await _write(slots, folder)


async def _write_again(slots: SlotSource, folder: Path, every: float) -> None:
    """A disk that was full for a moment ends nothing; a failure is reported once until it is over."""
    well = True
    while True:
        well = await _write(slots, folder, say=well)
        await asyncio.sleep(every)


async def _write(slots: SlotSource, folder: Path, say: bool = True) -> bool:
    path, fleet = folder / PHONES, fleet_of(slots, time.time())
    beside = path.with_name(f".{PHONES}")

    def write() -> None:  # a thousand phones take longer than an event loop may stand still
        beside.write_text(as_json(fleet), encoding="utf-8")
        beside.replace(path)

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        if say:
            log.warning("%s can't be written (%s): `tapforge top` shows nothing new", path, error.strerror)
        return False
    return True


# --- for a person -----------------------------------------------------------------------------------------------------


def show(folder: Path, *, once: bool, rows: int | None = None) -> None:
    """On a terminal until Ctrl-C; elsewhere, and with `once`, one table. Raises FleetError."""
    console = Console()
    if once or not console.is_terminal:
        # A pipe says nothing about its width; 80 columns would cut what is wrong with a phone.
        wide = console if console.is_terminal else Console(width=160)
        wide.print(drawn(folder.name, read_fleet(folder), time.time(), rows))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                room = rows or max(5, console.size.height - 7)
                live.update(drawn(folder.name, read_fleet(folder), time.time(), room), refresh=True)
                time.sleep(1.0)
    except KeyboardInterrupt:
        return


def drawn(name: str, fleet: Fleet, now: float, rows: int | None = None) -> Group:
    """`rows`: phones that are shown at most."""
    c, age = fleet.counts, now - fleet.at
    states = {"leased": c.leased, "free": c.free, "sick": c.sick, "probation": c.probation}
    states["quarantined"] = c.quarantined
    head = Text.assemble((f"{name}  ", "bold"), f"{sum(states.values())} phones: ")
    head.append(", ".join(f"{number} {state}" for state, number in states.items()))
    if age > MISSED * EVERY:
        head.append(f"  (written {age:.0f} s ago: the run has ended, or its driver is gone)", "red")
    since = f"since the start: {c.quarantines} times into quarantine, {c.trials} trials, {c.recoveries} recoveries"
    table = Table(box=None, pad_edge=False)
    for title in ("phone", "state", "clean", "dirty", "strikes", "s/call", "next look", "last trouble"):
        table.add_column(title, justify="left" if title in ("phone", "state", "last trouble") else "right")
    phones = sorted(fleet.phones, key=lambda p: (_ORDER.index(p.state) if p.state in _ORDER else 0, p.name))
    for phone in phones[:rows]:
        table.add_row(
            phone.name,
            Text(phone.state, _STYLES.get(phone.state, "")),
            str(phone.clean),
            str(phone.dirty),
            str(phone.strikes + max(0, phone.failures - 1)),
            "-" if phone.pace is None else f"{phone.pace:.2f}",
            "-" if phone.again is None else f"{max(0.0, phone.again - now):.0f} s",
            Text(phone.why[:_WORDS], overflow="ellipsis", no_wrap=True),
        )
    left = len(phones) - len(phones[:rows])
    return Group(head, Text(since, style="dim"), table, *([Text(f"... and {left} more", "dim")] if left else []))
