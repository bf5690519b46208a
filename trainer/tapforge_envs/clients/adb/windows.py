"""What `dumpsys window` and `dumpsys telephony.registry` say, for all Android versions that have shell,v2. Pure.

Their output is for people and differs by version and maker, so each fact is looked for under every name it has had, and
a fact that isn't there is None or False, never an error: only what was read is ever held against a phone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

#: WindowManager.LayoutParams.FLAG_SECURE
_FLAG_SECURE: Final = 0x2000

#: characters of a line that are read; the facts stand at its beginning, and no expression sees more
_LINE: Final = 500
#: that may each have an app in front
_DISPLAYS: Final = 16

_FOCUS: Final = re.compile(r"mCurrentFocus=Window\{(\w+)(?: u\d+)? ([^}]*)\}")
_RECORD: Final = re.compile(r"[ {]([\w.]+)/([\w.$]+)[ }]")
_COMPONENT: Final = re.compile(r"([\w.]+)/([\w.$]+)")
_DISPLAY: Final = re.compile(r"\bmDisplayId=([0-9]{1,9})\b", re.ASCII)
_WINDOW: Final = re.compile(r"Window #\d+ Window\{(\w+)(?: u\d+)? ([^}]*)\}:")
_FLAG_BITS: Final = re.compile(r"\bfl=#?(?:0x)?([0-9a-f]{1,8})\b")
_SHOWN: Final = ("isOnScreen=true", "isVisible=true", "isReadyForDisplay()=true")
#: by names that mean it wherever they stand
_LOCKED: Final = frozenset(
    ("mShowingLockscreen=true", "isStatusBarKeyguard=true", "mIsKeyguardShowing=true", "isKeyguardShowing=true")
)
_OCCLUDED: Final = frozenset(("mKeyguardOccluded=true", "isKeyguardOccluded=true"))
#: the policy's own words on the lock screen come in the lines after this one
_KEYGUARD: Final = "KeyguardServiceDelegate"
_KEYGUARD_LINES: Final = 16
_INTERACTIVE: Final = "interactiveState=INTERACTIVE_STATE_"
_CALL_STATE: Final = re.compile(r"(?:mCallState|mForegroundCallState)=\[?(\d)")
_CALL_WINDOW: Final = re.compile(r"incall|callactivity|callui", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Windows:
    #: package of the app in front
    app: str | None = None
    #: its activity, by its short name, or what lies over it
    window: str | None = None
    #: the lock screen is in front
    locked: bool = False
    asleep: bool = False
    #: a visible window of the app in front forbids pictures of it
    secure: bool = False
    #: packages that have a window on the screen: two in split mode, more with floating windows
    visible: frozenset[str] = frozenset()

    @property
    def shows_call(self) -> bool:
        """The window in front belongs to a telephone call, or looks as if."""
        return bool(_CALL_WINDOW.search(f"{self.app or ''}/{self.window or ''}"))


@dataclass(slots=True)
class _Window:
    id: str
    title: str
    shown: bool = False
    secure: bool = False
    #: on another display than the phone's own
    elsewhere: bool = False


def read_windows(text: str) -> Windows:
    """Of `dumpsys window`."""
    focus: re.Match[str] | None = None
    record: re.Match[str] | None = None
    displays = _DISPLAYS
    windows: list[_Window] = []
    words: set[str] = set()
    policy: set[str] = set()
    policy_lines = 0
    for line in _lines(text):
        policy_lines = _KEYGUARD_LINES if line.startswith(_KEYGUARD) else policy_lines - 1
        said = [word for word in line.split() if word.endswith(("=true", "=false")) or word.startswith(_INTERACTIVE)]
        (policy if policy_lines > 0 else words).update(said)
        if focus is None and (found := _FOCUS.match(line)):
            focus = found
        elif record is None and displays and line.startswith("mFocusedApp="):
            displays -= 1
            record = _RECORD.search(line)
        elif found := _WINDOW.match(line):
            windows.append(_Window(found[1], found[2]))
        elif windows:
            windows[-1].shown |= any(word in line for word in _SHOWN)
            windows[-1].secure |= _has_flag(line)
            if found := _DISPLAY.search(line):
                windows[-1].elsewhere = found[1] != "0"
    app, window = _in_front(focus, record)
    words |= {word for word in policy if word not in ("showing=true", "occluded=true")}
    locked = "showing=true" in policy or words & _LOCKED
    return Windows(
        app=app,
        window=window,
        locked=bool(locked) and not (words & _OCCLUDED or "occluded=true" in policy),
        asleep=_asleep(words),
        secure=any(
            w.secure and ((focus and w.id == focus[1]) or (w.shown and app and w.title.startswith(f"{app}/")))
            for w in windows
        ),
        visible=frozenset(
            c[1] for w in windows if w.shown and not w.elsewhere and (c := _COMPONENT.fullmatch(w.title.strip()))
        ),
    )


def _asleep(words: set[str]) -> bool:
    """By the state of the phone; older ones say only which displays are on."""
    if states := {word.removeprefix(_INTERACTIVE) for word in words if word.startswith(_INTERACTIVE)}:
        return "SLEEP" in states
    return "mAwake=false" in words and "mAwake=true" not in words


def _in_front(focus: re.Match[str] | None, record: re.Match[str] | None) -> tuple[str | None, str | None]:
    """The app and its window."""
    if focus and (component := _COMPONENT.fullmatch(focus[2].strip())):
        app, window = component[1], component[2]
    elif record:
        app, window = record[1], record[2]
        if focus:
            # A dialog, a menu or the notification shade is in front of that app; the number behind a colon is new
            # each time.
            window = focus[2].partition(":")[0].strip() or window
    else:
        return None, None
    return app, window.removeprefix(app)


def _has_flag(line: str) -> bool:
    if line.startswith(("fl=", "flags=")) and "SECURE" in line.rstrip("}").partition("=")[2].split():
        return True
    bits = _FLAG_BITS.search(line) if "fl=" in line else None
    return bool(bits and int(bits[1], 16) & _FLAG_SECURE)


def _lines(text: str) -> Iterator[str]:
    return (line[:_LINE].strip() for line in text.split("\n"))


def call_states(text: str) -> frozenset[int]:
    """Of `dumpsys telephony.registry`, over all SIM cards: 0 idle, 1 ringing, 2 in a call."""
    return frozenset(int(found[1]) for line in _lines(text) if (found := _CALL_STATE.match(line)))
