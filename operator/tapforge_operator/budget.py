"""The disruption budget of a pool's claimed slots.

Promises:
1. It is made with the pool's first slot, and looked at every few minutes: who deletes it finds it again.
2. Nothing of somebody else's is changed. What keeps the budget from being what it should be is said (`trouble`): the
   pool works without it, but drains don't wait for its claimed slots.
3. Nobody waits for it.

Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from .kube.client import ApiError, Client, Object, path
from .logs import ref
from .objects import belongs
from .pool.manifests import disruption_budget
from .pool.records import Pool

log = logging.getLogger(__name__)

_POLICY: Final = "policy/v1"
_LOOK_SECONDS: Final = 300.0
#: after a look that found nothing out, or the budget of a deleted pool of the same name: it is collected soon
_SOON_SECONDS: Final = 5.0


class Budget:
    """That of one pool."""

    def __init__(self, client: Client, ask_leave: Callable[[], None]):
        """`ask_leave` is called before each write, and raises what ends everything."""
        self._client = client
        self._ask_leave = ask_leave
        self._next = -_LOOK_SECONDS
        #: what is wrong with it, in words; "" when nothing is known to be
        self.trouble = ""

    @property
    def wait(self) -> float:
        """Until it should be looked at again."""
        return max(0.0, self._next - time.monotonic())

    async def keep(self, pool: Pool) -> None:
        """Looks whether it is there, and makes it."""
        self._next = time.monotonic() + _LOOK_SECONDS
        wanted = disruption_budget(pool)
        name = wanted["metadata"]["name"]
        try:
            there = await self._find_or_make(path("poddisruptionbudgets", pool.namespace, group=_POLICY), name, wanted)
        except ApiError as error:
            self._next = time.monotonic() + _SOON_SECONDS
            about = ref("EmulatorPool", pool.namespace, pool.name, pool.uid)
            log.warning("pool %s/%s has no disruption budget yet: %s", pool.namespace, pool.name, error, extra=about)
            if not error.passing and error.status != 409:
                self._next = time.monotonic() + _LOOK_SECONDS
                self.trouble = f"the PodDisruptionBudget {name} can't be made: {error.message.rstrip('.')}"
            return
        if _is_left_over(there, pool):
            self._next = time.monotonic() + _SOON_SECONDS
        else:
            self.trouble = _trouble(there, wanted, pool)

    async def _find_or_make(self, where: str, name: str, wanted: Object) -> Object:
        try:
            return await self._client.get(f"{where}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        self._ask_leave()
        return await self._client.create(where, wanted)


def _is_left_over(there: Object, pool: Pool) -> bool:
    """It was made for a deleted pool of the same name."""
    owners = there["metadata"].get("ownerReferences") or ()
    return any((o.get("kind"), o.get("name")) == ("EmulatorPool", pool.name) and o["uid"] != pool.uid for o in owners)


def _trouble(there: Object, wanted: Object, pool: Pool) -> str:
    name, spec = wanted["metadata"]["name"], there.get("spec") or {}
    if not belongs(there["metadata"], pool.uid):
        return f"the PodDisruptionBudget {name} is somebody else's"
    if any(spec.get(field) != value for field, value in wanted["spec"].items()):
        return f"the PodDisruptionBudget {name} was changed by somebody else"
    return ""
