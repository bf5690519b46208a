"""The pools that claims can be asked of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tapforge_operator.broker.claim_record import SlotView
from tapforge_operator.broker.devices import DeviceRules, device_of
from tapforge_operator.broker.external import Url, urls_of
from tapforge_operator.broker.types import PoolNotFound
from tapforge_operator.kube.types import PoolObject


class PoolIndex:
    """By UID, by name, and by external URL."""

    def __init__(self, rules: DeviceRules | None = None) -> None:
        """`rules`: which namespace may name which device."""
        self._rules = rules or DeviceRules()
        self._pools: dict[str, PoolObject] = {}
        self._by_name: dict[tuple[str, str], PoolObject] = {}
        self._urls: dict[str, Url] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._pools

    def uids(self) -> list[str]:
        return list(self._pools)

    def put(self, pool: PoolObject) -> tuple[Sequence[Url], Sequence[Url]]:
        """The external URLs that it has and may have, and those that it has no longer."""
        before = self._pools.get(pool.uid)
        self._pools[pool.uid] = self._by_name[pool.key] = pool
        urls = self._allowed(pool)
        self._urls.update((url.uid, url) for url in urls)
        kept = {url.uid for url in urls}
        removed = [url for url in (self._allowed(before) if before else ()) if url.uid not in kept]
        for url in removed:  # what its Lease says from now on must not bring it back
            self._urls.pop(url.uid, None)
        return urls, removed

    def drop(self, uid: str) -> Sequence[Url]:
        """The external URLs that it had."""
        pool = self._pools.pop(uid, None)
        if pool is None:
            return ()
        if self._by_name.get(pool.key) is pool:
            del self._by_name[pool.key]
        urls = self._allowed(pool)
        for url in urls:
            self._urls.pop(url.uid, None)
        return urls

    def find(self, namespace: str, name: str) -> PoolObject:
        pool = self._by_name.get((namespace, name))
        if pool is None:
            raise PoolNotFound(f"there is no EmulatorPool {name} in namespace {namespace}")
        if pool.deleting:
            raise PoolNotFound(f"EmulatorPool {name} in namespace {namespace} is being deleted")
        return pool

    def name(self, uid: str) -> str:
        """metadata.name; "" of a pool that is gone."""
        pool = self._pools.get(uid)
        return pool.name if pool else ""

    def checks_fences(self, uid: str) -> bool:
        """The phones of the pool refuse a late holder by themselves."""
        pool = self._pools.get(uid)
        return pool is not None and pool.checks_fences

    def key(self, uid: str) -> str:
        """namespace/name, for metrics; "" of a pool that is gone."""
        pool = self._pools.get(uid)
        return f"{pool.namespace}/{pool.name}" if pool else ""

    def unlisted(self, views: Iterable[SlotView]) -> list[SlotView]:
        """Those of URLs that were taken out of their pool, or that it may not name."""
        found = [
            view
            for view in views
            if (pool := self._pools.get(view.pool)) is not None
            and view.namespace == pool.namespace
            and view.uid not in self._urls
        ]
        return [replace(view, device=device_of(view.address, self._protocol(view.pool))) for view in found]

    def refused(self, uid: str) -> list[Url]:
        """External URLs that the pool's namespace may not name."""
        pool = self._pools.get(uid)
        return [url for url in urls_of(pool) if not self._allows(url)] if pool is not None and self._rules else []

    def _allowed(self, pool: PoolObject) -> list[Url]:
        return [url for url in urls_of(pool) if self._allows(url)]

    def _allows(self, url: Url) -> bool:
        return self._rules.allow(url.namespace, url.url, url.protocol)

    def _protocol(self, uid: str) -> str:
        return str(self._pools[uid].spec.get("protocol") or "")

    def urls(self) -> Iterable[Url]:
        """All that are in a pool's list."""
        return self._urls.values()

    def url(self, slot_uid: str) -> Url | None:
        return self._urls.get(slot_uid)
