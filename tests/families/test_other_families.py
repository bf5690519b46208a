"""A model family of another package: found by its entry point, refused where it is none or offered twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tapforge_trainer.learner.families import FolderError, ModelConfig, families, family_named, family_of, shape_of
from tapforge_trainer.memory.known import config_of, published

SOURCE = """
from dataclasses import replace
from tapforge_trainer.learner.families import family_named

OURS = family_named("qwen2_vl")
FAMILY = replace(
    OURS,
    model_type="their_vl",
    engine_module="their_family.engine",
    published={"Their-VL-1B": OURS.published["Qwen2-VL-2B"] | {"model_type": "their_vl"}},
    repositories={"their-vl-1b": "Their-VL-1B"},
)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *entry_points: str) -> None:
    """Puts a real distribution with these entry points on the path."""
    (folder / "their_family.py").write_text(SOURCE)
    info = folder / "their_family-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tapforge.families]\n" + "\n".join(entry_points) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "their_family", raising=False)


def test_a_family_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = set(families())
    install(tmp_path, monkeypatch, "their_vl = their_family:FAMILY")
    assert set(families()) == ours | {"their_vl"}
    config = config_of("someone/Their-VL-1B")
    assert config is not None and "Their-VL-1B" in published()
    assert family_of(config).engine_module == "their_family.engine"
    assert shape_of(config).model_type == "their_vl"
    assert shape_of(config).parameters == shape_of(_config("Qwen2-VL-2B")).parameters


def _config(name: str) -> ModelConfig:
    return ModelConfig.of_document(Path("model"), published()[name])


@pytest.mark.parametrize(
    ("lines", "asked", "error", "words"),
    [
        (["qwen3_vl = their_family:FAMILY"], "qwen3_vl", ValueError, "more than once: .*tapforge's own"),
        (["llava = their_family:FAMILY"], "llava", TypeError, "not a Family 'llava'"),
        (["llava = their_family:SOURCE"], "llava", AttributeError, "SOURCE"),
        (["their_vl = their_family:OURS"], "their_vl", TypeError, "not a Family 'their_vl'"),
        (["their_vl = their_family:FAMILY"], "thier_vl", FolderError, "it trains qwen2_vl, .*, their_vl"),
    ],
)
def test_what_is_no_family_of_that_name_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    asked: str,
    error: type[Exception],
    words: str,
) -> None:
    install(tmp_path, monkeypatch, *lines)
    with pytest.raises(error, match=words):
        family_named(asked)
