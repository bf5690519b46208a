"""Whether external devices of a pool can be claimed: each claim is written on a Lease that the operator makes.

1. Without `--devices` the operator neither watches nor writes Leases; a pool of devices says so.
2. Otherwise the API server is asked from time to time whether it would take such a Lease. Claims alone would find out
   only when a caller waits, and a caller whose Lease is refused gets no reason.

Times are seconds.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from tapforge_operator import labels
from tapforge_operator.emulatorpool.backoff import LONGEST, LONGEST_NOT_ENABLED, refusal
from tapforge_operator.emulatorpool.state import Pool, Refusal
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.objectmeta import controller_reference
from tapforge_operator.observability.logging import ref

log = logging.getLogger(__name__)

_GROUP: Final = "coordination.k8s.io/v1"
#: after a question without an answer
_SOON: Final = 5.0
NOT_ENABLED: Final = Refusal(
    "DevicesNotEnabled",
    "the operator has no rights on Leases, on which claims of external devices are written: install the component "
    "devices (Helm: --set devices=true)",
)


class DeviceLeases:
    """Those of one pool."""

    def __init__(self, client: Client, enabled: bool):
        self._client = client
        self._next = 0.0 if enabled else float("inf")
        #: why its devices can't be claimed
        self.refusal = None if enabled else NOT_ENABLED

    @property
    def wait(self) -> float:
        """Until it should be asked again."""
        return max(0.0, self._next - time.monotonic())

    async def probe(self, pool: Pool) -> None:
        """Asks the API server whether it would take one; makes none."""
        self._next = time.monotonic() + LONGEST
        where = path("leases", pool.namespace, group=_GROUP)
        try:
            await self._client.create(where, _lease(pool), dry_run=True)
        except ApiError as error:
            known = refusal(error.status, error.reason, error.message)
            if known is not None:
                self._next = time.monotonic() + LONGEST_NOT_ENABLED
                self.refusal = known
            elif error.status != 409:
                self._next = time.monotonic() + _SOON
                about = ref("EmulatorPool", pool.namespace, pool.name, pool.uid)
                log.info("whether Leases of pool %s can be made is unknown: %s", pool.name, error, extra=about)
            return
        self.refusal = None


def _lease(pool: Pool) -> Object:
    return {
        "apiVersion": _GROUP,
        "kind": "Lease",
        "metadata": {
            "name": labels.slot_name(pool.name, pool.uid, 0, ""),
            "namespace": pool.namespace,
            "ownerReferences": [controller_reference("EmulatorPool", pool.name, pool.uid)],
        },
        "spec": {},
    }
