"""The phones that a run's file lists, as this machine reaches them: what `adb devices` says of each, or whether a
server takes a connection. Asks only, each time with a deadline; no phone is changed or connected."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from yarl import URL

from tapforge_api import TrainingRun
from tapforge_envs.clients.adb.device import AUTO, not_usable
from tapforge_envs.clients.adb.wire import AdbError, AdbServer, server_address
from tapforge_envs.slots.urls import parse_urls, read_urls

from .findings import Finding, State

#: for the adb server, and for a connection to one server
_SECONDS: Final = 5.0
#: that are named in a finding
_SHOWN: Final = 5
#: connections at once: fewer than the files that a process may open
_AT_ONCE: Final = 128


def listed(run: TrainingRun) -> list[str]:
    """Addresses in the file's order; none where phones come from elsewhere. Raises SlotError."""
    environment = run.spec.environment
    urls = environment.source.urls
    if urls is None:
        return []
    if urls.file is not None:
        return [one.url for one in read_urls(Path(urls.file), environment.protocol)]
    return [one.url for one in parse_urls(urls.list or (), "spec.environment.source.urls.list", environment.protocol)]


def phones(run: TrainingRun) -> list[Finding]:
    """Raises SlotError for a list that can't be read."""
    addresses = listed(run)
    if not addresses:
        return []
    return asyncio.run(_adb(addresses) if run.spec.environment.protocol == "adb" else _servers(addresses))


async def _adb(addresses: Sequence[str]) -> list[Finding]:
    try:
        server = AdbServer(server_address(os.environ))
        async with asyncio.timeout(_SECONDS):
            attached = await server.devices()
    except TimeoutError:
        remedy = "adb kill-server, then adb start-server"
        return [Finding("phones", "fail", f"the adb server didn't answer within {_SECONDS:g} s", remedy)]
    except (AdbError, ValueError) as error:
        return [Finding("phones", "fail", str(error), "")]
    return of_adb(addresses, {one.serial: one.state for one in attached})


def of_adb(addresses: Sequence[str], states: Mapping[str, str]) -> list[Finding]:
    """`states`: of attached phones by serial, as `adb devices` has them."""
    wanted = list(dict.fromkeys(name for one in addresses for name in ([*states] if one == AUTO else [one])))
    if not wanted:
        return [Finding("phones", "fail", "no phone is attached", "plug one in, or adb connect HOST:PORT")]
    # adb connects those when the run starts
    later = [name for name in wanted if name not in states and ":" in name]
    bad = [name for name in wanted if states.get(name, "") != "device" and name not in later]
    found = [Finding("phones", "fail", f"{name}: {not_usable(states.get(name, ''))}", "") for name in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        found.append(Finding("phones", "fail", f"and {len(bad) - _SHOWN} more can't be used", "see adb devices -l"))
    if later:
        text = f"adb hasn't connected {_some(later)} yet; the run does so when it starts"
        found.append(Finding("phones", "warn", text, f"try it: adb connect {later[0]}"))
    if (good := len(wanted) - len(bad) - len(later)) and not found:
        found.append(Finding("phones", "ok", f"{good} attached and allowed"))
    return found


async def _servers(addresses: Sequence[str]) -> list[Finding]:
    places = list(dict.fromkeys((url.host or "", url.port or 80) for url in map(URL, addresses)))
    turns = asyncio.Semaphore(_AT_ONCE)
    answers = await asyncio.gather(*(_trouble(host, port, turns) for host, port in places))
    return of_servers({f"{host}:{port}": why for (host, port), why in zip(places, answers, strict=True)})


async def _trouble(host: str, port: int, turns: asyncio.Semaphore) -> str:
    """Why there is no connection; "" is well."""
    try:
        async with turns, asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.transport.abort()
    return ""


def of_servers(troubles: Mapping[str, str]) -> list[Finding]:
    """`troubles`: by address, "" for one that takes connections."""
    bad = {address: why for address, why in troubles.items() if why}
    if not bad:
        return [Finding("phones", "ok", f"{len(troubles)} servers take connections; tapforge env check looks at one")]
    text = f"{len(bad)} of {len(troubles)} servers can't be reached: "
    text += "; ".join(f"{address}: {why}" for address, why in list(bad.items())[:_SHOWN])
    state: State = "fail" if len(bad) == len(troubles) else "warn"
    remedy = "start them, or correct spec.environment.source.urls; a run goes on with those that answer"
    return [Finding("phones", state, text + (" ..." if len(bad) > _SHOWN else ""), remedy)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
