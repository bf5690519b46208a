"""Prompts and answers as the model's vocabulary has them: with the tokenizer of the run's model, where it is here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tapforge_api import TrainingRun

from ..model_source.hub import cached_snapshot
from ..model_source.tiny_base import base_folder
from ..run.folder import EXPORT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE: Final = "tokenizer.json"
#: placeholders of a frame, by family
_PADS: Final = ("<|image_pad|>", "<image_soft_token>", "<|image|>")


class Texts:
    """Loads the tokenizer when it is asked for the first time. `why`: why there is none, once it was."""

    def __init__(self, folder: Path, run: TrainingRun):
        self._folder, self._run = folder, run
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self.why = ""

    def each(self, ids: Sequence[int]) -> list[str] | None:
        """The text of every token by itself; None without a tokenizer."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return None
        return [tokenizer.decode([id], skip_special_tokens=False) for id in ids]

    def prompt(self, ids: Sequence[int], frames: Sequence[str]) -> list[dict[str, Any]]:
        """Texts and frames in the order in which the model saw them; ids where there is no tokenizer."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return [{"ids": list(ids)}, *({"frame": frame} for frame in frames)]
        pads = {tokenizer.token_to_id(pad) for pad in _PADS} - {None}
        if sum(id in pads for id in ids) != len(frames):
            return [{"text": _text(tokenizer, ids)}, *({"frame": frame} for frame in frames)]
        parts: list[dict[str, Any]] = []
        left, piece = iter(frames), list[int]()
        for id in ids:
            if id in pads:
                parts += [{"text": _text(tokenizer, piece)}] if piece else []
                parts.append({"frame": next(left)})
                piece = []
            else:
                piece.append(id)
        return parts + ([{"text": _text(tokenizer, piece)}] if piece else [])

    def _loaded(self) -> Tokenizer | None:
        with self._lock:
            if self._tokenizer is None and not self.why:
                self._load()
            return self._tokenizer

    def _load(self) -> None:
        path = next((path for folder in self._folders() if (path := folder / _FILE).is_file()), None)
        if path is None:
            self.why = "the tokenizer of the run's model is not on this machine: tokens are shown as their ids"
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        except ImportError:
            self.why = "the package tokenizers is not installed: tokens are shown as their ids"
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            self.why = f"{path} is not a tokenizer: {error}"

    def _folders(self) -> list[Path]:
        source = self._run.spec.model.source
        found = [self._folder / EXPORT]
        try:
            if source.tiny is not None:
                found.append(base_folder())
            if source.path is not None:
                found.append(Path(source.path.folder))
            if source.hugging_face is not None:
                cached = cached_snapshot(source.hugging_face.repo, source.hugging_face.revision)
                found += [] if cached is None else [cached]
        except (OSError, ImportError):
            pass  # no base was built here
        return found


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text
