"""Screens of a run's phones, from which a model is to propose tasks: of a pool, of addresses, of processes.

Phones are leased one after another and given back at once. Over adb a screen is the phone as a reset leaves it; of
tapforge's protocol, of the simulated phone in states that follow from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapforge_api import TrainingRun
from tapforge_envs.clients.phones import PhoneClients
from tapforge_envs.phone import catalog
from tapforge_envs.phone.own_check import PROPOSED
from tapforge_envs.phone.tasks import SEEDS
from tapforge_envs.protocol import EnvironmentFault, Task
from tapforge_envs.slots.lease_life import LeasedPhone
from tapforge_envs.slots.source import Lease, SlotError, Verdict

from ..generation.looking import Screen, look
from ..tasks.source import TaskError
from .assembly import slots_of

#: of these a task may be a goal alone
_PROTOCOLS = ("tapforge", "adb")


async def screens_of(run: TrainingRun, suite: str, apps: Sequence[str], phones: int, seed: int) -> list[Screen]:
    """Of so many phones, or states of them. A phone that fails is passed over. Raises TaskError where none shows a
    screen, or where tasks of its protocol can't be goals."""
    environment = run.spec.environment
    if environment.protocol not in _PROTOCOLS:
        raise TaskError(
            f"spec.environment.protocol: servers that speak {environment.protocol} know tasks by name, and a goal that "
            f"a model proposes has none; propose from phones that speak {' or '.join(_PROTOCOLS)}"
        )
    if environment.protocol == "tapforge" and suite not in catalog.SUITES:
        raise TaskError(catalog.unknown("suite", suite, list(catalog.SUITES)))
    clients, found, last = PhoneClients(), list[Screen](), ""
    slots = slots_of(run, clients.health)
    try:
        await slots.start()
        for number in range(phones):
            lease = await slots.acquire(environment.deadlines.acquire_seconds)
            try:
                task = await _task(clients, lease, suite, (seed + number) % SEEDS)
                found += await _looked(clients, lease, task, apps)
            except EnvironmentFault as fault:
                last = str(fault)
                await slots.release(lease, Verdict.UNPROVEN, last)
            else:
                await slots.release(lease, Verdict.CLEAN)
    except SlotError as error:
        raise TaskError(str(error)) from error
    finally:
        await slots.close()
        await clients.close()
    if not found:
        raise TaskError(f"no phone showed a screen: {last}")
    return found


async def _looked(clients: PhoneClients, lease: Lease, task: Task, apps: Sequence[str]) -> list[Screen]:
    phone = LeasedPhone(clients.open(lease.phone), lease.life)
    found = [one async for one in look(phone, task, apps)]
    await phone.close()
    return found


async def _task(clients: PhoneClients, lease: Lease, suite: str, seed: int) -> Task:
    """In which a phone is looked at."""
    if lease.phone.protocol == "adb":
        return await clients.some_task(lease.phone)
    return Task(suite=suite, template=PROPOSED, seed=seed, goal="Look around.")
