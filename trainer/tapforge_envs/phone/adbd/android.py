"""A phone as adb sees it: the simulated phone, and what Android is around its apps (power, lock, keyboard, files, ...).

- The screen is the phone's own, unless the display is off, the lock screen or a call lies over it, or the app in front
  is marked secure; then the frame is black, as on a phone.
- Input reaches the apps only when the phone is awake, unlocked and in no call. Input that reached
  no app is not remembered.
- A client that shares the phone over another protocol (`slot.Slot`) sees the apps, and nothing that lies over them.

No I/O here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from PIL import Image

from tapforge_envs import protocol as p
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.draw import frame
from tapforge_envs.phone.screen import Screen, Widget
from tapforge_envs.phone.slot import Slot
from tapforge_envs.phone.tree import ui_tree

from .files import Files

PREFIX: Final = "dev.tapforge."
ACTIVITY: Final = ".MainActivity"
ADB_KEYBOARD: Final = "com.android.adbkeyboard/.AdbIME"
LATIN_KEYBOARD: Final = "com.android.inputmethod.latin/.LatinIME"
#: bytes that running commands and transfers of one phone hold together
MAX_HELD: Final = 256 * 1024 * 1024
DIALER: Final = "com.android.dialer"
SYSTEM_UI: Final = "com.android.systemui"


class Memory:
    """Bytes that what runs on a phone may hold together: output that isn't taken yet, files that are still coming."""

    def __init__(self, limit: int = MAX_HELD):
        self.limit = limit
        self.used = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What is held in a block; it is let go with it."""
        held = Held(self)
        try:
            yield held
        finally:
            held.resize(0)


class Held:
    def __init__(self, memory: Memory):
        self._memory = memory
        self._size = 0

    def resize(self, size: int) -> bool:
        """Holds `size` bytes from now on. False where there is no room, and nothing has changed then."""
        used = self._memory.used - self._size + size
        if size > self._size and used > self._memory.limit:
            return False
        self._memory.used, self._size = used, size
        return True


@dataclass
class Android:
    slot: Slot
    serial: str = "tapforge"
    awake: bool = True
    locked: bool = False
    #: asked for when the phone is unlocked; "" for none
    pin: str = ""
    #: quarter turns, as Android counts them: 1 is landscape with the top to the left
    rotation: int = 0
    #: the size that `wm size` was set to: `input` counts in its pixels, and pictures keep the display's own
    override: tuple[int, int] | None = None
    #: ids of its panels, two where it folds, and the one that it draws on: the others are dark
    panels: tuple[str, ...] = ("4619827259835644672",)
    panel: str = "4619827259835644672"
    #: package of the app in the other half of a split screen, which is not drawn
    beside: str = ""
    #: the app in front forbids screenshots (FLAG_SECURE)
    secure: bool = False
    #: a call comes in; its screen lies over the apps until the call is ended
    call: bool = False
    #: whether ADBKeyboard is installed
    keyboard: bool = True
    enabled_keyboards: set[str] = field(default_factory=lambda: {LATIN_KEYBOARD})
    default_keyboard: str = LATIN_KEYBOARD
    #: settings that the phone's own state doesn't have: (namespace, name) -> value
    settings: dict[tuple[str, str], str] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    memory: Memory = field(default_factory=Memory)
    #: where a finger went down (`input motionevent`), pixels
    down: tuple[float, float] | None = None
    #: digits typed at the lock screen
    typed_pin: str = ""

    # --- the phone ---

    @property
    def phone(self) -> Phone:
        """The phone of the running episode, else the one that lies there."""
        phone = self.slot.phone
        sideways = self.rotation % 2 == 1
        phone.width, phone.height = (
            (self.slot.height, self.slot.width) if sideways else (self.slot.width, self.slot.height)
        )
        return phone

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of what the screen shows, pixels."""
        phone = self.phone
        return phone.width, phone.height

    def shown_at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of what the screen shows, for those in which `input` counts."""
        wide, high = self.counted
        return x * self.size[0] / wide, y * self.size[1] / high

    @property
    def apps(self) -> list[str]:
        """Names of the apps that have an icon, without the launcher."""
        return [name for name, app in self.phone.image.apps.items() if app.glyph]

    @property
    def front(self) -> str:
        """The app in front; what lies over it isn't asked."""
        app: str = self.phone.state["nav"]["app"]
        return app

    @property
    def usable(self) -> bool:
        """Whether input reaches the apps."""
        return self.awake and not self.locked and not self.call

    def act(self, action: p.Action) -> str:
        """What reaches the apps; "" when it had an effect, else a note."""
        return self.phone.act(action) if self.usable else "the phone is asleep, locked or in a call"

    def insert(self, text: str) -> str:
        """What the input method writes; a note as from `act`."""
        return self.phone.insert(text) if self.usable else "the phone is asleep, locked or in a call"

    def component(self) -> str:
        """The activity in front, PACKAGE/CLASS as Android writes it."""
        if self.call:
            return f"{DIALER}/com.android.incallui.InCallActivity"
        return f"{PREFIX}{self.front}/{PREFIX}{self.front}{ACTIVITY}"

    def field(self) -> Widget | None:
        """The text field that has the focus."""
        if not self.usable:
            return None
        return next((w for w in self.phone.screen().widgets if w.kind == "input" and w.on), None)

    # --- what is seen ---

    @property
    def counted(self) -> tuple[int, int]:
        """Width and height of the screen as it lies, in the pixels in which `input` counts."""
        if self.override is None:
            return self.size
        return self.override if self.rotation % 2 == 0 else self.override[::-1]

    def screenshot(self, panel: str = "") -> p.Frame:
        """`panel`: of which of them; the first one without it."""
        width, height = self.size
        if not self.awake or (self.secure and self.usable) or (panel or self.panels[0]) != self.panel:
            return _black(width, height)
        return frame(self._screen(), width, height)

    def tree(self) -> str:
        width, height = self.size
        tree = ui_tree(self._screen(), self.front, width, height)
        if not self.usable:
            own, over = f"{PREFIX}{self.front}", DIALER if self.call else SYSTEM_UI
            tree = tree.replace(f'package="{own}"', f'package="{over}"')
        return tree.replace('<hierarchy rotation="0">', f'<hierarchy rotation="{self.rotation}">', 1)

    def _screen(self) -> Screen:
        if self.call:
            return _cover("Incoming call", "0151 2345")
        if self.locked:
            return _cover("Locked", "Enter PIN" if self.pin else "Swipe up to unlock")
        return self.phone.screen()

    # --- power and lock ---

    def sleep(self) -> None:
        self.awake, self.locked, self.typed_pin = False, True, ""

    def wake(self) -> None:
        self.awake = True

    def dismiss_keyguard(self) -> None:
        """As a swipe over the lock screen does: a phone with a PIN asks for it."""
        if self.awake and not self.pin:
            self.locked = False

    def enter_pin(self) -> None:
        if self.awake and self.locked and self.typed_pin == self.pin:
            self.locked = False
        self.typed_pin = ""

    # --- tasks ---

    def begin(self, task: p.Task | None) -> None:
        """A fresh phone with this task, or with none. Raises slot.Refused for a task that it doesn't have."""
        if task is None:
            self.slot.restart()
        else:
            self.slot.begin(task)
        self.awake, self.locked, self.call, self.secure, self.rotation = True, False, False, False, 0

    def score(self) -> p.Score | None:
        """The judge's word on this moment; None without a task."""
        return self.phone.evaluate() if self.slot.task is not None else None


def app_of(package: str) -> str | None:
    """NAME of dev.tapforge.NAME."""
    name = package.removeprefix(PREFIX)
    return name if name != package and name else None


def _cover(title: str, words: str) -> Screen:
    """What lies over the apps."""
    return Screen((24, 28, 40), (Widget("cover", "words", (0.05, 0.3, 0.9, 0.2), title, words, tap=False),))


@lru_cache(maxsize=8)
def _black(width: int, height: int) -> p.Frame:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return p.Frame.of(out.getvalue(), width, height)
