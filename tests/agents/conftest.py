"""A small model folder: a byte-level tokenizer with Qwen3-VL's special tokens, and its image processor's settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn import draw_frame, draw_png
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tapforge_envs.protocol import Frame
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.agents.tokens import Tokens

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: as in Qwen's tokenizer, ordinary tokens that the model may say
UNMARKED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CORPUS = [
    '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [166, 100]}}\n</tool_call>',
    "open the settings and turn on the wifi",
    " click click home back type",
]


@pytest.fixture(scope="session")
def png() -> Callable[..., bytes]:
    return draw_png


@pytest.fixture(scope="session")
def frame() -> Callable[..., Frame]:
    return draw_frame


#: what an image processor says beside its bounds
PROCESSOR = {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}


def train_tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    built.train_from_iterator(CORPUS * 4, trainer)
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    built.add_tokens([AddedToken(text, special=False, normalized=False) for text in UNMARKED])
    return built


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 256 * 32 * 32}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"size": size}))
    return folder


@pytest.fixture(scope="session")
def tokens(model_folder: Path) -> Tokens:
    return Tokens.load(model_folder)


@pytest.fixture(scope="session")
def agent_of(model_folder: Path) -> Callable[..., ChatAgent]:
    def build(**changes) -> ChatAgent:
        options = {
            "prompt": "compact",
            "history_images": 1,
            "history_steps": 8,
            "context_tokens": 4096,
            "response_tokens": 64,
        }
        return make_agent("qwen3-vl", model_folder, **{**options, **changes})

    return build
