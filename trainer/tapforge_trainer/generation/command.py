"""`tapforge tasks generate`: from options to a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tapforge_api.judge import ApiKey, JudgeModel
from tapforge_api.pool import Protocol
from tapforge_envs.protocol import EnvironmentFault

from ..judges.endpoint import EndpointError
from ..judges.prompt_file import PromptError
from ..tasks.files import read_tasks
from ..tasks.source import TaskError
from ..tasks.walked import held_out
from .alike import Goals
from .asking import Asker
from .generate import Generated, GenerationError, Generator, Wanted, summary
from .looking import Screen, simulated_screens
from .prompts import Prompts


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    url: str
    model: str
    api_key_env: str | None
    suite: str
    phones: int
    apps: tuple[str, ...]
    count: int
    per_question: int
    infeasible: float
    max_steps: int
    against: tuple[Path, ...]
    prompts: Path | None
    prompt: str | None
    rewrite: bool
    check: bool
    temperature: float
    max_requests: int
    max_tokens: int | None
    patience: int
    seed: int


async def generate(
    path: Path,
    options: GenerateOptions,
    say: Callable[[str], None],
    screens: Callable[[], Awaitable[list[Screen]]] | None = None,
    protocol: Protocol = "tapforge",
) -> Iterator[str]:
    """`screens`: of phones that speak `protocol`; None: of the simulated phone. Returns lines that say what was found.
    Raises TaskError, for whatever ends it early too."""
    if options.prompt and options.prompts:
        raise TaskError("--prompt simulated-phone has no words: leave --prompts out")
    try:
        model = JudgeModel(
            name="generator",
            url=options.url,
            model=options.model,
            temperature=options.temperature,
            api_key=None if options.api_key_env is None else ApiKey(environment=options.api_key_env),
            seed=options.seed,
            max_tokens=4096,
        )
        prompts = Prompts(options.prompts, simulated=options.prompt is not None)
        asker = Asker(
            model, path.with_name(path.name + ".answers"), max_requests=options.max_requests,
            max_tokens=options.max_tokens, say=say,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise TaskError(f"--{first['loc'][0] if first['loc'] else 'url'}: {first['msg']}") from error
    except (PromptError, ValueError) as error:
        raise TaskError(str(error)) from error
    wanted = Wanted(
        options.count, options.infeasible, options.per_question, options.patience, options.seed, options.max_steps,
        options.rewrite, options.check,
    )  # fmt: skip
    try:
        others = _evaluated(options, protocol)
        if screens is None:
            seen = simulated_screens(options.suite, options.apps, options.phones, options.seed)
        else:
            seen = await screens()
        generator = Generator(asker, prompts, seen, wanted, options.model, others)

        def report(found: Generated) -> None:
            say(
                f"{found.tasks:,} of {options.count:,} tasks after {found.rounds:,} rounds, {asker.requests:,} requests"
            )

        async with asker:
            await generator.write(path, report)
    except (EndpointError, GenerationError, EnvironmentFault) as error:
        raise TaskError(str(error)) from error
    return summary(generator.found, asker.requests, asker.tokens, asker.kept)


def _evaluated(options: GenerateOptions, protocol: Protocol) -> Goals:
    """Goals that are measured on: of the files, and of what the suite holds out."""
    goals = Goals()
    for file in options.against:
        for task in read_tasks(file, protocol, judged=True).tasks:
            if task.goal:
                goals.add(task.goal, str(file))
    if protocol == "tapforge":
        for goal in sorted(held_out(options.suite)):
            goals.add(goal, f"the suite {options.suite}")
    return goals
