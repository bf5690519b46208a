"""The phone of a lease, as who plays on it has it."""

from tapforge_envs.clients.phones import PhoneClients
from tapforge_envs.slots.lease_life import LeasedPhone
from tapforge_envs.slots.source import Lease

_clients = PhoneClients()
_open: dict[Lease, LeasedPhone] = {}


def on(lease: Lease) -> LeasedPhone:
    """One and the same for a lease."""
    if lease not in _open:
        _open[lease] = LeasedPhone(_clients.open(lease.phone), lease.life)
    return _open[lease]


async def hang_up() -> None:
    """At the end of a test's phones: connections belong to one event loop."""
    _open.clear()
    await _clients.close()
