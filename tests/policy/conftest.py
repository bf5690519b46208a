"""One tiny model folder, one Ray, one engine and one learner of two ranks for all tests of this room: each takes many
seconds to start. Tests that change weights begin by putting the first ones back (`fresh`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from both_ends import Hand
from safetensors.torch import load_file, save_file
from tests.s3 import CREDENTIALS, Proxy, s3_proxy, s3_server
from tiny_samples import Tiny

from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.sync.proof import Probe, make_probe
from tapforge_trainer.tiny.folder import write_model

__all__ = ["s3_proxy", "s3_server"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that make an end of what all share run when no other one needs it, however files were named."""
    last = [item for item in items if "expendable" in _fixtures(item)]
    items[:] = [item for item in items if item not in last]
    end = max((place for place, item in enumerate(items, 1) if "both" in _fixtures(item)), default=len(items))
    items[end:end] = last


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    import torch

    torch.set_num_threads(1)  # as ranks have it; two that wait for each other are slower on matrices this small
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, 0)
    path = folder / "model.safetensors"
    weights = load_file(path)
    # Flatter than the model starts: many different tokens get sampled.
    weights["model.language_model.embed_tokens.weight"] *= 0.25
    save_file(weights, path, {"format": "pt"})
    return Tiny.of(folder)


@pytest.fixture(scope="session")
def ray_cluster(s3_proxy: Proxy) -> Iterator[None]:
    """Its workers inherit where object storage is."""
    import both_ends
    import ray
    import tiny_samples

    os.environ |= {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_proxy.endpoint}
    start_ray()
    for module in (tiny_samples, both_ends):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.shutdown()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def both(tiny: Tiny, ray_cluster: None) -> AsyncIterator[tuple[Engines, Learner]]:
    """An engine and two ranks, started side by side."""
    engines = Engines(tiny.engine_settings(), tiny.form, tiny.tokens.image_pad)
    learner = Learner(tiny.learner_settings(ranks=2))
    await asyncio.gather(engines.ready(), learner.ready())
    yield engines, learner
    await engines.close()
    await learner.close()


@pytest.fixture(scope="session")
def probe(tiny: Tiny) -> Probe:
    tokens = tiny.tokens
    marks = tokens.image_pad, tokens.vision_start, tokens.vision_end
    return make_probe(tiny.form, tokens.allowed_ids, *marks, tiny.engine_settings().context_tokens)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def first_weights(both: tuple[Engines, Learner], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tapforge_trainer.learner import checkpoints

    root = tmp_path_factory.mktemp("first")
    await checkpoints.save(both[1], root, 0, {})
    return root


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(both: tuple[Engines, Learner], first_weights: Path) -> Learner:
    """The learner of two ranks with its first weights and no optimizer state."""
    from tapforge_trainer.learner import checkpoints

    await checkpoints.load(both[1], first_weights)
    return both[1]


@pytest.fixture
def expendable(fresh: Learner, request: pytest.FixtureRequest) -> Learner:
    """`fresh` for a test after which it can't be used again."""
    items = request.session.items
    later = [item.nodeid for item in items[items.index(request.node) + 1 :] if "both" in _fixtures(item)]
    assert not later, f"{later} would find the learner dead"
    return fresh


@pytest.fixture
def next_version(both: tuple[Engines, Learner]) -> int:
    return both[0].version + 1


@pytest_asyncio.fixture(loop_scope="session")
async def hand(both: tuple[Engines, Learner]) -> AsyncIterator[Hand]:
    """On the engine; afterwards it goes on as it was, also when it is another one than before."""
    yield Hand(both[0])
    await Hand(both[0]).let_go()
