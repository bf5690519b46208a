"""`tapforge teacher serve`: the simulated phone's demonstrator behind OpenAI's chat wire, to try `collect` with.

It knows a run's tasks by their goals, and the screens that its demonstrations of them pass. A question is answered with
what the demonstration does on its last image; where several demonstrations of the goal pass that screen, with that of
the step that the conversation is at. A screen that none passes ends the task as failed.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from aiohttp import web

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.protocol import Action, Task, Terminate

from ..agents.coordinates import ImagePixels, Plane
from ..agents.dialect import Dialect
from ..frames.frame import FrameError, decode, name_of
from ..judges.server import Faults, broken, chat_application, refusal

_STEP: Final = re.compile(r"^Step \d+:", re.MULTILINE)
_BLOCK: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CALL: Final = re.compile(r'\{"name": "(?P<name>\w+)", "arguments": (?P<said>.*)\}', re.DOTALL)
_LOST: Final = Terminate(status="failure")


@dataclass(frozen=True, slots=True)
class TeacherFaults:
    """Besides those of any endpoint (`judges/server.py:Faults`)."""

    two_calls: bool = False
    #: places as pixels, whatever was asked for
    pixels: bool = False


class Demonstrator:
    """What is done on a screen for a goal. Demonstrations are played when their goal is asked for."""

    def __init__(self, tasks: Iterable[Task], width: int, height: int, *, error_rate: float = 0.0):
        """Of tasks of the simulated phone's suites, on screens of this size. `error_rate`: of decisions."""
        self._size, self._error_rate = (width, height), error_rate
        self._tasks: dict[str, list[Task]] = {}
        for task in tasks:
            self._tasks.setdefault(task.goal, []).append(task)
        #: by goal and screen: place in the demonstration, and what it does
        self._known: dict[str, dict[str, list[tuple[int, Action]]]] = {}

    def goal_in(self, text: str) -> str | None:
        """The longest goal that the text holds."""
        return max((goal for goal in self._tasks if goal in text), key=len, default=None)

    def act(self, goal: str, screen: str, step: int) -> Action:
        """`screen`: by name; `step`: how many answers came before."""
        if goal not in self._known:
            known: dict[str, list[tuple[int, Action]]] = {}
            self._known[goal] = known
            for task in self._tasks[goal]:
                for place, (name, action) in enumerate(self._played(task)):
                    known.setdefault(name, []).append((place, action))
        found = self._known[goal].get(screen, [])
        at_step = [action for place, action in found if place == step]
        return (at_step or [action for _, action in found] or [_LOST])[0]

    def _played(self, task: Task) -> Iterator[tuple[str, Action]]:
        phone, template = catalog.phone_for(task.suite, *self._size), catalog.template_of(task)
        rng = Random(f"teacher:{task.key}")
        frame = phone.reset(task.seed, template.rules(task.params)).frame
        for action in demonstration(phone, template, task.params, lambda: rng.random() < self._error_rate):
            yield name_of(decode(frame.data, frame.sha256)), action
            frame = phone.step(action).observation.frame


class TeacherServer:
    """POST /v1/chat/completions and GET /v1/models."""

    def __init__(
        self,
        model: str,
        demonstrator: Demonstrator,
        dialect: Dialect,
        faults: Faults = Faults(),  # noqa: B008 - frozen
        teacher_faults: TeacherFaults = TeacherFaults(),
    ):
        self.model = model
        self._demonstrator, self._dialect = demonstrator, dialect
        self._faults, self._teacher_faults = faults, teacher_faults
        #: questions so far
        self.requests = 0

    def application(self) -> web.Application:
        return chat_application(self.model, self._complete)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        faults = self._faults.at(self.requests)
        wrong = self._teacher_faults if faults is self._faults else TeacherFaults()
        if (instead := await broken(faults)) is not None:
            return instead
        try:
            body = await request.json()
            if body["model"] != self.model:
                return refusal(
                    404, f"the model {str(body['model'])[:80]!r} does not exist; this server has {self.model!r}"
                )
            text, screen, step, images = _asked(body)
            pixels = decode(screen, "sent")
            goal = self._demonstrator.goal_in(text)
            if goal is None:
                return refusal(400, "the question has the goal of no task that this teacher knows")
            action = await asyncio.to_thread(self._demonstrator.act, goal, name_of(pixels), step)
        except (KeyError, TypeError, ValueError, FrameError) as error:
            return refusal(400, f"the request can't be read: {type(error).__name__}: {error}")
        plane = Plane(self._dialect.coordinates, pixels.shape[1], pixels.shape[0])
        if wrong.pixels:
            plane = Plane(ImagePixels(), pixels.shape[1], pixels.shape[0])
        said = self._dialect.write(action, plane)
        if wrong.two_calls:
            said = f"{said}\n{said}"
        if faults.prose:
            said = "I would tap the button in the middle of the screen now."
        used = {"prompt_tokens": len(text) // 4 + 64 * images, "completion_tokens": len(said) // 4}
        return web.json_response(
            {
                "id": f"chatcmpl-{self.requests}",
                "object": "chat.completion",
                "model": "another-model" if faults.wrong_model else self.model,
                "choices": [{"index": 0, "message": self._message(said, body), "finish_reason": "stop"}],
                **({} if faults.no_usage else {"usage": used}),
            }
        )

    def _message(self, said: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A call as a call, where the question names tools."""
        calls = [_CALL.fullmatch(one) for one in _BLOCK.findall(said)] if body.get("tools") else []
        made = [
            {"id": f"call-{number}", "type": "function", "function": {"name": call["name"], "arguments": call["said"]}}
            for number, call in enumerate(calls)
            if call is not None
        ]
        if not made:
            return {"role": "assistant", "content": said}
        return {"role": "assistant", "content": None, "tool_calls": made}


def _asked(body: Mapping[str, Any]) -> tuple[str, bytes, int, int]:
    """The texts of the user, the last image, answers before, number of images. Raises ValueError and its like."""
    texts: list[str] = []
    images: list[str] = []
    answers = 0
    for message in body["messages"]:
        content = message["content"]
        answers += message["role"] == "assistant"
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "image_url":
                images.append(part["image_url"]["url"])
            elif message["role"] == "user":
                texts.append(part["text"])
    if not images:
        raise ValueError("no image")
    text = "\n".join(texts)
    return text, base64.b64decode(images[-1].partition(",")[2]), answers + len(_STEP.findall(text)), len(images)


def dialect_named(name: str) -> Dialect:
    """Of an adapter that no model's folder decides. Raises ValueError."""
    from ..agents.registry import dialect_of

    found = dialect_of(name, Path())
    if found is None:
        raise ValueError(f"the adapter {name} can't be served: its answers are another package's")
    return found
