"""What the operator's flags refuse, in words, before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tapforge_operator.config import broker_address, certificate_names
from tapforge_operator.main import main

GOOD = ("broker.lab.example", "*.lab.example", "BROKER", "10.0.0.9", "fd00::9")


def test_names_and_addresses_of_a_certificate() -> None:
    assert certificate_names(GOOD) == GOOD


@pytest.mark.parametrize("name", ["", ".x", "a..b", "https://a", "a_b", "*", "*.*.a", "a" * 64])
def test_what_no_certificate_can_be_good_for_is_refused(name: str) -> None:
    said = CliRunner().invoke(main, ["--certificate-name", name])
    assert said.exit_code == 2
    assert f"{name!r} is neither a DNS name nor an address" in said.output.replace("\n", " ")


#: http would show the token to the network; the others lead drivers nowhere, or are good for no certificate
NO_ADDRESSES = (
    "http://broker.example:8443",
    "broker.example:8443",
    "https://",
    "https://a:0",
    "https://a:99999",
    "https://me@a",
    "https://a?x=1",
    "https://a_b",
    "https://[fd00::9",
    "https://a\n",
    "https://a/b c",
    "https://a#b",
)


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_an_address_that_no_driver_takes_is_refused(text: str) -> None:
    said = CliRunner().invoke(main, ["--broker-url", text])
    assert said.exit_code == 2 and "--broker-url" in said.output


def test_an_address_that_drivers_take_stands() -> None:
    for text in ("", "https://broker.example", "https://10.0.0.9:443/claims", "https://[fd00::9]:8443"):
        assert broker_address(text) == text
