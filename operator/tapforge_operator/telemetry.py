"""What the operator measures of itself: OpenTelemetry instruments, read as Prometheus text.

Promises:
1. Labels are bounded: a pool or a run ("namespace/name"), a slot's state, a run's phase, an API verb, a class of
   answers, a watched kind, and an error's name out of at most sixteen. Never a Pod or a message.
2. A pool's series begin with its first `pool_state` or `reconciled` and end with `forget`; what is said of it before or
   afterwards is dropped, so that a late word doesn't bring a deleted pool back.
3. Whatever the API server says is also noted in `attention`, of which plans take what is old and what is not.
4. Nothing here is global and nothing is pushed: whoever serves /metrics calls `render`, from any thread.

Everything but `render` belongs to the event loop. Names end in their unit; times are seconds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Final

import prometheus_client
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from tapforge_api.pool import EmulatorPoolStatus

from .attention import Attention
from .run_telemetry import RunTelemetry

#: of what `render` returns
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

#: what slots are counted by. They overlap: a claimed slot is also ready and has a Pod
STATES: Final = ("desired", "pods", "ready", "claimed", "booting", "updated", "unschedulable", "unhealthy")

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PATIENT = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BOOT = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0)

#: between two looks at the event loop
_LAG_SECONDS = 0.25
_ERRORS = 16
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


def slot_counts(status: EmulatorPoolStatus) -> dict[str, int]:
    """What `pool_state` takes, out of a pool's status."""
    return {state: status.desired_replicas if state == "desired" else getattr(status, state) for state in STATES}


class Telemetry:
    """Made once and passed down. `identity` names this process among replicas, `clock` is monotonic."""

    def __init__(
        self, identity: str = "", clock: Callable[[], float] = time.monotonic, attention: Attention | None = None
    ):
        self.attention = attention or Attention()
        self._clock = clock
        self._began = clock()
        self._events: dict[str, float] = {}
        self._newest = self._began
        self._term = 0
        self._errors: set[str] = set()
        self._pools: dict[str, _Pool] = {}
        self._resource = Resource(
            {
                "service.name": "tapforge-operator",
                "service.version": version("tapforge"),
                "service.instance.id": identity,
            }
        )
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        meter = _meter(self._registry, self._resource, with_target=True)
        self.runs = RunTelemetry(meter, clock)
        # Not OpenTelemetry's, which took an eighth of the time of a create.
        self._calls = prometheus_client.Histogram(
            "tapforge_api_call_seconds",
            "calls to the API server by verb and class of answer (none: nothing came)",
            ("verb", "status"),
            buckets=_QUICK,
            registry=self._registry,
        )
        self._lag = prometheus_client.Histogram(
            "tapforge_loop_lag_seconds",
            "how late the event loop is: claims, renewals of the leadership and everything else wait so long",
            buckets=_QUICK,
            registry=self._registry,
        )
        self._passed_on = meter.create_counter(
            "tapforge_forwarded_calls",
            description="callers that were passed on to the leader, by whether it answered",
        )
        meter.create_observable_gauge(
            "tapforge_watch_event_age_seconds",
            [self._ages],
            unit="s",
            description="since the last event of a watched kind",
        )
        meter.create_observable_gauge(
            "tapforge_leader", [lambda _: [Observation(int(self._term > 0))]], description="1 while this process leads"
        )
        meter.create_observable_gauge(
            "tapforge_leader_term",
            [lambda _: [Observation(self._term)]],
            description="number of this process' leadership, 0 while it stands by",
        )

    # --- the API server and the leadership ----------------------------------------------------------------------------

    def api_call(self, verb: str, status: int, seconds: float) -> None:
        """One attempt; `status` is 0 where no answer came."""
        if 0 < status < 500:
            self.attention.heard()
        self._calls.labels(verb, f"{status // 100}xx" if status else "none").observe(seconds)

    async def measure_lag(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))

    def passed_on(self, answered: bool) -> None:
        """A caller was passed on to the leader."""
        self._passed_on.add(1, {"answered": "true" if answered else "false"})

    def event(self, kind: str) -> None:
        """A watch said something, just now."""
        self.attention.heard()
        self._newest = self._events[kind] = self._clock()

    def event_age(self, kind: str = "") -> float:
        """Seconds since the last event of a kind, or of any; since the start where there was none."""
        return self._clock() - (self._events.get(kind, self._began) if kind else self._newest)

    def leading(self, term: int) -> None:
        """This process leads in that term, and has just read everything; 0: it doesn't lead."""
        if term:
            self.attention.begin()
        self._term = term
        self._newest = self._clock()

    @property
    def leads(self) -> bool:
        return self._term > 0

    # --- pools --------------------------------------------------------------------------------------------------------

    def pool_state(self, pool: str, counts: Mapping[str, int]) -> None:
        """How many slots there are of each state: all of `STATES`, no other."""
        if set(counts) != set(STATES):
            raise ValueError(f"counts of {pool} have to be of {', '.join(STATES)}, not of {', '.join(sorted(counts))}")
        known = self._begin(pool)
        for state, count in counts.items():
            known.slots.set(count, {**known.label, "state": state})

    def claims(self, pool: str, held: int, waiting: int) -> None:
        """Claims that are held, and slots that waiting callers ask for."""
        if known := self._known(pool):
            known.held.set(held, known.label)
            known.waiting.set(waiting, known.label)

    def reconciled(self, pool: str, seconds: float, error: str | None = None) -> None:
        """A pass over a pool ended; `error` is the name of what it failed with."""
        known = self._begin(pool)
        known.passes.record(seconds, known.label)
        if error is not None:
            known.errors.add(1, {**known.label, "error": self._bounded(error)})

    def booted(self, pool: str, seconds: float) -> None:
        """A slot became ready for the first time, so long after its container's start."""
        if known := self._known(pool):
            known.boots.record(seconds, known.label)

    def replaced(self, pool: str, seconds: float) -> None:
        """The replacement of a sick slot was created, so long after the slot was seen to be sick."""
        if known := self._known(pool):
            known.replacements.record(seconds, known.label)

    def claim_granted(self, pool: str, seconds: float) -> None:
        """A claim was written on its slot, so long after it was asked for."""
        if known := self._known(pool):
            known.grants.record(seconds, known.label)

    def claim_waited(self, pool: str, seconds: float, granted: bool) -> None:
        """An acquire was answered after so long, with at least one claim or with none."""
        if known := self._known(pool):
            known.waits.record(seconds, {**known.label, "granted": "true" if granted else "false"})

    def forget(self, pool: str) -> None:
        """The pool is gone, and its series with it."""
        self._pools.pop(pool, None)

    def render(self) -> bytes:
        """Everything as Prometheus text, of `CONTENT_TYPE`."""
        families: dict[str, Metric] = {}
        for registry in (self._registry, *[pool.registry for pool in list(self._pools.values())]):
            for family in registry.collect():
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                # When a series began is no figure of its own.
                families[family.name].samples.extend(s for s in family.samples if not s.name.endswith("_created"))
        return generate_latest(_Families(families.values()))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _known(self, pool: str) -> _Pool | None:
        if pool and "/" not in pool:  # it would be dropped without a word; "" is a pool that its caller knows no more
            raise ValueError(f"a pool is named by namespace/name, not {pool!r}")
        return self._pools.get(pool)

    def _begin(self, pool: str) -> _Pool:
        if (known := self._known(pool)) is None:
            known = self._pools[pool] = _Pool(pool, self._resource)
        return known

    def _bounded(self, error: str) -> str:
        if error not in self._errors:
            if len(self._errors) >= _ERRORS or not _WORD.fullmatch(error):
                return "Other"
            self._errors.add(error)
        return error

    def _ages(self, _: CallbackOptions) -> Iterable[Observation]:
        now = self._clock()
        return [Observation(now - then, {"kind": kind}) for kind, then in list(self._events.items())]


class _Pool:
    """The instruments of one pool. OpenTelemetry forgets no series, so each pool has a provider that goes with it."""

    def __init__(self, key: str, resource: Resource):
        self.label = {"pool": key}
        self.registry = CollectorRegistry()
        meter = _meter(self.registry, resource)
        self.slots = meter.create_gauge("tapforge_pool_slots", description="slots by state; the states overlap")
        self.held = meter.create_gauge("tapforge_claims_held", description="claims that somebody holds")
        self.waiting = meter.create_gauge("tapforge_claims_waiting", description="slots that waiting callers ask for")
        self.errors = meter.create_counter("tapforge_reconcile_errors", description="passes over the pool that failed")
        self.passes = _seconds(meter, "tapforge_reconcile_seconds", "one pass over the pool", _QUICK)
        self.boots = _seconds(meter, "tapforge_boot_seconds", "from the container's start until ready", _BOOT)
        self.replacements = _seconds(
            meter, "tapforge_replacement_seconds", "from a slot seen sick until its replacement is created", _PATIENT
        )
        self.grants = _seconds(meter, "tapforge_claim_seconds", "from the question until the claim is written", _QUICK)
        self.waits = _seconds(meter, "tapforge_claim_wait_seconds", "from the question until its answer", _PATIENT)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _meter(registry: CollectorRegistry, resource: Resource, with_target: bool = False) -> Meter:
    reader = PrometheusMetricReader(disable_target_info=not with_target, scope_info_enabled=False, registry=registry)
    provider = MeterProvider([reader], resource, AlwaysOffExemplarFilter(), shutdown_on_exit=False)
    return provider.get_meter("tapforge")


def _seconds(meter: Meter, name: str, description: str, bounds: tuple[float, ...]) -> Histogram:
    return meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=list(bounds)
    )
