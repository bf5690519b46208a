"""The operator of a release after this one, as far as older ones meet it: this one, whose statuses have a field more in
each struct."""

from __future__ import annotations

from typing import Any

from tapforge_operator.kube.client import Client
from tapforge_operator.main import main

#: of each struct
FIELD = "later"


def newer(value: Any) -> Any:
    """A status, or a part of it, as that release writes it."""
    if isinstance(value, list):
        return [newer(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {**{name: newer(inner) for name, inner in value.items()}, FIELD: {"since": "then"}}


def allow(schema: Any) -> None:
    """Makes that release's schema of a status, or a part of it, of ours, in place."""
    if "properties" in schema:
        for inner in schema["properties"].values():
            allow(inner)
        schema["properties"][FIELD] = {"type": "object", "properties": {"since": {"type": "string"}}}
    if "items" in schema:
        allow(schema["items"])


def _upgrade() -> None:
    patch = Client.patch

    async def patch_newer(self: Client, path: str, body: Any, *more: Any, **options: Any) -> Any:
        if path.endswith("/status") and isinstance(body, dict) and "/apis/tapforge.dev/" in path:
            body = {**body, "status": newer(body["status"])}
        return await patch(self, path, body, *more, **options)

    Client.patch = patch_newer  # type: ignore[method-assign]


if __name__ == "__main__":
    _upgrade()
    main()
