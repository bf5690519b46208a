"""`tapforge-operator`: keeps EmulatorPools as they should be and hands out claims of their phones.

What happens, in order: watch everything; answer the kubelet; wait to lead; read everything once more, consistently;
rebuild the claims from what is written on the slots; serve. A process that loses its leadership forgets what it had in
memory, which may be wrong by then, and waits to lead again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import uvloop
from aiohttp import web

from tapforge_operator.clusternetwork import MONITORING, RunNetwork, namespace_labels
from tapforge_operator.config import (
    Settings,
    advertised,
    broker_address,
    certificate_names,
    claim_quotas,
    device_rules,
)
from tapforge_operator.kube.cache import WatchFreshness
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.credentials import Credentials, NoCluster
from tapforge_operator.kube.informers import Scope
from tapforge_operator.kube.leaderelection import Election, Timing
from tapforge_operator.manager import Leadership
from tapforge_operator.metricsaccess import MetricsAccess
from tapforge_operator.observability.health import Access, application, silence
from tapforge_operator.observability.logging import configure as configure_logging
from tapforge_operator.observability.metrics import Telemetry
from tapforge_operator.server import (
    EVERYWHERE,
    HEALTH_CONNECTIONS,
    IDLE,
    Connections,
    fitting,
    listen,
    raise_file_limit,
)

log = logging.getLogger("tapforge_operator")

LEASE = "tapforge-operator"
#: calls to the API server at once for claims. With more of them each takes longer and none more are done: those that
#: would reach their deadline there are asked about and sent again, which adds to the server's load
_CLAIMS_IN_FLIGHT = 128
#: reviews of callers: they wait behind no claims, whose callers would all wait for them
_REVIEWS_IN_FLIGHT = 16
#: seconds in which a task that is cancelled has to end
_END_SECONDS = 5.0


#: of Python's collector of cyclic garbage: new objects until the young ones are looked at, such looks until the middle
#: ones are, and so on
_GARBAGE_THRESHOLDS = (5_000, 50, 100)


def _collect_garbage_less_often() -> None:
    """For a process that holds many small records for long. As Python starts the collector, it looks at everything that
    there is again and again while thousands of slots are made: a fifth of the operator's time, in pauses of a tenth of
    a second in which no claim is answered. Hardly anything here is cyclic; what is waits a little longer. Called once,
    when everything has been imported: modules live as long as the process and are left out."""
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    gc.collect()
    gc.freeze()


def _identity() -> str:
    """Two processes on one machine have to differ: one that finds its own name in the Lease leads at once."""
    return f"{socket.gethostname()}-{os.getpid()}"


@click.command(context_settings={"auto_envvar_prefix": "TAPFORGE_OPERATOR", "show_default": True})
@click.option("--identity", envvar="POD_NAME", default=_identity, help="name in the leader Lease")
@click.option("--own-namespace", envvar="POD_NAMESPACE", default="tapforge-system", help="for Lease, keys, certificate")
@click.option("--namespace", "namespaces", multiple=True, help="watch only this namespace; may be repeated")
@click.option("--nodes/--no-nodes", default=True, help="watch nodes, to notice cordoned and lost ones")
@click.option(
    "--devices/--no-devices",
    default=False,
    help="claims of external devices, in Leases; needs the rights of the component devices",
)
@click.option("--host", default=EVERYWHERE, help="address to listen on; :: is every one, IPv4's too")
@click.option("--broker-port", type=click.IntRange(0, 65535), default=8443, help="port of the claims, HTTPS; 0: any")
@click.option("--health-port", type=click.IntRange(0, 65535), default=8080, help="port of health and metrics; 0: any")
@click.option(
    "--metrics-token/--no-metrics-token",
    default=False,
    help="serve metrics only to bearers of a token that RBAC allows to get /metrics",
)
@click.option(
    "--advertise-address",
    envvar="POD_IP",
    default="",
    help="address, or address:port, at which other replicas reach this one's broker; without it they forward no calls",
)
@click.option("--broker-url", default="", help="the claims' address for runs' Pods; default: that of the Service")
@click.option(
    "--run-network/--no-run-network", default=True, help="limit access to runs' Pods by a NetworkPolicy for each run"
)
@click.option(
    "--kuberay-namespace",
    default="",
    metavar="LABELS",
    help="KEY=VALUE,... of KubeRay's namespace, which reaches Ray's dashboards; default: any namespace",
)
@click.option(
    "--metrics-namespace",
    "metrics_namespaces",
    multiple=True,
    default=(",".join(f"{key}={value}" for key, value in MONITORING.items()),),
    metavar="LABELS",
    help="KEY=VALUE,... of namespaces that reach the metrics of runs' Ray Pods; may be repeated; empty: any namespace",
)
@click.option("--certificate-name", "names", multiple=True, help="name or address the certificate is also good for")
@click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="folder with tls.crt, tls.key and ca.crt of the broker, a mounted Secret; default: an authority of its own",
)
@click.option(
    "--claim-quota",
    "claim_quota",
    multiple=True,
    metavar="NAMESPACE=N",
    help="slots that a namespace's claimants may hold at once, over all pools; may be repeated; *=N: all other ones",
)
@click.option(
    "--person-claim-quota",
    type=click.IntRange(0),
    help="slots that one person, claiming under their own name, may hold at once, over all pools; default: any number",
)
@click.option("--connections", type=click.IntRange(1), default=4096, help="of callers to the broker at once")
@click.option(
    "--address-connections",
    type=click.IntRange(0),
    default=0,
    help="of one address to the broker at once; 0: half of --connections",
)
@click.option(
    "--external-device",
    "external_device",
    multiple=True,
    metavar="NAMESPACE=HOSTS",
    help="external devices that a namespace's pools may name: a network, an address or a host, as *.lab.example; may "
    "be repeated; *=HOSTS: every namespace; without it all may name any",
)
@click.option("--in-flight", type=click.IntRange(1, 1024), default=64, help="calls to the API server at once")
@click.option("--lease-seconds", type=click.FloatRange(3), default=15.0, help="until another one may lead, seconds")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING"]), default="INFO")
@click.option("--audit-log/--no-audit-log", default=True, help="a line for each claim that is granted or ends")
@click.option("--plain-logs", is_flag=True, help="lines for people instead of JSON")
def main(
    identity: str,
    own_namespace: str,
    namespaces: tuple[str, ...],
    nodes: bool,
    devices: bool,
    host: str,
    broker_port: int,
    health_port: int,
    metrics_token: bool,
    advertise_address: str,
    broker_url: str,
    run_network: bool,
    kuberay_namespace: str,
    metrics_namespaces: tuple[str, ...],
    names: tuple[str, ...],
    tls_dir: Path | None,
    claim_quota: tuple[str, ...],
    person_claim_quota: int | None,
    external_device: tuple[str, ...],
    connections: int,
    address_connections: int,
    in_flight: int,
    lease_seconds: float,
    log_level: str,
    audit_log: bool,
    plain_logs: bool,
) -> None:
    """Runs the operator until SIGTERM."""
    configure_logging(log_level, plain_logs, audit=audit_log)
    _collect_garbage_less_often()
    files = raise_file_limit()
    try:
        quotas = claim_quotas(claim_quota, person_claim_quota)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--claim-quota") from error
    try:
        rules = device_rules(external_device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--external-device") from error
    try:
        dns_names = certificate_names(names)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--certificate-name") from error
    try:
        address = broker_address(broker_url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--broker-url") from error
    try:
        network = RunNetwork(
            run_network, namespace_labels(kuberay_namespace), tuple(map(namespace_labels, metrics_namespaces))
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kuberay-namespace, --metrics-namespace") from error
    settings = Settings(
        identity=identity,
        namespace=own_namespace,
        scope=Scope(namespaces, nodes, devices),
        host=host,
        broker_port=broker_port,
        health_port=health_port,
        metrics_token=metrics_token,
        broker_url=address,
        run_network=network,
        advertised=advertised(advertise_address, broker_port),
        names=dns_names,
        tls_dir=tls_dir,
        quotas=quotas,
        devices=rules,
        connections=fitting(connections, files),
        address_connections=address_connections,
        in_flight=in_flight,
        timing=Timing(lease_seconds, lease_seconds * 2 / 3, lease_seconds / 5),
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ended = runner.run(run(settings))
    except NoCluster as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if ended == "stopped" else 1)


async def run(settings: Settings) -> str:
    """Runs until it is stopped; returns why it ended: "stopped" or what went wrong."""
    credentials = await Credentials.load()
    telemetry = Telemetry(settings.identity, freshness=WatchFreshness(gap=settings.timing.renew_seconds))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(credentials.close)
        client = await stack.enter_async_context(Client(credentials, settings.in_flight, watcher=telemetry.api_call))
        # Claims and reviews of tokens have their own connections and queues: they don't wait behind a pool's creates.
        claims = await stack.enter_async_context(Client(credentials, _CLAIMS_IN_FLIGHT, watcher=telemetry.api_call))
        reviews = await stack.enter_async_context(Client(credentials, _REVIEWS_IN_FLIGHT, watcher=telemetry.api_call))
        # Elections have a pool of their own: a queue of writes must not cost the leadership.
        voter = await stack.enter_async_context(Client(credentials, 16, watcher=telemetry.api_call))
        where = settings.advertised
        election = Election(voter, settings.namespace, LEASE, settings.identity, settings.timing, address=where)
        leadership = Leadership(settings, client, claims, reviews, election, telemetry)
        access = MetricsAccess(client).refusal if settings.metrics_token else None
        await _serve_health(stack, settings, telemetry, leadership, access)
        lag = asyncio.create_task(telemetry.measure_lag(), name="the loop's lag")
        stack.callback(lag.cancel)
        following = leadership.informers.watch(client, settings.namespace)
        watches = asyncio.create_task(following, name="the watches")
        leading = asyncio.create_task(leadership.run(), name="the leadership")
        stopped = asyncio.create_task(_signalled(), name="waiting")
        done, _ = await asyncio.wait({watches, leading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        await leadership.close()
        for task in (leading, stopped, watches):
            await _end(task)
        return _why(done - {stopped})


async def _signalled() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()


async def _end(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_END_SECONDS)


def _why(ended: Iterable[asyncio.Task[Any]]) -> str:
    for task in ended:
        error = None if task.cancelled() else task.exception()
        log.error("%s ended", task.get_name(), exc_info=error)
        return f"{task.get_name()}: {error or 'ended'}"
    log.info("stopped")
    return "stopped"


async def _serve_health(
    stack: AsyncExitStack,
    settings: Settings,
    telemetry: Telemetry,
    leadership: Leadership,
    access: Access | None,
) -> None:
    app = application(
        telemetry, silence(telemetry, settings.silence_seconds), leadership.unready, leadership.role, access
    )
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await listen(runner, settings.host, settings.health_port, connections=Connections(HEALTH_CONNECTIONS))
    log.info("health and metrics on port %d", runner.addresses[0][1])


if __name__ == "__main__":
    main()
