"""Runs from apply to Complete with nothing pretended: real phones, KubeRay, Ray, vLLM and the learner, while phones,
drivers and Ray clusters die; two that share phones; one that can't work.
"""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster
from e2e.installed import OPERATOR_NAMESPACE, room
from live_pool import LivePool, name, note_of, ready, uid, uids
from live_run import pool_source
from real_cluster import run_python
from trained import START, Times, Trained, phones, volume

from tapforge_operator import labels
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.records import EpisodeRecord

PHONES = 4
#: more than any test waits for
MANY = {"maxUpdates": 1000}
#: phones that die until one of them does in the middle of an episode
TRIES = 6

pytestmark = pytest.mark.node

Object = dict[str, Any]


@pytest.fixture
def times() -> Iterator[Times]:
    yield (found := Times())
    print(found)


def _claimed(pool: LivePool) -> list[Object]:
    """Slots that somebody holds."""
    return [pod for pod in pool.pods() if note_of(pod, labels.CLAIM)]


def _a_phone_dies(real: Cluster, pool: LivePool, times: Times) -> None:
    """One that the run holds: most of the time, but not always, it plays an episode on it."""
    victim = pool.wait("a phone that is held", lambda: next(iter(_claimed(pool)), None))
    assert victim is not None
    real.node.kill(victim)

    def replaced() -> bool:
        now = [pod for pod in pool.pods() if ready(pod)]
        return len(now) == PHONES and uid(victim) not in uids(now)

    times.of("phone killed to its successor ready", lambda: pool.wait("the phone's successor", replaced))
    pool.wait("the run to have it", lambda: len(_claimed(pool)) == PHONES)


def _attempt(run: Trained, disk: Path) -> Path:
    """Where its last attempt writes."""
    (folder,) = disk.glob(f"{run.namespace}/{run.uid}/attempt-*/{run.name}")
    return folder


def _broken(run: Trained, disk: Path) -> list[EpisodeRecord]:
    """Its episodes that do not count."""
    return [episode for episode in Recording(_attempt(run, disk) / "rollout").episodes() if not episode.valid]


def _driver_restarted(run: Trained) -> None:
    """Until the next driver has done an update. What the killed one had done may reach the status after its end."""
    run.wait("the driver to be started again", lambda: run.status()["progress"]["restarts"] > 0, START)
    run.wait_update(run.update() + 1)


#: what a Pod of the namespace asks of Ray's dashboard: its jobs, and to run one; the answers' statuses
_ASKS = """
import json, urllib.error, urllib.request
def asked(data, token=""):
    headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + token} if token else {})
    try:
        return urllib.request.urlopen(urllib.request.Request(%r, data, headers), timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code
job = json.dumps({"entrypoint": "env"}).encode()
print(json.dumps([asked(None), asked(job), asked(job, "another"), asked(None, %r)]))
"""


def _only_holders_of_the_token_start_jobs(real: Cluster, run: Trained, elsewhere: Object) -> None:
    head = run.head()
    cluster = head["metadata"]["labels"]["ray.io/cluster"]
    secret = real.api("GET", f"/api/v1/namespaces/{run.namespace}/secrets/{cluster}")
    token = base64.b64decode(secret["data"]["auth_token"]).decode()
    jobs = f"http://{head['status']['podIP']}:8265/api/jobs/"
    assert run_python(real, run.namespace, name(elsewhere), _ASKS % (jobs, token)) == [401, 401, 403, 200]


def test_a_run_is_complete_though_everything_of_it_died(real: Cluster, times: Times) -> None:
    space = room(real, "real-life")
    pool = LivePool(real, space, **phones(PHONES))
    disk = volume(real, space)
    pool.wait_ready(PHONES)
    run = Trained(
        real,
        space,
        "life",
        **pool_source("phones", PHONES),
        stop=MANY,
        checkpoints={"everyUpdates": 1, "storage": {"volumeClaim": {"claimName": "checkpoints"}}},
    )
    times.of("apply to the first update", lambda: run.wait_update(1))
    run.wait_ready("True", "Running")
    run.wait("its phones to be counted", lambda: run.status()["leases"] == {"wanted": PHONES, "held": PHONES})
    _only_holders_of_the_token_start_jobs(real, run, pool.pods()[0])

    # A phone dies in the middle of an episode.
    for _ in range(TRIES):
        _a_phone_dies(real, pool, times)
        run.wait_update(run.update() + 2)
        if _broken(run, disk):
            break

    # The driver dies, and its Ray cluster lives.
    before = run.head()
    os.kill(run.driver_pid(), signal.SIGKILL)
    times.of("driver killed to its next update", lambda: _driver_restarted(run))
    assert uid(run.head()) == uid(before) and run.attempts() == [1]
    assert run.status()["progress"]["restarts"] == 1

    # The Ray cluster dies.
    real.api("DELETE", f"/api/v1/namespaces/{space}/pods/{name(before)}", {"gracePeriodSeconds": 0})
    run.wait("the end of the first attempt", lambda: run.status()["lostClusters"] == 1)
    reached = run.update()
    times.of("Ray cluster lost to the next attempt's update", lambda: run.wait_update(reached + 1))
    assert run.attempts() == [2]

    # It is suspended, and goes on.
    run.edit(suspend=True)
    times.of("suspend to stopped", lambda: run.wait("it to stop", lambda: run.says("Suspended", "True")))
    status = run.status()
    assert status["checkpoint"]["update"] == status["progress"]["update"] >= reached + 1
    run.wait("its machines to be gone", lambda: not run.jobs() and not run.heads())
    pool.wait("its phones to be given back", lambda: pool.status()["claimed"] == 0)
    reached = status["progress"]["update"]
    run.edit(suspend=False)
    times.of("resume to the next update", lambda: run.wait_update(reached + 1))
    assert run.status()["attempts"] == 3 and run.status()["lostClusters"] == 1

    # It ends.
    run.edit(stop={"maxUpdates": run.update() + 1})
    run.wait_complete()
    run.wait("its machines to be gone", lambda: not run.heads())
    pool.wait("its phones to be given back", lambda: pool.status()["claimed"] == 0)
    told = [reason for reason, _ in run.events()]
    happened = {"AttemptStarted", "DriverRestarted", "ClusterLost", "Stopping", "Suspended", "Running", "Complete"}
    # What the API server doesn't take within seconds is told in the log alone.
    which = ("-l", "app.kubernetes.io/name=tapforge-operator")
    log = real.kubectl("logs", "-n", OPERATOR_NAMESPACE, *which, "--tail=-1").stdout
    unwritten = [line for line in log.splitlines() if "an Event could not be written" in line and space in line]
    assert len(happened - set(told)) <= len(unwritten), (told, unwritten)
    _nothing_was_learned_from_deaths(run, disk)

    run.delete()
    run.wait("nothing of it to be left", lambda: not _left(real, space, run.uid))


def _nothing_was_learned_from_deaths(run: Trained, disk: Path) -> None:
    folder = _attempt(run, disk)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == run.update()
    assert summary["invalid_episodes"] > 0
    assert _broken(run, disk)
    groups = Recording(folder / "rollout").groups()
    assert all(episode.valid for group in groups for episode in group.episodes)
    # Every update, whoever did it.
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    assert {event["update"] for event in lines if event["event"] == "update"} == set(range(1, summary["updates"] + 1))


def _left(real: Cluster, space: str, owner: str) -> list[str]:
    """What stands in the namespace and says that it is the run's."""
    found = []
    for group, kind in (
        ("api/v1", "pods"),
        ("api/v1", "configmaps"),
        ("apis/networking.k8s.io/v1", "networkpolicies"),
        ("apis/batch/v1", "jobs"),
        ("apis/ray.io/v1", "rayjobs"),
        ("apis/ray.io/v1", "rayclusters"),
    ):
        for thing in real.api("GET", f"/{group}/namespaces/{space}/{kind}")["items"]:
            about = thing["metadata"]
            owners = [one["uid"] for one in about.get("ownerReferences", ())]
            if owner in (about.get("labels", {}).get(labels.RUN_UID), *owners):
                found.append(f"{kind}/{about['name']}")
    return found


@pytest.mark.long
def test_two_runs_share_the_phones_there_are_and_one_that_fails_says_why(real: Cluster, times: Times) -> None:
    space = room(real, "real-share")
    pool = LivePool(real, space, **phones(PHONES))
    pool.wait_ready(PHONES)
    ask = {**pool_source("phones", 3 * PHONES), "stop": MANY}
    fragile = Trained(real, space, "fragile", **ask, cluster={"driverRestarts": 0, "backoffLimit": 0})
    fragile.wait_update(1)
    told = f"it could use {3 * PHONES} phones, and pool phones has {PHONES} at most"
    fragile.wait("to be told", lambda: told in fragile.status()["message"])
    leases = {"wanted": 3 * PHONES, "held": PHONES}
    fragile.wait("its phones to be counted", lambda: fragile.status()["leases"] == leases)
    other = Trained(real, space, "other", **ask)
    other.wait_update(1, 2 * START)

    def held(run: Trained) -> int:
        return int(run.status()["leases"]["held"])

    other.wait("half of the phones for each", lambda: held(other) == held(fragile) == PHONES // 2)
    os.kill(fragile.driver_pid(), signal.SIGKILL)
    fragile.wait("the failure", lambda: fragile.says("Failed", "True"))
    message = fragile.status()["message"]
    assert "the driver was killed" in message and "exit code 137" in message, message
    other.wait("all phones", lambda: held(other) == PHONES)

    # The head of the other one is evicted, as by a drain: it costs the run nothing that counts.
    head = name(other.head())
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": head, "namespace": space}}
    real.api("POST", f"/api/v1/namespaces/{space}/pods/{head}/eviction", eviction)
    times.of("head evicted to its attempt over", lambda: other.wait("it", lambda: other.status()["disruptions"] == 1))
    assert "EvictionByEvictionAPI" in other.status()["attempt"]["message"]
    times.of("and to the next attempt's RayJob", lambda: other.wait("it", lambda: other.attempts() == [2]))
    other.wait_ready("True", "Running", START)
    status = other.status()
    assert (status["disruptions"], status["lostClusters"], status["failures"]) == (1, 0, 0)

    # Nothing stays of a run that is deleted while it trains, and its phones are free again.
    def gone() -> bool:
        return not _left(real, space, other.uid)

    other.delete()
    times.of("run deleted to nothing left", lambda: pool.wait("nothing of the run to be left", gone, 180))
    pool.wait("its phones to be free", lambda: pool.status()["claimed"] == 0)
    pool.wait_ready(PHONES)


@pytest.mark.long
def test_a_run_whose_file_can_not_work_fails_at_once_and_says_what_to_do(real: Cluster) -> None:
    space = room(real, "real-wrong")
    LivePool(real, space, **phones(1)).wait_ready(1)
    run = Trained(real, space, "wrong", **pool_source("phones", 1), tasks={"file": "/there/is/none.jsonl"})
    run.wait("the failure", run.over, 240)
    status = run.status()
    assert run.says("Failed", "True", "Configuration"), run.describe()
    assert "/there/is/none.jsonl" in status["message"], status["message"]
    assert status["attempts"] == 1 and status["progress"]["restarts"] == 0
    run.wait("its machines to be gone", lambda: not run.heads())
