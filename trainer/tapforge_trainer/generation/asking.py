"""Asks the endpoint that proposes: what was answered is in a journal, and what it may cost has a bound.

An answer that is in the journal costs nothing and is never asked for again: a command that was stopped goes on where it
was. The key is that of all that decides an answer: the texts, the screen, the model and its sampling, the round.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from tapforge_api.judge import JudgeModel

from ..judges.endpoint import Endpoints, key_of
from ..judges.openai_chat import Said, wire_of
from ..judges.question import Question
from ..judges.usage import Usage


class SpentError(Exception):
    """The bound on what may be asked is reached."""


class _Entry(BaseModel):
    """A line of the journal."""

    key: str
    texts: list[str | None] = Field(min_length=1)
    tokens: int


class Asker:
    """Use it as an async context manager."""

    def __init__(
        self,
        model: JudgeModel,
        journal: Path,
        *,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        deadline_seconds: float = 300.0,
        environ: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
    ):
        """`max_tokens`: of questions and answers together, as the endpoint counts them; both bounds count what the
        journal has. `say`: which endpoint is waited for. Raises ValueError for a key or a wire that isn't there, and
        for a journal that isn't one."""
        self._model = model
        self._wire = wire_of(model)
        self._key = key_of(model.api_key, os.environ if environ is None else environ, model.name)
        self._path, self._deadline = journal, deadline_seconds
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._endpoints = Endpoints(say)
        self._answers: dict[str, list[str | None]] = {}
        self.requests, self.tokens, self.kept = 0, 0, 0
        self._read_journal()

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._endpoints.close()

    def _read_journal(self) -> None:
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = _Entry.model_validate_json(line)
            except ValidationError as error:
                why = error.errors(include_url=False)[0]["msg"]
                raise ValueError(f"{self._path}:{number} is not an answer that was kept: {why}; remove it") from error
            self._answers[entry.key] = entry.texts
            self.requests += 1
            self.tokens += entry.tokens
        if whole != data:
            os.truncate(self._path, len(whole))

    async def ask(self, text: str, picture: bytes | None, round_: int) -> str | None:
        """The answer's text; None for one that was cut off or refused. Raises EndpointError and SpentError."""
        parts = (text,) if picture is None else (picture, text)
        about = [self._model.model, self._model.temperature, self._model.max_tokens, self._model.seed, round_, text]
        key = hashlib.sha256(json.dumps(about).encode() + (picture or b"")).hexdigest()
        if key in self._answers:
            self.kept += 1
            return self._answers[key][0]
        if self._max_requests is not None and self.requests >= self._max_requests:
            raise SpentError(f"--max-requests {self._max_requests:,} are spent")
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            raise SpentError(f"--max-tokens {self._max_tokens:,} are spent ({self.tokens:,})")
        question, usage = Question("", parts, None, key), Usage()
        said: Said = await self._endpoints.of(self._model).ask(
            self._wire.path,
            lambda: json.dumps(self._wire.body(question, self._model, 1, round_)).encode(),
            self._wire.headers(self._key),
            self._model,
            asyncio.get_running_loop().time() + self._deadline,
            lambda answer: self._wire.read(answer, self._model),
            usage,
            self._key,
        )
        texts = [one for one, _ in said.texts[:1]]
        await asyncio.to_thread(self._write, key, texts, said.prompt_tokens + said.answer_tokens)
        return texts[0]

    def _write(self, key: str, texts: list[str | None], tokens: int) -> None:
        entry: dict[str, Any] = {"key": key, "texts": texts, "tokens": tokens}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._answers[key] = texts
        self.requests += 1
        self.tokens += tokens
