"""`dumpsys`: the lines that adb clients look for, in the order and with the words that Android prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from tapforge_envs.phone.adbd import android as a
from tapforge_envs.phone.adbd.android import Android
from tapforge_envs.phone.adbd.result import Result, failed, said

from .apps import notifications, part


def dumpsys(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    words = [word for word in words if word not in ("-a", "--noredact")]
    if not words or words == ["-l"]:
        return said("Currently running services:\n" + "\n".join(f"  {name}" for name in sorted(_SERVICES)))
    if words[0] not in _SERVICES:
        return failed(f"Can't find service: {words[0]}")
    return _SERVICES[words[0]](android, words[1:])


def _window(android: Android, words: Sequence[str]) -> Result:
    width, height = android.size
    own = f"{android.slot.width}x{android.slot.height}"
    bars = _word(android.locked)
    lines = [
        "WINDOW MANAGER POLICY STATE (dumpsys window policy)",
        f"    mAwake={_word(android.awake)} mScreenOnEarly={_word(android.awake)}",
        f"    mDreamingLockscreen={bars} mShowingLockscreen={bars} isStatusBarKeyguard={bars}",
        f"    KeyguardServiceDelegate showing={bars} mIsShowing={bars} secure={_word(bool(android.pin))}",
        "WINDOW MANAGER DISPLAY CONTENTS (dumpsys window displays)",
        "  Display: mDisplayId=0",
        f"    init={own} 420dpi cur={width}x{height} app={width}x{height} rng={width}x{width}-{height}x{height}",
        f"    mRotation=ROTATION_{android.rotation * 90} mCurrentRotation=ROTATION_{android.rotation * 90}",
        "WINDOW MANAGER WINDOWS (dumpsys window windows)",
        f"  Window #0 {_window_name(android)}:",
        "    mDisplayId=0 rootTaskId=12",
        "    mAttrs={(0,0)(fillxfill) sim={adjust=pan} ty=BASE_APPLICATION fmt=TRANSPARENT",
        f"      fl=LAYOUT_IN_SCREEN {'SECURE ' if android.secure else ''}HARDWARE_ACCELERATED}}",
        f"    isOnScreen={_word(android.awake)} isVisible={_word(android.awake)}",
        *_beside(android),
        f"  mCurrentFocus={_window_name(android)}",
        f"  mFocusedApp=ActivityRecord{{7c2a11 u0 {_short(android)} t12}}",
    ]
    return said("\n".join(lines))


def _beside(android: Android) -> list[str]:
    """The window in the other half of a split screen."""
    if not android.beside:
        return []
    return [
        f"  Window #1 Window{{6aa001 u0 {android.beside}/{android.beside}{a.ACTIVITY}}}:",
        f"    isOnScreen={_word(android.awake)} isVisible={_word(android.awake)}",
    ]


def _window_name(android: Android) -> str:
    if not android.awake:
        return "null"
    if android.locked and not android.call:
        return "Window{5f3e7a u0 NotificationShade}"
    return f"Window{{4be1f0 u0 {android.component()}}}"


def _short(android: Android) -> str:
    """PACKAGE/.Class, as records of activities are written."""
    package, _, name = android.component().partition("/")
    return f"{package}/{name.removeprefix(package)}"


def _activity(android: Android, words: Sequence[str]) -> Result:
    record = f"ActivityRecord{{7c2a11 u0 {_short(android)} t12}}"
    package = android.component().split("/")[0]
    if words[:1] == ["top"]:
        return said(f"TASK 12: type=standard\n  ACTIVITY {_short(android)} 7c2a11 pid=4242")
    recent = [a.PREFIX + name for name in dict.fromkeys(reversed(android.phone.state["opened"]))]
    lines = [
        "ACTIVITY MANAGER ACTIVITIES (dumpsys activity activities)",
        f"    mResumedActivity: {record}",
        f"  topResumedActivity={record}",
        f"  ResumedActivity: {record}",
        f"  mFocusedApp={record}",
        f"  mLastPausedActivity: null  mCurTask={package}",
        *(f"  * Recent #{number}: Task{{12 #{number} A={name}}}" for number, name in enumerate(recent[:20])),
    ]
    return said("\n".join(lines))


def _power(android: Android, words: Sequence[str]) -> Result:
    lines = [
        "POWER MANAGER (dumpsys power)",
        f"  mWakefulness={'Awake' if android.awake else 'Asleep'}",
        f"  mWakefulnessChanging=false  mIsPowered=true  mHoldingDisplaySuspendBlocker={_word(android.awake)}",
        f"Display Power: state={'ON' if android.awake else 'OFF'}",
    ]
    return said("\n".join(lines))


def _input_method(android: Android, words: Sequence[str]) -> Result:
    shown = _word(android.field() is not None)
    return said(
        f"Input method manager state:\n  mCurMethodId={android.default_keyboard} mCurId={android.default_keyboard}\n"
        f"  mShowRequested={shown} mInputShown={shown}"
    )


def _notification(android: Android, words: Sequence[str]) -> Result:
    records = [f"    NotificationRecord(0x01 key={key})" for key in notifications(android)]
    return said("\n".join(["Current Notification Manager state:", "  Notification List:", *records]))


def _calls(android: Android, words: Sequence[str]) -> Result:
    return said(f"last known state:\n  mCallState={int(android.call)}\n  mForegroundCallState={int(android.call)}")


def _battery(android: Android, words: Sequence[str]) -> Result:
    return said("Current Battery Service state:\n  AC powered: true\n  status: 2\n  level: 100\n  scale: 100")


def _display(android: Android, words: Sequence[str]) -> Result:
    width, height = android.size
    wide, high = android.counted
    state = "ON" if android.awake else "OFF"
    panels = [
        f'  DisplayDeviceInfo{{"Built-in Screen": uniqueId="local:{panel}", '
        f"{android.slot.width} x {android.slot.height}, modeId 1, density 420, rotation 0, type INTERNAL, state "
        f"{state if panel == android.panel else 'OFF'}, FLAG_DEFAULT_DISPLAY}}"
        for panel in android.panels
    ]
    viewport = (
        f"DisplayViewport{{type=INTERNAL, valid=true, isActive=true, displayId=0, uniqueId='local:{android.panel}', "
        f"physicalPort=0, orientation={android.rotation}, logicalFrame=Rect(0, 0 - {wide}, {high}), "
        f"physicalFrame=Rect(0, 0 - {width}, {height}), deviceWidth={width}, deviceHeight={height}}}"
    )
    lines = ["DISPLAY MANAGER (dumpsys display)", f"  mViewports=[{viewport}]", *panels, f"  mScreenState={state}"]
    return said("\n".join([*lines, f"  mCurrentOrientation={android.rotation}"]))


def _input(android: Android, words: Sequence[str]) -> Result:
    return said(f"INPUT MANAGER (dumpsys input)\n    SurfaceOrientation: {android.rotation}")


def _package(android: Android, words: Sequence[str]) -> Result:
    app = a.app_of(words[0]) if words else None
    if app not in android.apps:
        return failed(f"Unable to find package: {' '.join(words[:1])}")
    return said(f"Packages:\n  Package [{words[0]}] (7c2a11):\n    versionCode=1\n    versionName=1.0")


def _own(android: Android, words: Sequence[str]) -> Result:
    try:
        return said(json.dumps(part(android, words[0] if words else ""), ensure_ascii=False))
    except LookupError as error:
        return failed(f"tapforge: {error}")


def _word(yes: bool) -> str:
    return "true" if yes else "false"


_SERVICES: Final[dict[str, Callable[[Android, Sequence[str]], Result]]] = {
    "activity": _activity,
    "battery": _battery,
    "display": _display,
    "input": _input,
    "input_method": _input_method,
    "notification": _notification,
    "package": _package,
    "power": _power,
    "tapforge": _own,
    "telephony.registry": _calls,
    "window": _window,
}
