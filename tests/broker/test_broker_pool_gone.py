"""A pool of external devices that goes while somebody is being given one: the broker goes on for everybody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from claim_cluster import until

from tapforge_api.claims import Acquire
from tapforge_operator.broker.claim_record import Keys
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.types import Holder, PoolNotFound
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.types import PoolObject, observe_pool

pytestmark = pytest.mark.usefixtures("own_time")


class Busy:
    """An API server that answers 503 until it is told otherwise."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.tried = 0
        self.busy = True

    async def get(self, path: str) -> dict[str, Any]:
        raise ApiError(path, 404, "NotFound", "there is none")

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.tried += 1
        if self.busy:
            raise ApiError(path, 503, "Busy", "later")
        self.created.append(body)
        return {**body, "metadata": {**body["metadata"], "uid": "lease", "resourceVersion": "7"}}

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise ApiError(path, 404, "NotFound", "there is none")

    async def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        raise ApiError(path, 404, "NotFound", "there is none")


def devices(name: str) -> PoolObject:
    metadata = {"namespace": "lab", "name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return observe_pool({"metadata": metadata, "spec": {"external": {"urls": [f"http://{name}.example:8000"]}}})


@pytest.mark.parametrize("attempts", [0, 3])
async def test_a_pool_that_goes_while_a_claim_is_written_ends_nobody_elses_claims(attempts: int) -> None:
    api = Busy()
    claims = Claims(api, Keys(b"k" * 32), lambda: True)
    claims.begin(1, [devices("old"), devices("other")], [])
    asked = asyncio.create_task(claims.acquire("lab", "old", Holder("user/ann"), Acquire(request="request-1")))
    await until(lambda: api.tried >= attempts)
    claims.forget_pool("uid-old")
    with pytest.raises(PoolNotFound):
        await asyncio.wait_for(asked, 10)
    api.busy = False
    await asyncio.sleep(60)
    assert not api.created, "a Lease of a pool that is gone would never be deleted"
    assert claims.leading
    got = await claims.acquire("lab", "other", Holder("user/bob"), Acquire(request="request-2"))
    assert len(got.claims) == 1
    await claims.end()
