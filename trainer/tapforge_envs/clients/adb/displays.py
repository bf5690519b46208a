"""How a phone's own screen lies, and on which of its panels it is drawn: what `dumpsys display` says. Pure.

Android draws display 0, which `input` touches, on one panel at a time. A foldable phone has two, a phone on a monitor
as well, and `screencap` takes its picture of whichever it finds first, unless one is named: that of a folded phone may
be the dark one inside. A fact that isn't there is never held against a phone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ...protocol import Frame

#: lines of `dumpsys display` that are read
LINES: Final = "DisplayViewport|DisplayDeviceInfo"
#: characters of an entry that are read: one names each mode of its panel
_ENTRY: Final = 50_000
_VIEWPORT: Final = re.compile(r"DisplayViewport\{([^{}]{1,2000})\}")
_FIELD: Final = re.compile(r"(\w+)=('[^']*'|Rect\([^)]*\)|[^,]*)")
_FRAME: Final = re.compile(r"Rect\(0, 0 - ([1-9][0-9]{0,4}), ([1-9][0-9]{0,4})\)", re.ASCII)
#: a panel by its id, as `screencap -d` takes it; what apps draw on without a panel is `virtual:`
_PANEL: Final = re.compile(r"local:([0-9]{1,20})", re.ASCII)
_OFF: Final = re.compile(r", state OFF\b")


@dataclass(frozen=True, slots=True)
class Displays:
    #: quarter turns of the screen
    turns: int | None = None
    #: its width and height as it lies, in the pixels in which `input` counts
    size: tuple[int, int] | None = None
    #: the panel that it is drawn on; "": not known
    panel: str = ""
    panels: frozenset[str] = frozenset()
    #: panels without power
    off: frozenset[str] = frozenset()

    @property
    def camera(self) -> str:
        """The panel that a picture has to be asked of; "" where there is no choice."""
        return self.panel if len(self.panels) > 1 else ""

    @property
    def dark(self) -> bool:
        """Its panel has no power."""
        return self.panel in self.off

    def shows(self, frame: Frame) -> bool:
        """Whether a picture can be one of the screen as it lies."""
        if self.size is None or self.size[0] == self.size[1] or frame.width == frame.height:
            return True
        return (self.size[0] > self.size[1]) == (frame.width > frame.height)

    def moved(self, now: Displays) -> bool:
        """Whether the screen was turned, folded or set to another size; False where that isn't known."""
        facts = ((self.size, now.size), (self.turns, now.turns), (self.panel or None, now.panel or None))
        return any(was is not None and is_ is not None and was != is_ for was, is_ in facts)


def read_displays(text: str) -> Displays:
    """Of `dumpsys display`."""
    panels, off = set[str](), set[str]()
    for part in text.split("DisplayDeviceInfo{")[1:]:
        entry = part.partition("\n")[0].partition("DisplayViewport{")[0][:_ENTRY]
        if found := _PANEL.search(entry):
            panels.add(found[1])
            if _OFF.search(entry):
                off.add(found[1])
    main: dict[str, str] = {}
    for viewport in _VIEWPORT.finditer(text):
        fields = {name: value.strip("' ") for name, value in _FIELD.findall(viewport[1])}
        if found := _PANEL.fullmatch(fields.get("uniqueId", "")):
            panels.add(found[1])
        if fields.get("displayId") != "0" or "false" in (fields.get("valid"), fields.get("isActive")):
            continue
        main = main or fields
    turns, size = main.get("orientation", ""), _FRAME.fullmatch(main.get("logicalFrame", ""))
    panel = _PANEL.fullmatch(main.get("uniqueId", ""))
    return Displays(
        turns=int(turns) if turns in ("0", "1", "2", "3") else None,
        size=(int(size[1]), int(size[2])) if size else None,
        panel=panel[1] if panel else "",
        panels=frozenset(panels),
        off=frozenset(off),
    )
