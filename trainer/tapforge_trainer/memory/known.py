"""Facts that a plan needs no download for: sizes of the models that families name, and of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tapforge_trainer.learner.families import ModelConfig, families
from tapforge_trainer.run.model_facts import published_as

MIB: Final = 2**20
GIB: Final = 2**30


def published() -> Mapping[str, Mapping[str, Any]]:
    """What config.json of each published model says, as far as sizes go."""
    return {name: config for family in families().values() for name, config in family.published.items()}


def config_of(repo: str) -> ModelConfig | None:
    """Of a repository of Hugging Face, upper and lower case being the same; None: it is not known here."""
    known = published_as(repo)
    return None if known is None else ModelConfig.of_document(Path(repo), known)


#: MiB that nvidia-smi reports; a name is one of the words of nvidia.com/gpu.product, without "NVIDIA"
GPUS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "B200": 183_359,
        "H200": 143_771,
        "H100-80GB": 81_559,
        "H100-PCIe": 81_559,
        "H100-NVL": 95_830,
        "H20": 97_871,
        "A100-80GB": 81_920,
        "A100-40GB": 40_960,
        "L40S": 46_068,
        "L40": 46_068,
        "L4": 23_034,
        "A10G": 23_028,
        "A10": 23_028,
        "A40": 46_068,
        "RTX-A6000": 49_140,
        "RTX-6000-Ada": 49_140,
        "RTX-5090": 32_607,
        "RTX-4090": 24_564,
        "RTX-3090": 24_576,
        "V100-32GB": 32_768,
        "V100-16GB": 16_384,
        "T4": 15_360,
    }
)


def gpu_bytes(product: str) -> int | None:
    """Of a GPU, or of a slice of one, by its name or its nvidia.com/gpu.product; None: not known here, or several that
    differ."""
    words = set(product.upper().replace("_", "-").replace(" ", "-").split("-"))
    if "MIG" in words:  # its slice is the last word, such as 1g.10gb
        slices = [int(found[1]) for word in words if (found := re.fullmatch(r"\d+G\.(\d+)GB.*", word))]
        return slices[0] * 1024 * MIB if len(slices) == 1 else None
    if "LAPTOP" in words:  # another card of the same name
        return None
    known = {name: set(name.upper().split("-")) for name in GPUS}
    inside = [name for name, its in known.items() if its <= words]
    if inside:
        return GPUS[max(inside, key=len)] * MIB
    sizes = {GPUS[name] for name, its in known.items() if words <= its}
    return sizes.pop() * MIB if len(sizes) == 1 else None
