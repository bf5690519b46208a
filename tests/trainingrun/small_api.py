"""An API server in memory for runs: resourceVersions, UIDs, preconditions, merge patches, finalizers, lists, watches.
And a connection to it that can break at any write, before or after it was carried out."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from tapforge_operator.kube.client import ApiError

Object = dict[str, Any]
Event = tuple[str, str, Object]


def copied(thing: Any) -> Any:
    """Of plain JSON, which is all that is here: many times quicker than `deepcopy`, and most of what is done here."""
    return json.loads(json.dumps(thing))


def refuse(status: int, reason: str) -> ApiError:
    return ApiError("call", status, reason, reason)


class SmallApi:
    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        #: every create and delete that was carried out
        self.log: list[tuple[str, str]] = []
        self.version = 100
        self.history: list[Event] = []
        self.listeners: list[Callable[[str, str, Object], None]] = []
        self._uids = itertools.count(1)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        if path not in self.objects:
            raise refuse(404, "NotFound")
        return copied(self.objects[path])

    def create(self, path: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        where = f"{path}/{name}"
        if where in self.objects:
            raise refuse(409, "AlreadyExists")
        made = copied(body)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made["metadata"] |= {"uid": f"uid-{next(self._uids)}", "creationTimestamp": stamp, "generation": 1}
        if path.endswith("/rayjobs"):
            made["metadata"]["finalizers"] = ["ray.io/rayjob-finalizer"]
        self.log.append(("create", where))
        return self._put("ADDED", where, made)

    def patch(self, path: str, body: Object) -> Object:
        where = path.removesuffix("/status")
        found = self.get(where)
        asked = body.get("metadata") or {}
        if any(asked.get(key, found["metadata"][key]) != found["metadata"][key] for key in ("uid", "resourceVersion")):
            raise refuse(409, "Conflict")
        before = copied(found.get("spec"))
        merged = _merge(found, {k: v for k, v in body.items() if k != "metadata"})
        if merged.get("spec") != before:
            merged["metadata"]["generation"] += 1
        return self._put("MODIFIED", where, merged)

    def delete(self, path: str, uid: str = "") -> Object:
        found = self.get(path)
        if uid and found["metadata"]["uid"] != uid:
            raise refuse(409, "Conflict")
        self.log.append(("delete", path))
        if found["metadata"].get("finalizers"):
            if "deletionTimestamp" in found["metadata"]:
                return found
            found["metadata"]["deletionTimestamp"] = "2026-11-20T12:00:00Z"
            return self._put("MODIFIED", path, found)
        self._drop(path)
        return {"kind": "Status", "status": "Success"}

    def finalise(self, path: str) -> None:
        if path in self.objects and "deletionTimestamp" in self.objects[path]["metadata"]:
            self._drop(path)

    def of(self, kind: str) -> dict[str, Object]:
        """By name."""
        return {p.rpartition("/")[2]: o for p, o in self.objects.items() if f"/{kind}/" in p}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _put(self, event: str, where: str, body: Object) -> Object:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[where] = body
        self._tell(event, where, body)
        return copied(body)

    def _drop(self, where: str) -> None:
        body = self.objects.pop(where)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", where, body)

    def _tell(self, event: str, where: str, body: Object) -> None:
        self.history.append((event, where, copied(body)))
        for listener in list(self.listeners):
            listener(event, where, copied(body))


def _merge(into: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(into) if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


class Line:
    """One process' way to the API server; what an operator takes for a `Client`. It breaks for good at the `fatal`-th
    write (from 0), carried out or not."""

    def __init__(self, api: SmallApi, fatal: int = -1, carried_out: bool = False) -> None:
        self.api = api
        self.dead = asyncio.Event()
        self.writes = 0
        self._fatal = fatal
        self._carried_out = carried_out

    async def get(self, path: str, deadline: float | None = None) -> Object:
        await self._travel()
        return self.api.get(path)

    async def create(
        self, path: str, body: Object, deadline: float | None = None, *, dry_run: bool = False, strict: bool = False
    ) -> Object:
        if dry_run:
            await self._travel()
            return copied(body)
        return await self._write(lambda: self.api.create(path, body))

    async def patch(self, path: str, body: Object) -> Object:
        if not body:  # nothing is written
            return await self.get(path)
        return await self._write(lambda: self.api.patch(path, body))

    async def delete(self, path: str, body: Object) -> Object:
        return await self._write(lambda: self.api.delete(path, body["preconditions"]["uid"]))

    async def pages(self, path: str, selector: str = "", **_: Any) -> AsyncIterator[tuple[list[Object], str]]:
        await self._travel()
        wanted = dict(pair.split("=") for pair in selector.split(",") if "=" in pair)
        found = [copied(o) for p, o in self.api.objects.items() if p.rpartition("/")[0] == path]
        yield [o for o in found if wanted.items() <= o["metadata"].get("labels", {}).items()], str(self.api.version)

    async def watch(self, path: str, selector: str = "", *, since: str, **_: Any) -> AsyncIterator[Object]:
        await self._travel()
        events: asyncio.Queue[Event] = asyncio.Queue()
        for event in self.api.history:
            if int(event[2]["metadata"]["resourceVersion"]) > int(since):
                events.put_nowait(copied(event))
        listener = lambda *event: events.put_nowait(event)  # noqa: E731
        self.api.listeners.append(listener)
        try:
            while True:
                kind, where, body = await events.get()
                if where.rpartition("/")[0] == path:
                    yield {"type": kind, "object": body}
        finally:
            self.api.listeners.remove(listener)

    async def _travel(self) -> None:
        await asyncio.sleep(0)
        if self.dead.is_set():
            raise refuse(0, "ConnectionLost")

    async def _write(self, write: Callable[[], Object]) -> Object:
        await self._travel()
        number, self.writes = self.writes, self.writes + 1
        if number == self._fatal:
            self.dead.set()
            if self._carried_out:
                write()
            raise refuse(0, "ConnectionLost")
        return write()
