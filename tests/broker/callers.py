"""An API server that knows tokens, Pods with owners, and rights."""

from __future__ import annotations

import base64
import json
from typing import Any

from tapforge_api.claims import AUDIENCE
from tapforge_operator.broker.types import PoolNotFound
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.types import PoolObject, observe_pool

Object = dict[str, Any]


def jwt(subject: str, exp: float | None = None) -> str:
    parts = [{"alg": "none"}, {"sub": subject} | ({"exp": exp} if exp is not None else {})]
    coded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*coded, "signature"])


class Callers:
    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.users: dict[str, Object] = {}
        self.audiences: list[str] | None = [AUDIENCE]
        self.allowed: set[tuple[str, str, str]] = set()
        self.asked: list[str] = []
        self.down = False
        self.pools: dict[tuple[str, str], PoolObject] = {}
        self.add_pool("lab", "phones")

    # --- the cluster --------------------------------------------------------------------------------------------------

    def add_pool(self, namespace: str, name: str, owner: Object | None = None) -> None:
        metadata = {"namespace": namespace, "name": name, "uid": f"{name}-uid", "resourceVersion": "1"}
        owners = [{**owner, "controller": True}] if owner else []
        self.pools[namespace, name] = observe_pool({"metadata": {**metadata, "ownerReferences": owners}, "spec": {}})

    def add(self, path: str, kind: str, owner: tuple[str, str] | None = None, uid: str = "", **more: Any) -> str:
        """An object, and its controller as (apiVersion, path)."""
        namespace = path.split("/namespaces/")[1].split("/")[0]
        uid = uid or f"uid-of-{path.rpartition('/')[2]}"
        metadata: Object = {"name": path.rpartition("/")[2], "namespace": namespace, "uid": uid}
        if owner is not None:
            above = self.objects[owner[1]]
            metadata["ownerReferences"] = [
                {
                    "apiVersion": owner[0],
                    "kind": above["kind"],
                    "name": above["metadata"]["name"],
                    "uid": above["metadata"]["uid"],
                    "controller": True,
                }
            ]
        self.objects[path] = {"kind": kind, "metadata": metadata, **more}
        return path

    def add_run(self, name: str = "train", pool: str = "phones", namespace: str = "lab") -> str:
        """A run with its RayJob, RayCluster and submitter Job; returns the path of the run."""
        source = {"pool": {"name": pool}} if pool else {"processes": {}}
        run = self.add(
            f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}/trainingruns/{name}",
            "TrainingRun",
            spec={"environment": {"source": source}},
        )
        ray = f"/apis/ray.io/v1/namespaces/{namespace}"
        job = self.add(f"{ray}/rayjobs/{name}-0", "RayJob", ("tapforge.dev/v1alpha1", run))
        cluster = self.add(f"{ray}/rayclusters/{name}-0-abc", "RayCluster", ("ray.io/v1", job))
        submitter = self.add(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}-0", "Job", ("ray.io/v1", job))
        self.add(f"/api/v1/namespaces/{namespace}/pods/{name}-head", "Pod", ("ray.io/v1", cluster))
        self.add(f"/api/v1/namespaces/{namespace}/pods/{name}-submitter", "Pod", ("batch/v1", submitter))
        return run

    def token_of(self, pod: str, namespace: str = "lab", uid: str = "", **jwt_fields: Any) -> str:
        token = jwt(f"{namespace}/{pod}/{uid}", **jwt_fields)
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        known = self.objects.get(path, {"metadata": {"uid": "gone"}})["metadata"]["uid"]
        self.users[token] = {
            "username": f"system:serviceaccount:{namespace}:default",
            "uid": "sa-uid",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "extra": {
                "authentication.kubernetes.io/pod-name": [pod],
                "authentication.kubernetes.io/pod-uid": [uid or known],
            },
        }
        return token

    def token_for(self, user: str, **jwt_fields: Any) -> str:
        token = jwt(user, **jwt_fields)
        self.users[token] = {"username": user, "groups": ["system:authenticated"]}
        return token

    def find_pool(self, namespace: str, name: str) -> PoolObject:
        if (namespace, name) not in self.pools:
            raise PoolNotFound(f"there is no EmulatorPool {name} in namespace {namespace}")
        return self.pools[namespace, name]

    # --- the API server -----------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Object:
        self._hear("get")
        if path not in self.objects:
            raise ApiError(path, 404, "NotFound", "not found")
        return self.objects[path]

    async def create(self, path: str, body: Object) -> Object:
        self._hear(body["kind"])
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            user = self.users.get(spec["token"])
            if user is None:
                return {"status": {"authenticated": False, "error": "invalid bearer token"}}
            status: Object = {"authenticated": True, "user": user}
            if self.audiences is not None:
                status["audiences"] = [a for a in spec["audiences"] if a in self.audiences]
            return {"status": status}
        where = spec["resourceAttributes"]
        assert (where["group"], where["resource"], where["subresource"], where["verb"]) == (
            "tapforge.dev",
            "emulatorpools",
            "claim",
            "create",
        )
        return {"status": {"allowed": (spec["user"], where["namespace"], where["name"]) in self.allowed}}

    async def patch(self, path: str, body: Object) -> Object:
        raise NotImplementedError

    async def delete(self, path: str, body: Object | None = None) -> Object:
        raise NotImplementedError

    def _hear(self, what: str) -> None:
        self.asked.append(what)
        if self.down:
            raise ApiError("question", 0, "Deadline", "no answer")
