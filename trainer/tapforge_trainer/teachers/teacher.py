"""A model behind an endpoint, or one that is served here, as the rollout's `Generator`: asked by the judges' client, in
OpenAI's chat completions.

- Requests are bounded, asked again and given up as `judges/endpoint.py` says; each that fails is counted by kind.
- An answer that doesn't come ends nothing by itself: its episode is played again later. So many in a row end the whole
  (`TeacherError`), so does an endpoint without any answer for `answer_seconds` when the next one is given up (twice
  that at most), and at once what is refused for good: a key, a model, an address. A question that is refused costs its
  episode alone, once another was answered.
- What it waits for is said while no answer comes.
- Tokens are counted before an answer is used. Once `max_tokens` are used nothing is asked any more (`BudgetUsed`);
  answers under way then may exceed it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from tapforge_api.judge import JudgeModel

from ..judges.endpoint import EndpointError, Endpoints, Served, key_of
from ..judges.openai_chat import OpenAIChat, WrongAnswer, content_of, image_part
from ..judges.usage import Usage
from ..records import FinishReason, Generation, Prompt, Sampling
from .agent import TeacherAgent, ids_of, messages_of
from .ledger import Ledger

#: answers in a row that didn't come
_IN_A_ROW: Final = 8
#: seconds without an answer after which a failed request is said, and until the next one is
_QUIET: Final = 1.0
_AGAIN: Final = 30.0
#: characters of an answer: more are no answer to a step
_LONGEST: Final = 20_000


class TeacherError(Exception):
    """Nothing more can be collected. The message names the endpoint and the remedy."""


class BudgetUsed(TeacherError):
    """The bound on tokens is reached."""


class Teacher:
    """A `Generator` for a `TeacherAgent`. Belongs to one event loop; close it."""

    def __init__(
        self,
        agent: TeacherAgent,
        model: JudgeModel,
        ledger: Ledger,
        *,
        tool_calls: bool = False,
        max_tokens: int | None = None,
        answer_seconds: float = 300.0,
        environ: Mapping[str, str],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`say`: for people. `tool_calls`: the request names the tool, and answers may call it; in words they may in
        any case. `answer_seconds`: of an answer with all retries. Raises ValueError for a key or an option that isn't
        there."""
        self._agent, self._model, self._ledger = agent, model, ledger
        self._tool_calls, self._max_tokens, self._seconds = tool_calls, max_tokens, answer_seconds
        self._wire = OpenAIChat({option.name: option.value for option in model.options})
        self._key = key_of(model.api_key, environ, model.name)
        self._endpoints = Endpoints()
        self._usage = Usage()
        self._missing = 0
        self._say, self._said_at = say, -math.inf
        #: since when no request has been answered, of those that failed since the last answer
        self._silent: float | None = None
        self._failures = 0

    @property
    def spent(self) -> str:
        """Why nothing is asked any more, in words; "": it is."""
        if self._max_tokens is None or self._ledger.tokens < self._max_tokens:
            return ""
        return f"--max-tokens {self._max_tokens:,} are used ({self._ledger.tokens:,}); raise it to go on"

    def use_models(self, models: Mapping[str, Served]) -> None:
        """Where models that are served here are asked from here on, by name."""
        self._endpoints.serve(models)

    async def close(self) -> None:
        await self._endpoints.close()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Raises TeacherError."""
        if spent := self.spent:
            raise BudgetUsed(spent)
        try:
            text, finish, asked, said = await self._endpoints.of(self._model).ask(
                self._wire.path,
                lambda: json.dumps(self._body(prompt, sampling)).encode(),
                self._wire.headers(self._key),
                self._model,
                asyncio.get_running_loop().time() + self._seconds,
                self._read,
                self._usage,
                self._key,
                self._failed,
            )
        except EndpointError as error:
            # A refusal may be of this question alone, such as a history that is too long for the endpoint's context. It
            # says nothing of an endpoint that has answered others.
            self._missing += not (error.of_question and self._ledger.answers)
            final = error.permanent and not error.of_question
            if error.of_question:
                self._silent = None  # the endpoint has answered
            quiet = 0.0 if self._silent is None else asyncio.get_running_loop().time() - self._silent
            if final or self._missing >= _IN_A_ROW:
                more = "" if final else f"; {self._missing} answers in a row didn't come"
                raise TeacherError(f"{error}{more}") from error
            if quiet >= self._seconds:
                raise TeacherError(f"{error}; no answer came for {quiet:.0f} s (--answer-seconds)") from error
            return Generation((), (), (), (), "abort", 0)
        self._missing, self._silent = 0, None
        self._ledger.answered(asked, said)
        ids = ids_of(text)
        zeros = (0,) * len(ids)
        # Messages of several thousand bytes are not kept: nothing is learned from a prompt that isn't the student's.
        return Generation((), ids, zeros, zeros, finish, 0)

    def _failed(self, kind: str, why: str) -> None:
        self._ledger.failure(kind, why)
        now = asyncio.get_running_loop().time()
        if self._silent is None:
            self._silent, self._failures = now, 0
        self._failures += 1
        quiet = now - self._silent
        if quiet >= _QUIET and now - self._said_at >= _AGAIN:
            self._said_at = now
            self._say(
                f"waiting for {self._model.model}: {self._failures:,} requests failed in {quiet:.0f} s without an "
                f"answer, the last one: {why}; it ends after {2 * self._seconds:.0f} s"
            )

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        frames = iter(prompt.frames)
        messages = [
            {
                "role": message["role"],
                "content": [
                    image_part(next(frames).data) if part["type"] == "image" else part for part in message["content"]
                ],
            }
            for message in messages_of(prompt)
        ]
        body = self._wire.request(messages, self._model)
        if self._tool_calls:
            body["tools"] = [self._agent.tool(prompt.frames[-1])]
        return body

    def _read(self, answer: Any) -> tuple[str, FinishReason, int, int]:
        """Raises WrongAnswer."""
        choices, asked, said = self._wire.choices(answer, self._model)
        if self._max_tokens is not None and not (asked or said):
            raise WrongAnswer(
                "the answer has no usage, so --max-tokens could not hold; leave it out, or use an endpoint that "
                "reports prompt_tokens and completion_tokens",
                permanent=True,
            )
        choice = choices[0]
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise WrongAnswer("a choice without a message")
        text = _said(message)
        cut = choice.get("finish_reason") == "length" or len(text) > _LONGEST
        return text[:_LONGEST], "length" if cut else "stop", asked, said


def _said(message: Mapping[str, Any]) -> str:
    """Words and calls of an answer in the form in which an adapter reads them."""
    content = content_of(message)
    parts = [content] if isinstance(content, str) and content else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        called = call.get("function") if isinstance(call, dict) else None
        if isinstance(called, dict):
            given = called.get("arguments")
            arguments = given if isinstance(given, str) else json.dumps(given)
            parts.append(
                f'<tool_call>\n{{"name": {json.dumps(called.get("name"))}, "arguments": {arguments}}}\n</tool_call>'
            )
    return "\n".join(parts) or str(message.get("refusal") or "")
