"""Judges: models that say from screens whether a task was done, or whether a step helped.

A judge asks one model or several, each a stated number of times, and decides by a stated rule. Keys of endpoints are
named here and never written here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import Keyed, OneOf, Path, Rule, Seconds, Seed, Spec, Url, Word
from .plugin import PluginOptions

ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9@./][!-~]*$")]
VotingRule = Literal["unanimous", "majority", "any"]
#: prompts of ours, each with what it shows
PromptName = Literal[
    "task",
    "task-screens",
    "task-marked",
    "step",
    "zerogui",
    "clawgui-task",
    "clawgui-step",
    "simulated-phone",
    "simulated-phone-step",
    "tiny",
]


class ApiKey(OneOf):
    """Where the key of an endpoint is. It is read when the judge starts, and is in no record, log or error."""

    environment: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = (
        Field(None, description="environment variable that holds it")
    )
    file: Path | None = Field(None, description="file that holds it, such as a mounted Secret's")


class Price(Spec):
    """What an endpoint charges, in a currency of yours."""

    prompt: Annotated[float, Field(ge=0, le=1_000_000)] = Field(0.0, description="per million prompt tokens")
    answer: Annotated[float, Field(ge=0, le=1_000_000)] = Field(0.0, description="per million answer tokens")


class JudgeModel(Spec):
    """A model behind an endpoint, or one that the run serves, and how it is asked."""

    name: Word = Field("judge", description="name in records and metrics")
    url: Url | None = Field(
        None,
        description="endpoint up to and with the version, as in https://HOST/v1; without it `model` is the name of one "
        "of spec.models",
    )
    model: ModelName = Field(
        description="model as the endpoint calls it, an answer of another one being an error; without url the name of "
        "one of spec.models"
    )
    served_as: ModelName | None = Field(
        None, description="what the endpoint's answers call the model, where that is another name"
    )
    wire: Word = Field(
        "openai", description="openai: chat completions with images; another one by entry point tapforge.judges"
    )
    options: PluginOptions = Field(
        (), description="options of the wire; of openai: further fields of each request, with values in JSON"
    )
    api_key: ApiKey | None = Field(None, description="where the endpoint's key is; without it none is sent")
    samples: Annotated[int, Field(ge=1, le=64)] = Field(1, description="answers per question: each is a vote")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="temperature of the answers")
    max_tokens: Annotated[int, Field(ge=16, le=65_536)] = Field(1024, description="longest answer, tokens")
    seed: Seed | None = Field(None, description="seed that is sent; without it none is")
    concurrency: Annotated[int, Field(ge=1, le=4096)] = Field(
        8, description="questions at once; judges of the same url share the smallest of theirs"
    )
    connect_seconds: Seconds = Field(10.0, description="longest wait for a connection")
    request_seconds: Seconds = Field(120.0, description="longest wait for an answer, from the request on")
    price: Price = Field(Price(), description="price, for the figure rewards/judge_money")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="samples above 1 need a temperature above 0: a greedy model answers the same each time",
            cel="self.samples == 1 || self.temperature != 0.0",
            holds=lambda o: o.samples == 1 or o.temperature > 0,
        ),
        Rule(
            message="url must have neither a user nor a query: name the endpoint's key in apiKey",
            cel="!has(self.url) || !self.url.matches('[@?]')",
            holds=lambda o: o.url is None or ("@" not in o.url and "?" not in o.url),
        ),
        Rule(
            message="without url there must be no apiKey, no servedAs and no other wire: the run asks a model of its "
            "own in its own way",
            cel="has(self.url) || (!has(self.apiKey) && !has(self.servedAs) && self.wire == 'openai')",
            holds=lambda o: o.url is not None or (o.api_key, o.served_as, o.wire) == (None, None, "openai"),
        ),
    )


JudgeModels = Annotated[tuple[JudgeModel, ...], Field(min_length=1, max_length=8), Keyed("name")]


class JudgeSpec(Spec):
    """A judge."""

    models: JudgeModels = Field(description="models that vote, each with all its samples")
    voting: VotingRule = Field(
        "majority",
        description="unanimous: 1 if every vote is 1; majority: what more than half of all votes say; any: 1 if one "
        "vote is 1. Unreadable answers are unknown votes: where they could change the verdict, and in a tie, "
        "there is none",
    )
    cascade: Annotated[tuple[JudgeModel, ...], Field(max_length=8), Keyed("name")] = Field(
        (), description="models that decide instead where the votes of `models` are not all the same"
    )
    prompt: PromptName | None = Field(
        None, description="what is shown, and in which words; without it `task` or `step`, by the stream"
    )
    prompt_file: Path | None = Field(
        None, description="Jinja file of yours in place of the words; `prompt` still says which screens are shown"
    )
    screens: Annotated[int, Field(ge=2, le=256)] = Field(
        16,
        description="screens that are shown at most. Of more, the first and the last ones are shown and those between "
        "at equal distances",
    )
    answer_key: bool = Field(
        True,
        description="an answer counts only with a word of its question in it, so that text of a screen or goal that "
        "the model copies is not a score; false: for small models that don't copy the word",
    )
    deadline_seconds: Seconds = Field(
        300.0, description="longest wait for a verdict, with all retries; then it is missing"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="models and cascade must have different names: records name a vote by its model's",
            cel="self.models.all(m, self.cascade.all(c, c.name != m.name))",
            holds=lambda o: not {model.name for model in o.models} & {model.name for model in o.cascade},
        ),
    )
