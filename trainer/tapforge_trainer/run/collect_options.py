"""What `tapforge collect` is asked for, and the teacher that this is about: an endpoint, or one of `spec.models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tapforge_api.judge import ApiKey, JudgeModel
from tapforge_api.models import ServedModel
from tapforge_api.plugin import PluginOption

from .assembly import ConfigurationError


@dataclass(frozen=True, slots=True)
class CollectOptions:
    #: an endpoint's url, or the name of one of `spec.models`
    teacher: str
    #: as the endpoint calls it
    model: str | None
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


def teacher_of(options: CollectOptions, models: Sequence[ServedModel]) -> JudgeModel:
    """The teacher in the words of a judge; without `url` the command serves it. Raises ConfigurationError."""
    names = [model.name for model in models]
    served = options.teacher in names
    if served and (wrong := _of_endpoints(options)):
        raise ConfigurationError(
            f"--teacher {options.teacher} is one of spec.models, which the command serves; leave out "
            f"{', '.join(wrong)}, for endpoints alone"
        )
    if not served and not {":", "/"} & set(options.teacher):
        known = f"it has {', '.join(names)}" if names else "it has none"
        raise ConfigurationError(
            f"--teacher {options.teacher} is not one of spec.models ({known}), nor an endpoint as in "
            "http://127.0.0.1:9000/v1"
        )
    if not served and options.model is None:
        raise ConfigurationError(f"--teacher {options.teacher} is an endpoint: name its model with --model")
    try:
        return JudgeModel(
            name="teacher",
            url=None if served else options.teacher,
            model=options.teacher if served else str(options.model),
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


def _of_endpoints(options: CollectOptions) -> list[str]:
    given = {
        "--model": options.model,
        "--served-as": options.served_as,
        "--api-key-env": options.api_key_env,
        # vLLM's server takes tools only with a parser for the model's family.
        "--tool-calls": options.tool_calls or None,
    }
    return [name for name, value in given.items() if value is not None]
