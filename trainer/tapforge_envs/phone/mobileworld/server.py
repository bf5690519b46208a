"""The simulated phone behind MobileWorld's HTTP API, so that clients and trainers written for it work on it.

    python -m tapforge_envs.phone.server --protocol mobileworld --devices emulator-5554 --width 1080 --height 2400

What a client relies on is as there, with the same JSON:
1. `/health` tells of devices that were asked for before, and of no others: with none it says `ok`. A device that isn't
   plugged in makes every call of it 500 `Device is not healthy`, and `/health` not ok for good.
2. `/step` answers 200 whatever the phone made of the action, but 500 for an unknown app. Coordinates are
   pixels. `status` does nothing, `answer` is
   kept for the judge; the episode goes on after both.
3. `/task/eval` is a GET with a JSON body and looks at the phone as it is. A task that was not initialised, or torn
   down, is 500 without words, as every exception that the server doesn't expect.
4. A body or query of another shape is 422 with the place of each mistake, and nothing is executed.

Tasks are named `SUITE-SPLIT-NUMBER`; `/task/list` has the feasible ones of the first `tasks` numbers. Other than there,
`wait` doesn't wait, `ask_user` has one answer, `/download` has the latest screenshots only, and there is no modem.
Variants: `mobileworld` answers `/health` with 200, `redroid` with 503 when a device is sick.

With a `Motion` (`phone/motion.py`) screens move for a while after an action, and `/motion?device=` tells whether the
last screenshot was of the one that stays. A fault of `phone/faults.py` that is about a frame spoils the screenshots
until the next step; `lost_task` is a server that was started anew. For faults and motion an episode is `DEVICE:n`, the
n-th task that was initialised there.
"""

from __future__ import annotations

import base64
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from aiohttp import web

from tapforge_envs import protocol as p
from tapforge_envs.phone.faults import Call
from tapforge_envs.phone.injection import Injector
from tapforge_envs.phone.motion import Motion, MovingScreen
from tapforge_envs.phone.slot import Slot
from tapforge_envs.phone.tree import ui_tree
from tapforge_envs.serving.claims import Refused
from tapforge_envs.serving.http import slot_application

from .devices import Device, TaskNames, device_action, judged, spoilt
from .messages import (
    DEVICE,
    DeviceAction,
    DeviceQuery,
    Failed,
    Init,
    InitQuery,
    PathQuery,
    ScreenshotQuery,
    Sms,
    Step,
    SuiteQuery,
    TaskCall,
    TaskQuery,
    XmlQuery,
    body_of,
    query_of,
)

Variant = Literal["mobileworld", "redroid"]
SUITE_FAMILY = "mobile_world"
#: what `open_app` answers for a name that is none of an app, as the server there trips over it
_UNKNOWN_APP = "1 validation error for AdbResponse\ncommand\n  Input should be a valid string"
#: screenshots that /download has, per server
_KEPT = 16
_SCREENS = PurePosixPath("/app/service/artifacts")


@dataclass
class MobileWorld:
    """One server, with its phones."""

    width: int
    height: int
    suites: tuple[str, ...]
    names: TaskNames
    faults: Injector
    serials: tuple[str, ...] = (DEVICE,)
    variant: Variant = "mobileworld"
    #: phones by serial, where other protocols share them; the others are made
    slots: dict[str, Slot] = field(default_factory=dict)
    motion: Motion | None = None
    devices: dict[str, Device] = field(init=False)
    #: that a client asked for, whether they exist or not
    registered: dict[str, bool] = field(default_factory=dict)
    initialised: set[str] = field(default_factory=set)
    screens: OrderedDict[str, bytes] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """As a server process does that has just been started."""
        for serial in self.serials:
            if serial not in self.slots:
                self.slots[serial] = Slot(self.width, self.height, self.suites)
            self.slots[serial].restart()
        self.devices = {serial: Device(serial, self.slots[serial]) for serial in self.serials}
        self.registered.clear()
        self.initialised.clear()

    def device(self, serial: str) -> Device:
        self.registered[serial] = serial in self.devices
        if not self.registered[serial]:
            raise Failed(500, "Device is not healthy")
        return self.devices[serial]

    def task(self, name: str) -> p.Task:
        try:
            return self.names[name]
        except LookupError as error:
            raise Failed(500, None) from error

    # --- the phone and its screen ---

    async def health(self, request: web.Request) -> Any:
        well = self.faults.lying or not self.faults.hung
        status = {serial: plugged_in and well for serial, plugged_in in self.registered.items()}
        ok = all(status.values())
        body = {"ok": ok, "devices": list(status), "device_status": status}
        return web.json_response(body, status=503 if not ok and self.variant == "redroid" else 200)

    async def init_get(self, request: web.Request) -> Any:
        return await self._init(query_of(request, InitQuery).device)

    async def init_post(self, request: web.Request) -> Any:
        return await self._init((await body_of(request, Init)).device)

    async def _init(self, serial: str) -> Any:
        await self._sick()
        self.device(serial)
        return {"device": serial, "viewport_size": [self.width, self.height]}

    async def state(self, request: web.Request) -> Any:
        device = self.device(query_of(request, DeviceQuery).device)
        app = device.phone.state["nav"]["app"]
        size = {"device": device.serial, "viewport_size": [self.width, self.height]}
        return {**size, "current_activity": f"dev.tapforge.{app}", "current_app": app}

    async def screenshot(self, request: web.Request) -> Any:
        asked = query_of(request, ScreenshotQuery)
        await self._sick()
        device = self.device(asked.device)
        name = asked.prefix or time.strftime("%Y%m%d_%H%M%S")
        path = str(_SCREENS / device.serial / "screens" / f"{name}.png")
        shown = device.phone.observe().frame.data if device.moving is None else await device.moving.screenshot()
        data = spoilt(shown, device.fault)
        self.screens[path] = data
        while len(self.screens) > _KEPT:
            self.screens.popitem(last=False)
        answer = {"device": device.serial, "path": path}
        return {**answer, "b64_png": base64.b64encode(data).decode()} if asked.return_b64 else answer

    async def download(self, request: web.Request) -> Any:
        data = self.screens.get(query_of(request, PathQuery).path)
        if data is None:
            raise Failed(404, "file not found")
        return web.Response(body=data, content_type="image/png")

    async def xml(self, request: web.Request) -> Any:
        asked = query_of(request, XmlQuery)
        device = self.device(asked.device)
        if asked.mode == "ac":
            raise Failed(500, "xml ac pull failed")
        name = asked.prefix or time.strftime("%Y%m%d_%H%M%S")
        path = str(_SCREENS / device.serial / "xml" / f"{name}.xml")
        phone = device.phone
        tree = ui_tree(phone.screen(), phone.state["nav"]["app"], self.width, self.height)
        answer = {"device": device.serial, "mode": asked.mode, "path": path}
        return {**answer, "content": tree} if asked.return_content else answer

    async def moved(self, request: web.Request) -> Any:
        device = self.device(query_of(request, DeviceQuery).device)
        if device.moving is None:
            raise Failed(404, "screens don't move here: start the server with --motion, and a task")
        return device.moving.told()

    async def sms(self, request: web.Request) -> Any:
        self.device((await body_of(request, Sms)).device)
        raise Failed(500, "Failed to send SMS: this phone has no modem")

    # --- actions ---

    async def step(self, request: web.Request) -> Any:
        asked = await body_of(request, Step)
        device = self.device(asked.device)
        index, device.steps = device.steps, device.steps + 1
        await self._strike(device, "step", index)
        device = self.device(asked.device)
        result = self._act(device, asked.action)
        if device.moving is not None:
            await device.moving.acted(device.episode, index)
        await self.faults.delay("step", device.episode, index)
        return {"device": device.serial, "action": asked.action.model_dump(), "result": result}

    def _act(self, device: Device, asked: DeviceAction) -> str:
        """What adb says on standard output, which is nothing where it fails."""
        match asked.action_type:
            case "answer":
                device.answer = asked.text or ""
                return "OK"
            case "status":
                return asked.goal_status or "unknown"
            case "ask_user":
                if not device.task:
                    raise Failed(500, "user_sys_prompt is not configured. Please initialize the task first.")
                return "I have nothing to add to the task."
            case "wait":
                return "OK"
            case "unknown":
                return "UNKNOWN_ACTION"
            case "finished" | "mcp" | None:
                raise Failed(500, f"400: unknown action: {asked.action_type}")
        action = device_action(asked, self.width, self.height)
        if action is None:
            return ""
        if isinstance(action, p.Type):  # by ADBKeyboard, for which a line end is a character
            device.phone.insert(action.text)
            return "Broadcasting: Intent { act=ADB_INPUT_B64 flg=0x400000 (has extras) }\nBroadcast completed: result=0"
        note = device.phone.act(action)
        if isinstance(action, p.OpenApp):
            if note:
                raise Failed(500, _UNKNOWN_APP)
            return "Events injected: 1"
        return ""

    # --- tasks ---

    async def task_list(self, request: web.Request) -> Any:
        return [self.names.card(name) for name in self.names.all]

    async def task_goal(self, request: web.Request) -> Any:
        return self.task(query_of(request, TaskQuery).task_name).goal

    async def task_metadata(self, request: web.Request) -> Any:
        name = query_of(request, TaskQuery).task_name
        self.task(name)
        return self.names.card(name)

    async def task_complexity(self, request: web.Request) -> Any:
        name = query_of(request, TaskQuery).task_name
        try:
            return float(self.names[name].max_steps)
        except LookupError as error:
            raise Failed(500, f"Error getting complexity for task: {error}") from error

    async def task_init(self, request: web.Request) -> Any:
        asked = await body_of(request, TaskCall)
        device = self.device(asked.req_device)
        try:
            task = self.names[asked.task_name]
        except LookupError as error:
            raise Failed(500, f"Error initializing task: {error}") from error
        device.inits, device.steps, device.task = device.inits + 1, 0, asked.task_name
        await self._strike(device, "reset", -1)
        device = self.device(asked.req_device)
        device.slot.begin(task)
        device.answer = ""
        device.moving = MovingScreen(self.motion, device.phone) if self.motion is not None else None
        self.initialised.add(asked.task_name)
        self.faults.new_episode()
        await self.faults.delay("reset", device.episode, -1)
        return "OK"

    async def task_eval(self, request: web.Request) -> Any:
        asked = await body_of(request, TaskCall)
        device = self.device(asked.req_device)
        self.task(asked.task_name)
        await self._strike(device, "evaluate", -1)
        if asked.task_name not in self.initialised or device.task != asked.task_name:
            raise Failed(500, None)
        score = judged(device)
        await self.faults.delay("evaluate", device.episode, -1)
        return {"score": score.value, "reason": "; ".join((score.reason, *score.side_effects))}

    async def task_tear_down(self, request: web.Request) -> Any:
        asked = await body_of(request, TaskCall)
        await self._sick()
        device = self.device(asked.req_device)
        self.task(asked.task_name)
        self.initialised.discard(asked.task_name)
        device.answer = ""
        return "OK"

    async def switch(self, request: web.Request) -> Any:
        family = query_of(request, SuiteQuery).target_family
        if family != SUITE_FAMILY:
            raise Failed(400, f"Invalid suite_family: {family}. Must be '{SUITE_FAMILY}'")
        return {"message": f"Already on suite_family {family}", "suite_family": family, "switched": False}

    # --- faults ---

    async def _sick(self) -> None:
        """For calls that no fault is drawn for: a phone that hangs doesn't answer them either, a liar refuses them."""
        if self.faults.hung:
            await self.faults.never()

    async def _strike(self, device: Device, call: Call, index: int) -> None:
        try:
            device.fault = await self.faults.strike(call, device.episode, index)
        except Refused as refused:
            raise Failed(500, "Device is not healthy" if refused.status == 503 else str(refused)) from refused
        if device.fault is not None and device.fault.kind == "lost_task":
            self.start_anew()


# --- over HTTP --------------------------------------------------------------------------------------------------------

_Call = Callable[[MobileWorld, web.Request], Awaitable[Any]]
_GET: dict[str, _Call] = {
    "/health": MobileWorld.health,
    "/init": MobileWorld.init_get,
    "/state": MobileWorld.state,
    "/screenshot": MobileWorld.screenshot,
    "/download": MobileWorld.download,
    "/xml": MobileWorld.xml,
    "/task/list": MobileWorld.task_list,
    "/task/goal": MobileWorld.task_goal,
    "/task/metadata": MobileWorld.task_metadata,
    "/task/complexity": MobileWorld.task_complexity,
    "/task/eval": MobileWorld.task_eval,
    "/faults": lambda server, request: server.faults.show(request),
    "/motion": MobileWorld.moved,
}
_POST: dict[str, _Call] = {
    "/init": MobileWorld.init_post,
    "/sms": MobileWorld.sms,
    "/step": MobileWorld.step,
    "/task/init": MobileWorld.task_init,
    "/task/tear_down": MobileWorld.task_tear_down,
    "/suite_family/switch": MobileWorld.switch,
    "/faults": lambda server, request: server.faults.set(request),
}


@web.middleware
async def _failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Failed as failed:
        if failed.detail is None:
            return web.Response(text="Internal Server Error", status=failed.status)
        return web.json_response({"detail": failed.detail}, status=failed.status)
    except Refused as refused:
        return web.json_response({"detail": str(refused)}, status=refused.status)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)


def _answered(call: _Call) -> Callable[[MobileWorld, web.Request], Awaitable[web.StreamResponse]]:
    async def answer(server: MobileWorld, request: web.Request) -> web.StreamResponse:
        value = await call(server, request)
        return value if isinstance(value, web.StreamResponse) else web.json_response(value)

    return answer


def application(servers: Sequence[MobileWorld]) -> web.Application:
    """Servers as one aiohttp application, server i under /slot/i."""
    return slot_application(
        servers,
        get={path: _answered(call) for path, call in _GET.items()},
        post={path: _answered(call) for path, call in _POST.items()},
        failures=_failures,
    )
