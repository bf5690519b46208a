"""A Pod that was claimed once is cheap to write from then on: the API server keeps no notes of its fields any more."""

from __future__ import annotations

import pytest
from e2e.cluster import JSON_PATCH, MERGE, STRATEGIC, Cluster, Refused

from tapforge_operator import labels
from tapforge_operator.broker import claim_record
from tapforge_operator.broker.claim_record import ClaimRecord, Keys, SlotView

KEYS = Keys(b"k" * 32)


def phone(cluster: Cluster, namespace: str, **metadata: object) -> tuple[str, SlotView]:
    where = f"/api/v1/namespaces/{namespace}/pods"
    spec = {"schedulerName": "none", "containers": [{"name": "emulator", "image": "example.com/phone:1"}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "phone", **metadata}, "spec": spec}
    made = cluster.api("POST", where, body)["metadata"]
    assert made["managedFields"]
    return f"{where}/phone", SlotView(made["uid"], "pool", namespace, "phone", made["resourceVersion"])


def record(view: SlotView, fence: int) -> ClaimRecord:
    return ClaimRecord(view.uid, fence, "user/somebody", "", "request-1", 0, 60.0)


WRITTEN = {"labels": {"app": "phone"}, "annotations": {labels.SAFE_TO_EVICT: "true"}}
NOT_READY = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}


@pytest.mark.parametrize("by_version", [False, True])
def test_a_claim_ends_the_notes_of_who_wrote_which_field(cluster: Cluster, namespace: str, by_version: bool):
    where, view = phone(cluster, namespace, **WRITTEN)
    write = claim_record.claim_by_version if by_version else claim_record.claim_patch
    kind = MERGE if by_version else JSON_PATCH
    claimed = cluster.api("PATCH", where, write(view, record(view, 1), KEYS), kind)
    assert "managedFields" not in claimed["metadata"]
    later = cluster.api("PATCH", f"{where}/status", NOT_READY, STRATEGIC)
    assert "managedFields" not in later["metadata"]


def test_a_claim_is_written_on_a_pod_that_changed_and_never_on_one_that_was_claimed(cluster: Cluster, namespace: str):
    where, free = phone(cluster, namespace, **WRITTEN)
    cluster.api("PATCH", f"{where}/status", NOT_READY, STRATEGIC)
    claimed = cluster.api("PATCH", where, claim_record.claim_patch(free, record(free, 5), KEYS), JSON_PATCH)["metadata"]
    assert claimed["annotations"][labels.FENCE] == "5"
    # An attempt that is late, and somebody who saw the slot when it was free.
    for fence in (5, 6):
        with pytest.raises(Refused) as refused:
            cluster.api("PATCH", where, claim_record.claim_patch(free, record(free, fence), KEYS), JSON_PATCH)
        assert refused.value.status == 422
    clear = claim_record.clear_patch(free, record(free, 5), 3)
    cleared = cluster.api("PATCH", where, clear, JSON_PATCH)["metadata"]
    assert labels.CLAIM not in cleared["annotations"]
    assert (cleared["annotations"][labels.EPISODES], cleared["annotations"][labels.FENCE]) == ("3", "5")
    assert labels.CLAIMED not in cleared["labels"]
    with pytest.raises(Refused) as refused:
        cluster.api("PATCH", where, clear, JSON_PATCH)
    assert refused.value.status == 422


def test_the_end_of_a_claim_that_is_late_hits_no_later_claim(cluster: Cluster, namespace: str):
    where, view = phone(cluster, namespace, **WRITTEN)
    cluster.api("PATCH", where, claim_record.claim_by_version(view, record(view, 7), KEYS), MERGE)
    with pytest.raises(Refused) as refused:
        cluster.api("PATCH", where, claim_record.clear_patch(view, record(view, 5), 1), JSON_PATCH)
    assert refused.value.status == 422
