"""The operator dies and comes back, at the worst moments: holders keep their slots, nobody gets one twice, no Pod is
made or lost that should not be, and one that is only exchanged for a newer release changes nothing.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from claiming import Denied, caller
from e2e.cluster import API_SERVER, PATIENCE, Cluster, Refused, binaries, fake
from holders import Holder, Judge, slot_of
from live_pool import LivePool, Object, name, phone, uid, uids
from operator_process import Ground, Operator

from tapforge_api.claims import Claim

TTL = {"ttlSeconds": 600}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


@contextmanager
def counted(pool: LivePool) -> Iterator[list[int]]:
    """How many slots there were at many moments, as consistent lists."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            try:
                seen.append(len(pool.pods()))
            except (OSError, Refused):  # the API server is away
                continue

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


@pytest.mark.long
def test_ten_kills_in_a_busy_pool(cluster: Cluster, space: str, operator: Operator) -> None:
    """Holders claim and play, phones crash, the size and the template change; the operator is killed all the while,
    also before it leads and in the middle of its start."""
    strategy = {"maxSurge": 1, "maxUnavailable": 1}
    sick = {"maxReplacementsPercentPerHour": 10_000}
    pool = LivePool(cluster, space, replicas=8, updateStrategy=strategy, health=sick)
    pool.wait_ready(8)
    judge, chance = Judge(), random.Random(1)
    holders = [Holder(caller(operator, space), "phones", judge, seed) for seed in range(5)]
    for holder in holders:
        holder.start()
    with counted(pool) as seen:
        for kill in range(10):
            time.sleep(chance.choice([0.2, 0.7, 1.2, 2.0]))
            if kill in (3, 7):
                pool.edit(replicas=6 if kill == 3 else 8)
            if kill == 5:
                pool.edit(template=phone("phone:2"))
            victim = chance.choice(pool.pods() or [None])
            if victim is not None and kill % 2:
                judge.harm(uid(victim))
                with suppress(Refused):  # it went meanwhile, for a size or a template
                    pool.annotate(name(victim), {fake.EXIT: "0"})
            operator.kill9()
            operator.start()
            if kill % 3:
                operator.wait_ready()
        operator.wait_ready()
        granted = judge.granted
        # How many there were before is a matter of how fast the machine is between two kills.
        enough = lambda: judge.granted > max(granted + 5, 30) and judge.renewed > 50  # noqa: E731
        pool.wait("claims after the last kill", enough)
        for holder in holders:
            holder.stop()
        for holder in holders:
            holder.join(180)
            assert not holder.is_alive() and holder.error is None, holder.error
        pool.wait_ready(8)
    assert judge.accusations == []
    assert judge.lost == [], "operators come and go, claims stay"
    assert judge.granted > 30 and judge.renewed > 50
    assert max(seen) <= 8 + 1, "planned and surge"
    pool.wait("all to be new", lambda: pool.status()["updated"] == 8 and pool.status()["claimed"] == 0)
    pool.wait("no mark to be left", lambda: not pool.marked())


def test_an_upgrade_with_claims_held_changes_nothing(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=3)
    devices = LivePool(cluster, space, "devices", external={"urls": ["http://10.2.0.1:8000", "http://10.2.0.2:8000"]})
    pool.wait_ready(3)
    who = caller(operator, space)
    claims = [*who.acquire_all(2, **TTL), who.acquire_one("devices", **TTL)]
    pool.wait("the statuses to say so", lambda: (pool.status()["claimed"], devices.status()["claimed"]) == (2, 1))
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed"
    pool.wait("its disruption budget", lambda: cluster.exists(budget))
    pool.wait("the disruption controller to have counted", lambda: counted_pods(cluster.api("GET", budget)) == 2)

    def versions() -> dict[str, str]:
        things = [pool.object(), devices.object(), *pool.all_pods()]
        things += cluster.api("GET", f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases")["items"]
        things += cluster.api("GET", f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets")["items"]
        return {thing["metadata"]["uid"]: thing["metadata"]["resourceVersion"] for thing in things}

    before, term = versions(), operator.term
    operator.stop()
    operator.start().wait_ready()
    assert operator.term > term
    assert {said.state for said in who.renew(*claims)} == {"held"}
    reconciled = f"{space}/phones"
    pool.wait("a look at the pool", lambda: operator.metrics("tapforge_reconcile_seconds_count", pool=reconciled) > 0)
    # Only status.claimed's budget is somebody else's to write: the disruption controller's, and it had no reason to.
    assert versions() == before
    fresh = who.acquire_one(**TTL)
    assert fresh.slot not in [claim.slot for claim in claims] and fresh.fence > max(c.fence for c in claims[:2])
    who.release(*claims, fresh)
    pool.wait("all to be free", lambda: (pool.status()["claimed"], devices.status()["claimed"]) == (0, 0))


def counted_pods(budget: Object) -> int:
    status = budget.get("status") or {}
    return int(status.get("currentHealthy", 0)) if "observedGeneration" in status else 0


def test_what_happened_while_nobody_was_there_is_found_out(cluster: Cluster, space: str, operator: Operator) -> None:
    """Pods that went, crashed, or were claimed and never renewed; a pool that was edited, one that was deleted, one
    that is new."""
    pool = LivePool(cluster, space, replicas=4)
    leaving = LivePool(cluster, space, "leaving", replicas=1)
    pods = pool.wait_ready(4)
    leaving.wait_ready(1)
    who = caller(operator, space)
    held, crashed, deleted = who.acquire_all(3, **TTL)
    left = who.acquire_one("leaving", **TTL)
    leaving.wait("the status to say so", lambda: leaving.status()["claimed"] == 1)
    operator.kill9()
    pool.annotate(crashed.slot, {fake.EXIT: "0"})
    cluster.api("DELETE", pool.place(deleted.slot))
    pool.edit(replicas=5)
    leaving.delete(claimed=True)
    leaving.wait("its end", lambda: not leaving.all_pods())
    pool.wait("the crash", lambda: pool.pod(crashed.slot)["status"]["phase"] == "Failed")
    pool.wait("the deleted one to be gone", lambda: not cluster.exists(pool.place(deleted.slot)))
    new = LivePool(cluster, space, "new", replicas=1)
    operator.start().wait_ready()
    assert [said.state for said in who.renew(held, crashed, deleted, left)] == ["held", "lost", "lost", "lost"]
    after = pool.wait_ready(5)
    assert not {slot_of(crashed), slot_of(deleted)} & set(uids(after))
    kept = set(uids(pods)) & set(uids(after))
    assert len(kept) == 2, "the held one and the free one"
    new.wait_ready(1)


def test_a_stopped_operator_lets_its_callers_go_at_once(cluster: Cluster, space: str, operator: Operator) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(who.acquire, waitSeconds=600)
        pool.wait("somebody to wait", lambda: operator.metrics("tapforge_claims_waiting", pool=f"{space}/phones") == 1)
        operator.stop()
        with pytest.raises((Denied, OSError)) as refusal:
            waiting.result(timeout=60)
    if isinstance(refusal.value, Denied):
        assert refusal.value.status == 503
    lease = cluster.api("GET", f"{LEASES.format(operator.own_namespace)}/tapforge-operator")
    assert lease["spec"].get("holderIdentity", "") == "", "the next one need not wait"
    operator.start().wait_ready()
    assert who.state(claim) == "held"


# --- docs/keys.md ---


class Page:
    """The commands of docs/keys.md, as its reader types them. Where they stop and start the Deployment, which has other
    Pods here, the operator of the tests is stopped and started too."""

    def __init__(self, operator: Operator, folder: Path):
        self._operator, self._folder = operator, folder
        page = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
        found = re.findall(r"^ *```sh\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
        self.backup, self.restore, self.rotate, self.count, self.take_out, self.authority = map(textwrap.dedent, found)

    def run(self, block: str) -> str:
        said = ""
        lines = block.replace("tapforge-system", self._operator.own_namespace)
        for part in filter(str.strip, re.split(r"^(kubectl .* scale .*)\n", lines, flags=re.MULTILINE)):
            if "--replicas=0" in part:
                self._operator.stop()
            said += self._bash(part)
            if "--replicas=2" in part:
                self._operator.start().wait_ready()
        return said

    def keys(self) -> set[str]:
        """Names of the keys that claims are signed with."""
        return set(re.findall(r'"key":"(\w+)"', self.run(self.count)))

    def _bash(self, script: str) -> str:
        path = f"{binaries.ensure()}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self._folder,
            env={"PATH": path, "KUBECONFIG": str(self._operator.cluster.kubeconfig), "HOME": str(self._folder)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def deployment(cluster: Cluster, ground: Ground) -> Iterator[None]:
    """One of the operator's name, with Pods of nothing."""
    labels = {"app.kubernetes.io/name": "tapforge-operator"}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "tapforge-operator", "namespace": ground.own},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": phone() | {"metadata": {"labels": labels}},
        },
    }
    cluster.apply(body)
    yield
    cluster.api("DELETE", f"/apis/apps/v1/namespaces/{ground.own}/deployments/tapforge-operator")


@pytest.mark.long
@pytest.mark.usefixtures("deployment")
def test_the_steps_of_the_page_on_keys_lose_no_claim(
    cluster: Cluster, space: str, operator: Operator, tmp_path: Path
) -> None:
    pool, page = LivePool(cluster, space, replicas=3), Page(operator, tmp_path)
    devices = LivePool(cluster, space, "devices", external={"urls": ["http://10.2.1.1:8000"]})
    pods = uids(pool.wait_ready(3))
    who = caller(operator, space)
    early = [*who.acquire_all(1, **TTL), who.acquire_one("devices", **TTL)]
    secret = f"/api/v1/namespaces/{operator.own_namespace}/secrets/tapforge-broker"
    bundle = f"/api/v1/namespaces/{operator.own_namespace}/configmaps/tapforge-broker-ca"

    def data() -> Object:
        return cluster.api("GET", secret)["data"] if cluster.exists(secret) else {}

    def authorities() -> set[str]:
        return (
            set(cluster.api("GET", bundle)["data"]["ca.crt"].split("-----BEGIN")) if cluster.exists(bundle) else set()
        )

    def states() -> set[str]:
        return {said.state for said in who.renew(*held)}

    def unproved() -> float:
        return operator.metrics("tapforge_broker_unproved_claims")

    def of_new_key() -> Claim | None:
        claim = who.acquire_one(**TTL)
        if page.keys() > keys:
            return claim
        who.release(claim)
        return None

    # Deleted under a leader: it is as it was.
    before, held, keys = data(), early, page.keys()
    cluster.api("DELETE", secret)
    cluster.api("DELETE", bundle)
    pool.wait("both to be written back", lambda: data() == before and cluster.exists(bundle))

    page.run(page.rotate)
    rotated = data()
    assert rotated["hmac.key.before"] == before["hmac.key"] != rotated["hmac.key"]
    late = pool.wait("a claim with the new key", of_new_key)
    held = [*early, late]
    assert states() == {"held"}
    who.release(*early)
    held = [late]
    page.run(page.take_out)
    assert "hmac.key.before" not in data() and states() == {"held"} and unproved() == 0

    # Lost, with no operator left that knows it.
    page.run(page.backup)
    operator.stop()
    cluster.api("DELETE", secret)
    operator.start().wait_ready()
    who = caller(operator, space)  # whoever trusts the lost authority alone has to read the bundle again
    pool.wait("the claim to be shown as unproved", lambda: unproved() == 1)
    assert states() == {"held"}
    page.run(page.restore)
    pool.wait("the claim to be proved", lambda: unproved() == 0)
    assert states() == {"held"}
    old, who = authorities(), caller(operator, space)
    page.run(page.authority)
    pool.wait("the new authority beside the others", lambda: authorities() > old)
    assert states() == {"held"}, "callers that trust the old ones go on"
    who = caller(operator, space)
    assert states() == {"held"}
    who.release(*held)
    pool.wait("all to be free", lambda: (pool.status()["claimed"], devices.status()["claimed"]) == (0, 0))
    assert set(uids(pool.pods())) == set(pods)


# --- two of them ---


@pytest.fixture
def standby(cluster: Cluster, ground: Ground, operator: Operator) -> Iterator[Operator]:
    """A second one, beside the leader."""
    one = Operator(cluster, ground.own, ground.spaces, identity="standby").start().wait_ready(leads=False)
    yield one
    one.stop()
    operator.restart(signal.SIGTERM)


def test_callers_go_through_whichever_replica_answers_also_when_the_leader_leaves(
    cluster: Cluster, space: str, operator: Operator, standby: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    pool.wait("the standby to know the leader", lambda: standby.role == "standing by; operator-0 leads")
    assert operator.role == f"leads in term {operator.term}" and standby.term == 0
    who = caller(standby, space)
    claims = who.acquire_all(3, **TTL)
    assert {said.state for said in who.renew(*claims)} == {"held"}
    with pytest.raises(Denied) as refusal:
        who.acquire("no-such-pool")
    assert refusal.value.status in (403, 404)
    passed_on = lambda: standby.metrics("tapforge_forwarded_calls_total", answered="true")  # noqa: E731
    pool.wait("the calls that were passed on to be shown", lambda: passed_on() >= 3)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(who.acquire, waitSeconds=600)
        pool.wait("somebody to wait", lambda: operator.metrics("tapforge_claims_waiting", pool=f"{space}/phones") == 1)
        operator.stop()
        with pytest.raises(Denied) as sent_on:
            waiting.result(timeout=60)
    assert (sent_on.value.status, sent_on.value.reason) == (503, "NotLeader")
    standby.wait_ready()
    assert {said.state for said in who.renew(*claims)} == {"held"}
    fences = [claim.fence for claim in claims]
    who.release(*claims)
    assert who.acquire_one(**TTL).fence > max(fences)


def test_a_caller_that_leaves_the_standby_leaves_the_leader(
    cluster: Cluster, space: str, operator: Operator, standby: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    pool.wait("the standby to know the leader", lambda: standby.role == "standing by; operator-0 leads")
    who = caller(standby, space)
    claim = who.acquire_one(**TTL)
    with ThreadPoolExecutor(1) as threads:
        who.patience = -598.0  # it goes after two seconds of its ten minutes
        left = threads.submit(who.acquire, waitSeconds=600)
        with pytest.raises(OSError, match="timed out"):
            left.result(timeout=60)
    who.patience = 60.0
    pool.wait("nobody to wait", lambda: operator.metrics("tapforge_claims_waiting", pool=f"{space}/phones") == 0)
    who.release(claim)
    assert who.acquire_one(**TTL).fence > claim.fence, "nobody has it"


@pytest.mark.long
def test_a_leader_that_dies_is_replaced_and_callers_of_the_other_one_lose_nothing(
    cluster: Cluster, space: str, ground: Ground, operator: Operator
) -> None:
    """With the Lease that users get. Nobody answers for claims until it has run out."""
    pool = LivePool(cluster, space, replicas=3)
    pods = pool.wait_ready(3)
    operator.stop()
    first = Operator(cluster, ground.own, ground.spaces, identity="first").start().wait_ready()
    second = Operator(cluster, ground.own, ground.spaces, identity="second").start()
    second.wait_ready(leads=False)
    pool.wait("the standby to know the leader", lambda: second.role == "standing by; first leads")
    who = caller(second, space)
    claims = who.acquire_all(2, ttlSeconds=60)
    first.kill9()
    told = set()

    def taken_over() -> bool:
        try:
            told.update(said.state for said in who.renew(*claims))
        except Denied as error:
            told.add(error.reason)
        return second.term > 0

    pool.wait("the other one to lead", taken_over)
    second.wait_ready()
    told.update(said.state for said in who.renew(*claims))
    assert told == {"NotLeader", "held"}
    first.start().wait_ready(leads=False)
    pool.wait("the first to stand by", lambda: first.role == "standing by; second leads")
    back = caller(first, space)
    assert {said.state for said in back.renew(*claims)} == {"held"}
    assert back.acquire_one(**TTL).slot not in [claim.slot for claim in claims]
    assert uids(pool.wait_ready(3)) == uids(pods)
    for one in (first, second):
        one.stop()
    operator.start().wait_ready()


# --- the API server goes away -----------------------------------------------------------------------------------------


def test_holders_keep_renewing_while_the_api_server_is_away(cluster: Cluster, space: str, operator: Operator) -> None:
    """Restarted at once, it is missed by nobody; and nothing that was under way is lost or done twice."""
    pool = LivePool(cluster, space, replicas=6)
    pods = pool.wait_ready(6)
    who = caller(operator, space)
    claims = who.acquire(slots=2, waitSeconds=60, **TTL)
    pid = cluster.pid(operator.name)
    pool.edit(replicas=30)
    with cluster.without(API_SERVER):
        assert {said.state for said in who.renew(*claims)} == {"held"}
    pool.wait_ready(30)
    assert set(uids(pods)) <= set(uids(pool.pods()))
    assert {said.state for said in who.renew(*claims)} == {"held"}
    who.release(*claims)
    assert cluster.pid(operator.name) == pid and operator.term > 0, "the same process still leads"


def test_an_api_server_that_hangs_ends_the_term_and_nothing_else(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=2)
    pods = pool.wait_ready(2)
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    pid, term = cluster.pid(operator.name), operator.term
    with cluster.paused(API_SERVER):
        assert who.state(claim) == "held", "renewals need no API server"
        cluster.wait_for("the term to be over", lambda: operator.term == 0)
        with pytest.raises(Denied) as denied:
            who.renew(claim)
        assert (denied.value.status, denied.value.reason) == (503, "NotLeader")
        assert operator.health("healthz") == "", "no reason to be killed"
    operator.wait_ready()
    assert cluster.pid(operator.name) == pid and operator.term > term, "the same process, in a later term"
    assert who.state(claim) == "held"
    assert uids(pool.wait_ready(2)) == uids(pods)
    who.release(claim)
