"""A phone over adb, seen as an `Environment`: any Android phone, emulator or cloud phone from Android 7 on.

Its server is the adb server of this machine (`wire.py`); nothing is installed on the phone but, to type
other scripts than Latin, ADBKeyboard.

Promises:
1. Every call ends within its deadline (`Deadlines`, seconds) or raises `EnvironmentFault`; nothing is sent twice. adb
   can't tell whether a line that ran out of time was carried out.
2. An observation is a whole PNG of this phone, taken after the action. A phone that is gone, unauthorized, offline,
   locked, asleep, called, or that shows what may not be photographed, is a fault that says so.
3. Taps go by the frame that was seen last: a phone that is turned or folded is used as it lies. Where the phone counts
   in other pixels, by those (`touch.py`). One that was turned or folded since that frame is not touched.
4. `evaluate` runs the task's own check, and has no default verdict: a task without one, or a check that breaks, is a
   fault with reason judge_error.
5. One episode per phone: an older one in this process, under whatever address, finds its lease lost.

What a task brings is in `tasks.py`, what a reset does in `reset.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tapforge_api.environment import Adb, Settle

from ... import protocol as p
from ...protocol import EnvironmentFault, Frame, Observation, Reason, Score, StepResult, Task
from ..http import Deadlines
from ..settling import settle as settled_screen
from .actions import command_of
from .apps import package_of, packages_in
from .device import Device, DeviceError
from .displays import Displays
from .judge import judged
from .keyboard import Keyboard, put_back
from .reset import prepare, start
from .touch import override_size, touched_size
from .windows import Windows
from .wire import AdbError, AdbServer, server_address, short

#: of a step's deadline that a wait may take: an agent must not be able to make its own episode invalid
_WAIT_SHARE: Final = 0.5
#: a finger that rests longer does nothing else, seconds
_LONGEST_PRESS: Final = 5.0
_CLOSE_SECONDS: Final = 5.0
#: pictures for one observation of a phone that is turned or folded while they are taken
_PICTURES: Final = 3
_AT_PLACES: Final = (p.Tap, p.DoubleTap, p.LongPress, p.Swipe, p.Drag, p.Scroll)


@dataclass
class AdbPhones:
    """What a process has to remember of phones between episodes."""

    server: AdbServer
    #: identity of a phone -> the client that has it
    holders: MutableMapping[str, AdbClient] = field(default_factory=dict)
    #: address of a phone -> its own input method, while it has ours
    keyboards: MutableMapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of_environment(slot: str) -> AdbPhones:
        """At the server that the `adb` command would use here. Raises EnvironmentFault for variables that name none."""
        try:
            return AdbPhones(AdbServer(server_address(os.environ)))
        except ValueError as error:
            raise EnvironmentFault(f"{slot}: {error}") from error

    async def close(self) -> None:
        """Puts back input methods of phones whose episode broke, as far as they can be reached."""

        async def restore(address: str, method: str) -> None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await put_back(Device(self.server, address), method)
            except (TimeoutError, AdbError, DeviceError):
                return  # a phone that is gone keeps what it has; docs/adb.md says how to put it back

        await asyncio.gather(*(restore(address, method) for address, method in self.keyboards.items()))
        self.keyboards.clear()


class AdbClient:
    """One phone. Lives as long as a lease."""

    def __init__(
        self,
        address: str,
        phones: AdbPhones,
        deadlines: Deadlines | None = None,
        slot: str = "",
        options: Adb | None = None,
        settle: Settle | None = None,
    ):
        """`address`: a serial, or HOST:PORT of an adbd."""
        self.slot = slot or address
        self._phones = phones
        self._device = Device(phones.server, address)
        self._keyboard = Keyboard(self._device, phones.keyboards)
        self._deadlines = deadlines or Deadlines()
        self._options = options or Adb()
        self._settle = settle or Settle()
        self._identity = ""
        self._task: Task | None = None
        self._answer = ""
        self._seen: Observation | None = None
        #: what `wm size` was set to, pixels
        self._override: tuple[int, int] | None = None
        #: how the screen lay when it was seen last
        self._displays = Displays()
        #: packages that are installed; None: not listed yet
        self._installed: frozenset[str] | None = None

    async def health(self) -> str:
        """Which phone it is and since when it runs."""
        async with self._call("health", self._deadlines.health):
            return await self._device.reach()

    async def reset(self, task: Task) -> Observation:
        self._task, self._seen, self._installed, self._answer = None, None, None, ""
        self._displays = Displays()
        async with self._call("reset", self._deadlines.reset):
            self._identity = await self._device.reach()
            self._phones.holders[self._identity] = self
            await prepare(self._device, self._options, task, self._keyboard)
            # What knows no `wm size` can't have been set by it.
            self._override = override_size((await self._device.shell("wm size")).text)
            seen, _ = await self._observe(None, expects_change=True)
        self._task = task
        return seen

    async def step(self, action: p.Action, index: int) -> StepResult:
        name = f"step {index} ({action.type})"
        before = self._seen
        if before is None:
            raise self._fault(name, "comes without a reset before it")
        if isinstance(action, p.FINAL_ACTIONS):
            self._answer = action.text if isinstance(action, p.Answer) else ""
            return StepResult(before, done=True)
        async with self._call(name, self._deadlines.step):
            note = await self._act(action, before)
            seen, odd = await self._observe(before, expects_change=not isinstance(action, p.Wait))
        return StepResult(seen, note="; ".join(words for words in (note, odd) if words))

    async def evaluate(self) -> Score:
        if (task := self._task) is None:
            raise self._fault("evaluate", "comes without a reset before it", Reason.JUDGE_ERROR)
        async with self._call("evaluate", self._deadlines.evaluate):
            if await self._device.identity() != self._identity:
                raise DeviceError("it was booted again before its episode was judged")
        async with self._call("evaluate", self._deadlines.evaluate, Reason.JUDGE_ERROR):
            return await judged(self._device, task, self._answer)

    async def close(self) -> None:
        """Puts the phone's own input method back."""
        self._task = self._seen = None
        if self._phones.holders.get(self._identity) is self:
            async with self._call("close", self._deadlines.close):
                await self._keyboard.restore()
            del self._phones.holders[self._identity]

    async def _act(self, action: p.Action, before: Observation) -> str:
        """What is odd about how it went; "" for nothing. Raises UnsupportedAction before anything is done."""
        match action:
            case p.Wait(seconds=seconds):
                await asyncio.sleep(min(seconds, self._deadlines.step * _WAIT_SHARE))
            case p.Type(text=text):
                await self._keyboard.type(text)
            case p.OpenApp(name=name):
                return await self._open(name)
            case p.LongPress(x=x, y=y, seconds=seconds) if seconds > _LONGEST_PRESS:
                return await self._act(p.LongPress(x=x, y=y, seconds=_LONGEST_PRESS), before)
            case _:
                line = command_of(action, *touched_size(before.frame, self._counted))
                known = self._displays != Displays()
                if known and isinstance(action, _AT_PLACES) and self._displays.moved(await self._device.displays()):
                    return "the screen was turned, folded or resized after its picture was taken: it was not touched"
                await self._device.run(line)
        return ""

    @property
    def _counted(self) -> tuple[int, int] | None:
        """The size in whose pixels the phone counts touches, where it is known."""
        return self._displays.size or self._override

    async def _open(self, name: str) -> str:
        """An app that isn't there is the agent's mistake, and changes nothing: the same as on our own phone."""
        if self._installed is None:
            self._installed = packages_in(await self._device.run("pm list packages"))
        named = {app.name.casefold(): app.package for app in self._options.apps}
        package = package_of(name, self._installed, named)
        if package is None:
            return f"no app {short(name, 60)!r}, or several: nothing was opened"
        return await start(self._device, package)

    async def _observe(self, before: Observation | None, *, expects_change: bool) -> tuple[Observation, str]:
        """What the phone shows once it has settled, and what is odd about it."""
        earlier = before.frame if before else None
        frame, windows = await self._picture(earlier, expects_change=expects_change)
        await self._device.refuse_unusable(frame, windows, self._displays)
        try:
            touched_size(frame, self._counted)
        except ValueError as error:
            raise DeviceError(str(error)) from error
        tree, note = await self._device.ui_tree() if self._options.ui_tree else (None, "")
        if earlier is not None and (earlier.width, earlier.height) != (frame.width, frame.height):
            turned = (earlier.width > earlier.height) != (frame.width > frame.height)
            words = "the screen was turned" if turned else "the screen has another size"
            words = f"{words}: it is {frame.width}x{frame.height} pixels now"
            note = f"{note}; {words}" if note else words
        self._seen = Observation(frame, app=windows.app, ui_tree=tree, window=windows.window)
        return self._seen, note

    async def _picture(self, earlier: Frame | None, *, expects_change: bool) -> tuple[Frame, Windows]:
        """A picture of the screen as it lies, and what it shows: taken again where the screen was turned meanwhile, or
        is drawn on another panel."""
        for _ in range(_PICTURES):
            camera = self._displays.camera
            try:
                settled = await settled_screen(
                    partial(self._device.frame, camera), self._settle, before=earlier, expects_change=expects_change
                )
            except EnvironmentFault as fault:  # of a frame that can't be decoded, and names no phone
                raise DeviceError(str(fault)) from fault
            windows, self._displays, boot = await self._device.windows()
            if not self._identity.endswith(f"/{boot}"):
                raise DeviceError("it was booted again in the middle of the episode: what the task had set up is lost")
            if self._displays.camera == camera and self._displays.shows(settled.frame):
                return settled.frame, windows
        size = self._displays.size or (0, 0)
        raise DeviceError(
            f"its pictures lie otherwise than its screen, which is {size[0]}x{size[1]} pixels, {_PICTURES} times in a "
            "row: lock its rotation (`adb shell wm user-rotation lock`), and leave it as it is folded"
        )

    @asynccontextmanager
    async def _call(self, call: str, seconds: float, reason: Reason = Reason.ENV_ERROR) -> AsyncIterator[None]:
        """Whatever goes wrong inside is a fault of this call."""
        if call not in ("health", "reset"):
            self._refuse_others(call)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise self._fault(call, f"not done within {seconds:g} s", Reason.DEADLINE) from error
        except (AdbError, DeviceError) as error:
            raise self._fault(call, await self._device.explained(error), reason) from error
        if call != "health":
            self._refuse_others(call)

    def _refuse_others(self, call: str) -> None:
        """What the phone showed to an episode that began meanwhile is nothing of this one."""
        if self._phones.holders.get(self._identity) is not self:
            raise self._fault(call, "another episode of this process uses the phone", Reason.LEASE_LOST)

    def _fault(self, call: str, what: str, reason: Reason = Reason.ENV_ERROR) -> EnvironmentFault:
        return EnvironmentFault(f"{self.slot}: {call}: {what}", reason)
