"""`tapforge env check`: does a server keep to its protocol? Violations in words, with the request that showed each.

`tapforge.py` checks our own protocol rule by rule, with raw requests; `through_client.py` any other one through its
client, and that what can't be served is refused (`refusals.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from tapforge_api.pool import Protocol

from ..clients.http import Deadlines
from ..clients.phones import PhoneAddress
from ..protocol import Task
from ..wire import PROTOCOL
from .tapforge import check_tapforge
from .through_client import Requests, check_through_client
from .violations import Violation

__all__ = ["DEADLINE", "Checked", "Violation", "check", "examine", "run_check"]

#: seconds a call of our own protocol may take
DEADLINE = 10.0
_ONCE = (
    "a step that timed out is not sent again, because what it did is unknown; behind `tapforge env serve` it is asked "
    "for again"
)
#: what to do where nothing answers: at a URL, and over adb
_START = (
    "Start the server, or correct the address; `tapforge phone serve` serves a simulated phone",
    "`adb devices` lists the phones that are attached",
)


@dataclass(frozen=True, slots=True)
class Checked:
    violations: Sequence[Violation]
    #: worth knowing, and no violations
    notes: Sequence[str]
    #: False: nothing answered, so that the only violation says why, and nothing is known of the rules
    reached: bool = True


async def check(url: str, deadline: float = DEADLINE) -> list[Violation]:
    """All violations of our protocol by the server (or slot) at `url`; none means that it conforms. `deadline`: seconds
    per call."""
    return list((await examine(url, deadline=deadline)).violations)


async def examine(
    url: str, protocol: Protocol = "tapforge", task: Task | None = None, deadline: float = DEADLINE
) -> Checked:
    """`url`: of a server, or with adb the name of a phone. `task`: that is played; without it the first that the
    server lists. `deadline`: seconds per call; resets of other protocols have five times as many."""
    if protocol == "tapforge":
        requests, timeout = Requests(), aiohttp.ClientTimeout(total=deadline)
        async with aiohttp.ClientSession(timeout=timeout, trace_configs=requests.traces()) as session:
            checked = await check_tapforge(session, url, deadline, task)
        return Checked(checked.found(), checked.notes(), requests.answered)
    deadlines = Deadlines(deadline, 5 * deadline, deadline, 2 * deadline, deadline)
    running = await check_through_client(PhoneAddress(url, url, deadlines, protocol=protocol), task)
    return Checked(
        list(dict.fromkeys(running.violations)),
        (
            *running.notes,
            str(running.states),
            _ONCE,
        ),
        running.reached,
    )


def run_check(url: str, deadline: float = DEADLINE, protocol: Protocol = "tapforge", task: Task | None = None) -> int:
    """Prints what was found. 0: conforms, 1: violations, or nothing answers, 2: `url` is none."""
    if protocol != "adb" and not url.startswith(("http://", "https://")):
        print(f"{url!r} is not a URL of an environment server: it must start with http:// or https://")
        return 2
    checked = asyncio.run(examine(url, protocol, task, deadline))
    if not checked.reached:
        why = "; ".join(violation.words for violation in checked.violations)
        what = "this phone can't be used" if protocol == "adb" else "nothing answers there"
        print(f"{url}: nothing was checked, because {what}: {why}. {_START[protocol == 'adb']}")
        return 1
    for violation in checked.violations:
        print(violation)
    for note in checked.notes:
        print(note)
    name = PROTOCOL if protocol == "tapforge" else protocol
    found = len(checked.violations)
    several = "" if found == 1 else "s"
    print(f"{url}: {found} violation{several} of {name}" if found else f"{url} conforms to {name}")
    return 1 if found else 0
