"""The published models as tests have them: configurations, vocabulary, folders."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from tests.families import real
from transformers import AutoModelForImageTextToText

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.learner.families import ModelConfig, families, family_of


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2-vl-7b", 8.291),
        ("qwen2.5-vl-3b", 3.755),
        ("qwen2.5-vl-7b", 8.292),
        ("qwen3-vl-2b", 2.128),
        ("qwen3-vl-4b", 4.438),
        ("qwen3-vl-8b", 8.767),
        ("qwen3-vl-30b-a3b", 31.07),
    ],
)
def test_configurations_have_the_published_sizes(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = real.model_class(name)(real.config(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_vocabulary_is_the_published_one() -> None:
    made = real.tokenizer()
    ids = {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|vision_start|>": 151652,
        "<|image_pad|>": 151655,
        "<tool_call>": 151657,
        "<|file_sep|>": 151664,
        "</think>": 151668,
    }
    assert {text: made.convert_tokens_to_ids(text) for text in ids} == ids
    # known from every Qwen2 and Qwen3
    assert made.encode("Hello, world!") == [9707, 11, 1879, 0]
    text = unicodedata.normalize("NFC", 'Größe 中文 🙂 {"x": 512}\n\n  tap\t12345')
    assert made.decode(made.encode(text)) == text


@pytest.mark.parametrize("name", real.TINY)
def test_a_folder_is_whole(name: str) -> None:
    from transformers import AutoProcessor

    folder = real.folder(name)
    tokens = Tokens.load(folder)
    assert tokens.image_pad == 151655
    found = ModelConfig.of_folder(folder)
    assert (found.model_type, found.image_token) == (real.family(name), 151655)
    _, loading = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    processor = AutoProcessor.from_pretrained(folder)
    said = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "tap"}]}], add_generation_prompt=True
    )
    assert "<|vision_start|><|image_pad|><|vision_end|>tap<|im_end|>" in said


@pytest.mark.parametrize("name", ["qwen2-vl-7b-tiny", "qwen2.5-vl-7b-tiny"])
def test_the_flat_layout_is_the_same_model(name: str) -> None:
    from transformers import AutoConfig

    flat, nested = real.folder(name, flat=True), real.folder(name)
    assert "text_config" not in json.loads((flat / "config.json").read_text())
    ours = [ModelConfig.of_folder(folder) for folder in (flat, nested)]
    assert ours[0].text["num_hidden_layers"] == ours[1].text["num_hidden_layers"] == 2
    theirs = [AutoConfig.from_pretrained(folder) for folder in (flat, nested)]
    for field in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(theirs[0].text_config, field) == getattr(theirs[1].text_config, field)
    for field in ("rope_theta", "mrope_section"):
        assert theirs[0].text_config.rope_parameters[field] == theirs[1].text_config.rope_parameters[field]
    flat_vision, vision = (config.vision_config.to_dict() for config in theirs)
    assert vision.items() <= flat_vision.items()


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:

    real.write_folder(tmp_path, "qwen3-vl-2b-tiny", 2, 2, "bfloat16", file_bytes=20 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_names_and_layouts_come_back() -> None:
    """From the published files to parameters, and to the engine, which takes what was published."""
    from safetensors.torch import load_file

    for name in real.TINY:
        folder = real.folder(name)
        family = family_of(ModelConfig.of_folder(folder))
        published = load_file(folder / "model.safetensors")
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        parameters = dict(model.named_parameters())
        assert {family.parameter_of(key) for key in published} == parameters.keys()
        for key, tensor in published.items():
            own = family.parameter_of(key)
            assert torch.equal(family.for_engine(own, parameters[own].detach()), tensor), key


def test_the_engine_takes_experts_as_they_were_published() -> None:
    """vLLM's class says that the sides of fused experts are swapped: (experts, in, out). Parameters are (experts, out,
    in)."""
    source = (Path(_vllm()) / "model_executor" / "models" / "qwen3_vl_moe.py").read_text()
    assert "is_fused_checkpoint_transposed=True" in source
    tensor = torch.empty(8, 192, 256)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert families()["qwen3_vl_moe"].for_engine(name, tensor).shape == (8, 256, 192)
    assert families()["qwen3_vl"].for_engine(name, tensor) is tensor


def _vllm() -> str:
    from importlib.util import find_spec

    return str(Path(find_spec("vllm").origin).parent)


@pytest.mark.parametrize("name", real.TINY)
def test_lora_adapts_the_language_model_only(name: str) -> None:
    family = families()[real.family(name)]
    with torch.device("meta"):
        model = real.model_class(name)(real.config(name, 2, 2))
    pattern = re.compile(family.lora_pattern())
    found = {key for key, part in model.named_modules() if pattern.fullmatch(key)}
    assert len(found) == 2 * len(family.lora_targets)
    assert all(isinstance(model.get_submodule(key), torch.nn.Linear) and ".visual." not in key for key in found)
