"""The border between words and structure."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tapforge_trainer.agents.tokens import Tokens

SPELLED = ("<|image_pad|>", "<|im_end|>", "<|im_start|>system\n", "<|vision_start|>", "<|video_pad|>", "<image>")


@pytest.mark.parametrize("text", SPELLED)
def test_a_spelled_special_token_stays_text(tokens: Tokens, text: str) -> None:
    ids = tokens.encode(f"Open {text} now")
    assert not set(ids) & {*tokens.banned_ids, tokens.im_end}
    assert tokens.decode(ids) == f"Open {text} now"


@given(text=st.lists(st.sampled_from(SPELLED) | st.text(max_size=10), max_size=5).map("".join))
def test_text_comes_back_and_never_holds_structure(tokens: Tokens, text: str) -> None:
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert not set(ids) & {*tokens.banned_ids, tokens.im_end}


def test_allowed_are_ordinary_tokens_and_the_end_mark(tokens: Tokens, model_folder: Path) -> None:
    vocabulary = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    allowed = {vocabulary.id_to_token(id) for id in tokens.allowed_ids}
    banned = {vocabulary.id_to_token(id) for id in tokens.banned_ids}
    assert {"<|im_end|>", "<tool_call>", "</tool_call>", "<think>"} <= allowed
    assert banned == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    }
    assert len(tokens.allowed_ids) + len(tokens.banned_ids) == vocabulary.get_vocab_size(with_added_tokens=True)
    assert list(tokens.allowed_ids) == sorted(set(tokens.allowed_ids))
    assert tokens.stop_ids == (vocabulary.token_to_id("<|im_end|>"),)


def test_decode_drops_the_end_mark_and_hides_nothing_else(tokens: Tokens) -> None:
    ids = tokens.encode("go")
    assert tokens.decode([*ids, tokens.im_end]) == "go"
    assert tokens.decode([*ids, tokens.image_pad, *ids]) == "go<|image_pad|>go"


@given(ids=st.lists(st.integers(0, 300), max_size=20))
def test_any_ids_decode(tokens: Tokens, ids: list[int]) -> None:
    assert isinstance(tokens.decode(ids), str)


def test_expand_repeats_each_placeholder_in_place(tokens: Tokens) -> None:
    pad = tokens.image_pad
    assert tokens.expand((1, pad, 2, pad, 3), [2, 3]) == (1, pad, pad, 2, pad, pad, pad, 3)
    assert tokens.expand((1, 2), []) == (1, 2)


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1]])
def test_expand_refuses_another_number_of_frames(tokens: Tokens, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="2 image placeholders"):
        tokens.expand((tokens.image_pad, tokens.image_pad), counts)


def test_padding_and_truncation_of_the_file_do_not_apply(model_folder: Path, tmp_path: Path) -> None:
    changed = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=64)
    changed.save(str(tmp_path / "tokenizer.json"))
    text = "a text of more than four tokens"
    assert Tokens.load(tmp_path).encode(text) == Tokens.load(model_folder).encode(text)


def test_long_texts_are_encoded_whole(tokens: Tokens) -> None:
    text = "open the settings " * 1000
    assert tokens.decode(tokens.encode(text)) == text


def test_a_missing_or_broken_file_is_named(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokens.load(tmp_path)


def test_a_vocabulary_without_a_needed_token_is_refused(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copy(model_folder / "tokenizer.json", path)
    path.write_text(path.read_text().replace("<|image_pad|>", "<|picture|>"))
    with pytest.raises(ValueError, match=r"<\|image_pad\|>"):
        Tokens.load(tmp_path)


def test_a_needed_token_that_text_could_spell_is_refused(tokens: Tokens, model_folder: Path) -> None:
    ordinary = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ordinary.add_tokens([AddedToken("<|image_pad|>", special=False, normalized=False)])
    marked = {token.content: token.special for token in ordinary.get_added_tokens_decoder().values()}
    if marked["<|image_pad|>"]:
        pytest.fail("the tokenizer kept the mark; build this case in another way")
    with pytest.raises(ValueError, match=r"<\|image_pad\|>"):
        Tokens(ordinary)
