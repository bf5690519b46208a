"""Text and token ids, with a strict border between words and structure.

Promises:
- `encode` never yields a special token: text that spells "<|image_pad|>" stays text. `encode_with` yields those that
  it is given, and no others. `split` without markers finds any, and is for a
  chat template's own text alone.
- `allowed_ids` are what a policy may say: every ordinary token, <|im_end|>, and the special tokens that its family's
  answers hold (`sayable`). Other special tokens are banned at sampling and in log-probabilities.
- `expand` turns one placeholder per frame into one per visual token; nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .named_tokens import named_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: of texts beyond this only the last few are remembered: system prompts
_CACHED_CHARACTERS = 2_000
_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@lru_cache(maxsize=64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, markers)) + ")")


class Tokens:
    """A model's vocabulary. Owns its tokenizer: no other code may change that object's settings. `sayable`: special
    tokens of the family's answers, as far as the vocabulary has them; `stop`: the one that ends an answer; `named`:
    special tokens by the names that chat templates have for them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        origin: str = "tokenizer",
        *,
        sayable: Sequence[str] = (),
        stop: str = "<|im_end|>",
        named: Mapping[str, str] | None = None,
    ):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "encode special tokens as text": the name is the library's
        self._tokenizer = tokenizer
        special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        missing = [text for text in _SPECIALS if text not in special]
        if missing:
            raise ValueError(
                f"{origin} has no special token {', '.join(missing)}; a tokenizer of the Qwen-VL family has them, "
                "marked as special (else text could spell them)"
            )
        self.im_start, self.im_end, self.vision_start, self.vision_end, self.image_pad, self.video_pad = (
            special[text] for text in _SPECIALS
        )
        self.special = special
        self.named = dict(named or {})
        self.stop = special.get(stop, self.im_end)
        self.stop_ids: tuple[int, ...] = (self.stop,)
        # Tokens of a family whose end mark the vocabulary lacks are none of this model's.
        said = {special[text] for text in sayable if text in special and stop in special}
        self.banned_ids: tuple[int, ...] = tuple(sorted(set(special.values()) - said - {self.im_end, self.stop}))
        everything = set(tokenizer.get_vocab(with_added_tokens=True).values())
        self.allowed_ids: tuple[int, ...] = tuple(sorted(everything - set(self.banned_ids)))
        self._remembered = lru_cache(maxsize=8192)(self._encode)
        self._remembered_long = lru_cache(maxsize=16)(self._encode)

    @staticmethod
    def load(model_folder: Path, *, sayable: Sequence[str] = (), stop: str = "<|im_end|>") -> Tokens:
        from tokenizers import Tokenizer  # costs start-up time that a CLI without a model need not pay

        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; use a complete Qwen-VL model folder")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        return Tokens(tokenizer, str(path), sayable=sayable, stop=stop, named=named_tokens(model_folder))

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text: no special tokens, whatever the text spells."""
        return self._remembered(text) if len(text) <= _CACHED_CHARACTERS else self._remembered_long(text)

    def encode_with(self, text: str, markers: Sequence[str]) -> tuple[int, ...]:
        """Ids of text in which these special tokens count, as far as the vocabulary has them, and no others."""
        ids: list[int] = []
        for piece in self.split(text, markers):
            ids.extend(self.encode(piece) if isinstance(piece, str) else (piece,))
        return tuple(ids)

    def split(self, text: str, markers: Sequence[str] | None = None) -> list[str | int]:
        """Text cut at special tokens: strings that hold none of them, and ids. None: all that the vocabulary has."""
        named = self.special if markers is None else [m for m in markers if m in self.special]
        known: dict[str, str | int] = {marker: self.special[marker] for marker in named}
        if not known or "<" not in text:
            return [text] if text else []
        pattern = _pattern(tuple(sorted(known, key=len, reverse=True)))
        return [known.get(piece, piece) for piece in pattern.split(text) if piece]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without the end mark. Special tokens show as their names; they hide nowhere."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return self._tokenizer.decode(ids[:end], skip_special_tokens=False)

    def show(self, ids: Sequence[int]) -> str:
        """All of it as text, special tokens by their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def expand(self, ids: Sequence[int], visual_tokens: Sequence[int]) -> tuple[int, ...]:
        """`visual_tokens` holds the number for each frame, in order. Raises ValueError if counts differ."""
        pad = self.image_pad
        found = ids.count(pad)
        if found != len(visual_tokens):
            raise ValueError(f"{found} image placeholders for {len(visual_tokens)} frames")
        expanded: list[int] = []
        counts = iter(visual_tokens)
        for id in ids:
            if id == pad:
                expanded.extend([pad] * next(counts))
            else:
                expanded.append(id)
        return tuple(expanded)
