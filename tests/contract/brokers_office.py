"""The operator's broker behind its port, with what it tells a run's Pod; of this release, or of one that says more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web
from broker_house import House
from claim_cluster import Lab
from operators_part import environment, made, pods_of, ray_job, seen

from tapforge_envs.slots.broker_calls import BROKER_CA, BROKER_TOKEN_FILE, BROKER_URL
from tapforge_operator.broker import http
from tapforge_operator.trainingrun import rayjob
from tapforge_operator.trainingrun.progress import Reports, add_progress

#: as `callers.Callers.add_run` has it
NAME, NAMESPACE, UID = "train", "lab", "uid-of-train"


class Office(House):
    """A broker that takes reports as well, and says a field more in each answer where it is a release newer."""

    def __init__(self, lab: Lab, newer: bool) -> None:
        super().__init__(lab)
        self.reports = Reports(lambda uid: None)
        self.newer = newer

    def add_to(self, app: web.Application) -> None:
        add_progress(app, self.reports, self.auth)
        if self.newer:
            app.middlewares.insert(0, _says_more)

    def told(self, folder: Path) -> dict[str, str]:
        """Environment of the head of the run's second attempt, with its files in a folder of this machine."""
        run = replace(seen(made({"cluster": {"image": "i"}}, NAME), NAMESPACE), uid=UID)
        broker = rayjob.Broker(self.url, self.material.ca.decode())
        found = environment(pods_of(ray_job(run, 2, broker))["head"])
        files = {BROKER_TOKEN_FILE: self.token, BROKER_CA: rayjob.broker_config_map(run, broker)["data"]["ca.crt"]}
        for variable, text in files.items():
            file = folder / Path(found[variable]).name
            file.write_text(text)
            found[variable] = str(file)
        assert found[BROKER_URL] == self.url
        return found


@asynccontextmanager
async def opened(lab: Lab, newer: bool = False) -> AsyncIterator[Office]:
    office = Office(lab, newer)
    await office.open()
    try:
        yield office
    finally:
        await office.close()


@web.middleware
async def _says_more(request: web.Request, handler: http.Handler) -> web.StreamResponse:
    answer = await handler(request)
    assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
    body = json.dumps(more(json.loads(answer.body)))
    return web.Response(status=answer.status, text=body, content_type="application/json")


def more(value: Any) -> Any:
    """The same with a field that nobody knows in every object."""
    if isinstance(value, dict):
        return {**{name: more(one) for name, one in value.items()}, "laterField": {"deep": [1]}}
    return [more(one) for one in value] if isinstance(value, list) else value
