"""What a reset does to a phone, in order: wake and unlock, calls, notifications, apps that run, data, keyboard, the
task's own setup, home screen, the task's app. `spec.environment.adb` says what of it is done; `docs/adb.md` lists it.

A line that fails, fails the reset: a phone in half a state must not be practised on.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from tapforge_api.environment import Adb

from ...protocol import Task
from .actions import MAX_LINE
from .apps import component_in, packages_in, split_component
from .device import Device, DeviceError
from .keyboard import ADB_KEYBOARD, Keyboard
from .windows import Windows
from .wire import short

#: times that the lock screen is asked whether it went, and between them, seconds
_LOCK_CHECKS: Final = 10
_LOCK_SECONDS: Final = 0.3
#: in front of everything, and no app: stopping it blinks or restarts the phone's own interface
_SYSTEM: Final = frozenset(("android", "com.android.systemui"))
_HOME: Final = "-a android.intent.action.MAIN -c android.intent.category.HOME"
_LAUNCHER: Final = "-a android.intent.action.MAIN -c android.intent.category.LAUNCHER"


async def prepare(device: Device, options: Adb, task: Task, keyboard: Keyboard) -> None:
    """Raises DeviceError, AdbError."""
    app = None
    if (text := task.params.get("app", "")) and (app := split_component(text)) is None:
        raise DeviceError(f"the task's app {short(text, 80)!r} is neither a package nor package/activity")
    if options.stay_awake:
        await device.run("svc power stayon true")
    windows = await _unlocked(device) if options.unlock else (await device.windows())[0]
    if states := await device.calls() - {0}:
        raise DeviceError("it has an incoming call" if 1 in states else "it is in a call: end it")
    if options.collapse_notifications:
        await device.run("cmd statusbar collapse")
    if options.do_not_disturb:
        await device.run("cmd notification set_dnd on")
    await _stop_apps(device, options, windows, app[0] if app else "")
    for package in options.clear_data:
        if "Success" not in (said := await device.run(f"pm clear {package}")):
            raise DeviceError(f"pm clear {package}: {short(said)}")
    await keyboard.set_up(options.keyboard)
    for line in task.params.get("setup", "").splitlines():
        if line.strip():
            await device.run(line)
    await device.run("input keyevent KEYCODE_HOME")
    if app and (trouble := await start(device, *app)):
        raise DeviceError(f"the task's app: {trouble}")


async def start(device: Device, package: str, activity: str = "") -> str:
    """Starts an app, as a tap on its icon would. Why it didn't start; "" if it did."""
    component = f"{package}/{activity}" if activity else None
    if component is None:
        found = await device.shell(f"cmd package resolve-activity --brief {package}")
        component = component_in(found.text) if found.status == 0 else None
    if component is None:
        return f"{package} has nothing to start (no launcher activity), or is not installed"
    # Not by monkey: it turns the rotation of the screen on.
    result = await device.shell(f"am start -W {_LAUNCHER} -n {shlex.quote(component)}")
    said = f"{result.stdout.decode('utf-8', 'replace')}\n{result.stderr.decode('utf-8', 'replace')}"
    errors = [line.strip() for line in said.splitlines() if line.strip().startswith(("Error", "Exception"))]
    if result.status or errors:
        return f"{component} did not start: {short('; '.join(errors)) or result.words()}"
    return ""


async def _unlocked(device: Device) -> Windows:
    """Raises DeviceError for a phone that asks for a PIN."""
    await device.run("input keyevent KEYCODE_WAKEUP && wm dismiss-keyguard")
    for _ in range(_LOCK_CHECKS):
        windows, _, _ = await device.windows()
        if not (windows.locked or windows.asleep):
            return windows
        await asyncio.sleep(_LOCK_SECONDS)
    if windows.asleep:
        raise DeviceError("its screen stays off")
    raise DeviceError("its lock screen stays: remove PIN, pattern and password from a phone for training")


async def _stop_apps(device: Device, options: Adb, windows: Windows, app: str) -> None:
    launcher = component_in((await device.shell(f"cmd package resolve-activity --brief {_HOME}")).text) or ""
    # What shares the screen would stay there: the home key leaves one half of a split screen, and floating windows.
    stopped = {*options.force_stop, app, windows.app or "", *windows.visible}
    if options.force_stop_third_party:
        stopped |= packages_in(await device.run("pm list packages -3"))
    keyboard = (await device.run("settings get secure default_input_method")).partition("/")[0].strip()
    stopped -= {*options.keep, *_SYSTEM, launcher.partition("/")[0], keyboard, ADB_KEYBOARD.partition("/")[0], ""}
    for line in _lines(f"am force-stop {package}" for package in sorted(stopped)):
        await device.run(line)


def _lines(commands: Iterable[str]) -> Iterator[str]:
    """As few lines as they fit into; the first that fails ends its line."""
    line = ""
    for command in commands:
        if line and len(line) + len(command) + 4 > MAX_LINE:
            yield line
            line = ""
        line = f"{line} && {command}" if line else command
    if line:
        yield line
