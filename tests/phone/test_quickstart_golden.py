"""The quickstart image's screens at 96x160 never change: models are trained on them.

Hashes are of pixels, so that another zlib doesn't matter. A wanted change of these screens needs new base models.
"""

import hashlib
import io

import pytest
from PIL import Image

from tapforge_envs.phone import catalog, quickstart
from tapforge_envs.phone.tasks import SEEDS, make_task

GOLDEN = {
    0: "04e7f76809dcbb48",
    1: "194d24bd470d8531",
    2: "5941a9fbb0491920",
    3: "493ba021acac563c",
    4: "379eb3611341ee9a",
    5: "76d58a40ad63d657",
    6: "26aee762099dc60b",
    7: "f0dd9f002f9a11c2",
    8: "3bb6272f687899f9",
    9: "a8a2b44ef56ac5d8",
    10: "a0ffb02c34265d0d",
    11: "613996911196e82f",
    12: "1e8894eac8875005",
    13: "af11b1d1fc86ab8e",
    14: "00ae044b67ed824d",
    15: "9b0534061d3ce053",
    16: "06538398be42a30a",
    17: "d7ead85d41cc732e",
    18: "7a0c406513b8c15a",
    19: "f3d0a0d34bd4d138",
    20: "9020e3e5e45bcffb",
    21: "8e78c80c1d814e7b",
    22: "f5c42c2c40f460e8",
    23: "cfd212791a4f2e6a",
}


def _digest(number: int) -> str:
    """All screens of a demonstration: first, after each step. The task doesn't depend on how splits are made."""
    template = quickstart.TEMPLATES[number % len(quickstart.TEMPLATES)]
    params = template.combinations[number * 7 % len(template.combinations)]
    task = make_task("quickstart", template, params, number * 1_234_567 + number % 3 * SEEDS)
    phone = catalog.phone_for("quickstart", 96, 160)
    seen = hashlib.sha256()

    def see(observation) -> None:
        with Image.open(io.BytesIO(observation.frame.data)) as image:
            assert image.size == (96, 160)
            seen.update(image.convert("RGB").tobytes())

    see(phone.reset(task.seed, catalog.rules_of(task)))
    for do in template.plan(task.params, lambda: False):
        see(phone.step(do.resolve(phone)).observation)
    return seen.hexdigest()[:16]


@pytest.mark.parametrize("seed", GOLDEN)
def test_screens_of_the_quickstart_phone_are_what_models_were_trained_on(seed):
    assert _digest(seed) == GOLDEN[seed]
