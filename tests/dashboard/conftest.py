"""Made runs (`bench/load/made_run.py`), and the browser of the phone page's tests."""

import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "bench"), str(_ROOT / "tests" / "phone")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index of a test is in the user's cache."""
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5,000 episodes, which no test changes."""
    from load.made_run import Shape, make_run

    shape = Shape(5000, steps=4, screens=40, prompt=12, answer=8)
    return make_run(tmp_path_factory.mktemp("runs") / "made", shape)
