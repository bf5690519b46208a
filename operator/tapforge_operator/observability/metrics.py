"""What the operator measures of itself: OpenTelemetry instruments, read as Prometheus text.

Promises:
1. Labels are bounded: a pool or a run ("namespace/name"), a slot's state, a run's phase, a condition's type and its
   reason, a namespace that a flag names, an API verb, a class of answers, a watched kind, and an error's name out of at
   most sixteen. Never a Pod or a message.
2. A pool's series begin with its first `pool_state` or `reconciled` and end with `forget`, or with the leadership: a
   process that stands by knows nothing of pools. Figures of it that come before or afterwards are dropped, so that a
   late one doesn't bring a deleted pool back.
3. Whatever the API server says is also noted in `freshness`, of which plans take what is old and what is not.
4. Nothing here is global and nothing is pushed: the server of /metrics calls `render`, from any thread.

Everything but `render` belongs to the event loop. Names end in their unit; times are seconds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import prometheus_client
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from tapforge_api.base import Condition
from tapforge_api.pool import EmulatorPoolStatus
from tapforge_api.run_status import TrainingRunStatus
from tapforge_operator.kube.cache import WatchFreshness

#: of what `render` returns
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

#: what slots are counted by. They overlap: a claimed slot is also ready and has a Pod
STATES: Final = ("desired", "pods", "ready", "claimed", "booting", "updated", "unschedulable", "unhealthy")

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MINUTES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
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
        self, identity: str = "", clock: Callable[[], float] = time.monotonic, freshness: WatchFreshness | None = None
    ):
        self.freshness = freshness or WatchFreshness()
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
        self._quotas: Callable[[], Mapping[str, tuple[int, int]]] = dict
        self._unproved: Callable[[], int] = int
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
        self._unreadable = meter.create_counter(
            "tapforge_unreadable_objects",
            description="reads of an object that could not be parsed",
        )
        meter.create_observable_gauge(
            "tapforge_watch_event_age_seconds",
            [self._ages],
            unit="s",
            description="since the last event of a watched kind",
        )
        meter.create_observable_gauge(
            "tapforge_claim_quota",
            [lambda _: self._each_quota(lambda quota, _: quota)],
            description="slots that claimants of a namespace may hold at once, where it has a quota of its own",
        )
        meter.create_observable_gauge(
            "tapforge_claim_quota_used",
            [lambda _: self._each_quota(lambda _, used: used)],
            description="slots that claimants of a namespace with a quota of its own hold, over all pools",
        )
        self._expiry = meter.create_gauge(
            "tapforge_broker_certificate_expiry_timestamp_seconds",
            unit="s",
            description="when the certificate that the broker serves expires, since 1970",
        )
        self._refused = meter.create_gauge(
            "tapforge_broker_certificate_refused",
            description="1 while a mounted certificate is not served because callers would refuse it",
        )
        meter.create_observable_gauge(
            "tapforge_broker_unproved_claims",
            [lambda _: [Observation(self._unproved())]],
            description="claims that are signed with a key which the operator lost",
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
            self.freshness.refresh()
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

    def watch_quotas(self, quotas: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Where the quota and the use of each namespace that has one are read, from any thread."""
        self._quotas = quotas

    def watch_unproved(self, unproved: Callable[[], int]) -> None:
        """Where the number of claims that can't be proved is read, from any thread."""
        self._unproved = unproved

    def certificate(self, expires: float | None, refused: bool) -> None:
        """The broker serves a certificate that ends then, or none yet; `refused`: the mounted one can't be served."""
        if expires is not None:
            self._expiry.set(expires)
        self._refused.set(int(refused))

    def event(self, kind: str) -> None:
        """A watch said something, just now."""
        self.freshness.refresh()
        self._newest = self._events[kind] = self._clock()

    def passed_over(self, kind: str) -> None:
        """An object of a kind can't be understood."""
        self._unreadable.add(1, {"kind": kind})

    def event_age(self, kind: str = "") -> float:
        """Seconds since the last event of a kind, or of any; since the start where there was none."""
        return self._clock() - (self._events.get(kind, self._began) if kind else self._newest)

    def leading(self, term: int) -> None:
        """This process leads in that term, and has just read everything; 0: it doesn't lead."""
        if term:
            self.freshness.reset()
        else:
            self._pools.clear()
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

    def pool_conditions(self, pool: str, conditions: Sequence[Condition]) -> None:
        """The conditions that its status has."""
        if known := self._known(pool):
            known.conditions = tuple((c.type, c.reason) for c in conditions if c.status == "True")

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
                # The time at which a series began is not exported.
                families[family.name].samples.extend(s for s in family.samples if not s.name.endswith("_created"))
        return generate_latest(_Families(families.values()))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _known(self, pool: str) -> _Pool | None:
        if pool and "/" not in pool:  # it would be dropped silently; "" is a pool that its caller knows no more
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

    def _each_quota(self, figure: Callable[[int, int], int]) -> list[Observation]:
        # Not `namespace`: Prometheus gives this label to the target.
        return [Observation(figure(*use), {"claimant_namespace": name}) for name, use in self._quotas().items()]

    def _ages(self, _: CallbackOptions) -> Iterable[Observation]:
        now = self._clock()
        return [Observation(now - then, {"kind": kind}) for kind, then in list(self._events.items())]


class _Pool:
    """The instruments of one pool. OpenTelemetry forgets no series, so each pool has a provider that goes with it."""

    def __init__(self, key: str, resource: Resource):
        self.label = {"pool": key}
        self.registry = CollectorRegistry()
        meter = _meter(self.registry, resource)
        #: type and reason of those that are True
        self.conditions: tuple[tuple[str, str], ...] = ()
        meter.create_observable_gauge(
            "tapforge_pool_condition", [self._observe_conditions], description="1 for each condition that is True"
        )
        self.slots = meter.create_gauge("tapforge_pool_slots", description="slots by state; the states overlap")
        self.held = meter.create_gauge("tapforge_claims_held", description="claims that are held")
        self.waiting = meter.create_gauge("tapforge_claims_waiting", description="slots that waiting callers ask for")
        self.errors = meter.create_counter("tapforge_reconcile_errors", description="passes over the pool that failed")
        self.passes = _seconds(meter, "tapforge_reconcile_seconds", "one pass over the pool", _QUICK)
        self.boots = _seconds(meter, "tapforge_boot_seconds", "from the container's start until ready", _BOOT)
        self.replacements = _seconds(
            meter, "tapforge_replacement_seconds", "from a slot seen sick until its replacement is created", _MINUTES
        )
        self.grants = _seconds(meter, "tapforge_claim_seconds", "from the question until the claim is written", _QUICK)
        self.waits = _seconds(meter, "tapforge_claim_wait_seconds", "from the question until its answer", _MINUTES)

    def _observe_conditions(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(1, {**self.label, "condition": kind, "reason": why}) for kind, why in self.conditions]


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


# --- runs ------------------------------------------------------------------------------------------------------------

#: starting: on its way, and what it waits for will come; stalled: a person is needed
PHASES: Final = ("starting", "running", "queued", "suspended", "stalled", "complete", "failed")


def phase_of(status: TrainingRunStatus) -> str:
    """By its conditions."""
    true = {c.type: c.reason for c in status.conditions if c.status == "True"}
    if "Complete" in true or "Failed" in true:
        return "complete" if "Complete" in true else "failed"
    if "Stalled" in true:
        return "stalled"
    if "Suspended" in true:
        return "suspended" if "Ready" in true else "queued"
    return "running" if "Ready" in true else "starting"


@dataclass(frozen=True, slots=True)
class _Run:
    key: str
    phase: str
    status: TrainingRunStatus
    #: when its driver reported last, by the clock; None: not yet
    last_report: float | None


class RunTelemetry:
    """What the operator knows of runs: read when the metrics are rendered, from the status of each run.

    - A run's series begin with its first `observe` and end with `forget`.
    - What drivers report is measured while they run: a driver that fell silent, and one that has ended, are not the
      same.
    - The label `run` is "namespace/name", `phase` is one of `PHASES`; every phase is there, also one that no run is in.

    `observe` and `forget` belong to the event loop, reading may happen in any thread.
    """

    def __init__(self, meter: Meter, clock: Callable[[], float]):
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        meter.create_observable_gauge("tapforge_runs", [self._phases], description="runs by phase")
        meter.create_observable_gauge(
            "tapforge_run_condition", [self._conditions], description="1 for each condition that is True"
        )
        meter.create_observable_counter(
            "tapforge_run_attempts",
            [self._each(lambda run: run.status.attempts)],
            description="attempts that were begun",
        )
        meter.create_observable_counter(
            "tapforge_run_lost_clusters",
            [self._each(lambda run: run.status.lost_clusters)],
            description="attempts that ended with the loss of their Ray cluster",
        )
        meter.create_observable_counter(
            "tapforge_run_disruptions",
            [self._each(lambda run: run.status.disruptions)],
            description="attempts that the cluster ended: eviction, drain, preemption, lost node",
        )
        meter.create_observable_gauge(
            "tapforge_run_driver_restarts",
            [self._each(lambda run: run.status.progress.restarts)],
            description="how often the driver was started again within the attempt",
        )
        meter.create_observable_gauge(
            "tapforge_run_updates",
            [self._each(lambda run: run.status.progress.update)],
            description="updates that are done",
        )
        meter.create_observable_gauge(
            "tapforge_run_success_ratio",
            [self._each(lambda run: run.status.progress.success)],
            description="success rate in training episodes of the last update",
        )
        meter.create_observable_gauge(
            "tapforge_run_left_seconds",
            [self._each(lambda run: run.status.progress.seconds_left if run.phase == "running" else None)],
            unit="s",
            description="estimate of the time to the end",
        )
        meter.create_observable_gauge(
            "tapforge_run_progress_age_seconds",
            [self._each(self._age)],
            unit="s",
            description="since the last report of the driver of a run that runs",
        )

    def observe(self, uid: str, key: str, status: TrainingRunStatus, silence: float | None) -> None:
        """The run is so; its driver reported last `silence` seconds ago."""
        then = None if silence is None else self._clock() - silence
        self._runs[uid] = _Run(key, phase_of(status), status, then)

    def forget(self, uid: str) -> None:
        """The run is gone, or is not ours to report."""
        self._runs.pop(uid, None)

    def _age(self, run: _Run) -> float | None:
        return None if run.last_report is None or run.phase != "running" else self._clock() - run.last_report

    def _phases(self, _: CallbackOptions) -> Iterable[Observation]:
        counts = Counter(run.phase for run in list(self._runs.values()))
        return [Observation(counts[phase], {"phase": phase}) for phase in PHASES]

    def _conditions(self, _: CallbackOptions) -> Iterator[Observation]:
        for run in list(self._runs.values()):
            for condition in run.status.conditions:
                if condition.status == "True":
                    labels = {"run": run.key, "condition": condition.type, "reason": condition.reason}
                    yield Observation(1, labels)

    def _each(self, figure: Callable[[_Run], float | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterator[Observation]:
            for run in list(self._runs.values()):
                if (value := figure(run)) is not None:
                    yield Observation(value, {"run": run.key})

        return read
