"""The tiny model is a Qwen3-VL folder like any other, and its tokenizer says an answer in few tokens."""

import json

import pytest

from tapforge_envs.phone.quickstart import COLUMNS, ROWS, TEMPLATES, cell
from tapforge_envs.phone.screen import center
from tapforge_envs.protocol import Home, Tap, Terminate
from tapforge_trainer.agents import parse
from tapforge_trainer.agents.qwen3vl import format_action
from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.tiny.folder import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_model(path, seed=3)
    return path


def test_the_same_seed_writes_the_same_model(folder, tmp_path):
    write_model(tmp_path, seed=3)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "preprocessor_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    write_model(tmp_path, seed=4)
    assert (tmp_path / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_a_tap_is_five_tokens_and_other_answers_are_one(folder):
    tokens = Tokens.load(folder)
    for column in range(COLUMNS):
        for row in range(ROWS):
            x, y = center(cell(column, row))
            text = format_action(Tap(x=x, y=y))
            assert len(tokens.encode(text)) == 5
            assert tokens.decode(tokens.encode(text)) == text
    for action in (Home(), Terminate(status="success"), Terminate(status="infeasible")):
        text = format_action(action)
        assert len(tokens.encode(text)) == 1
        assert parse(tokens.decode(tokens.encode(text))) == action


def test_every_goal_is_a_token_a_word(folder):
    tokens = Tokens.load(folder)
    for template in TEMPLATES:
        for params in template.combinations:
            goal = template.goal(params)
            assert len(tokens.encode(goal)) <= len(goal.split()) + 1, goal


def test_any_text_has_an_encoding(folder):
    tokens = Tokens.load(folder)
    for text in ("Grüße, 你好 \x00 <|image_pad|>", "12345", ""):
        assert tokens.decode(tokens.encode(text)) == text


def test_the_shipped_base_has_the_tokenizer_and_shape_that_the_code_writes(folder):
    """Else the base has to be built again: `tapforge tiny build --output trainer/tapforge_trainer/tiny/base`."""
    assert (SHIPPED / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    mine, shipped = (json.loads((place / "config.json").read_text()) for place in (folder, SHIPPED))
    for part in ("text_config", "vision_config"):
        for config in (mine, shipped):
            config[part].pop("dtype", None)
        assert mine[part] == shipped[part]
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 5_000_000
