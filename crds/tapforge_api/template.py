"""The Pod of a slot, as its user writes it: passed through, except for what would break the slot.

Promises:
1. Every field of a Pod may be written. Only those below are checked, because the operator reads them or adds to them;
   the rest is the API server's to check when the Pod is made.
2. `PodTemplate.written` is what the user wrote and nothing else: a later release that knows more fields, with defaults,
   gets the same out of the same object. Roll-outs are decided by it.
3. Refused are only what the operator needs for itself (labels and annotations that name a slot's holder) and what can't
   work (two containers on one port, a restart in place, no phone at all).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from .base import GROUP, Annotations, DnsLabel, Keyed, Labels, Rule, Spec, qualified_keys

#: the container that is the phone
EMULATOR = "emulator"

#: written by the operator on every slot; a template with another value would be overruled in silence
RESERVED_LABELS = ("app.kubernetes.io/managed-by",)
RESERVED_ANNOTATIONS = ("cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt")

CapabilityNames = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=64)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Passed(Spec):
    """An object as in a Pod; it is passed through."""

    model_config = ConfigDict(extra="allow")


class ContainerPort(Spec):
    """A port of a container as in a Pod; only its number is read, everything else is passed through."""

    model_config = ConfigDict(extra="allow")

    container_port: Port = Field(description="number of the port")


class Capabilities(Spec):
    """Linux capabilities of a container."""

    model_config = ConfigDict(extra="allow")

    add: CapabilityNames | None = Field(None, description="capabilities to add")
    drop: CapabilityNames | None = Field(None, description="capabilities to drop; without it all of them")


class SecurityContext(Spec):
    """What a container may do. Where nothing is written it may do little: no new privileges, no capabilities."""

    model_config = ConfigDict(extra="allow")

    privileged: bool | None = Field(None, description="the container owns its node; KVM has its own field for that")
    capabilities: Capabilities | None = Field(None, description="Linux capabilities")


class Resources(Spec):
    """What a container needs and may take."""

    model_config = ConfigDict(extra="allow")

    requests: Passed | None = Field(None, description="needed amounts, by resource")
    limits: Passed | None = Field(None, description="largest amounts, by resource")


class Container(Spec):
    """A container as in a Pod; what doesn't stand here is passed through."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel = Field(description=f"name of the container; the phone's is `{EMULATOR}`")
    image: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[!-~]+$")] = Field(
        description="image, with a tag or digest"
    )
    ports: Annotated[tuple[ContainerPort, ...], Field(max_length=64)] | None = Field(
        None, description="ports that the container listens on"
    )
    resources: Resources | None = Field(None, description="what the container needs and may take")
    security_context: SecurityContext | None = Field(None, description="what the container may do")
    volume_mounts: Annotated[tuple[Passed, ...], Field(max_length=64)] | None = Field(
        None, description="where volumes are in the container"
    )


class PodSpec(Spec):
    """A Pod's spec; what doesn't stand here is passed through."""

    model_config = ConfigDict(extra="allow")

    containers: Annotated[tuple[Container, ...], Field(min_length=1, max_length=16), Keyed("name")] = Field(
        description=f"containers; exactly one is named {EMULATOR}: it is the phone"
    )
    init_containers: Annotated[tuple[Container, ...], Field(max_length=16), Keyed("name")] | None = Field(
        None, description="containers that run before the phone"
    )
    restart_policy: Literal["Never"] | None = Field(
        None, description="Never, written or not: a sick phone's Pod is replaced, not restarted"
    )
    security_context: Passed | None = Field(None, description="what all containers may do; without it no odd syscalls")
    volumes: Annotated[tuple[Passed, ...], Field(max_length=64)] | None = Field(
        None, description="volumes that containers mount"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message=f"exactly one container must be named {EMULATOR}: it is the phone",
            cel=f"self.containers.exists_one(c, c.name == '{EMULATOR}')",
            holds=lambda o: [c.name for c in o.containers].count(EMULATOR) == 1,
        ),
    )


def _not_reserved(field: str, names: tuple[str, ...], why: str) -> Rule:
    """A map that has none of the operator's names as a key."""
    listed = ", ".join(names)
    return Rule(
        message=f"{field} must not have {GROUP}/... or {listed}: {why}",
        cel=f"self.{field}.all(k, !k.startsWith('{GROUP}/') && !(k in [{', '.join(map(repr, names))}]))",
        holds=lambda o: all(not k.startswith(f"{GROUP}/") and k not in names for k in getattr(o, field)),
    )


class TemplateMetadata(Spec):
    """Labels and annotations of the slots' Pods, beside the operator's own."""

    labels: Labels = Field({}, description="labels of the Pods")
    annotations: Annotations = Field({}, description="annotations of the Pods")

    rules: ClassVar[tuple[Rule, ...]] = (
        qualified_keys("labels"),
        qualified_keys("annotations"),
        _not_reserved("labels", RESERVED_LABELS, "the operator finds its slots by them"),
        _not_reserved("annotations", RESERVED_ANNOTATIONS, "the operator sets them by whether a slot is claimed"),
    )


class PodTemplate(Spec):
    """The Pod of a slot."""

    metadata: TemplateMetadata = Field(TemplateMetadata(), description="labels and annotations of the Pods")
    spec: PodSpec = Field(description="spec of the Pods, as in any Pod template; exactly one container is the phone")

    def written(self) -> dict[str, Any]:
        """The template as plain JSON data, without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
