"""Where a claim says that its phone is: a URL, or what `adb connect` takes; addresses of IPv6 in brackets."""

from __future__ import annotations

from typing import Any

import pytest

from tapforge_api.claims import Claim
from tapforge_operator.broker.claim_record import SlotView
from tapforge_operator.broker.messages import url_of
from tapforge_operator.kube.types import observe_pool


@pytest.mark.parametrize(
    ("spec", "address", "url"),
    [
        ({"port": 9000}, "10.0.0.7", "http://10.0.0.7:9000"),
        ({}, "fd00::7", "http://[fd00::7]:8000"),
        ({"protocol": "mobileworld", "port": 6800}, "fd00::7", "http://[fd00::7]:6800"),
        ({"protocol": "adb", "port": 5555}, "10.0.0.7", "10.0.0.7:5555"),
        ({"protocol": "adb", "port": 5555}, "fd00::7", "[fd00::7]:5555"),
        ({"external": {}}, "https://phones.example.com/7", "https://phones.example.com/7"),
        ({"external": {}, "protocol": "adb"}, "device-1:5556", "device-1:5556"),
        ({"external": {}, "protocol": "adb"}, "[fd00::7]:5556", "[fd00::7]:5556"),
        ({"external": {}, "protocol": "adb"}, "http://device-1:5556/", "device-1:5556"),
        ({"external": {}, "protocol": "adb"}, "http://device-1", "device-1:5555"),
        ({"external": {}, "protocol": "adb"}, "http://[fd00::7]/x?y", "[fd00::7]:5555"),
    ],
)
def test_the_address_of_a_claim(spec: dict[str, Any], address: str, url: str) -> None:
    metadata = {"namespace": "lab", "name": "phones", "uid": "u", "resourceVersion": "1"}
    pool = observe_pool({"metadata": metadata, "spec": spec})
    view = SlotView("slot", "u", "lab", "phone-1", "1", address=address, lasting="external" in spec)
    told = url_of(view, pool)
    assert told == url
    Claim(id="slot-uid.7", secret="s" * 20, slot="phone-1", url=told, fence=7, ttl_seconds=60.0)
