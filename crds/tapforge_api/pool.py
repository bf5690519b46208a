"""`EmulatorPool`: phones to practise on. Times are seconds.

Promises:
1. Exactly one of `replicas`, `scaling` and `external` says how many slots there are. The first two have Pods made of
   `template`; `external` names devices that exist already.
2. What a holder of a slot relies on (its address and protocol) doesn't change under it: `protocol`, `port`, and Pods or
   none, stay as long as the pool lives. Everything else may be edited at any time.
3. Nothing privileged happens that isn't written in the spec.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, GetJsonSchemaHandler, PlainValidator
from pydantic_core import CoreSchema

from .base import (
    API_VERSION,
    UNIQUE,
    Address,
    Change,
    Conditions,
    Count,
    Metadata,
    Positive,
    Rule,
    Seconds,
    Spec,
    compare,
    exactly_one_of,
    fixed,
)
from .template import PodTemplate, Port

MAX_SLOTS = 20_000
#: what the server of a phone speaks
Protocol = Literal["tapforge", "mobileworld", "androidworld", "osworld", "androidlab", "adb"]
#: protocols whose servers check the fences of claims (`tapforge_envs/wire.py`)
FENCED_PROTOCOLS: Final = frozenset({"tapforge"})
Slots = Annotated[int, Field(ge=0, le=MAX_SLOTS)]


_PERCENT = r"^(100|[0-9]{1,2})%$"


class _IntOrString:
    """Writes Kubernetes' own word for "a number or a percentage" into the schema: no union of ours."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "x-kubernetes-int-or-string": True,
            "pattern": _PERCENT,
            "maxLength": 4,
            "minimum": 0,
            "maximum": MAX_SLOTS,
        }


def _slots_or_percent(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SLOTS:
        return value
    if isinstance(value, str) and re.fullmatch(_PERCENT[1:-1], value):
        return value
    raise ValueError(f"should be a number of slots up to {MAX_SLOTS} or a percentage such as 10%, not {value!r}")


#: 5 (slots) or "10%" (of the desired slots)
SlotsOrPercent = Annotated[int | str, PlainValidator(_slots_or_percent), _IntOrString]


class Scaling(Spec):
    """The operator sizes the pool by claims."""

    min_replicas: Slots = Field(0, description="slots that are there without any claim")
    max_replicas: Slots = Field(description="slots at most")
    warm_spares: Slots = Field(1, description="free slots kept ready beyond the claimed ones")
    idle_seconds: Seconds = Field(300.0, description="how long a slot beyond need is kept, seconds")

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("min_replicas", "<=", "max_replicas", "the range of sizes would be empty"),
        compare("warm_spares", "<=", "max_replicas", "spares count as slots"),
    )


class External(Spec):
    """Real devices and cloud phones: no pods are made for them."""

    urls: Annotated[tuple[Address, ...], Field(min_length=1, max_length=4096), UNIQUE] = Field(
        description="addresses, each of one device's server; all speak `protocol`. URLs; with adb HOST:PORT"
    )


class Kvm(Spec):
    """How an emulator gets at hardware virtualisation."""

    mode: Literal["None", "DevicePlugin", "HostPath"] = Field(
        "None",
        description="None; DevicePlugin: a resource, without privileges; HostPath: /dev/kvm of the node, in a "
        "privileged container",
    )
    resource_name: Annotated[
        str, Field(min_length=3, max_length=253, pattern=r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$")
    ] = Field(
        "devices.kubevirt.io/kvm",
        description="resource that the device plugin offers, of which a slot takes 1; with DevicePlugin only",
    )
    privileged: bool = Field(
        False, description="consent to a privileged container, which owns its node; HostPath needs it"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="privileged must be true with mode HostPath, and only then: /dev/kvm of the node opens to a "
            "privileged container only, and such a container owns its node. DevicePlugin needs no privileges",
            cel="(self.mode == 'HostPath') == self.privileged",
            holds=lambda o: (o.mode == "HostPath") == o.privileged,
        ),
    )


class Boot(Spec):
    """How long a phone may take to start."""

    deadline_seconds: Seconds = Field(600.0, description="from the container's start until Ready, seconds")
    pull_deadline_seconds: Seconds = Field(
        1800.0, description="image pull after which the pool counts as Degraded, seconds; the slot is kept"
    )


class Recycle(Spec):
    """When a healthy slot is replaced by a fresh one."""

    after_episodes: Positive | None = Field(None, description="episodes; without it never")
    after_seconds: Seconds | None = Field(None, description="age, seconds; without it never")
    retain_failed: Annotated[int, Field(ge=0, le=100)] = Field(
        0, description="Pods of failed slots kept for a look at their logs"
    )


class Health(Spec):
    """When a slot counts as sick, and how fast sick slots are replaced."""

    unready_grace_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        60.0, description="how long a slot may be unready, seconds"
    )
    max_replacements_percent_per_hour: Annotated[int, Field(ge=1, le=10_000)] = Field(
        100,
        description="replacements of sick slots per hour, percent of the desired slots, but never less than 5; then "
        "the pool is Stalled",
    )


class UpdateStrategy(Spec):
    """How a new template reaches the slots: unclaimed ones first, claimed ones when they are given back."""

    max_surge: SlotsOrPercent = Field(0, description="slots beyond the desired number, as a number or a percentage")
    max_unavailable: SlotsOrPercent = Field("10%", description="slots missing, as a number or a percentage")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="maxSurge and maxUnavailable can't both be 0: no slot could ever be replaced",
            cel="!((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge in ['0%', '00%']) && "
            "(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable in ['0%', '00%']))",
            holds=lambda o: not {o.max_surge, o.max_unavailable} <= {0, "0%", "00%"},
        ),
    )


_HAS_PORT: Final = "(has(c.ports) && !c.ports.all(p, p.containerPort != self.port))"


def _containers_with(port: int, template: PodTemplate) -> int:
    return sum(any(p.container_port == port for p in c.ports or ()) for c in template.spec.containers)


def is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


class EmulatorPoolSpec(Spec):
    """What the slots are and how many. Exactly one of replicas, scaling and external says how many."""

    replicas: Slots | None = Field(
        None, description="slots; no default, because an autoscaler or a person owns this number"
    )
    scaling: Scaling | None = Field(
        None, description="the operator sizes the pool: claimed slots, those that are waited for, and spares"
    )
    external: External | None = Field(None, description="devices that exist already; no Pods are made")
    template: PodTemplate | None = Field(
        None, description="the Pod of a slot; another one is rolled out, unclaimed slots first. Not with external"
    )
    protocol: Protocol = Field("tapforge", description="what the server in a slot speaks; can't be changed later")
    port: Port = Field(
        8000,
        description="TCP port of the server in a slot, which is the container that has it as a containerPort, or else "
        "the emulator; can't be changed later. With external the URLs say it",
    )
    readiness_path: Annotated[str, Field(min_length=1, max_length=1024, pattern="^/[!-~]*$")] = Field(
        "/health", description="HTTP path that answers 200 when the phone can serve; with adb the port is asked"
    )
    kvm: Kvm = Field(Kvm(), description="how an emulator gets at hardware virtualisation")
    boot: Boot = Field(Boot(), description="how long a phone may take to start before its slot is replaced")
    recycle: Recycle = Field(Recycle(), description="when a healthy slot is replaced by a fresh one")
    health: Health = Field(Health(), description="when a slot counts as sick, and how fast sick slots are replaced")
    update_strategy: UpdateStrategy = Field(
        UpdateStrategy(), description="how many slots may be exchanged at once, for a new template or a recycling"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one_of("replicas", "scaling", "external"),
        Rule(
            message="template must be set, unless external is: then there are no Pods and it must not",
            cel="has(self.external) != has(self.template)",
            holds=lambda o: (o.external is None) != (o.template is None),
        ),
        Rule(
            message="port must be that of one container: several of the template have it as a containerPort",
            cel=f"!has(self.template) || self.template.spec.containers.all(c, !{_HAS_PORT}) || "
            f"self.template.spec.containers.exists_one(c, {_HAS_PORT})",
            holds=lambda o: o.template is None or _containers_with(o.port, o.template) <= 1,
        ),
        Rule(
            message="external.urls must be URLs, http://HOST:PORT; HOST:PORT alone is an address of protocol adb",
            cel="!has(self.external) || self.protocol == 'adb' || self.external.urls.all(u, u.startsWith('http://') || "
            "u.startsWith('https://'))",
            holds=lambda o: o.external is None or o.protocol == "adb" or all(map(is_url, o.external.urls)),
        ),
        Rule(
            message="kvm and recycle speak of Pods: with external there are none, leave both out",
            cel="!has(self.external) || (self.kvm.mode == 'None' && !has(self.recycle.afterEpisodes) && "
            "!has(self.recycle.afterSeconds) && self.recycle.retainFailed == 0)",
            holds=lambda o: o.external is None or (o.kvm.mode == "None" and o.recycle == Recycle()),
        ),
    )
    changes: ClassVar[tuple[Change, ...]] = (
        fixed("protocol", "holders of a slot rely on its protocol; make another pool"),
        fixed("port", "holders of a slot rely on its port; make another pool"),
        Change(
            message="external can't be set or removed later: slots either are Pods or are not; make another pool",
            cel="has(self.external) == has(oldSelf.external)",
            holds=lambda old, new: (old.external is None) == (new.external is None),
            at="",
        ),
    )


class SlotFailure(Spec):
    """A slot that failed, with what it said last."""

    pod: Annotated[str, Field(max_length=253)] = Field(description="name of the Pod")
    reason: Annotated[str, Field(max_length=128)] = Field(description="why the slot was given up, as one word")
    time: Annotated[str, Field(max_length=40)] = Field(description="when (RFC 3339)")
    log_tail: Annotated[str, Field(max_length=4096)] = Field("", description="end of the emulator's log")


class SickReplacements(Spec):
    """Sick slots that were replaced within five minutes."""

    time: Annotated[str, Field(max_length=40)] = Field(description="when the last of them was (RFC 3339)")
    slots: Count = Field(description="how many")


class EmulatorPoolStatus(Spec):
    """What the operator last saw. Written by the operator only."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of")
    desired_replicas: Count = Field(0, description="slots that there should be")
    pods: Count = Field(0, description="slots that have a Pod")
    ready: Count = Field(0, description="slots that can serve")
    claimed: Count = Field(0, description="slots that a run holds")
    booting: Count = Field(0, description="slots that start")
    updated: Count = Field(0, description="slots that are made of the present template; equal to pods when none is old")
    unschedulable: Count = Field(0, description="slots that no node has room for")
    unhealthy: Count = Field(0, description="slots that are sick and wait for their replacement")
    replaced_total: Annotated[int, Field(ge=0, le=2**53)] = Field(0, description="slots replaced so far")
    selector: Annotated[str, Field(max_length=1024)] = Field(
        "", description="label selector of the Pods, for autoscalers"
    )
    last_failures: tuple[SlotFailure, ...] = Field((), max_length=5, description="the latest failures, newest first")
    sick_replacements: tuple[SickReplacements, ...] = Field(
        (),
        max_length=12,
        description="what health.maxReplacementsPercentPerHour counts: of the hour up to the last one, oldest first",
    )
    conditions: Conditions = Field((), description="Ready, Reconciling, Stalled, Degraded")


class EmulatorPool(Spec):
    """Phones to practise on. Each slot is one phone: a Pod that the operator makes, watches and replaces, or a device
    that exists already. A slot is handed out to one holder at a time."""

    api_version: Literal["tapforge.dev/v1alpha1"] = Field(API_VERSION, description="version of this API")
    kind: Literal["EmulatorPool"] = Field("EmulatorPool", description="kind of this object")
    metadata: Metadata = Field(description="name, namespace, labels")
    spec: EmulatorPoolSpec = Field(
        description="what the slots are and how many; exactly one of replicas, scaling and external is set"
    )
    status: EmulatorPoolStatus | None = Field(None, description="what the operator last saw; not part of a file")
