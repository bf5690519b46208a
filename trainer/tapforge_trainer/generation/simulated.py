"""`tapforge tasks serve`: an endpoint that proposes tasks for the simulated phone, without a model.

It reads the `data` of our prompts. Goals are sentences of walks on the phone that the question names: each can be done.
Those that can't be done name an app that no phone has. A rewriting says the goal as it is. It may repeat itself, err in
its checks, and answer in prose, on demand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Final, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapforge_envs.phone.walks import operations
from tapforge_envs.phone.walks.walk import WalkError, walk

_MAX_REQUEST: Final = 64 * 1024 * 1024
#: walks that are tried for a goal
_TRIES: Final = 20
#: of tasks that can't be done: on no phone
_NOWHERE: Final = ("Telescope", "Recorder", "Wallet", "Radio", "Scanner", "Compass", "Diary", "Translator")
_WISHES: Final = (
    "open {app} and start a new entry",
    "turn on the dark theme of {app}",
    "delete the last item in {app}",
    "set the volume of {app} to {n}",
    "rename the list {n} in {app}",
    "add {n} items in {app}",
)


class _Asked(BaseModel):
    model_config = ConfigDict(extra="ignore")

    kind: Literal["propose", "rewrite", "check"]
    suite: Literal["quickstart", "standard"] = "quickstart"
    seed: int = Field(0, ge=0)
    app: str = Field("", max_length=64)
    count: Annotated[int, Field(ge=1, le=100)] = 1
    infeasible: bool = False
    goal: str = Field("", max_length=1000)


class ProposerServer:
    def __init__(
        self, model: str, *, seed: int = 0, repeat: bool = False, prose: bool = False, error_rate: float = 0.0
    ):
        """`repeat`: always the same few goals; `error_rate`: of its checks."""
        self.model = model
        self._seed, self._repeat, self._prose, self._error_rate = seed, repeat, prose, error_rate
        self.requests = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_REQUEST)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests += 1
        try:
            body = await request.json()
            text, number = _text(body), int(body.get("seed") or 0)
            asked = _Asked.model_validate_json(text)
        except (KeyError, TypeError, ValueError) as error:
            what = "name none or `simulated-phone`" if isinstance(error, ValidationError) else str(error)
            words = f"this endpoint reads the data of the prompts of --prompt simulated-phone ({what[:200]})"
            return web.json_response({"error": {"message": words}}, status=400)
        said = (
            "I would rather talk about it."
            if self._prose
            else json.dumps(await asyncio.to_thread(self._answer, asked, number))
        )
        used = {"prompt_tokens": len(text) // 4, "completion_tokens": len(said) // 4}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "model": self.model, "choices": [choice], "usage": used})

    def _answer(self, asked: _Asked, number: int) -> dict[str, Any]:
        if asked.kind == "rewrite":
            return {"task": asked.goal}
        rng = Random(f"{self._seed}:{asked.kind}:{asked.seed}:{asked.app}:{asked.goal}:{0 if self._repeat else number}")
        if asked.kind == "check":
            possible = not any(name.casefold() in asked.goal.casefold() for name in _NOWHERE)
            return {"possible": possible != (rng.random() < self._error_rate)}
        count = min(asked.count, 3) if self._repeat else asked.count
        if asked.infeasible:
            return {"tasks": [_impossible(rng) for _ in range(count)]}
        return {"tasks": [goal for _ in range(count) if (goal := _possible(asked, rng))]}


def _impossible(rng: Random) -> str:
    return rng.choice(_WISHES).format(app=rng.choice(_NOWHERE), n=rng.randint(2, 9))


def _possible(asked: _Asked, rng: Random) -> str | None:
    """A walk's sentence; None where the app has no operation."""
    apps = (asked.app,) if asked.app in operations.apps(asked.suite) else ()
    for _ in range(_TRIES):
        try:
            return walk(asked.suite, asked.seed, rng, most=1 if apps else 3, apps=apps).task.goal
        except WalkError:
            continue
    return None


def _text(body: Mapping[str, Any]) -> str:
    (user,) = (message for message in body["messages"] if message["role"] == "user")
    content = user["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")
