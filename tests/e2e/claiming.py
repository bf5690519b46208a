"""Callers of the broker, each call over a TLS connection of its own; and who may call: service accounts, Pods of
runs."""

from __future__ import annotations

import http.client
import itertools
import json
import ssl
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e.cluster import Cluster
from operator_process import Operator

from tapforge_api.claims import AUDIENCE, Acquired, Claim, Released, Renewed, RenewedAll

Object = dict[str, Any]
#: why the broker says 503: nobody could tell it who is calling
UNCHECKED = "CannotAuthenticate"
_NUMBERS = itertools.count(1)


class Denied(Exception):
    """The broker's answer was no success."""

    def __init__(self, status: int, body: Object):
        super().__init__(f"{status} {body}")
        self.status = status
        self.reason = body.get("reason", "")
        self.message = body.get("message", "")


@dataclass
class Caller:
    """Somebody with a token. Any thread may use one."""

    operator: Operator
    namespace: str
    token: str
    #: seconds that a call may take beyond what it asked to wait
    patience: float = 60.0
    _tls: ssl.SSLContext = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tls = ssl.create_default_context(cafile=str(self.operator.ca))

    def acquire(self, pool: str = "phones", *, request: str = "", **ask: Any) -> list[Claim]:
        """`ask` as in `Acquire`; by itself it doesn't wait for slots."""
        body = {"request": request or uuid.uuid4().hex, "waitSeconds": 0, **ask}
        path = f"/v1/namespaces/{self.namespace}/pools/{pool}/claims"
        said = self.post(path, body, wait=float(body["waitSeconds"]))
        return list(Acquired.model_validate(said).claims)

    def acquire_one(self, pool: str = "phones", **ask: Any) -> Claim:
        (claim,) = self.acquire_all(1, pool, **ask)
        return claim

    def acquire_all(self, slots: int, pool: str = "phones", **ask: Any) -> list[Claim]:
        """So many: an answer may hold fewer, when some of them take longer to be written than others. Where the API
        server was too slow to say who is asking, it asks again, as it is told."""
        claims: list[Claim] = []
        end = time.monotonic() + self.patience
        while missing := slots - len(claims):
            try:
                more = self.acquire(pool, **{"waitSeconds": 60, **ask, "slots": missing})
            except Denied as error:
                if error.reason != UNCHECKED or time.monotonic() > end:
                    raise
                time.sleep(0.5)
                continue
            assert 0 < len(more) <= missing, (claims, more)
            claims += more
        return claims

    def renew(self, *claims: Claim, episodes: int = 0) -> list[Renewed]:
        said = self.post("/v1/claims/renew", {"claims": [_held(c, episodes) for c in claims]})
        return list(RenewedAll.model_validate(said).claims)

    def state(self, claim: Claim) -> str:
        """held, recalled or lost; and why."""
        return self.renew(claim)[0].state

    def release(self, *claims: Claim, verdict: str = "clean", episodes: int = 0) -> list[Renewed]:
        given = [{**_held(claim, episodes), "verdict": verdict} for claim in claims]
        return list(Released.model_validate(self.post("/v1/claims/release", {"claims": given})).claims)

    def post(self, path: str, body: Any, wait: float = 0.0) -> Object:
        """Raises Denied; OSError where nobody answers."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, payload, {"Authorization": f"Bearer {self.token}"}, wait)

    def call(self, method: str, path: str, body: bytes, headers: Mapping[str, str], wait: float = 0.0) -> Object:
        host, port = self.operator.broker.removeprefix("https://").split(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=self.patience + wait, context=self._tls)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Denied(answer.status, json.loads(text))
        return dict(json.loads(text))


def _held(claim: Claim, episodes: int) -> Object:
    return {"id": claim.id, "secret": claim.secret, "episodes": episodes}


# --- who may call -----------------------------------------------------------------------------------------------------


def account(cluster: Cluster, namespace: str, *, may: bool = True) -> str:
    """Name of a new service account; `may`: it has the right to claim in its namespace."""
    name = f"caller-{next(_NUMBERS)}"
    cluster.api("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
    if may:
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tapforge-claimer"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        cluster.api("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", binding)
        _wait_for_right(cluster, namespace, name)
    return name


def caller(operator: Operator, namespace: str) -> Caller:
    """Somebody new who may claim slots of the namespace's pools."""
    name = account(operator.cluster, namespace)
    return Caller(operator, namespace, operator.cluster.token(namespace, name, AUDIENCE))


def run(cluster: Cluster, namespace: str, name: str, pool: str = "phones", **source: Any) -> Object:
    """A TrainingRun that uses the pool."""
    spec = {"environment": {"source": {"pool": {"name": pool, **source}}}}
    body = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": name}, "spec": spec}
    return cluster.api("POST", f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}/trainingruns", body)


def owned_by(*owners: Object) -> list[Object]:
    """ownerReferences whose controller is the first one."""
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": owner is owners[0],
        }
        for owner in owners
    ]


def run_pod(cluster: Cluster, namespace: str, owner: Object, name: str = "driver", **spec: Any) -> str:
    """The token of a new Pod whose controller is `owner`."""
    metadata = {"name": name, "ownerReferences": owned_by(owner)}
    spec = {"containers": [{"name": "driver", "image": "trainer:1"}], **spec}
    pods = f"/api/v1/namespaces/{namespace}/pods"
    made = cluster.api("POST", pods, {"metadata": metadata, "spec": spec})
    return cluster.token(namespace, "default", AUDIENCE, pod=(name, made["metadata"]["uid"]))


def slots_of(claims: Iterable[Claim]) -> list[str]:
    return [claim.slot for claim in claims]


def _wait_for_right(cluster: Cluster, namespace: str, name: str) -> None:
    user = f"system:serviceaccount:{namespace}:{name}"
    claim = ("create", "tapforge.dev", "emulatorpools/claim", namespace)
    cluster.wait_for(f"the right of {name}", lambda: may(cluster, user, *claim))


def may(cluster: Cluster, user: str, verb: str, group: str, resource: str, namespace: str, name: str = "") -> bool:
    """What RBAC says of it at this moment; `namespace` "" is the whole cluster."""
    kind, _, sub = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": sub}
    spec = {"user": user, "resourceAttributes": attributes | {"namespace": namespace, "name": name}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(cluster.api("POST", path, body)["status"]["allowed"])
