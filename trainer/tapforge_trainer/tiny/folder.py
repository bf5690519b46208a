"""A randomly initialised tiny Qwen3-VL as a model folder that transformers, vLLM and the learner load.

The initial scales matter more than the shape: position embeddings of the usual size drown in the patches, and a model
that can't tell places apart never learns to look something up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .tokenizer import write_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3VLConfig

PATCH, MERGE = 16, 2
#: standard deviations of the initial weights
_INIT, _INIT_PATCH, _INIT_POSITION, _INIT_TOKEN = 0.05, 0.025, 0.7, 0.3


def write_model(folder: Path, seed: int) -> None:
    """Writes config, tokenizer, processor and random weights of about 1.1 million parameters (fp32)."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_processor(folder)
    config = tiny_config(folder)
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue  # norms and biases start as transformers sets them: ones and zeros
            if "pos_embed" in name:
                scale = _INIT_POSITION
            elif "embed_tokens" in name:
                scale = _INIT_TOKEN
            elif "patch_embed" in name:
                scale = _INIT_PATCH
            else:
                scale = _INIT
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.save_pretrained(folder)


def tiny_config(folder: Path) -> Qwen3VLConfig:
    """The configuration; the vocabulary is the one of the folder's tokenizer."""
    from tokenizers import Tokenizer
    from transformers import Qwen3VLConfig

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    return Qwen3VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "bos_token_id": None,
        },
        vision_config={
            "hidden_size": 64,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


def write_processor(folder: Path) -> None:
    """The image processor's settings: Qwen3-VL's, with sizes that leave a 96x160 screen as it is."""
    sizes = {"shortest_edge": 4 * (PATCH * MERGE) ** 2, "longest_edge": 4096 * (PATCH * MERGE) ** 2}
    common = {
        "size": sizes,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {**common, "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**common, "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
