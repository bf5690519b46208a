"""Where a run runs on a cluster: a Ray cluster of one head and groups of workers. A laptop pays no attention to it.

Promises:
1. Every field of a Pod may be written for head, workers and submitter; those below are checked, because the operator
   adds to them, the rest is the API server's to check. Nothing has to be written: a template without containers gets
   one of the run's image.
2. The container that Ray runs in is named `ray`, the submitter's `ray-job-submitter`; others may stand beside them.
3. What KubeRay would refuse later, unnoticed, is refused here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field

from .base import GROUP, INT32, Annotations, Count, DnsLabel, Keyed, Labels, Positive, Rule, Spec, qualified_keys
from .template import Passed, Resources, SecurityContext

#: the container that Ray runs in, and the one that hands the driver to Ray
RAY: Final = "ray"
SUBMITTER: Final = "ray-job-submitter"
#: Ray's own name for the group of the head
HEAD: Final = "head"

Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
StartParams = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]

#: parameters of `ray start` that KubeRay refuses here, because they have fields of their own
_NOT_START_PARAMS = ("labels", "redis-username", "redis-password")


class RayContainer(Spec):
    """A container as in a Pod; what doesn't stand here is passed through."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel = Field(description=f"name of the container; Ray's is `{RAY}`, the submitter's `{SUBMITTER}`")
    image: Image | None = Field(None, description="image; of Ray's and the submitter's container without it the run's")
    env: Annotated[tuple[Passed, ...], Field(max_length=256)] | None = Field(
        None, description="environment variables, beside those that the operator adds"
    )
    resources: Resources | None = Field(None, description="what the container needs and may take")
    security_context: SecurityContext | None = Field(None, description="what the container may do")
    volume_mounts: Annotated[tuple[Passed, ...], Field(max_length=64)] | None = Field(
        None, description="where volumes are in the container"
    )


class RayPodSpec(Spec):
    """A Pod's spec; what doesn't stand here is passed through."""

    model_config = ConfigDict(extra="allow")

    containers: Annotated[tuple[RayContainer, ...], Field(max_length=16), Keyed("name")] | None = Field(
        None, description="containers; the operator adds what is missing of its own"
    )
    init_containers: Annotated[tuple[RayContainer, ...], Field(max_length=16), Keyed("name")] | None = Field(
        None, description="containers that run before"
    )
    restart_policy: Annotated[str, Field(max_length=5, pattern="^Never$")] | None = Field(
        None, description="Never, written or not: what is lost is replaced, not restarted with an empty memory"
    )
    security_context: Passed | None = Field(None, description="what all containers may do; without it no odd syscalls")
    volumes: Annotated[tuple[Passed, ...], Field(max_length=64)] | None = Field(
        None, description="volumes that containers mount"
    )


def _not_ours(field: str) -> Rule:
    return Rule(
        message=f"{field} must not have {GROUP}/... as a key: the operator finds a run's Pods by them",
        cel=f"self.{field}.all(k, !k.startsWith('{GROUP}/'))",
        holds=lambda o: not any(k.startswith(f"{GROUP}/") for k in getattr(o, field)),
    )


class RayMetadata(Spec):
    """Labels and annotations of Pods, beside the operator's and KubeRay's own."""

    labels: Labels = Field({}, description="labels of the Pods; also those that gang schedulers read")
    annotations: Annotations = Field({}, description="annotations of the Pods")

    rules: ClassVar[tuple[Rule, ...]] = (
        qualified_keys("labels"),
        qualified_keys("annotations"),
        _not_ours("labels"),
        _not_ours("annotations"),
    )


class RayTemplate(Spec):
    """Pods of one kind, as in any Pod template; nothing in it has to be written."""

    metadata: RayMetadata = Field(RayMetadata(), description="labels and annotations of the Pods")
    spec: RayPodSpec = Field(
        RayPodSpec(),
        description="spec of the Pods: resources, nodeSelector, tolerations, serviceAccountName, imagePullSecrets, "
        "priorityClassName, schedulerName and whatever else a Pod has",
    )

    def written(self) -> dict[str, Any]:
        """The template as plain JSON data, without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


#: older ones know no token authentication
_RAY_VERSION: Final = r"^(2\.(5[2-9]|[6-9][0-9]|[1-9][0-9][0-9]+)|[3-9]|[1-9][0-9]+)\."

_START_PARAMS: Final = Rule(
    message=f"rayStartParams must not have {', '.join(_NOT_START_PARAMS)}: KubeRay refuses them",
    cel=f"self.rayStartParams.all(k, !(k in [{', '.join(map(repr, _NOT_START_PARAMS))}]))",
    holds=lambda o: not set(o.ray_start_params) & set(_NOT_START_PARAMS),
)


class Head(Spec):
    """The Pod of Ray's head. The driver runs in it."""

    template: RayTemplate = Field(RayTemplate(), description="the Pod")
    ray_start_params: StartParams = Field({}, description="parameters of `ray start`, such as num-cpus, all as text")

    rules: ClassVar[tuple[Rule, ...]] = (_START_PARAMS,)


class Workers(Spec):
    """A group of equal Pods for learner ranks and engines."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="name of the group"
    )
    replicas: Annotated[int, Field(ge=0, le=4096)] = Field(1, description="Pods")
    template: RayTemplate = Field(RayTemplate(), description="the Pods")
    ray_start_params: StartParams = Field({}, description="parameters of `ray start`, such as num-cpus, all as text")

    rules: ClassVar[tuple[Rule, ...]] = (_START_PARAMS,)


class Submitter(Spec):
    """The Pod that hands the driver to Ray and follows its log."""

    template: RayTemplate = Field(RayTemplate(), description="the Pod")


class ClusterSpec(Spec):
    """The Ray cluster of a run."""

    image: Image = Field(
        description="the trainer's image; head, workers and submitter run it, unless they say otherwise"
    )
    ray_version: Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+[a-z0-9.+-]*$")] = (
        Field("2.60.0", description="version of Ray in the image, 2.52 or newer")
    )
    head: Head = Field(Head(), description="Ray's head")
    workers: Annotated[tuple[Workers, ...], Field(max_length=16), Keyed("name")] = Field(
        (), description="groups of workers; without any the head does everything"
    )
    submitter: Submitter = Field(Submitter(), description="what hands the driver to Ray")
    min_ready_slots: Annotated[int, Field(ge=0, le=4096)] = Field(
        1,
        description="phones that the run has to be able to have before the machines are asked for: ready, and not "
        "claimed by others beyond their share",
    )
    driver_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        3, description="how often the driver is started again in place after a crash, in each attempt"
    )
    backoff_limit: Annotated[int, Field(ge=0, le=500)] = Field(
        3,
        description="how often a Ray cluster that is lost is replaced without the run getting any further; evictions, "
        "drains, lost nodes, preemptions and suspensions don't count",
    )
    active_deadline_seconds: Positive | None = Field(
        None,
        description="how long the run may be active, seconds since its start, its last resumption, or since a queue "
        "let it in last; without it for ever",
    )
    ttl_seconds_after_finished: Count | None = Field(
        None,
        description="when the RayJob is deleted after the run's end, and the logs of its Pods with it, seconds; "
        "without it together with the run. The machines are given back at once",
    )
    suspend_grace_seconds: Annotated[int, Field(ge=0, le=INT32)] = Field(
        60,
        description="how long a checkpoint may take when the run is suspended or out of time, or when its Ray Pods are "
        "evicted, seconds",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="rayVersion must be 2.52 or newer: an older Ray has no token authentication",
            cel=f"self.rayVersion.matches(r'{_RAY_VERSION}')",
            holds=lambda o: re.match(_RAY_VERSION, o.ray_version) is not None,
        ),
    )
