"""Adapters by name, and a room that is cheap to import."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapforge_trainer.agents import agent_names, make_agent

OPTIONS = {
    "prompt": "compact",
    "history_images": 1,
    "history_steps": 4,
    "context_tokens": 512,
    "response_tokens": 64,
}


def test_an_unknown_name_suggests_the_nearest(model_folder: Path) -> None:
    assert "qwen3-vl" in agent_names()
    with pytest.raises(ValueError, match="unknown agent 'qwen3vl'; did you mean 'qwen3-vl'"):
        make_agent("qwen3vl", model_folder, **OPTIONS)
    with pytest.raises(ValueError, match=r"unknown agent 'Zz' \(known: .*qwen3-vl"):
        make_agent("Zz", model_folder, **OPTIONS)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        make_agent("qwen3-vl", tmp_path / "nowhere", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"prompt": "terse"}, "terse"),
        ({"history_images": 0}, "history_images is 0"),
        ({"history_steps": -1}, "history_steps is -1"),
        ({"response_tokens": 512}, "response_tokens 512"),
        ({"response_tokens": 0}, "response_tokens 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(model_folder: Path, change: dict, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make_agent("qwen3-vl", model_folder, **{**OPTIONS, **change})


def test_other_packages_bring_adapters_as_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    (tmp_path / "someones_agents.py").write_text(
        "def build(folder, **options):\n    return folder, options\n\n"
        "def older(folder, *, prompt, history_images, history_steps, context_tokens, response_tokens, image_first,\n"
        "          min_pixels, max_pixels, prompt_file, context):\n    return folder\n"
    )
    info = tmp_path / "someones_agents-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-agents\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tapforge.agents]\nsomeones = someones_agents:build\nold = someones_agents:older\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "someones" in agent_names()
    folder, options = make_agent("someones", model_folder, **OPTIONS)
    assert folder == model_folder
    assert options == {
        **OPTIONS,
        "image_first": False,
        "min_pixels": None,
        "max_pixels": None,
        "prompt_file": None,
        "context": None,
    }
    assert make_agent("someones", model_folder, **OPTIONS, keep=1)[1]["keep"] == 1
    assert make_agent("old", model_folder, **OPTIONS) == model_folder
    with pytest.raises(ValueError, match="no history in blocks: leave out adapter.history"):
        make_agent("old", model_folder, **OPTIONS, keep=1)


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = ["torch", "ray", "vllm", "transformers", "tokenizers", "PIL", "numpy"]
    code = f"import sys, tapforge_trainer.agents; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.strip() == "[]"


BASES = {"gui-owl": "qwen3_vl", "ui-tars": "qwen2_5_vl"}


def test_using_an_agent_loads_no_torch(model_folder: Path, tmp_path: Path) -> None:
    folders = {}
    for name in agent_names():
        folders[name] = str(shutil.copytree(model_folder, tmp_path / name))
        base = BASES.get(name.removesuffix("-computer"), "")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": base}))
    code = (
        "import sys; from pathlib import Path; from tapforge_trainer.agents import make_agent\n"
        f"for name, folder in {folders!r}.items():\n"
        f"    make_agent(name, Path(folder), **{OPTIONS | {'prompt': 'full', 'context_tokens': 8192}!r})\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.strip() == "[]"
