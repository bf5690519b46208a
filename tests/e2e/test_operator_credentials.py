"""An operator whose exec plugin, as EKS, GKE and AKS have one, gives tokens that end within seconds: the same process
goes on over many of them, also when a token ends early or the plugin fails for a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster import Cluster
from live_pool import LivePool
from operator_process import ACCOUNT, Ground, Operator

#: signs as the API server does, which gives no token for less than ten minutes, and is lenient for one: a token is good
#: for `life`
PLUGIN = """
import base64, json, pathlib, sys, time
from datetime import UTC, datetime
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

here = pathlib.Path(__file__).parent
with (here / "runs").open("a") as file:
    file.write(f"{time.time()}\\n")
if (here / "broken").exists():
    sys.exit("no session: sign in again")
life, told = map(float, (here / "lives").read_text().split())
coded = lambda data: base64.urlsafe_b64encode(data).rstrip(b"=").decode()
head, body, _ = (here / "token").read_text().split(".")
now = time.time()
times = {"iat": int(now - 120), "nbf": int(now - 120), "exp": int(now + life - 60)}
claims = json.loads(base64.urlsafe_b64decode(body + "==")) | times
signed = f"{head}.{coded(json.dumps(claims).encode())}"
key = serialization.load_pem_private_key((here / "accounts.key").read_bytes(), None)
r, s = utils.decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
status = {"token": f"{signed}.{coded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"}
status["expirationTimestamp"] = datetime.fromtimestamp(now + told, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


class Plugin:
    def __init__(self, cluster: Cluster, ground: Ground, folder: Path) -> None:
        self._folder = folder
        (folder / "plugin.py").write_text(PLUGIN)
        (folder / "token").write_text(cluster.token(ground.own, ACCOUNT))
        (folder / "accounts.key").write_bytes((cluster.folder / "accounts.key").read_bytes())
        self.live(20, told=12)
        config = yaml.safe_load(cluster.user_with_token("exec", "-").read_text())
        plugin = {"command": sys.executable, "args": [str(folder / "plugin.py")], "interactiveMode": "Never"}
        config["users"][0]["user"] = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", **plugin}}
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def live(self, seconds: float, told: float | None = None) -> None:
        """Of tokens from now on; `told`: what the plugin says instead. Where that is less, a request that takes seconds
        on a busy machine is not refused. Reading credentials anew starts two processes: also that may take seconds."""
        (self._folder / "lives").write_text(f"{seconds} {told or seconds}")

    def breaks(self, broken: bool) -> None:
        if broken:
            (self._folder / "broken").touch()
        else:
            (self._folder / "broken").unlink()

    @property
    def runs(self) -> int:
        return len((self._folder / "runs").read_text().splitlines())


@pytest.fixture(scope="module")
def plugin(cluster: Cluster, ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    return Plugin(cluster, ground, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def operator(cluster: Cluster, ground: Ground, plugin: Plugin) -> Iterator[Operator]:
    one = Operator(cluster, ground.own, ground.spaces, kubeconfig=plugin.kubeconfig).start().wait_ready()
    yield one
    one.stop()


def test_tokens_are_renewed_before_they_end(cluster: Cluster, space: str, operator: Operator, plugin: Plugin) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    term = operator.term
    # An API server remembers for ten seconds that a token was good: after these the first one is good no longer.
    began, runs = time.monotonic(), plugin.runs
    cluster.wait_for("several renewals", lambda: plugin.runs > runs + 1 and time.monotonic() > began + 32)
    pool.edit(replicas=2)
    pool.wait_ready(2)
    assert operator.term == term, "it has led all the time"
    assert operator.records("kube.credentials") == [], "no refusal, no renewal that failed"


def refusals(operator: Operator) -> int:
    """How often the API server refused the credentials before their end."""
    return sum(one.level == "INFO" for one in operator.records("kube.credentials"))


def named(words: str, operator: Operator) -> bool:
    return any(one.level == "WARNING" and words in one.message for one in operator.records("kube.credentials"))


def test_a_token_that_ends_early_is_renewed_after_one_refusal(
    cluster: Cluster, space: str, operator: Operator, plugin: Plugin
) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    plugin.live(20, told=3600)
    refused = refusals(operator)
    cluster.wait_for("a refusal", lambda: refusals(operator) > refused)
    pool.edit(replicas=2)
    pool.wait_ready(2)
    plugin.live(20, told=12)


def test_a_plugin_that_fails_is_named_and_asked_again(
    cluster: Cluster, space: str, operator: Operator, plugin: Plugin
) -> None:
    pool = LivePool(cluster, space, replicas=1)
    pool.wait_ready(1)
    plugin.breaks(True)
    cluster.wait_for("the operator to say so", lambda: named("no session: sign in again", operator))
    cluster.wait_for("the end of its term", lambda: operator.term == 0)
    plugin.breaks(False)
    pool.edit(replicas=2)
    pool.wait_ready(2)
