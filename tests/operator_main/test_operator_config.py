"""What the operator's flags refuse, in words, before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tapforge_operator.config import certificate_names
from tapforge_operator.main import main

GOOD = ("broker.lab.example", "*.lab.example", "BROKER", "10.0.0.9", "fd00::9")


def test_names_and_addresses_of_a_certificate() -> None:
    assert certificate_names(GOOD) == GOOD


@pytest.mark.parametrize("name", ["", ".x", "a..b", "https://a", "a_b", "*", "*.*.a", "a" * 64])
def test_what_no_certificate_can_be_good_for_is_refused(name: str) -> None:
    said = CliRunner().invoke(main, ["--certificate-name", name])
    assert said.exit_code == 2
    assert f"{name!r} is no DNS name and no address" in said.output.replace("\n", " ")
