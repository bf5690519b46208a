"""Who may claim: real tokens of a real API server, good ones and all kinds of bad ones; and what bad calls are told."""

from __future__ import annotations

import base64
import itertools
import json
import time
from pathlib import Path

import pytest
from claiming import UNCHECKED, Caller, Denied, Object, account, caller, owned_by, run, run_pod
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from e2e.cluster import Cluster, Refused
from live_pool import LivePool, name, uid
from operator_process import Operator
from ray_kinds import ray_kinds

from tapforge_api.claims import AUDIENCE
from tapforge_operator import labels

ISSUER = "https://kubernetes.default.svc.cluster.local"
POOL = "phones"
_LIARS = itertools.count(1)


@pytest.fixture
def pool(cluster: Cluster, space: str, operator: Operator) -> LivePool:
    pool = LivePool(cluster, space, POOL, replicas=2)
    pool.wait_ready(2)
    return pool


def refused(who: Caller, pool: str = POOL) -> Denied:
    def judged() -> Denied | None:
        with pytest.raises(Denied) as denied:
            who.acquire(pool)
        return None if denied.value.reason == UNCHECKED else denied.value

    said = who.operator.cluster.wait_for("word of who is calling", judged)
    assert said is not None
    return said


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_for_somebody_else_is_none_for_the_broker(
    cluster: Cluster, space: str, operator: Operator, pool: LivePool
) -> None:
    name = account(cluster, space)
    for token in (
        cluster.token(space, name),  # for the API server
        cluster.token(space, name, "vault.example.org"),
        "not.a.token",
        "x" * 8_000,
        "",
    ):
        said = refused(Caller(operator, space, token))
        assert (said.status, said.reason) == (401, "Unauthorized") and said.message
    assert Caller(operator, space, cluster.token(space, name, AUDIENCE)).acquire_one()


def test_an_expired_token_is_refused(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    """Signed by the cluster's own key, so that nothing but its time is wrong."""
    name = account(cluster, space)
    good = cluster.token(space, name, AUDIENCE)
    fresh = resigned(cluster, good, {})
    assert Caller(operator, space, fresh).acquire_one(), "the forgery is as good as the real one"
    now = int(time.time())
    late = resigned(cluster, good, {"iat": now - 7200, "nbf": now - 7200, "exp": now - 3600})
    said = refused(Caller(operator, space, late))
    assert (said.status, said.reason) == (401, "Unauthorized") and "expired" in said.message
    early = resigned(cluster, good, {"nbf": now + 3600, "exp": now + 7200})
    assert refused(Caller(operator, space, early)).status == 401


def resigned(cluster: Cluster, token: str, claims: Object) -> str:
    """The token with these claims changed, signed with the API server's own key."""
    head, body, _ = token.split(".")
    said = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | claims
    assert said["iss"] == ISSUER
    text = f"{head}.{_b64(json.dumps(said).encode())}"
    pem = Path(cluster.folder / "accounts.key").read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    if isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
    else:
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        r, s = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return f"{text}.{_b64(signature)}"


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_a_token_ends_with_its_pod(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    """Somebody kept it: it is worth nothing, also not for a Pod of the same name. What was claimed by it stays claimed
    until it expires: its secret is with the holder."""
    token = run_pod(cluster, space, run(cluster, space, "learning"))
    who = Caller(operator, space, token)
    claim = who.acquire_one(ttlSeconds=3600)
    where = f"/api/v1/namespaces/{space}/pods/driver"
    cluster.api("DELETE", where)
    cluster.wait_for("the end of the Pod", lambda: not cluster.exists(where))
    run_pod(cluster, space, run(cluster, space, "another"))

    def over() -> bool:
        try:
            who.acquire()
        except Denied as error:
            return error.status == 401
        return False

    cluster.wait_for("the token to be worth nothing", over)
    assert who.state(claim) == "held"


# --- rights -----------------------------------------------------------------------------------------------------------


def test_without_a_right_nobody_claims(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    nobody = Caller(operator, space, cluster.token(space, account(cluster, space, may=False), AUDIENCE))
    said = refused(nobody)
    assert (said.status, said.reason) == (403, "Forbidden")
    assert "emulatorpools/claim" in said.message and space in said.message
    # The right is the namespace's: it is worth nothing in another one.
    elsewhere = Caller(operator, "default", caller(operator, space).token)
    assert refused(elsewhere).status == 403


def test_a_pods_token_is_traced_to_its_run(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    """Over a Job, as a submitter's; each owner is read and compared by UID."""
    training = run(cluster, space, "learning")
    metadata = {"name": "submitter", "ownerReferences": owned_by(training)}
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x"}]}}
    jobs = f"/apis/batch/v1/namespaces/{space}/jobs"
    cluster.api("POST", jobs, {"metadata": metadata, "spec": {"template": template}})
    # The Pod that the Job makes: from any other one its controller would take the owner away.
    pods = f"/api/v1/namespaces/{space}/pods?labelSelector=batch.kubernetes.io%2Fjob-name%3Dsubmitter"
    (pod,) = cluster.wait_for("the Job's Pod", lambda: cluster.api("GET", pods)["items"])
    direct = Caller(operator, space, run_pod(cluster, space, training, "direct"))
    by_job = Caller(operator, space, cluster.token(space, "default", AUDIENCE, pod=(name(pod), uid(pod))))
    first = direct.acquire_one(ttlSeconds=3600)
    assert by_job.acquire_one(ttlSeconds=3600).slot != first.slot
    # Both are the same holder: a request that one of them sent is known to the other.
    assert by_job.acquire(request="of-the-run", slots=1, waitSeconds=0) == []
    direct.release(first)
    third = direct.acquire_one(request="by-either", ttlSeconds=3600)
    assert by_job.acquire(request="by-either", slots=1) == [third]


def lied(cluster: Cluster, space: str, owner: Object) -> str:
    """The token of a Pod whose owner there is not; "" when the Pod was collected before there was one."""
    try:
        return run_pod(cluster, space, owner, f"liar-{next(_LIARS)}")
    except Refused as error:
        if error.status != 404:
            raise
        return ""


def test_a_pod_that_only_says_so_is_no_runs(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    """The names are right, a UID is not; or there is no run at all; or the run uses another pool."""
    training = run(cluster, space, "learning")
    liar = {**training, "metadata": {**training["metadata"], "uid": "00000000-0000-4000-8000-000000000000"}}
    # The garbage collector finds out as well: then the token is no longer one, or there is no Pod left to make it for.
    token = cluster.wait_for("a liar's token", lambda: lied(cluster, space, liar))
    assert refused(Caller(operator, space, token)).status in (401, 403)
    config = cluster.api("POST", f"/api/v1/namespaces/{space}/configmaps", {"metadata": {"name": "x"}})
    config |= {"apiVersion": "v1", "kind": "ConfigMap"}
    assert refused(Caller(operator, space, run_pod(cluster, space, config, "by-config"))).status == 403
    elsewhere = run(cluster, space, "elsewhere", pool="others")
    said = refused(Caller(operator, space, run_pod(cluster, space, elsewhere, "elsewhere")))
    assert said.status == 403 and "spec.environment.source.pool.name" in said.message


def test_over_the_owners_that_kuberay_makes(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    """Pod, RayCluster, RayJob, TrainingRun."""
    above = run(cluster, space, "learning")
    with ray_kinds(cluster) as kinds:
        for kind in kinds:
            body: Object = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "by-hand"}}
            body["metadata"]["ownerReferences"] = owned_by(above)
            where = f"/apis/ray.io/v1/namespaces/{space}/{kind.lower()}s"
            above = cluster.api("POST", where, body)
        head = Caller(operator, space, run_pod(cluster, space, above, "head"))
        claim = head.acquire_one()
        assert pool.pod(claim.slot)["metadata"]["labels"][labels.RUN] == "learning"


# --- bad calls --------------------------------------------------------------------------------------------------------


def test_bad_calls_are_told_what_is_wrong(cluster: Cluster, space: str, operator: Operator, pool: LivePool) -> None:
    who = caller(operator, space)
    acquire = f"/v1/namespaces/{space}/pools/{POOL}/claims"
    ask = {"request": "request-1"}
    bad: list[tuple[str, object, int, str, str]] = [
        (acquire, b"{", 400, "Invalid", "JSON"),
        (acquire, b"\xff\xfe", 400, "Invalid", ""),
        (acquire, [], 400, "Invalid", ""),
        (acquire, {}, 400, "Invalid", "request"),
        (acquire, {**ask, "slots": 0}, 400, "Invalid", "slots"),
        (acquire, {**ask, "slots": 10**9}, 400, "Invalid", "slots"),
        (acquire, {**ask, "ttlSeconds": 1}, 400, "Invalid", "ttlSeconds"),
        (acquire, {**ask, "waitSeconds": "long"}, 400, "Invalid", "waitSeconds"),
        (acquire, {"request": "../../etc"}, 400, "Invalid", "request"),
        (acquire, b"[" * 50_000, 400, "Invalid", ""),
        (acquire, b"[" * 100_000, 413, "BodyTooLarge", ""),
        (acquire, b"x" * (2 << 20), 413, "BodyTooLarge", ""),
        (f"/v1/namespaces/{space}/pools/none/claims", ask, 404, "PoolNotFound", "none"),
        ("/v1/claims/renew", {"claims": []}, 400, "Invalid", "claims"),
        ("/v1/claims/renew", {"claims": [{"id": "x"}]}, 400, "Invalid", ""),
        ("/v1/claims/release", {"claims": [{"id": "12345678.1", "secret": "s" * 20, "verdict": 7}]}, 400,
         "Invalid", "verdict"),
        ("/v1/claims/steal", {}, 404, "NotFound", "/v1/claims/renew"),
        ("/", {}, 404, "NotFound", ""),
    ]  # fmt: skip
    for path, body, status, reason, word in bad:
        with pytest.raises(Denied) as denied:
            who.post(path, body)
        assert (denied.value.status, denied.value.reason) == (status, reason), (path, denied.value)
        assert word in denied.value.message and denied.value.message, (path, denied.value)
    with pytest.raises(Denied) as denied:
        who.call("GET", acquire, b"", {})
    assert (denied.value.status, denied.value.reason) == (405, "MethodNotAllowed")
    with pytest.raises(Denied) as denied:
        who.call("POST", acquire, json.dumps(ask).encode(), {})
    assert denied.value.status == 401 and "Authorization" in denied.value.message
    # A claim that never was is no error: it is lost, as any other that nobody has.
    answer = who.post("/v1/claims/renew", {"claims": [{"id": "12345678.1", "secret": "s" * 20}]})
    assert answer["claims"][0]["state"] == "lost" and answer["claims"][0]["reason"]
    # After all of it nothing is claimed, and claims are still to be had.
    assert who.acquire_all(2)


def test_a_pool_can_not_be_claimed_from_another_namespace(
    cluster: Cluster, space: str, operator: Operator, pool: LivePool
) -> None:
    training = run(cluster, "default", f"of-{space}", pool=POOL)
    driver = f"driver-of-{space}"
    token = run_pod(cluster, "default", training, driver)
    said = refused(Caller(operator, space, token))
    assert (said.status, said.reason) == (403, "Forbidden")
    cluster.api("DELETE", f"/api/v1/namespaces/default/pods/{driver}")
    cluster.api("DELETE", f"/apis/tapforge.dev/v1alpha1/namespaces/default/trainingruns/of-{space}")
    assert [name(pod) for pod in pool.pods()], "the pool is as it was"
