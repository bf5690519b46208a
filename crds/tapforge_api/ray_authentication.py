"""Ray's token authentication: a caller without a token of a run's Ray cluster starts nothing in it.

KubeRay makes a token for each Ray cluster and gives it to the Pods of that cluster. A Pod's own environment would come
before that, so what a template says against it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .cluster import RAY, SUBMITTER, ClusterSpec, RayTemplate

#: variable that Ray reads its mode from, and the only mode that a run's Ray cluster has
MODE: Final = "RAY_AUTH_MODE"
TOKEN_MODE: Final = "token"
#: variable that Ray reads the token from
TOKEN: Final = "RAY_AUTH_TOKEN"


def authentication_error(cluster: ClusterSpec) -> str | None:
    """What a template says against it, and what to do; None: nothing."""
    for where, container, template in _templates(cluster):
        at = f"spec.cluster.{where}.template.spec.containers[{container}].env"
        for variable in _environment(template, container):
            name, value = variable.get("name"), variable.get("value")
            if name == TOKEN:
                return f"{at} sets {TOKEN}, and KubeRay makes the token of each Ray cluster: leave it out"
            if name == MODE and value != TOKEN_MODE:
                given = "takes its value from elsewhere" if value is None else f"is {value!r}"
                return (
                    f"{at}: {MODE} {given}, and a run's Ray cluster takes work from holders of its token only: leave "
                    f"it out, or set it to {TOKEN_MODE!r}"
                )
    return None


def _templates(cluster: ClusterSpec) -> Iterable[tuple[str, str, RayTemplate]]:
    yield "head", RAY, cluster.head.template
    for number, workers in enumerate(cluster.workers):
        yield f"workers[{number}]", RAY, workers.template
    yield "submitter", SUBMITTER, cluster.submitter.template


def _environment(template: RayTemplate, container: str) -> Iterable[dict[str, object]]:
    for each in template.spec.containers or ():
        if each.name == container:
            yield from (variable.model_extra or {} for variable in each.env or ())
