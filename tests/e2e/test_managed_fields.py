"""A Pod that was claimed once is cheap to write from then on: the API server keeps no notes of its fields any more."""

from __future__ import annotations

from e2e.cluster import MERGE, STRATEGIC, Cluster

from tapforge_operator.broker import pods
from tapforge_operator.broker.mark import Keys, Mark
from tapforge_operator.broker.records import SlotView


def test_a_claim_ends_the_notes_of_who_wrote_which_field(cluster: Cluster, namespace: str):
    where = f"/api/v1/namespaces/{namespace}/pods"
    spec = {"schedulerName": "none", "containers": [{"name": "emulator", "image": "example.com/phone:1"}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "phone"}, "spec": spec}
    made = cluster.api("POST", where, body)["metadata"]
    assert made["managedFields"]
    view = SlotView(made["uid"], "pool", namespace, "phone", made["resourceVersion"])
    mark = Mark(made["uid"], 1, "user/somebody", "", "request-1", 0, 60.0)
    claimed = cluster.api("PATCH", f"{where}/phone", pods.claim_patch(view, mark, Keys(b"k" * 32)), MERGE)
    assert "managedFields" not in claimed["metadata"]
    status = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    later = cluster.api("PATCH", f"{where}/phone/status", status, STRATEGIC)
    assert "managedFields" not in later["metadata"]
