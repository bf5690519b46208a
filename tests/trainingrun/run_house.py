"""A run, an operator, and everything around them on a small API server: KubeRay, the pool and the driver are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from small_api import Line, SmallApi

from tapforge_api.progress import Progress
from tapforge_operator import labels
from tapforge_operator.config import Settings
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.informers import Scope
from tapforge_operator.observability.metrics import Telemetry
from tapforge_operator.trainingrun.controller import RunQueue
from tapforge_operator.trainingrun.progress import TryLater

GROUP = "/apis/tapforge.dev/v1alpha1/namespaces/lab"
RUN = f"{GROUP}/trainingruns/run"
POOL = f"{GROUP}/emulatorpools/run"
JOBS = "/apis/ray.io/v1/namespaces/lab/rayjobs"
TEMPLATE = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}
SPEC = {
    "environment": {"source": {"ownPool": {"slots": 2, "spec": {"replicas": 2, "template": TEMPLATE}}}},
    "checkpoints": {"storage": {"volumeClaim": {"claimName": "disk"}}},
    "cluster": {"image": "i", "backoffLimit": 1},
}


class Process:
    """An operator, as far as runs go."""

    def __init__(self, api: SmallApi, line: Line) -> None:
        self.line = line
        self.telemetry = Telemetry()
        self.cache = Cache(self.telemetry, lambda _: None)
        settings = Settings("operator", scope=Scope(("lab",), nodes=False))
        leads = lambda: not line.dead.is_set()  # noqa: E731
        self.runs = RunQueue(settings, self.cache, line, self.telemetry, leads)  # type: ignore[arg-type]
        self._api = api

    async def begin(self) -> None:
        for path, body in self._api.objects.items():
            self._saw("ADDED", path, body)
        self._api.listeners.append(self._saw)
        await self.runs.start()

    async def end(self) -> None:
        """May be called again."""
        if self._saw in self._api.listeners:
            self._api.listeners.remove(self._saw)
        await self.runs.stop()

    def told(self, begin: str) -> list[str]:
        """What it measures, by the beginning of its name."""
        return [line for line in self.telemetry.render().decode().splitlines() if line.startswith(begin)]

    def _saw(self, event: str, path: str, body: Any) -> None:
        if "/trainingruns/" in path:
            self.cache.observe_run(body, event == "DELETED")
        elif "/emulatorpools/" in path:
            self.cache.observe_pool(body, event == "DELETED")


class House:
    """Everything around the operator, and operators one after the other."""

    def __init__(self) -> None:
        self.api = SmallApi()
        self.api.create("/api/v1/namespaces/tapforge-system/configmaps", config_map("tapforge-broker-ca"))
        disk = {"metadata": {"name": "disk", "namespace": "lab"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
        self.api.create("/api/v1/namespaces/lab/persistentvolumeclaims", disk)
        body = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "run"}, "spec": SPEC}
        body["metadata"] |= {"namespace": "lab"}  # type: ignore[operator]
        self.uid = self.api.create(f"{GROUP}/trainingruns", body)["metadata"]["uid"]
        self.api.listeners.append(self._others)
        self.sequence = 0

    def _others(self, event: str, path: str, body: Any) -> None:
        """The keeper of the pool, and KubeRay's finalizer."""
        if path == POOL and event == "ADDED":
            asyncio.get_running_loop().call_soon(self.api.patch, f"{POOL}/status", {"status": {"ready": 2}})
        if path.startswith(JOBS) and "deletionTimestamp" in body["metadata"] and event == "MODIFIED":
            asyncio.get_running_loop().call_soon(self.api.finalise, path)

    @property
    def status(self) -> Any:
        return self.api.get(RUN).get("status") or {}

    def says(self, kind: str, reason: str) -> bool:
        return any(
            c["type"] == kind and c["status"] == "True" and c["reason"] == reason
            for c in self.status.get("conditions", ())
        )

    def jobs(self) -> list[int]:
        return sorted(int(o["metadata"]["labels"][labels.ATTEMPT]) for o in self.api.of("rayjobs").values())

    def changes(self) -> list[tuple[str, str]]:
        """What was created and deleted so far, Events aside."""
        return [entry for entry in self.api.log if "/events/" not in entry[1]]

    def kuberay(self, job: str, deployment: str, message: str = "") -> None:
        status = {"jobStatus": job, "jobDeploymentStatus": deployment, "message": message}
        (number,) = self.jobs()
        self.api.patch(f"{JOBS}/{labels.ray_job_name('run', number)}/status", {"status": status})

    async def live(self, fatal: int, carried_out: bool) -> Process:
        """The whole story; at the fatal write the operator dies and another one begins. Returns the first one."""
        first = self.process = Process(self.api, Line(self.api, fatal, carried_out))
        await self.process.begin()
        successor = asyncio.create_task(self._replace())
        try:
            async with asyncio.timeout(120):
                await self._story()
        finally:
            successor.cancel()
            await self.process.end()
        return first

    async def _replace(self) -> None:
        first = self.process
        await first.line.dead.wait()
        await first.end()
        self.process = Process(self.api, Line(self.api))
        await self.process.begin()

    async def _story(self) -> None:
        await self.until(lambda: len(self.jobs()) == 1)
        self.kuberay("RUNNING", "Running")
        await self.report(update=2)
        await self.report(update=3, checkpoint={"update": 3, "path": "/storage/3"})
        self.api.patch(RUN, {"spec": {"suspend": True}})
        await self.until(lambda: self.process.runs.reports is not None and self.stopping())
        await self.report(update=3, final="stopped")
        await self.until(lambda: self.says("Suspended", "Suspended") and not self.api.of("emulatorpools"))
        assert not self.jobs()
        self.api.patch(RUN, {"spec": {"suspend": False}})
        await self.until(lambda: len(self.jobs()) == 1)
        self.kuberay("RUNNING", "Running")
        await self.until(lambda: self.status["attempt"]["phase"] == "Active")
        self.kuberay("RUNNING", "Failed", "the head is gone")
        await self.until(lambda: self.status["lostClusters"] == 1 and len(self.jobs()) == 1 and self.fresh())
        self.kuberay("RUNNING", "Running")
        await self.report(update=9, final="complete")
        self.kuberay("SUCCEEDED", "Complete")
        await self.until(lambda: self.says("Complete", "Complete") and not self.api.of("emulatorpools"))

    def stopping(self) -> bool:
        return self.status["attempt"]["phase"] in ("Stopping", "Removing", "Over")

    def fresh(self) -> bool:
        (job,) = self.api.of("rayjobs").values()
        return "status" not in job

    async def report(self, **fields: Any) -> None:
        """As a driver does: again until it was answered, unless its attempt is over."""
        while self.jobs():
            (number,) = self.jobs()
            self.sequence += 1
            said = {"attempt": number, "sequence": self.sequence, **fields}
            said["advance"] = {"update": said.pop("update", 0), **said.get("advance", {})}
            try:
                async with asyncio.timeout(1):  # its operator may have died
                    await self.process.runs.reports.take(self.uid, Progress.model_validate(said))
                    return
            except (TryLater, TimeoutError):
                await asyncio.sleep(0.002)

    async def until(self, probe: Callable[[], bool]) -> None:
        while not probe():  # noqa: ASYNC110 - what is played here tells nobody
            await asyncio.sleep(0.002)


def config_map(name: str) -> Any:
    return {"kind": "ConfigMap", "metadata": {"name": name}, "data": {"ca.crt": "CERTIFICATE"}}
