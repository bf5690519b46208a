"""What `tapforge collect` is asked for, and the endpoint that this is about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tapforge_api.judge import ApiKey, JudgeModel
from tapforge_api.plugin import PluginOption

from .assembly import ConfigurationError


@dataclass(frozen=True, slots=True)
class CollectOptions:
    teacher: str
    model: str
    into: Path
    episodes: int
    keep: Literal["successes", "all"] = "successes"
    served_as: str | None = None
    api_key_env: str | None = None
    adapter: str | None = None
    prompt_file: Path | None = None
    coordinates: str | None = None
    tool_calls: bool = False
    temperature: float = 0.7
    answer_tokens: int = 1024
    answer_seconds: float = 300.0
    concurrency: int = 8
    max_tokens: int | None = None
    max_episodes: int | None = None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def most(self) -> int:
        """Episodes that are played at most."""
        return self.max_episodes or 10 * self.episodes


def endpoint_of(options: CollectOptions) -> JudgeModel:
    """The teacher in the words of a judge. Raises ConfigurationError."""
    try:
        return JudgeModel(
            name="teacher",
            url=options.teacher,
            model=options.model,
            served_as=options.served_as,
            api_key=None if options.api_key_env is None else ApiKey(environment=options.api_key_env),
            options=tuple(PluginOption(name=name, value=value) for name, value in options.options),
            temperature=options.temperature,
            max_tokens=options.answer_tokens,
            concurrency=options.concurrency,
            request_seconds=min(options.answer_seconds, max(120.0, options.answer_seconds / 2)),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        words = ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
        raise ConfigurationError(f"--teacher: {words}") from error
