"""The input method of a phone: ADBKeyboard types any script, `input text` only ASCII.

1. A broadcast answers `result=0` whether an app received it or not. What is believed is the setting
   `default_input_method`, asked after it was set and before every text.
2. The method that a phone had before is put back at the end of the episode, and at the end of the process for phones
   whose episode broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Final, Literal

from ...protocol import UnsupportedAction
from .actions import input_text, keyboard_text, needs_keyboard
from .device import Device, DeviceError
from .wire import short

ADB_KEYBOARD: Final = "com.android.adbkeyboard/.AdbIME"
_WHICH: Final = "settings get secure default_input_method"
#: a method is set by a service that answers before it did it
_CHECKS: Final = 10
_CHECK_SECONDS: Final = 0.2

Choice = Literal["auto", "adb", "input"]


class Keyboard:
    """Of one phone, for one episode."""

    def __init__(self, device: Device, previous: MutableMapping[str, str]):
        """`previous`: address of a phone -> its own input method, while it has ours; outlives the episode."""
        self._device = device
        self._previous = previous
        self._ours = False

    async def set_up(self, choice: Choice) -> None:
        """Raises DeviceError when ADBKeyboard is asked for and can't be had."""
        self._ours = False
        if choice == "input":
            return
        if ADB_KEYBOARD not in (await self._device.run("ime list -s -a")).split():
            if choice == "adb":
                raise DeviceError(
                    f"ADBKeyboard is not installed ({ADB_KEYBOARD}): `adb install ADBKeyboard.apk`, or set "
                    "spec.environment.adb.keyboard to auto or input"
                )
            return
        before = (await self._device.run(_WHICH)).strip()
        if before != ADB_KEYBOARD:
            if before and before != "null":
                self._previous[self._device.serial] = before
            await self._choose(ADB_KEYBOARD)
        self._ours = True

    async def type(self, text: str) -> None:
        """Raises UnsupportedAction for a text that can't be typed, before any of it is."""
        if not self._ours:
            if needs_keyboard(text):
                raise UnsupportedAction(
                    f"type: {short(text, 40)!r} is not ASCII, and ADBKeyboard, which types any script, is not used"
                )
            lines = input_text(text)
        else:
            lines = keyboard_text(text)
            if text and (await self._device.run(_WHICH)).strip() != ADB_KEYBOARD:
                await self._choose(ADB_KEYBOARD)
        for line in lines:
            await self._device.run(line)

    async def restore(self) -> None:
        if self._ours and (before := self._previous.get(self._device.serial)):
            await put_back(self._device, before)
            del self._previous[self._device.serial]
        self._ours = False

    async def _choose(self, method: str) -> None:
        await self._device.run(f"ime enable {method} && ime set {method}")
        for _ in range(_CHECKS):
            if (now := (await self._device.run(_WHICH)).strip()) == method:
                return
            await asyncio.sleep(_CHECK_SECONDS)
        raise DeviceError(f"{method} was set as its input method, but it has {short(now)!r}: does the phone refuse it?")


async def put_back(device: Device, method: str) -> None:
    await device.run(f"ime set {method}")
