"""What a file asks a cluster for: the run, and what stands beside it (pools, claims of volumes, ...), by server-side
apply.

1. The file is read by the same models as by `tapforge run -f`, with the same errors.
2. The API server is first asked whether it would take everything (dry run); only then anything is written.
3. Fields are owned by the field manager `tapforge`; those of others are not taken from them. What `tapforge cluster
   suspend` and `resume` wrote is ours, though for the API server it is another owner's: the file takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tapforge_api import GROUP, Source, TrainingRun, load_bundle
from tapforge_api.base import POD_TEMPLATES_ANNOTATION
from tapforge_api.gpus import cluster_gpus_error

from .api import APPLY, FIELD_MANAGER, ClusterError, Connection, Json, Refused
from .status import status_of

_CONFLICT: Final = 409
_INVALID: Final = 422
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class Applied:
    kind: str
    name: str
    what: Literal["created", "changed", "unchanged"]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.what}"


def read(file: Source, overrides: Sequence[str], namespace: str | None, default: str) -> tuple[TrainingRun, list[Json]]:
    """The run of a file, and all objects of it with their namespace, the run last. Raises SpecError, Refused."""
    run, objects = load_bundle(file, overrides)
    if run.spec.cluster is None:
        raise Refused(
            f"run {run.metadata.name} has no spec.cluster: on a cluster it has to say at least its image "
            "(--set spec.cluster.image=IMAGE)"
        )
    if POD_TEMPLATES_ANNOTATION in run.metadata.annotations:
        raise Refused(
            f"{file} is the file of a run that was started on a cluster, as the operator wrote it out: it has no Pod "
            "templates, nor what they ask for; submit the file that you wrote"
        )
    if wrong := cluster_gpus_error(run.spec):
        raise Refused(wrong)
    for one in objects:
        about = one.get("metadata")
        if not isinstance(about, dict):
            raise Refused(f"the {one.get('kind', 'object')} beside the run has no metadata.name")
        written = about.get("namespace")
        if namespace and written and namespace != written:
            raise Refused(
                f"{one.get('kind')} {about.get('name')} is of namespace {written} by its file, and {namespace} was "
                "asked for: leave one of the two out"
            )
        about["namespace"] = namespace or written or default
    return run, objects


def apply(connection: Connection, objects: Sequence[Json]) -> list[Applied]:
    """All of them or, as far as the API server can tell before, none."""
    places = [_place(connection, one) for one in objects]
    before = [_existing(connection, place) for place in places]
    for dry in (True, False):
        after = [
            _apply(connection, place, one, there, dry)
            for place, one, there in zip(places, objects, before, strict=True)
        ]
    return [
        Applied(one["kind"], one["metadata"]["name"], _what(there, now))
        for one, there, now in zip(objects, before, after, strict=True)
    ]


def _what(before: Json | None, after: Json) -> Literal["created", "changed", "unchanged"]:
    if before is None:
        return "created"
    same = before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    return "unchanged" if same else "changed"


def _place(connection: Connection, one: Json) -> str:
    """Path of an object."""
    version, kind = str(one.get("apiVersion", "")), str(one.get("kind", ""))
    name = one["metadata"].get("name")
    if not (version and kind and name):
        raise ClusterError(f"an object beside the run lacks apiVersion, kind or metadata.name: it has {sorted(one)}")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    try:
        known = connection.get(root)["resources"]
    except ClusterError as error:
        if error.code != _NOT_FOUND:
            raise
        known = []
    found = next((each for each in known if each["kind"] == kind and "/" not in each["name"]), None)
    if found is None:
        remedy = "tapforge's operator" if version.startswith(f"{GROUP}/") else "what it is part of"
        raise ClusterError(f"{connection.where} knows no {kind} of {version}: install {remedy} there")
    if not found["namespaced"]:
        raise ClusterError(f"{kind} {name} is of no namespace: the file of a run holds what is in its namespace")
    return f"{root}/namespaces/{one['metadata']['namespace']}/{found['name']}/{name}"


def _existing(connection: Connection, place: str) -> Json | None:
    try:
        return connection.get(place)
    except ClusterError as error:
        if error.code == _NOT_FOUND:
            return None
        raise


def _apply(connection: Connection, place: str, one: Json, before: Json | None, dry: bool) -> Json:
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry else {})}
    what = f"{one['kind']} {one['metadata']['namespace']}/{one['metadata']['name']}"
    try:
        try:
            return connection.request("PATCH", place, one, query=query, kind=APPLY)
        except ClusterError as error:
            if not (error.code == _CONFLICT and error.causes and all(map(_with_ourselves, error.causes))):
                raise
            return connection.request("PATCH", place, one, query={**query, "force": "true"}, kind=APPLY)
    except ClusterError as error:
        remedy = _remedy(one, before, error.code)
        raise ClusterError(f"{what} is not applied: {error}" + (f"\n{remedy}" if remedy else ""), error.code) from error


def _with_ourselves(cause: str) -> bool:
    """A conflict with what was not applied: the API server names the same manager, and with it how it wrote."""
    return cause.startswith(f'conflict with "{FIELD_MANAGER}" using ')


def _remedy(one: Json, before: Json | None, code: int) -> str:
    name = one["metadata"]["name"]
    if code == _CONFLICT:
        return "others own these fields: change them with the tool that wrote them, or leave them out of the file"
    started = one["kind"] == "TrainingRun" and before is not None and (before.get("status") or {}).get("startTime")
    if code == _INVALID and before is not None and started:
        state = status_of(before).word or "started"
        return (
            f"the run {name} is there already ({state}), and goes on as it began: give this one another metadata.name, "
            f"or delete that one first (kubectl delete trainingrun {name} -n {one['metadata']['namespace']})"
        )
    if code == _NOT_FOUND:
        return f"is there a namespace {one['metadata']['namespace']}?"
    return ""
