"""What brokers in memory live by."""

from __future__ import annotations

import own_time as own
import pytest


@pytest.fixture
async def own_time() -> own.OwnTime:
    """The test's loop keeps its own time."""
    return own.begin()
