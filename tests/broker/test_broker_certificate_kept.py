"""The look after the broker's certificate goes on, whatever a single look meets."""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest

from tapforge_operator.broker import tls
from tapforge_operator.broker.material import NOTHING, completed, fields
from tapforge_operator.kube.client import ApiError
from tapforge_operator.observability.metrics import Telemetry

pytestmark = pytest.mark.usefixtures("own_time")


class Contested:
    """A Secret with nothing of use in it; somebody else is faster at the first `conflicts` writes."""

    def __init__(self, conflicts: int):
        self.conflicts = conflicts
        self.data: dict[str, str] = {"tls.crt": base64.b64encode(b"none").decode()}

    async def get(self, path: str) -> dict[str, Any]:
        if path.endswith(tls.SECRET):
            return {"metadata": {"resourceVersion": "1"}, "data": self.data}
        raise ApiError(path, 404, "NotFound", "there is none")

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError(path, 409, "Conflict", "it changed")
        self.data = body["data"]
        return body

    async def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        raise ApiError(path, 404, "NotFound", "there is none")


async def test_a_secret_that_is_written_over_again_and_again_ends_no_look_after_it() -> None:
    api, material = Contested(conflicts=20), completed(NOTHING, ["localhost"], datetime.now(UTC))
    trust = ssl.create_default_context(cadata=material.ca.decode())
    served = tls.Own(["localhost"], tls.context(material), trust, material, Telemetry())
    keeps = asyncio.create_task(tls.keep(served, api, "system", every=0.01))
    async with asyncio.timeout(60):
        while api.conflicts or "hmac.key" not in api.data:
            assert not keeps.done()
            await asyncio.sleep(0.02)
    keeps.cancel()
    await asyncio.gather(keeps, return_exceptions=True)


async def test_callers_of_other_brokers_trust_an_authority_that_was_made_meanwhile() -> None:
    """A broker that stands by calls the leader, whose certificate may be of a newer authority."""
    material, other = (completed(NOTHING, ["localhost"], datetime.now(UTC)) for _ in range(2))
    api, trust = Contested(conflicts=0), ssl.create_default_context(cadata=material.ca.decode())
    api.data = {name: base64.b64encode(value).decode() for name, value in fields(other, {}).items()}
    served = tls.Own(["localhost"], tls.context(material), trust, material, Telemetry())
    keeps = asyncio.create_task(tls.keep(served, api, "system", every=0.01, leads=lambda: False))
    async with asyncio.timeout(60):
        while len(trust.get_ca_certs()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    keeps.cancel()
    await asyncio.gather(keeps, return_exceptions=True)
    made = ssl.PEM_cert_to_DER_cert(other.ca.decode())
    assert made in trust.get_ca_certs(binary_form=True)
