"""What is asked of a MobileWorld server, and the answers to what can't be served: FastAPI's JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError, model_validator

DEVICE = "emulator-5554"
ACTION_TYPES = (
    *("click", "double_tap", "scroll", "swipe", "input_text", "navigate_home", "navigate_back", "keyboard_enter"),
    *("open_app", "status", "wait", "long_press", "answer", "finished", "unknown", "drag", "ask_user", "mcp"),
)


def _rounded(value: Any) -> Any:
    return round(value) if isinstance(value, float) and value == value and abs(value) < 1e9 else value


def _known(value: str) -> str:
    if value not in ACTION_TYPES:
        raise ValueError(f"Invalid action type: {value}")
    return value


def _words(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else str(value)


def _keycode(value: str) -> str:
    if not value.startswith("KEYCODE_"):
        raise ValueError(f"Invalid keycode: {value}")
    return value


_Pixel = Annotated[int, BeforeValidator(_rounded)] | None


class DeviceAction(BaseModel):
    """An action as it travels; every field but the type may be missing."""

    action_type: Annotated[str, AfterValidator(_known)] | None = None
    index: int | None = None
    x: _Pixel = None
    y: _Pixel = None
    text: Annotated[str | None, BeforeValidator(_words)] = None
    direction: Literal["left", "right", "down", "up"] | None = None
    goal_status: str | None = None
    app_name: str | None = None
    keycode: Annotated[str, AfterValidator(_keycode)] | None = None
    clear_text: bool | None = None
    start_x: int | None = None
    start_y: int | None = None
    end_x: int | None = None
    end_y: int | None = None
    action_name: str | None = None
    action_json: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> DeviceAction:
        if self.index is not None and (self.x is not None or self.y is not None):
            raise ValueError("Either an index or a <x, y> should be provided.")
        return self


class Init(BaseModel):
    device: str = DEVICE
    type: Literal["cmd", "docker"] = "cmd"
    instance: dict[str, Any] | None = None


class Step(BaseModel):
    device: str
    action: DeviceAction


class TaskCall(BaseModel):
    task_name: str
    req_device: str


class Sms(BaseModel):
    device: str
    sender: str
    message: str


class InitQuery(BaseModel):
    device: str = DEVICE


class DeviceQuery(BaseModel):
    device: str


class ScreenshotQuery(DeviceQuery):
    prefix: str | None = None
    return_b64: bool = False


class XmlQuery(DeviceQuery):
    prefix: str | None = None
    mode: Literal["uia", "ac"] = "uia"
    return_content: bool = False


class TaskQuery(BaseModel):
    task_name: str


class PathQuery(BaseModel):
    path: str


class SuiteQuery(BaseModel):
    target_family: str


_Model = TypeVar("_Model", bound=BaseModel)


class Failed(Exception):
    """An answer other than 200. `detail` None: an uncaught exception, which has no words."""

    def __init__(self, status: int, detail: Any):
        super().__init__(str(detail))
        self.status = status
        self.detail = detail


def _mistakes(error: ValidationError, place: str) -> list[dict[str, Any]]:
    found = json.loads(error.json(include_url=False))
    return [{**mistake, "loc": [place, *mistake["loc"]]} for mistake in found]


async def body_of(request: web.Request, model: type[_Model]) -> _Model:
    data = await request.read()
    if not data:
        raise Failed(422, [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}])
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        at, why = getattr(error, "pos", 0), getattr(error, "msg", "it is nested too deeply")
        wrong = {"type": "json_invalid", "loc": ["body", at], "msg": "JSON decode error", "input": {}}
        raise Failed(422, [{**wrong, "ctx": {"error": why}}]) from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Failed(422, _mistakes(error, "body")) from error


def query_of(request: web.Request, model: type[_Model]) -> _Model:
    try:
        return model.model_validate(dict(request.query))
    except ValidationError as error:
        raise Failed(422, _mistakes(error, "query")) from error
