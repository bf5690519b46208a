"""kstatus is built before it is asked: a minute, once. Where it can't be built (no Go) its tests are skipped with the
reason; in CI that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from e2e.cluster import CannotBuild
from e2e.gitops import kstatus


@pytest.fixture(scope="session")
def flux() -> Callable[..., list[kstatus.Reading]]:
    try:
        kstatus.read()
    except CannotBuild as error:
        if os.environ.get("CI"):
            pytest.fail(f"no kstatus, and in CI there must be one: {error}", pytrace=False)
        pytest.skip(f"NOTHING OF WHAT FLUX READS WAS TESTED: {error}")
    return kstatus.read
