"""What becomes of a run whose NetworkPolicy can't be made, or is not as it has to be."""

from __future__ import annotations

from typing import Any

import pytest
from runs_made import UID, made
from small_api import Line, SmallApi

from tapforge_operator.clusternetwork import RunNetwork
from tapforge_operator.config import Settings
from tapforge_operator.kube.client import ApiError
from tapforge_operator.trainingrun.apply import RunWrites
from tapforge_operator.trainingrun.rayjob import Broker

BROKER = Broker("https://broker", "CERTIFICATE")
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"


class Forbidding(Line):
    """Without one right on NetworkPolicies."""

    def __init__(self, api: SmallApi, verb: str) -> None:
        super().__init__(api)
        self._verb = verb

    async def get(self, path: str, deadline: float | None = None) -> dict[str, Any]:
        self._check("get", path)
        return await super().get(path, deadline)

    async def create(self, path: str, body: dict[str, Any], deadline: float | None = None, **how: bool) -> Any:
        self._check("create", path)
        return await super().create(path, body, deadline, **how)

    def _check(self, verb: str, path: str) -> None:
        if verb == self._verb and path.startswith(POLICIES):
            raise ApiError(verb, 403, "Forbidden", f"cannot {verb} resource networkpolicies")


def writes(line: Line, network: RunNetwork | None = None) -> RunWrites:
    settings = Settings("operator", run_network=network or RunNetwork())
    return RunWrites(line, None, lambda: True, settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["get", "create"])
async def test_a_policy_that_may_not_be_made_holds_the_run_and_says_what_to_do(verb: str) -> None:
    api = SmallApi()
    mine = writes(Forbidding(api, verb))
    await mine.ensure_config(made(), BROKER)
    assert mine.refusal is not None and (mine.refusal.reason, mine.refusal.stalls) == ("Forbidden", True)
    assert f"cannot {verb} resource networkpolicies" in mine.refusal.message
    assert "--no-run-network" in mine.refusal.message
    assert len(api.of("configmaps")) == 2, "what Pods that are there mount is there"


async def test_a_cluster_without_policies_for_runs_needs_no_right_to_make_them() -> None:
    mine = writes(Forbidding(SmallApi(), "get"), RunNetwork(closed=False))
    await mine.ensure_config(made(), BROKER)
    assert mine.refusal is None


async def test_a_config_map_with_a_key_of_a_later_release_is_the_runs() -> None:
    api = SmallApi()
    mine = writes(Line(api))
    await mine.ensure_config(made(), BROKER)
    (config,) = (body for body in api.of("configmaps").values() if body.get("immutable"))
    config["data"]["later"] = "more"
    await mine.ensure_config(made(), BROKER)
    assert mine.refusal is None
    config["data"]["run.yaml"] = "another run"
    await mine.ensure_config(made(), BROKER)
    assert mine.refusal is not None and mine.refusal.reason == "ConfigChanged"


async def test_a_policy_follows_what_the_operator_is_told() -> None:
    api = SmallApi()
    line = Line(api)
    await writes(line).ensure_config(made(), BROKER)
    (policy,) = api.of("networkpolicies").values()
    assert policy["metadata"]["ownerReferences"][0]["uid"] == UID
    written = line.writes
    await writes(line).ensure_config(made(), BROKER)
    assert line.writes == written, "what is as it has to be is not written again"
    await writes(line, RunNetwork(kuberay={"team": "ray"})).ensure_config(made(), BROKER)
    (policy,) = api.of("networkpolicies").values()
    assert {"matchLabels": {"team": "ray"}} in [
        peer.get("namespaceSelector") for rule in policy["spec"]["ingress"] for peer in rule["from"]
    ]
