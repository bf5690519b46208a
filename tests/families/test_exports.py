"""An export is spelled as its base is, whoever wrote that one, and loads wherever its base loads: also in transformers
4, which does not know the fields and layouts that transformers 5 writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import real
from tests.families.samples import tokens

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.learner import export as exports
from tapforge_trainer.learner.base_layout import exported_config, write_config
from tapforge_trainer.learner.rank import Rank
from tapforge_trainer.model_source.tiny_base import SHIPPED, cache_root
from tapforge_trainer.placement.settings import LearnerSettings
from tapforge_trainer.run.adapters import prompted_by

#: the last transformers before 5, with the versions that it asks for of what it shares with 5
OLDER = ("transformers==4.57.6", "huggingface-hub==0.36.0", "tokenizers==0.22.1")
#: logits of a text with a picture of 2x2 visual tokens
LOGITS = """
import json, sys, torch, transformers
out = []
for folder in sys.argv[2:]:
    kind = getattr(transformers, sys.argv[1])
    model, told = kind.from_pretrained(folder, torch_dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    vision = model.config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size ** 2
    pixels = torch.linspace(-1, 1, 16 * size).view(16, size).to(model.dtype)
    ids = torch.tensor([[11, 12, 151652, *[151655] * 4, 151653, 13, 14, 15]])
    types = {} if transformers.__version__ < "5" else {"mm_token_type_ids": (ids == 151655).long()}
    with torch.no_grad():
        made = model.eval()(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 4, 4]]), **types,
        )
    out.append([str(model.dtype), made.logits[0, -1, :64].float().tolist()])
print(json.dumps([transformers.__version__, out]))
"""


def in_transformers_4(document: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json as transformers 4 spells it."""
    parts = {key: in_transformers_4(value, "") for key, value in document.items() if key.endswith("_config")}
    text = {key: value for key, value in document.items() if key not in (*parts, "dtype", "rope_parameters")} | parts
    if (rope := document.get("rope_parameters")) and "mrope_section" in rope:
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    return {**text, "torch_dtype": dtype, "transformers_version": "4.57.1"} if dtype else text


def base_of(name: str, layout: str, folder: Path) -> Path:
    """A model folder in float32 whose weights are links, in one of the layouts that people publish."""
    source = real.folder(name, flat=layout == "flat")
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = folder / "config.json"
    document = json.loads(config.read_text())
    config.unlink()
    if layout == "transformers 4":
        document = in_transformers_4(document, "float32")
    elif layout == "flat":
        document["torch_dtype"] = "float32"
    config.write_text(json.dumps(document | {"a field of theirs": {"ärger": [1, None]}}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("theirs\n")
    return folder


def export(
    base: Path, to: Path, dtype: Any = "float32", allowed: tuple[int, ...] | None = None, prompted: str = ""
) -> Path:
    """As the driver does it, by one rank in this process."""
    settings = LearnerSettings(str(base), allowed or tokens().allowed_ids, dtype=dtype, prompted=prompted)
    rank = Rank(settings, 0, torch.distributed.HashStore())
    try:
        partial = to.with_name(".partial")
        exports._prepare(to, partial)
        exports._export_rank(rank, str(partial))
        exports._publish(base, partial, to)
    finally:
        torch.distributed.destroy_process_group()
    return to


LAYOUTS = [
    ("qwen2-vl-7b-tiny", "flat"),
    ("qwen2.5-vl-7b-tiny", "flat"),
    ("qwen2.5-vl-7b-tiny", "transformers 5"),
    ("qwen3-vl-8b-tiny", "transformers 4"),
    ("qwen3-vl-30b-a3b-tiny", "transformers 4"),
]


#: whose names or layouts of tensors differ from transformers 5's
ALSO_SHORT = ("qwen2-vl-7b-tiny", "qwen3-vl-30b-a3b-tiny")


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_config_json_is_the_bases_but_for_the_number_format(name: str, layout: str, tmp_path: Path) -> None:
    base = base_of(name, layout, tmp_path / "base")
    (tmp_path / "export").mkdir()
    write_config(base, tmp_path / "export", "bfloat16")
    document, found = ((folder / "config.json").read_text() for folder in (base, tmp_path / "export"))
    assert json.loads(found) == json.loads(document.replace('"float32"', '"bfloat16"')) != json.loads(document)


@pytest.mark.parametrize(
    ("name", "layout"),
    [one if one[0] in ALSO_SHORT else pytest.param(*one, marks=pytest.mark.long) for one in LAYOUTS],
)
def test_an_export_is_spelled_as_its_base(name: str, layout: str, tmp_path: Path) -> None:
    base = base_of(name, layout, tmp_path / "base")
    made = export(base, tmp_path / "export", "bfloat16")
    document, found = (json.loads((folder / "config.json").read_text()) for folder in (base, made))
    number_formats = {key for key in ("dtype", "torch_dtype") if key in document}
    assert number_formats and all(found.pop(key) == "bfloat16" and document.pop(key) for key in number_formats)
    assert found == exported_config(document, "bfloat16") and list(found) == list(document)
    if layout != "transformers 5":
        assert found == document, "only the number format at the top is another one"
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (base, made))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[key], tensor.to(torch.bfloat16)) for key, tensor in theirs.items())
    files = [{str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} for folder in (base, made)]
    assert files[0] == files[1]
    for file in files[0] - {"config.json", "model.safetensors"}:
        assert (made / file).read_bytes() == (base / file).read_bytes() and not (made / file).is_symlink(), file


def test_an_export_says_how_it_was_prompted_and_not_how_its_base_was(tmp_path: Path) -> None:
    base = base_of("qwen2-vl-7b-tiny", "flat", tmp_path / "base")
    first = export(base, tmp_path / "first", prompted='{"prompt": "turns"}')
    assert prompted_by(first) == {"prompt": "turns"} and prompted_by(base) is None
    assert prompted_by(export(first, tmp_path / "second")) is None


def test_number_formats_are_named_where_the_base_names_them() -> None:
    base = {
        "torch_dtype": "float16",
        "dtype": None,
        "text_config": {"dtype": "float16", "rope_theta": 1e6},
        "vision_config": {"depth": 2},
    }
    assert exported_config(base, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "dtype": None,
        "text_config": {"dtype": "bfloat16", "rope_theta": 1e6},
        "vision_config": {"depth": 2},
    }
    assert exported_config({"model_type": "qwen3_vl"}, "bfloat16") == {"model_type": "qwen3_vl"}


def test_a_head_that_is_the_embedding_is_where_the_base_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever unties the two, reading another field of config.json, finds it; also over several files, one of which a
    single tensor is too large for."""
    base, allowed = tmp_path / "base", Tokens.load(SHIPPED).allowed_ids
    shutil.copytree(SHIPPED, base)
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, base / "model.safetensors", {"format": "pt"})
    plain = export(base, tmp_path / "plain", allowed=allowed)
    assert torch.equal(load_file(plain / "model.safetensors")["lm_head.weight"], embedding.float())
    monkeypatch.setattr(exports, "_FILE_BYTES", embedding.numel() * 4 - 1)
    made = export(base, tmp_path / "several", allowed=allowed)
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys() | {"lm_head.weight"}
    for file in set(index.values()):
        held = load_file(made / file)
        assert held.keys() == {name for name, place in index.items() if place == file}
        assert all(torch.equal(held[name], load_file(plain / "model.safetensors")[name]) for name in held)


@pytest.mark.long
def test_a_layout_of_experts_is_kept(tmp_path: Path) -> None:
    """Some files have experts as transformers 5 holds them."""
    base = base_of("qwen3-vl-30b-a3b-tiny", "transformers 5", tmp_path / "base")
    weights = base / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    own = {key: value.transpose(1, 2).contiguous() if ".experts." in key else value for key, value in tensors.items()}
    save_file(own, weights, {"format": "pt"})
    made = load_file(export(base, tmp_path / "export") / "model.safetensors")
    assert made.keys() == own.keys() and all(torch.equal(made[key], value) for key, value in own.items())


# --- an older transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def older() -> Path:
    """The packages of OLDER, installed once into the user's cache; everything else is this environment's."""
    folder = cache_root() / "test-packages" / OLDER[0]
    if folder.is_dir():
        return folder
    uv = shutil.which("uv") or next((str(path) for path in cache_root().glob("uv-*/bin/uv")), None)
    if uv is None:
        pytest.skip("NO EXPORT WAS LOADED BY AN OLDER TRANSFORMERS: there is no uv (make setup fetches it)")
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(new), *OLDER]
    try:
        subprocess.run(command, check=True, timeout=600)
        new.rename(folder)
    except subprocess.SubprocessError as error:
        pytest.skip(f"NO EXPORT WAS LOADED BY AN OLDER TRANSFORMERS: {OLDER[0]} can't be installed here: {error}")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), [one for one in LAYOUTS if one[1] != "transformers 5"])
def test_an_export_loads_where_its_base_loads(name: str, layout: str, older: Path, tmp_path: Path) -> None:
    """In the older transformers and in this one, with the same logits to the last bit, and nothing missing or left."""
    base = base_of(name, layout, tmp_path / "base")
    made = export(base, tmp_path / "export")
    kind = real.model_class(name).__name__
    for path, version in ((str(older), "4."), ("", "5.")):
        command = [sys.executable, "-c", LOGITS, kind, str(base), str(made)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found, (theirs, ours) = json.loads(done.stdout)
        assert found.startswith(version) and ours == theirs
