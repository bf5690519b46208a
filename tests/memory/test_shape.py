"""Parameter counts of a model from its config.json, against the Hugging Face classes, and what a broken file gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.real import NAMES, config, flat_config, model_class

from tapforge_trainer.learner.families import FolderError, ModelConfig, Shape, shape_of
from tapforge_trainer.memory.known import config_of, gpu_bytes, published

LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def of_document(document: Mapping[str, Any]) -> Shape:
    return shape_of(ModelConfig.of_document(Path("model"), document))


@pytest.mark.parametrize("name", [*NAMES, "qwen3-vl-8b-tiny", "qwen2.5-vl-7b-tiny", "qwen3-vl-30b-a3b-tiny"])
def test_counts_are_those_of_the_hugging_face_model(name: str) -> None:
    made = config(name)
    with torch.device("meta"):
        model = model_class(name)(made)
    shape = of_document(made.to_dict())
    vision = model.model.visual
    layers = model.model.language_model.layers

    def count(part: torch.nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    assert shape.parameters == count(model)
    assert shape.vision.parameters == count(vision)
    assert [layer.parameters for layer in shape.layers] == [count(layer) for layer in layers]
    assert shape.vision.block == count(vision.blocks[0])
    assert shape.embedding == model.get_input_embeddings().weight.numel()
    assert shape.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    names = [n for n in LORA if n in shape.layers[0].linears]
    linears = {n.rpartition(".")[2]: m for n, m in layers[0].named_modules() if isinstance(m, torch.nn.Linear)}
    assert shape.adapters(16, tuple(names))[0] == sum(
        16 * (linears[n].in_features + linears[n].out_features) for n in names
    )


@pytest.mark.parametrize("name", ["qwen2-vl-7b", "qwen2.5-vl-3b", "qwen2.5-vl-7b"])
def test_the_flat_layout_says_the_same(name: str) -> None:
    assert of_document(flat_config(name)) == of_document(config(name).to_dict())


@pytest.mark.parametrize("outside", [None, True, False])
@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize("name", ["qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"])
def test_of_two_fields_that_tie_the_head_the_one_counts_that_transformers_takes(
    name: str, inside: bool | None, outside: bool | None, tmp_path: Path
) -> None:
    made = config(name, 1, 1)
    document = made.to_dict()
    for part, value in ((document, outside), (document["text_config"], inside)):
        part.pop("tie_word_embeddings", None)
        part |= {} if value is None else {"tie_word_embeddings": value}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert of_document(document).tied == type(made).from_pretrained(tmp_path).tie_word_embeddings


def test_the_table_has_the_sizes_of_the_published_configurations() -> None:
    named = {name.lower(): name for name in published()}
    for name in NAMES:
        assert of_document(published()[named[name]]) == of_document(config(name).to_dict()), name


@pytest.mark.parametrize(
    ("repo", "billions"),
    [
        ("Qwen/Qwen3-VL-32B-Instruct", 33.357),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 33.453),
        ("ByteDance-Seed/UI-TARS-1.5-7B", 8.292),
        ("someone/qwen3-vl-2b-thinking", 2.128),
        ("Qwen/Qwen2-VL-2B-Instruct", 2.209),
    ],
)
def test_a_repository_is_known_by_its_name(repo: str, billions: float) -> None:
    found = config_of(repo)
    assert found is not None
    assert round(shape_of(found).parameters / 1e9, 3) == billions
    assert config_of(repo + "-GGUF") is None


@pytest.mark.parametrize(
    ("product", "mib"),
    [
        ("NVIDIA-H100-80GB-HBM3", 81_559),
        ("NVIDIA-A100-SXM4-40GB", 40_960),
        ("NVIDIA-A100-80GB-PCIe", 81_920),
        ("NVIDIA-L40S", 46_068),
        ("h200", 143_771),
        ("Tesla-V100-SXM2-32GB", 32_768),
        ("A100", None),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 10_240),
        ("NVIDIA-H100-MIG-3g.40gb", 40_960),
        ("NVIDIA-H100-MIG", None),
        ("NVIDIA-GeForce-RTX-4090-Laptop-GPU", None),
        ("NVIDIA-X1", None),
    ],
)
def test_a_gpu_is_known_by_its_product(product: str, mib: int | None) -> None:
    assert gpu_bytes(product) == (None if mib is None else mib * 2**20)


def test_what_is_missing_or_absurd_is_named() -> None:
    good = json.loads(json.dumps(published()["Qwen3-VL-8B"]))
    for field, value in (("num_hidden_layers", -1), ("hidden_size", "4096"), ("num_key_value_heads", 5)):
        bad = good | {"text_config": good["text_config"] | {field: value}}
        with pytest.raises(FolderError, match=f"text_config.{field} is"):
            of_document(bad)
    del good["text_config"]["intermediate_size"]
    with pytest.raises(FolderError, match=r"no text_config.intermediate_size"):
        of_document(good)
    with pytest.raises(FolderError, match="llama"):
        of_document(good | {"model_type": "llama"})
    with pytest.raises(FolderError, match="o_prj is not a linear layer"):
        of_document(published()["Qwen3-VL-8B"]).adapters(8, ("o_prj",))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(published())), data=st.data())
@settings(max_examples=500, deadline=None)
def test_any_file_ends_in_sizes_or_in_an_error_that_names_something(name: str, data: st.DataObject) -> None:
    document: dict[str, Any] = json.loads(json.dumps(published()[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        places = [document, *(part for part in document.values() if isinstance(part, dict))]
        place = data.draw(st.sampled_from(places))
        field = data.draw(st.sampled_from(sorted(place))) if place else "x"
        if data.draw(st.booleans()):
            place.pop(field, None)
        else:
            place[field] = data.draw(_JSON)
    try:
        shape = of_document(document)
    except FolderError as error:
        assert "config.json" in str(error) or "holds a" in str(error)
    else:
        assert shape.parameters > shape.vision.parameters > 0
        assert len(shape.layers) >= 1
