"""Files that belong to a release beside its code: samples, the kinds' CRDs, the locks of the trainer's packages.

A wheel has them inside this package (`pyproject.toml`, force-include), a checkout where its readers expect them. One
name leads to a file in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

Kind = Literal["samples", "crds", "locks"]

_PACKAGE: Final = Path(__file__).parent
#: below a checkout
_CHECKOUT: Final[dict[Kind, str]] = {"samples": "manifests/samples", "crds": "crds", "locks": "requirements"}


def folder(kind: Kind) -> Path:
    inside = _PACKAGE / "shipped" / kind
    return inside if inside.is_dir() else _PACKAGE.parents[1] / _CHECKOUT[kind]


def files(kind: Kind) -> dict[str, Path]:
    """By name, sorted. Samples and CRDs: the YAML files alone."""
    suffix = ".txt" if kind == "locks" else ".yaml"
    return {path.name: path for path in sorted(folder(kind).glob(f"*{suffix}"))}
