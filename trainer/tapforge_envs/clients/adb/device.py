"""One phone behind an adb server: is it there, run a line on it, see its screen. Nothing here knows tasks.

Errors are `AdbError` (the server or the connection) and `DeviceError` (what the phone said); `explained` makes words of
both that name the remedy.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from ...protocol import Frame
from .displays import LINES, Displays, read_displays
from .screen import frame_in, is_black, may_be_black
from .windows import Windows, call_states, read_windows
from .wire import AdbError, AdbServer, ShellResult, Trouble, short

#: HOST:PORT as `adb connect` takes it; a serial has no colon
_ENDPOINT: Final = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", re.ASCII)
#: mDNS numbers a name that it finds a second time: `adb-1A2B3C-d4e5f6 (2)._adb-tls-connect._tcp`
_SERIAL: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]*(?: \([0-9]{1,4}\)[-A-Za-z0-9._]*)?", re.ASCII)
#: every device that is attached
AUTO: Final = "auto"

#: of a screenshot and of a UI tree, bytes
_MAX_FRAME: Final = 64 * 1024 * 1024
_MAX_TREE: Final = 8 * 1024 * 1024
_TREE_FILE: Final = "/data/local/tmp/tapforge-ui.xml"
#: serials that emulators give themselves: equal for all of a version, and their kernels may be of one snapshot
_NO_SERIAL: Final = re.compile(r"EMULATOR\w*|unknown|0*|goldfish|ranchu", re.IGNORECASE)
#: seconds for the question what became of a phone
_EXPLAIN_SECONDS: Final = 2.0
#: a phone that was just connected is offline while it is greeted: how often it is asked, and between that, seconds
_GREETING_CHECKS: Final = 50
_GREETING_SECONDS: Final = 0.1
#: checks after which one that is still offline is connected anew
_GREETING_PATIENCE: Final = 10


#: since when the phone runs: the kernel, and Android, which in a container starts without it
_BOOT: Final = "getprop ro.boottime.init; cat /proc/sys/kernel/random/boot_id 2>/dev/null; true"
_BORDER: Final = "tapforge-boot"
_DISPLAYS_BORDER: Final = "tapforge-displays"
_DISPLAYS: Final = f"dumpsys display | grep -E '{LINES}'"


class DeviceError(Exception):
    """The phone is in a state in which it can't be used, or refused a command. Says which and the remedy."""


def is_endpoint(address: str) -> bool:
    return _ENDPOINT.fullmatch(address) is not None


def is_address(address: str) -> bool:
    """A serial or HOST:PORT."""
    return is_endpoint(address) or (_SERIAL.fullmatch(address) is not None and address != AUTO)


class Device:
    def __init__(self, server: AdbServer, address: str):
        """`address`: a serial, or HOST:PORT of an adbd."""
        self.server = server
        self.serial = address

    async def reach(self) -> str:
        """Until adb can talk to it; its `identity`. One at HOST:PORT is connected, and again when adb lost it,
        which adb may notice only when the phone is asked."""
        await self._connect()
        try:
            return await self.identity()
        except AdbError:
            if not is_endpoint(self.serial):
                raise
        await asyncio.sleep(_GREETING_SECONDS)
        await self._connect()
        return await self.identity()

    async def _connect(self) -> None:
        """adb's server says "connected" before it greeted the phone, and may lose it again when it clears an older
        connection away: what counts is what it lists."""
        state = await self._state()
        if is_endpoint(self.serial):
            for check in range(_GREETING_CHECKS):
                if state in ("device", "unauthorized"):
                    break
                if not state:
                    await self.server.connect(self.serial)
                elif state == "offline" and check % _GREETING_PATIENCE == 0:
                    await self.server.disconnect(self.serial)
                await asyncio.sleep(_GREETING_SECONDS)
                state = await self._state()
        if state != "device":
            raise not_usable(state)

    async def _state(self) -> str:
        """As adb says it; "" for one that it doesn't know."""
        return next((d.state for d in await self.server.devices() if d.serial == self.serial), "")

    async def identity(self) -> str:
        """Equal for two addresses of one phone, and another one after it was booted again. Emulators have no serial
        number of their own: theirs has the address in it."""
        line = f"getprop ro.serialno; getprop sys.boot_completed; {_BOOT}"
        serial, booted, *boot = (*(await self.run(line)).splitlines(), "", "")
        if booted.strip() != "1":
            raise DeviceError("it is still booting (sys.boot_completed is not 1)")
        place = f"@{self.serial}" if _NO_SERIAL.fullmatch(serial.strip()) else ""
        return f"{serial.strip()}{place}/{_boot_of(boot)}"

    async def shell(self, line: str) -> ShellResult:
        return await self.server.shell(self.serial, line)

    async def run(self, line: str) -> str:
        """What a line that has to work writes. Raises DeviceError when its exit status isn't 0."""
        result = await self.shell(line)
        if result.status:
            raise DeviceError(f"`{short(line, 120)}` ended with {result.status}: {result.words()}")
        return result.text

    async def frame(self, panel: str = "") -> Frame:
        """`panel`: which of several; without it the one that the phone takes."""
        line = f"screencap -p -d {panel}" if panel else "screencap -p"
        output = await self.server.exec_out(self.serial, line, _MAX_FRAME)
        try:
            # Megabytes that are summed twice: not beside the steps of other phones.
            return await asyncio.to_thread(frame_in, output)
        except ValueError as error:
            # A connection that ended and a command that did look the same.
            if (state := await self._state()) != "device":
                raise not_usable(state) from error
            raise DeviceError(str(error)) from error

    async def windows(self) -> tuple[Windows, Displays, str]:
        """What is in front, how the screen lies, and the end of `identity`, which is another one after the phone was
        booted again."""
        line = f"dumpsys window; echo {_DISPLAYS_BORDER}; {_DISPLAYS}; echo {_BORDER}; {_BOOT}"
        listed, _, boot = (await self.run(line)).rpartition(_BORDER)
        windows, _, displays = listed.partition(_DISPLAYS_BORDER)
        return await asyncio.to_thread(read_windows, windows), read_displays(displays), _boot_of(boot.splitlines())

    async def displays(self) -> Displays:
        """How the screen lies."""
        return read_displays((await self.shell(_DISPLAYS)).text)

    async def calls(self) -> frozenset[int]:
        # Not every phone has one: a tablet says that it can't find the service.
        return call_states((await self.shell("dumpsys telephony.registry")).text)

    async def refuse_unusable(self, frame: Frame, windows: Windows, displays: Displays) -> None:
        """Raises DeviceError for a screen on which no agent can work."""
        if windows.asleep:
            raise DeviceError(
                "its screen is off: keep it plugged in, with spec.environment.adb.stayAwake or 'Stay awake' in its "
                "developer options"
            )
        if displays.dark:
            raise DeviceError(
                "the display that it draws on is off: leave it folded or unfolded as it was, and keep that side on"
            )
        if windows.locked:
            raise DeviceError("its lock screen is in front: remove PIN, pattern and password from a phone for training")
        if windows.shows_call and 1 in await self.calls():
            raise DeviceError(f"it has an incoming call ({windows.app}): take out its SIM card, or set doNotDisturb")
        try:
            black = may_be_black(frame) and await asyncio.to_thread(is_black, frame)
        except ValueError as error:
            raise DeviceError(str(error)) from error
        if black and len(displays.panels) > 1 and not displays.panel:
            raise DeviceError(
                "its picture is black and it has several displays, of which it doesn't say which one it draws on: "
                "unfold it, and take it off other screens"
            )
        if black and windows.secure:
            raise DeviceError(
                f"{windows.app} forbids screenshots (FLAG_SECURE): its frames are black, so tasks can't lead there"
            )

    async def ui_tree(self) -> tuple[str | None, str]:
        """(the tree, what went wrong). A screen that never comes to rest has none; the phone is not at fault."""
        line = f"rm -f {_TREE_FILE} && uiautomator dump {_TREE_FILE} >/dev/null && cat {_TREE_FILE}"
        result = await self.server.shell(self.serial, line, _MAX_TREE)
        start, end = result.stdout.find(b"<?xml"), result.stdout.rfind(b"</hierarchy>")
        if start < 0 or end < start:
            return None, f"no UI tree: {result.words() or 'uiautomator wrote none'}"
        return result.stdout[start : end + len(b"</hierarchy>")].decode("utf-8", "replace"), ""

    async def explained(self, error: AdbError | DeviceError) -> str:
        """For a fault's message: the error, and what became of the phone where the error doesn't say it."""
        if isinstance(error, DeviceError) or error.trouble is Trouble.NO_SERVER:
            return str(error)
        words = f"adb: {error}"
        try:
            async with asyncio.timeout(_EXPLAIN_SECONDS):
                state = await self._state()
        except (TimeoutError, AdbError):
            return words
        return words if state == "device" else f"{not_usable(state)} ({words})"


def _boot_of(lines: Sequence[str]) -> str:
    return "/".join(line.strip() for line in lines if line.strip())


def not_usable(state: str) -> DeviceError:
    """Why a phone in this state of `adb devices` can't be used; "" is one that is not listed."""
    match state:
        case "":
            return DeviceError("adb doesn't know it any more: is it plugged in and on? `adb devices -l` lists all")
        case "unauthorized" | "authorizing":
            return DeviceError(
                "it hasn't allowed this computer: unlock it and accept 'Allow USB debugging' on its screen, for always"
            )
        case "offline" | "connecting":
            return DeviceError(f"it is {state}: plug it in again, or `adb reconnect offline`")
        case "no permissions":
            return DeviceError(
                "adb may not open its USB device: add a udev rule for it (Debian: android-sdk-platform-tools-common)"
            )
        case _:
            return DeviceError(f"its state is {state!r}, needed is 'device'")
