"""A phone as the operator makes it, from its Pod to an episode: the command, the environment and the probe that the Pod
has; the claim that the broker writes on it; and the client that plays by that claim, straight and through a bridge.

Writers: `emulatorpool.pod.slot_pods`, the broker. Readers: the phone's server, the bridge, `BrokerSlots` and
`PhoneClients`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from brokers_office import opened
from claim_cluster import NAMESPACE, POOL, Lab, pod_path
from operators_part import SAMPLES

from tapforge_api import load_pool
from tapforge_api.document import parse
from tapforge_api.pool import EmulatorPoolSpec
from tapforge_api.reading import read_pool
from tapforge_envs.bridge.server import Bridge, application
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.protocol import EnvironmentFault, Tap
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.source import Verdict
from tapforge_envs.wire import Fence
from tapforge_operator.emulatorpool.pod import slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Pool

UID = "uid-of-the-phones-pod"
SECONDS = 120.0
#: commands that are this project's own
SERVER = ["python", "-m", "tapforge_envs.phone.server"]
OURS = (SERVER, ["python", "-m", "tapforge_envs.web.server"], ["tapforge", "env", "serve"])


def pools() -> list[tuple[str, EmulatorPoolSpec]]:
    """Of every sample file, the own pools of runs too."""
    found = []
    for path in sorted(SAMPLES.glob("*.yaml")):
        for document in parse(path.read_text(), str(path)):
            spec = document.data.get("spec") or {}
            if document.data.get("kind") == "TrainingRun":
                spec = spec.get("environment", {}).get("source", {}).get("ownPool", {}).get("spec")
            elif document.data.get("kind") != "EmulatorPool":
                continue
            if spec and "external" not in spec:
                reading = read_pool({"metadata": {"name": POOL}, "spec": spec})
                assert reading.spec is not None, reading.message
                found.append((path.stem, reading.spec))
    return found


def container_of(spec: EmulatorPoolSpec) -> dict[str, Any]:
    """The one that serves."""
    pod = slot_pods(Pool(NAMESPACE, POOL, "pool-uid", 1, spec))(NewSlot("phone-0", 0))
    return next(c for c in pod["spec"]["containers"] if any(e["name"] == "TAPFORGE_SLOT" for e in c.get("env", ())))


@pytest.mark.parametrize(("name", "spec"), pools(), ids=lambda one: one if isinstance(one, str) else "")
def test_a_samples_server_listens_where_it_is_looked_for(name: str, spec: EmulatorPoolSpec) -> None:
    """`slot_pods`: probe and port <-> the options of a server of this project."""
    container = container_of(spec)
    if container.get("command") in OURS:
        assert f"--port={spec.port}" in container["args"] and "--host=::" in container["args"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": spec.port}


@asynccontextmanager
async def serving(container: Mapping[str, Any]) -> AsyncIterator[int]:
    """The container's own command on this machine, on a port that is free; as a kubelet starts it."""
    values = {"metadata.uid": UID}
    env = {
        e["name"]: e["value"] if "value" in e else values[e["valueFrom"]["fieldRef"]["fieldPath"]]
        for e in container["env"]
    }
    words = [*container["command"][1:], *container["args"], "--host=127.0.0.1", "--port=0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            yield json.loads(await process.stdout.readline())["port"]
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def bridged(port: int) -> AsyncIterator[int]:
    """A bridge beside the phone, which is the slot's server then; of a release that says a field more each time."""
    clients = PhoneClients()
    behind = PhoneAddress("behind", f"http://127.0.0.1:{port}")
    app, slots = application(Bridge([behind], uid=UID), clients)
    app.middlewares.insert(0, _says_more)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        for slot in slots:
            await slot.stop(1)
        await runner.cleanup()
        await clients.close()


@web.middleware
async def _says_more(request: web.Request, handler: Any) -> web.StreamResponse:
    """An observation begins with a line of JSON, every other answer is JSON."""
    answer = await handler(request)
    assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
    line, newline, rest = answer.body.partition(b"\n")
    answer.body = json.dumps(_more(json.loads(line))).encode() + newline + rest
    return answer


def _more(value: Any) -> Any:
    """What has names of its own instead of fields stays as it is."""
    if isinstance(value, dict):
        known = {name: one if name == "params" else _more(one) for name, one in value.items()}
        return {**known, "laterField": {"deep": [1]}}
    return [_more(one) for one in value] if isinstance(value, list) else value


def pool_of_one(spec: EmulatorPoolSpec, port: int) -> Lab:
    """The pool with its Pod, which runs on this machine and listens on the port."""
    lab = Lab(**{**spec.model_dump(mode="json", by_alias=True, exclude_unset=True), "port": port})
    made = slot_pods(Pool(NAMESPACE, POOL, lab.pool_uid, 1, spec))(NewSlot("phone-0", 0))
    made["metadata"] |= {"uid": UID}
    lab.cluster.put(pod_path("phone-0"), {**made, "spec": {**made["spec"], "nodeName": "n0"}})
    lab.set_ready("phone-0")
    lab.cluster.objects[pod_path("phone-0")]["status"]["podIP"] = "127.0.0.1"
    return lab


@pytest.mark.parametrize("bridge", [False, True], ids=["straight", "through a newer bridge"])
async def test_an_episode_is_played_on_a_phone_as_the_operator_makes_it(tmp_path: Path, bridge: bool) -> None:
    """`slot_pods` -> the phone's server; the broker's claim -> `BrokerSlots` -> `PhoneClients` -> that server."""
    spec = load_pool(SAMPLES / "pool-phones.yaml").spec
    container = container_of(spec)
    assert container["command"] == SERVER
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving({**container, "env": [] if bridge else container["env"]}))
        port = await stack.enter_async_context(bridged(port)) if bridge else port
        office = await stack.enter_async_context(opened(pool_of_one(spec, port)))
        look = f"http://127.0.0.1:{port}{container['readinessProbe']['httpGet']['path']}"
        async with aiohttp.ClientSession() as session, session.get(look) as answer:
            assert (answer.status, (await answer.json())["slot"]) == (200, UID)
        clients = PhoneClients()
        stack.push_async_callback(clients.close)
        slots = BrokerSlots(POOL, Access.of(office.told(tmp_path)), slots=1, health=clients.health)
        stack.push_async_callback(slots.close)
        await slots.start()
        lease = await slots.acquire(SECONDS)
        address = slots.address(lease.slot)
        assert address.url == f"http://127.0.0.1:{port}" and address.fence is not None
        assert address.fence.slot == UID
        client, task = clients.open(address), await clients.some_task(address)
        await client.reset(task)
        await client.step(Tap(x=0.5, y=0.5), 0)
        assert 0 <= (await client.evaluate()).value <= 1
        # Whoever had the phone before, and whoever thinks that it is another one, is refused by the phone itself.
        for wrong in (Fence(UID, address.fence.number - 1), Fence("another", address.fence.number)):
            late = clients.open(PhoneAddress(address.slot, address.url, fence=wrong))
            with pytest.raises(EnvironmentFault, match="the claim"):
                await late.reset(task)
        await slots.release(lease, Verdict.CLEAN)
