"""A small model folder: a byte-level tokenizer with Qwen3-VL's special tokens, and its image processor's settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn import draw_frame, draw_png
from small_tokenizer import PROCESSOR, train_tokenizer

from tapforge_envs.protocol import Frame
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.agents.tokens import Tokens


@pytest.fixture(scope="session")
def png() -> Callable[..., bytes]:
    return draw_png


@pytest.fixture(scope="session")
def frame() -> Callable[..., Frame]:
    return draw_frame


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
