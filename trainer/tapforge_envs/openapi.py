"""tapforge's own protocol as an OpenAPI 3.1 description, from the models that servers and clients use. Pure.

`wire.py` says what the answers mean; a frame that follows an observation's line of JSON has no JSON schema, so an
observation is `application/x-tapforge-observation`, described in words beside the schema of its line.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from .protocol import Task
from .serving.http import EpisodeRequest, ResetRequest, StepRequest
from .wire import (
    ANSWERS_HEADER,
    CONTENT_TYPE,
    FENCE_HEADER,
    NO_FENCE,
    PROTOCOL,
    SLOT_HEADER,
    STALE_FENCE,
    UNSUPPORTED_ACTION,
    WRONG_SLOT,
    ObservationHead,
)


class Health(BaseModel):
    """Whether the server can serve; other fields are allowed."""

    model_config = ConfigDict(extra="allow")

    status: str = Field(description='"ok" with status 200; with 503 what is wrong')
    protocol: str = Field(description=f'"{PROTOCOL}"')
    instance: str = Field(description="changes when the server process does")
    slot: str | None = Field(None, description="UID of the slot that this phone is; null outside of a pool")
    fence: int | None = Field(None, description="largest fence seen")


class Tasks(BaseModel):
    """Tasks of the server's suites."""

    tasks: list[Task]


class Verdict(BaseModel):
    """How well the task was done."""

    value: float = Field(ge=0, le=1, description="the score; a task's threshold makes it a success")
    reason: str = ""
    side_effects: list[str] = Field(default=[], description="what was changed and should not have been")


class Refusal(BaseModel):
    """An answer with a status other than 200."""

    error: str = Field(description="the value that was refused, and the remedy")
    reason: str = Field("", description="one word, where a program needs it")


_MODELS: Final = (Health, Tasks, EpisodeRequest, ResetRequest, StepRequest, ObservationHead, Verdict, Refusal)
_REFUSALS: Final = {
    "400": "the request can't be read",
    "401": "the server has a token, and the request lacks it",
    "403": "a page in a browser sent the request",
    "404": "no such suite, template or slot",
    "409": f"another episode's id, an index from the future, or a claim that doesn't hold: reason `{STALE_FENCE}`, "
    f"`{WRONG_SLOT}` or `{NO_FENCE}`",
    "413": "the body is over a MiB",
    "5XX": "the phone is sick; reason `deadline`: it didn't answer in time, `lease_lost`: another client uses it, "
    "`judge_error`: there is no verdict",
}
_UNSUPPORTED: Final = {
    "422": f"reason `{UNSUPPORTED_ACTION}`: the environment has no such action or refuses its value; nothing was "
    "executed, and the next step has the same index"
}


def openapi() -> dict[str, Any]:
    """Paths are below a slot's address: `/slot/N`, or nothing for slot 0."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tapforge's environment protocol",
            "version": PROTOCOL.partition("/")[2],
            "description": "One phone, emulator, desktop or browser. Calls to it come one after another.",
        },
        "paths": {
            "/health": {
                "get": {
                    "summary": "whether it can serve; needs neither a token nor a claim",
                    "responses": {"200": _json("Health", "it can"), "503": _json("Health", "it can't")},
                }
            },
            "/tasks": {
                "get": {
                    "summary": "tasks of a suite",
                    "parameters": [
                        _query("suite", {"type": "string"}, "all suites without it"),
                        _query("split", {"type": "string"}, "all splits without it"),
                        _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "tasks"),
                        _query("seed", {"type": "integer", "default": 0}, "of the drawn tasks"),
                    ],
                    "security": [{"token": []}],
                    "responses": {"200": _json("Tasks", "tasks"), **_refusals("400", "401", "403", "404")},
                }
            },
            "/reset": _call(
                "ResetRequest", "begin an episode, and end the one before", _observation("its first screen")
            ),
            "/step": _call(
                "StepRequest",
                "execute an action; an index that was answered gets the stored answer",
                _observation("the screen after the action has settled"),
                _UNSUPPORTED,
            ),
            "/evaluate": _call("EpisodeRequest", "score the episode", _json("Verdict", "the score")),
            "/close": _call(
                "EpisodeRequest",
                "end the episode",
                {"description": "it has ended", "content": {"application/json": {"schema": {"type": "object"}}}},
            ),
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


def _json(model: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(model)}}}


def _observation(description: str) -> dict[str, Any]:
    words = "one line of JSON (ObservationHead), a newline, and the bytes of the frame"
    return {
        "description": f"{description}: {words}",
        "headers": {
            ANSWERS_HEADER: {
                "description": "which call this answers: EPISODE/reset, EPISODE/step/INDEX; optional",
                "schema": {"type": "string"},
            }
        },
        "content": {
            CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}, "x-head": _ref("ObservationHead")}
        },
    }


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _refusals(*statuses: str, more: dict[str, str] | None = None) -> dict[str, Any]:
    words = _REFUSALS | (more or {})
    return {status: _json("Refusal", words[status]) for status in (*statuses, *(more or {}))}


def _call(
    body: str, summary: str, answer: dict[str, Any], more: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    headers = [
        {
            "name": name,
            "in": "header",
            "schema": schema,
            "description": description,
        }
        for name, schema, description in (
            (SLOT_HEADER, {"type": "string"}, "UID of the claimed slot; with the fence, or neither"),
            (FENCE_HEADER, {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "of the claim"),
        )
    ]
    return {
        "post": {
            "summary": summary,
            "parameters": headers,
            "security": [{"token": []}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
            "responses": {"200": answer, **_refusals(*_REFUSALS, more=more)},
        }
    }
