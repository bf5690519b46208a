"""OpenAI's chat completions with images: what most endpoints and vLLM's server speak. Also what a wire is.

Its options are further fields of the request, with values in JSON: `chat_template_kwargs` of `{"enable_thinking":
false}` for a model that thinks. A field that is null is left out, such as `max_tokens` where `max_completion_tokens` is
wanted.

A wire of another package is an entry point of the group `tapforge.judges`: called with the model's options (a mapping),
it returns a `Wire`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tapforge_api.judge import JudgeModel

from ..plugins import find, names
from .question import Question
from .verdicts import shortened

GROUP: Final = "tapforge.judges"
#: fields of a request that are not options
_OURS: Final = frozenset({"messages", "model", "n", "stream"})
#: what an endpoint may add to a model's name: its date
_DATED: Final = re.compile(r"-\d{4}-?\d{2}-?\d{2}")


class WrongAnswer(Exception):
    """An answer that isn't what was asked for. `permanent`: it would come again."""

    def __init__(self, message: str, permanent: bool = False):
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class Said:
    """`texts`: one per answer; None for one that was cut off or refused, with `why`."""

    texts: tuple[tuple[str | None, str], ...]
    prompt_tokens: int
    answer_tokens: int


class Wire(Protocol):
    """How an endpoint is spoken to. `body` and `read` do no I/O."""

    #: below the endpoint's url
    path: str

    def headers(self, key: str | None) -> dict[str, str]: ...

    def body(self, question: Question, model: JudgeModel, count: int, first: int) -> dict[str, Any]:
        """`count` answers, of which `first` is the number of the first one."""
        ...

    def read(self, answer: Any, model: JudgeModel) -> Said:
        """Raises WrongAnswer."""
        ...


class OpenAIChat:
    path = "/chat/completions"

    def __init__(self, options: Mapping[str, str]):
        """Raises ValueError for an option that is not JSON, or that is ours to say."""
        self._more: dict[str, Any] = {}
        for name, value in options.items():
            if name in _OURS:
                raise ValueError(f"the option {name} of the wire openai can't be set: it follows from the judge")
            try:
                self._more[name] = json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f"the option {name} of the wire openai is not JSON: {shortened(value, 80)!r}"
                ) from error

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(self, question: Question, model: JudgeModel, count: int, first: int) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for part in question.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append(image_part(part))
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if question.system:
            messages.insert(0, {"role": "system", "content": question.system})
        return self.request(messages, model, count, first)

    def request(
        self, messages: Sequence[Mapping[str, Any]], model: JudgeModel, count: int = 1, first: int = 0
    ) -> dict[str, Any]:
        """The body for a conversation."""
        body: dict[str, Any] = {
            "model": model.model,
            "messages": messages,
            "temperature": model.temperature,
            "max_tokens": model.max_tokens,
        }
        if count > 1:
            body["n"] = count
        if model.seed is not None:
            body["seed"] = model.seed + first
        return {name: value for name, value in {**body, **self._more}.items() if value is not None}

    def read(self, answer: Any, model: JudgeModel) -> Said:
        choices, asked, said = self.choices(answer, model)
        return Said(tuple(_text(choice) for choice in choices), asked, said)

    def choices(self, answer: Any, model: JudgeModel) -> tuple[list[Any], int, int]:
        """What is offered, and the tokens of question and answers; 0 where the endpoint doesn't say. Raises
        WrongAnswer."""
        if not isinstance(answer, dict):
            raise WrongAnswer(f"the answer is not a chat completion object: {shortened(repr(answer), 80)}")
        name = answer.get("model")
        if isinstance(name, str) and not is_served(name, model):
            raise WrongAnswer(
                f"the answer is of model {shortened(name, 80)!r}, asked for was {model.model!r}; if that is another "
                "name of it, set servedAs",
                permanent=True,
            )
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise WrongAnswer("the answer has no choices")
        used = answer.get("usage")
        usage = used if isinstance(used, dict) else {}
        asked, said = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if not (asked and "completion_tokens" in usage) and (model.price.prompt or model.price.answer):
            raise WrongAnswer(
                "the answer has no usage, so what it costs is unknown, and spec.stop.judgeMoney could not hold; leave "
                "the model's price out, or use an endpoint that reports prompt_tokens and completion_tokens",
                permanent=True,
            )
        return choices, asked, said


def image_part(png: bytes) -> dict[str, Any]:
    """Of a message's content."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


def is_served(name: str, model: JudgeModel) -> bool:
    """Whether an answer's model is the one that was asked for: the same name, or with its date."""
    if model.served_as is not None:
        return name == model.served_as
    return name == model.model or (
        name.startswith(model.model) and _DATED.fullmatch(name[len(model.model) :]) is not None
    )


def content_of(message: Mapping[str, Any]) -> Any:
    """A string, or whatever is there instead."""
    text = message.get("content")
    if isinstance(text, list):  # parts of text, as some servers answer
        return "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    return text


def _text(choice: Any) -> tuple[str | None, str]:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return None, "a choice without a message"
    if choice.get("finish_reason") in ("length", "content_filter"):
        return None, f"the answer was cut off ({choice['finish_reason']}): maxTokens may be too small"
    text = content_of(message)
    if not isinstance(text, str):
        return None, shortened(f"no text in the answer: {message.get('refusal') or message}", 200)
    return text, ""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0


_OWN: Final[Mapping[str, Callable[[Mapping[str, str]], Wire]]] = {"openai": OpenAIChat}


def wire_of(model: JudgeModel) -> Wire:
    """Raises ValueError for a wire that isn't there."""
    options = {option.name: option.value for option in model.options}
    found = find(GROUP, model.wire, _OWN)
    if model.wire in _OWN:
        return _OWN[model.wire](options)
    if found is None:
        known = ", ".join([*_OWN, *names(GROUP)])
        raise ValueError(f"judge {model.name}: there is no wire {model.wire!r}; known are {known}")
    made: Wire = found.load()(options)
    return made
