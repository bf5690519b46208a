"""`tapforge judge serve`: the judge of the simulated phone behind OpenAI's chat wire, with faults on demand.

- POST /v1/chat/completions and GET /v1/models. `n` answers have the sample numbers `seed`, `seed` + 1, ...
- Faults hold for every request, or for the first ones alone: slow answers, a status (with Retry-After), a page of HTML,
  ten megabytes of it, another model's name, prose without a score.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from tapforge_envs.serving.http import address_of, site_at, stop_signal

from .simulated import Errors, Played, QuestionError, answer, judged, read_question, truth

#: bytes of a question with its screens
_MAX_REQUEST: Final = 256 * 1024 * 1024
_HUGE: Final = 10 * 1024 * 1024
_PAGE: Final = "<!doctype html><title>Sign in</title><p>score: 1</p>"
#: answers at once
_MAX_ANSWERS: Final = 128


@dataclass(frozen=True, slots=True)
class Faults:
    #: seconds before an answer
    slow: float = 0.0
    status: int | None = None
    retry_after: float | None = None
    html: bool = False
    huge: bool = False
    wrong_model: bool = False
    prose: bool = False
    no_usage: bool = False
    #: requests that they hold for; None: all
    first: int | None = None

    def at(self, request: int) -> Faults:
        """Those of a request, by its number from 1."""
        return self if self.first is None or request <= self.first else Faults()


async def broken(faults: Faults) -> web.Response | None:
    """What is answered instead of an answer; None: nothing, after the time that a slow one takes."""
    await asyncio.sleep(faults.slow)
    if faults.status is not None:
        headers = {} if faults.retry_after is None else {"Retry-After": f"{faults.retry_after:g}"}
        return refusal(faults.status, "as --status asks", headers)
    if faults.html or faults.huge:
        page = _PAGE * (1 + _HUGE // len(_PAGE)) if faults.huge else _PAGE
        return web.Response(text=page, content_type="text/html")
    return None


def chat_application(model: str, complete: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    """OpenAI's two paths that a client asks: `complete` answers chats, and `model` is the only one."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    app = web.Application(client_max_size=_MAX_REQUEST)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    return app


class JudgeServer:
    def __init__(self, model: str, errors: Errors = Errors(), faults: Faults = Faults()):  # noqa: B008 - frozen
        self.model = model
        self._errors = errors
        self._faults = faults
        #: questions so far
        self.requests = 0

    def application(self) -> web.Application:
        return chat_application(self.model, self._complete)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        faults = self._faults.at(self.requests)
        if (instead := await broken(faults)) is not None:
            return instead
        try:
            body = await request.json()
            count, first, text, images = _asked(body, self.model)
            played = read_question(text)
            right = await asyncio.to_thread(truth, played)
        except LookupError as error:
            return refusal(404, str(error.args[0]))
        except QuestionError as error:
            return refusal(400, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return refusal(400, f"the request can't be read: {type(error).__name__}: {error}")
        said = [self._said(played, first + number, right, faults) for number in range(count)]
        # as a model would count, roughly
        used = {
            "prompt_tokens": len(text) // 4 + 256 * images,
            "completion_tokens": sum(len(one) // 4 for one in said),
        }
        return web.json_response(
            {
                "id": f"chatcmpl-{self.requests}",
                "object": "chat.completion",
                "model": "another-model" if faults.wrong_model else self.model,
                "choices": [
                    {"index": i, "message": {"role": "assistant", "content": one}, "finish_reason": "stop"}
                    for i, one in enumerate(said)
                ],
                **({} if faults.no_usage else {"usage": used}),
            }
        )

    def _said(self, played: Played, sample: int, right: tuple[bool, str], faults: Faults) -> str:
        if faults.prose:
            return "It looks as if the agent did rather well, I would say."
        return answer(played, *judged(played, sample, self._errors, right))


def _asked(body: Mapping[str, Any], model: str) -> tuple[int, int, str, int]:
    """Number of answers, sample number of the first, the user's text, number of images. Raises LookupError for another
    model, ValueError and its like for what is not a question."""
    if body["model"] != model:
        raise LookupError(f"the model {str(body['model'])[:80]!r} does not exist; this server has {model!r}")
    count, first = int(body.get("n") or 1), int(body.get("seed") or 0)
    if not 1 <= count <= _MAX_ANSWERS:
        raise ValueError(f"n must be 1 to {_MAX_ANSWERS}, found {count}")
    (user,) = (message for message in body["messages"] if message["role"] == "user")
    content = user["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    return count, first, text, sum(part["type"] == "image_url" for part in parts)


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return web.json_response(body, status=status, headers=headers)


class ModelServer(Protocol):
    """What answers as a model."""

    model: str

    def application(self) -> web.Application: ...


async def listen(server: ModelServer, host: str, port: int) -> int:
    """Serves until SIGTERM or Ctrl-C; says in one line of JSON where. Returns 0, or 2 when it can't listen."""
    stopping = stop_signal()
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        try:
            await site_at(runner, host, port).start()
        except OSError as error:
            print(f"can't listen on {host}:{port} ({error.strerror}); --port 0 takes a free one", file=sys.stderr)
            return 2
        print(json.dumps({"url": f"{address_of(runner, host)}v1", "model": server.model}), flush=True)
        await stopping.wait()
        return 0
    finally:
        await runner.cleanup()
