"""Keeps the world's RayJobs right, those with labels of ours.

KubeRay may not be installed, or be installed later: then the API server knows no RayJobs, the world says so, and it is
asked again every few seconds. (kopf would never look again.) The same where the operator may not look at them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from . import names
from .kube.client import ApiError, Client
from .kube.reflector import Kind, Reflector
from .world import World, within

log = logging.getLogger(__name__)

GROUP: Final = "ray.io/v1"
_MISSING: Final = "the cluster knows no RayJobs (rayjobs.ray.io): install KubeRay 1.4 or newer"
_JOBS: Final = Kind("RayJobs", "rayjobs", f"{names.MANAGED_BY}={names.OPERATOR}", GROUP)


def job_reflector(world: World, client: Client, spaces: tuple[str, ...], changed: Callable[[], None]) -> Reflector:
    """`spaces`: namespaces, "" for all of them. `changed` is told when the cluster learns of RayJobs or forgets."""

    def listed(space: str, uids: set[str], as_of: str) -> None:
        world.ray_jobs.replace(uids, as_of, within(space))
        can_be_had(space, "")

    def missing(space: str, error: ApiError) -> None:
        why = _MISSING if error.status == 404 else f"the operator may not look at RayJobs: {error.message}"
        can_be_had(space, why)

    def can_be_had(space: str, trouble: str) -> None:
        if trouble != world.no_ray_jobs.get(space, ""):
            world.no_ray_jobs[space] = trouble
            log.info("runs: %s%s", trouble or "RayJobs can be made", f" (in namespace {space})" if space else "")
            changed()

    return Reflector(client, _JOBS, spaces, world.saw_ray_job, listed, missing=missing)
