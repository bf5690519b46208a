"""Special tokens by the names that a chat template calls them by, `eos_token` for one: as transformers reads them of a
tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: what Qwen2's tokenizer, which all these models have, calls so where its files don't say
_QWEN2: Final = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def named_tokens(folder: Path) -> dict[str, str]:
    """Of tokenizer_config.json, and of special_tokens_map.json where that one has no list of tokens. A name that is
    null there has no token. Raises ValueError for a file that can't be read."""
    config = _object(folder / "tokenizer_config.json")
    found = dict(_QWEN2) if str(config.get("tokenizer_class") or "Qwen2").startswith("Qwen2") else {}
    files = [config] if "added_tokens_decoder" in config else [config, _object(folder / "special_tokens_map.json")]
    for file in files:
        for name in NAMES:
            if name not in file:
                continue
            value = file[name]
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[name] = text
            else:
                found.pop(name, None)
    return found


def _object(path: Path) -> Mapping[str, Any]:
    """Empty without the file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} is {type(found).__name__}, no JSON object")
    return found
