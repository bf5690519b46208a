"""Events as the API server takes them, and an API server that refuses them."""

from typing import Any, cast

import pytest

from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.events import record
from tapforge_operator.kube.types import Event, Reference

POOL = Reference("EmulatorPool", "default", "phones", "uid-1")


class _Api:
    def __init__(self, error: ApiError | None = None):
        self.error = error
        self.made: list[tuple[str, dict[str, Any]]] = []

    async def create(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        assert deadline > 0
        if self.error is not None:
            raise self.error
        self.made.append((path, body))
        return body


async def test_an_event_is_about_the_object_and_in_its_namespace() -> None:
    api = _Api()
    await record(cast(Client, api), POOL, Event("Warning", "Degraded", "x" * 5000))
    ((path, body),) = api.made
    assert path == "/api/v1/namespaces/default/events"
    assert body["metadata"]["namespace"] == "default" and body["metadata"]["name"].startswith("phones.")
    about = body["involvedObject"]
    assert (about["kind"], about["name"], about["uid"]) == ("EmulatorPool", "phones", "uid-1")
    assert about["apiVersion"].startswith("tapforge.dev/")
    assert len(body["message"]) <= 1024  # the API server refuses a longer one


async def test_an_event_that_is_refused_is_a_warning_that_names_the_object(caplog: pytest.LogCaptureFixture) -> None:
    api = _Api(ApiError("create", 403, "Forbidden", "exceeded quota"))
    await record(cast(Client, api), POOL, Event("Normal", "ScaledUp", "3 slots"))
    (line,) = caplog.records
    assert line.levelname == "WARNING" and "exceeded quota" in line.getMessage()
    assert line.ref == {"kind": "EmulatorPool", "namespace": "default", "name": "phones", "uid": "uid-1"}  # type: ignore[attr-defined]
