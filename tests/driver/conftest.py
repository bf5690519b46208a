"""A run's driver against an operator of a few lines; its certificates are those of the small broker."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.append(str(Path(__file__).parent.parent / "slots"))

from small_broker import Authority
from small_operator import SmallOperator


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest_asyncio.fixture
async def operator(authority: Authority) -> AsyncIterator[SmallOperator]:
    operator = SmallOperator()
    async with operator.serving(authority):
        yield operator
