"""The tiny model's tokenizer: byte-level BPE, Qwen's special tokens, and one token for each fixed part of an answer.

A tap is then six tokens (head, x, comma, y, tail, end of turn), any other quickstart answer two. Every other text still
has an encoding: all 256 bytes are in the vocabulary. Numbers of up to three digits are units when the grid uses them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tapforge_envs.phone.quickstart import COLUMNS, ROWS, TEMPLATES, cell
from tapforge_envs.phone.screen import center
from tapforge_envs.protocol import Action, Back, Home, Tap, Terminate
from tapforge_trainer.agents.qwen3vl import format_action

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: answers without coordinates: one token each
_WHOLE: tuple[Action, ...] = (
    Home(),
    Back(),
    Terminate(status="success"),
    Terminate(status="failure"),
    Terminate(status="infeasible"),
)
_WORDS = r"[0-9]{1,3}| ?[A-Za-z_]+|[^A-Za-z0-9]+"


def _taps() -> Iterator[str]:
    for column in range(COLUMNS):
        for row in range(ROWS):
            x, y = center(cell(column, row))
            yield format_action(Tap(x=x, y=y))


def _fixed_parts() -> list[str]:
    head, _, rest = next(_taps()).partition("[")
    tail = rest[rest.index("]") :]
    return [head + "[", tail, *(format_action(action) for action in _WHOLE)]


#: templates whose wording makes the vocabulary: those of the base's sentences. Others use the same words.
_WORDING = ("open", "open_two", "switch", "switch_two", "count", "switch_then_open", "two_panels", "missing_switch")


def _texts() -> Iterable[str]:
    for template in (t for t in TEMPLATES if t.name in _WORDING):
        for params in template.combinations:
            yield template.goal(params) + "\n"
    for _ in range(40):
        for tap in _taps():
            yield tap[tap.index("[") + 1 : tap.index("]")]
        yield "user\n"
        yield "assistant\n"
        yield " click click home home back invalid\n"


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json. The same code gives the same bytes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=4,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False, special=False) for part in _fixed_parts()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
