"""`am`, `pm`, `monkey`, `cmd`, `service`: apps, broadcasts and notifications.

A broadcast that no app receives completes with `result=0` like one that was received: what it did has to be looked up
elsewhere. The broadcasts `tapforge.*` are the simulated phone's own (see the package's docstring) and say what failed.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from tapforge_envs import protocol as p
from tapforge_envs.phone.adbd import android as a
from tapforge_envs.phone.adbd.android import Android, app_of
from tapforge_envs.phone.adbd.result import Result, failed, said
from tapforge_envs.phone.device import HOME
from tapforge_envs.phone.view import go
from tapforge_envs.serving.claims import Refused

from .input import press

_SYSTEM: Final = ("settings", HOME)
_SETTINGS_ACTIONS: Final = {
    "android.settings.SETTINGS": "",
    "android.settings.WIFI_SETTINGS": "network",
    "android.settings.WIRELESS_SETTINGS": "network",
    "android.settings.DISPLAY_SETTINGS": "display",
    "android.settings.SOUND_SETTINGS": "sound",
    "android.settings.DEVICE_INFO_SETTINGS": "about",
}
_MAX_TEXT: Final = 10_000
_FALSE: Final = ("false", "0")


@dataclass
class Intent:
    """The words of `am start` and `am broadcast`."""

    action: str = ""
    component: str = ""
    package: str = ""
    category: str = ""
    extras: dict[str, str] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)

    def text(self) -> str:
        """As `am` prints it."""
        parts = [f"act={self.action}"] if self.action else []
        parts += [f"cat=[{self.category}]"] if self.category else []
        parts += [f"pkg={self.package}"] if self.package else []
        parts += [f"cmp={self.component}"] if self.component else []
        return f"Intent {{ {' '.join(parts)}{' (has extras)' if self.extras else ''} }}"


def intent(words: Sequence[str]) -> Intent:
    """Raises ValueError for an option without its value."""
    found, at = Intent(), 0
    while at < len(words):
        word, at = words[at], at + 1
        count = 2 if word in ("--es", "--ez", "--ei", "--el", "--ef", "--eia", "--ela", "--esa", "--eu", "-e") else 1
        if word in ("-W", "-S", "-D", "-N", "-R"):
            found.options.add(word)
        elif word in ("--esn", "-a", "-n", "-p", "-c", "-d", "-t", "-f", "--user", "--display") or count == 2:
            if len(words) - at < count:
                raise ValueError(f"Error: Argument expected after {word!r}")
            values, at = words[at : at + count], at + count
            match word:
                case "-a":
                    found.action = values[0]
                case "-n":
                    found.component = values[0]
                case "-p":
                    found.package = values[0]
                case "-c":
                    found.category = values[0]
                case _ if count == 2:
                    found.extras[values[0]] = values[1]
        elif not word.startswith("-"):
            if "/" in word:
                found.component = word
            elif "." in word and not found.action:
                found.package = word
    return found


def am(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    try:
        match list(words):
            case ["start" | "start-activity", *rest]:
                return _start(android, intent(rest))
            case ["broadcast", *rest]:
                return _broadcast(android, intent(rest))
            case ["force-stop" | "kill" | "stop-app", *_, package]:
                if app_of(package) == android.front != HOME:
                    android.act(p.Home())
                if package == android.beside:
                    android.beside = ""
                return Result()
            case ["kill-all"]:
                return Result()
            case ["get-current-user"]:
                return said("0")
            case ["start-foreground-service" | "startservice" | "start-service", *_]:
                return failed("Error: Not found; no service started.", 1)
    except ValueError as error:
        return failed(str(error), 255)
    return failed(f"Unknown command: {' '.join(words[:1])}", 255)


def _start(android: Android, wanted: Intent) -> Result:
    starting = f"Starting: {wanted.text()}"
    package = wanted.component.split("/")[0] or wanted.package
    app = app_of(package)
    page = _SETTINGS_ACTIONS.get(wanted.action) if not package else None
    if page is not None and "settings" in android.apps:
        android.act(p.OpenApp(name="settings"))
        if page and android.front == "settings" and android.usable and "ui" in android.phone.state:
            go(android.phone.state, page)
    elif wanted.category == "android.intent.category.HOME" or app == HOME:
        android.act(p.Home())
    elif app in android.apps and _activity(wanted.component, package):
        if "-S" in wanted.options and android.front == app:
            android.act(p.Home())
        android.act(p.OpenApp(name=app or ""))
    elif wanted.component:
        return Result(
            f"{starting}\n".encode(),
            f"Error type 3\nError: Activity class {{{wanted.component}}} does not exist.\n".encode(),
            1,
        )
    else:
        return Result(
            f"{starting}\n".encode(), f"Error: Activity not started, unable to resolve {wanted.text()}\n".encode(), 1
        )
    if "-W" not in wanted.options:
        return said(starting)
    waited = f"Status: ok\nLaunchState: COLD\nActivity: {android.component()}\nTotalTime: 1\nWaitTime: 2\nComplete"
    return said(f"{starting}\n{waited}")


def _activity(component: str, package: str) -> bool:
    """Whether a component is the one activity of its package; a package alone means it."""
    name = component.partition("/")[2]
    return name in ("", a.ACTIVITY, package + a.ACTIVITY)


# --- broadcasts -------------------------------------------------------------------------------------------------------


def _broadcast(android: Android, wanted: Intent) -> Result:
    head = f"Broadcasting: {wanted.text()}"
    if wanted.action.startswith("tapforge."):
        return _own(android, wanted, head)
    if wanted.action.startswith("ADB_") and android.keyboard and android.default_keyboard == a.ADB_KEYBOARD:
        _typed(android, wanted)
    return said(f"{head}\nBroadcast completed: result=0")


def _typed(android: Android, wanted: Intent) -> None:
    """What ADBKeyboard does. What it can't read it drops, without a word."""
    extras = wanted.extras
    match wanted.action:
        case "ADB_INPUT_TEXT":
            _write(android, extras.get("msg", ""))
        case "ADB_INPUT_B64":
            try:
                _write(android, base64.b64decode(extras.get("msg", ""), validate=True).decode())
            except (binascii.Error, UnicodeDecodeError, ValueError):
                return
        case "ADB_INPUT_CHARS":
            codes = [int(c) for c in extras.get("chars", "").split(",") if c.isdecimal() and len(c) < 8]
            _write(android, "".join(chr(c) for c in codes if 0 < c < 0x110000 and not 0xD800 <= c < 0xE000))
        case "ADB_INPUT_CODE" | "ADB_EDITOR_CODE" as kind:
            code = extras.get("code", "")
            if kind == "ADB_INPUT_CODE":
                press(android, code)
            elif code in ("2", "3", "4", "5", "6"):  # go, search, send, next, done
                android.act(p.Enter())
        case "ADB_CLEAR_TEXT":
            held = android.field()
            for _ in range(len(held.text) if held is not None else 0):
                android.act(p.Key(name="DEL"))


def _write(android: Android, text: str) -> None:
    if text:
        android.insert(text[:_MAX_TEXT])


def _own(android: Android, wanted: Intent, head: str) -> Result:
    try:
        match wanted.action:
            case "tapforge.RESET":
                given = wanted.extras.get("task")
                android.begin(p.Task.model_validate_json(given) if given is not None else None)
            case "tapforge.FINISH":
                _finish(android, wanted.extras)
            case "tapforge.STATE":
                _happen(android, wanted.extras)
            case _:
                raise ValueError("there are tapforge.RESET, tapforge.FINISH and tapforge.STATE")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return failed(f"{wanted.action}: the task can't be read: {where or 'task'}: {first['msg']}")
    except (ValueError, Refused) as error:
        return failed(f"{wanted.action}: {error}")
    return said(f"{head}\nBroadcast completed: result=-1")


def _finish(android: Android, extras: dict[str, str]) -> None:
    if android.slot.task is None:
        raise ValueError("there is no task; tapforge.RESET with --es task starts one")
    if "answer" in extras:
        android.phone.act(p.Answer(text=extras["answer"][:_MAX_TEXT]))
        return
    status = extras.get("status")
    if status not in ("success", "failure", "infeasible"):
        raise ValueError(f"status is {status!r}, must be success, failure or infeasible; or give --es answer")
    android.phone.act(p.Terminate(status=status))


def _happen(android: Android, extras: dict[str, str]) -> None:
    for name, value in extras.items():
        yes = value.casefold() not in _FALSE
        match name:
            case "awake":
                android.wake() if yes else android.sleep()
            case "locked":
                android.locked = yes
            case "secure":
                android.secure = yes
            case "call":
                android.call = yes
            case "keyboard":
                android.keyboard = yes
                if not yes:
                    android.enabled_keyboards.discard(a.ADB_KEYBOARD)
                    android.default_keyboard = a.LATIN_KEYBOARD
            case "pin" if len(value) <= 16 and (value.isdecimal() or not value):
                android.pin = value
            case "rotation" if value in ("0", "1", "2", "3"):
                android.rotation = int(value)
            case _:
                raise ValueError(f"{name} {value!r}: there are secure, awake, locked, call, keyboard, rotation, pin")


# --- packages ---------------------------------------------------------------------------------------------------------


def _packages(android: Android) -> dict[str, bool]:
    """Installed packages, and whether each is the system's."""
    own = {f"{a.PREFIX}{name}": name in _SYSTEM for name in [*android.apps, HOME]}
    system = {a.SYSTEM_UI: True, a.DIALER: True, a.LATIN_KEYBOARD.split("/")[0]: True, "android": True}
    keyboard = {a.ADB_KEYBOARD.split("/")[0]: False} if android.keyboard else {}
    return {**own, **system, **keyboard}


def pm(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    known = _packages(android)
    match list(words):
        case ["list", "packages", *rest]:
            names = [name for name in rest if not name.startswith("-")]
            wanted = [
                f"package:/data/app/{name}/base.apk={name}" if "-f" in rest else f"package:{name}"
                for name, system in known.items()
                if not ("-3" in rest and system)
                and not ("-s" in rest and not system)
                and all(part in name for part in names)
            ]
            return said("\n".join(sorted(wanted)))
        case ["list", "features" | "users" as what]:
            return said("feature:android.hardware.touchscreen" if what == "features" else "Users:\n\tUserInfo{0:Owner}")
        case ["path", package]:
            return said(f"package:/data/app/{package}/base.apk") if package in known else Result(status=1)
        case ["clear", *_, package]:
            app = app_of(package)
            if app in (*android.apps, HOME):
                android.phone.clear(app or "")
            return said("Success") if package in known else failed("Failed")
        case ["grant" | "revoke" | "enable", package, *_]:
            return Result() if package in known else failed(f"Error: Unknown package: {package}", 255)
        case ["resolve-activity", *rest] if rest and rest[-1] in known and app_of(rest[-1]) in (*android.apps, HOME):
            name = f"{rest[-1]}/{a.ACTIVITY}"
            return said(f"priority=0 preferredOrder=0 match=0x108000 specificIndex=-1 isDefault=true\n{name}")
        case ["resolve-activity", *_]:
            return said("No activity found")
        case ["install" | "uninstall" as what, *_]:
            return failed(f"Failure [the simulated phone can't {what} packages]")
    return failed(f"Error: the simulated phone has no `pm {' '.join(words[:2])}`", 255)


def monkey(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    words = list(words)
    if "-p" not in words[:-1]:
        return failed("** Error: the simulated phone's monkey opens an app: -p PACKAGE ... 1", 255)
    app = app_of(words[words.index("-p") + 1])
    if app == HOME:
        android.act(p.Home())
    elif app in android.apps:
        android.act(p.OpenApp(name=app or ""))
    else:
        return Result(err=b"** No activities found to run, monkey aborted.\n", status=252)
    return said("Events injected: 1\n## Network stats: elapsed time=1ms (0ms mobile, 0ms wifi, 1ms not connected)")


def cmd(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    match list(words):
        case ["package", *rest]:
            return pm(android, rest, stdin)
        case ["activity", *rest]:
            return am(android, rest, stdin)
        case ["statusbar", "collapse" | "expand-notifications" | "expand-settings"]:
            return Result()
        case ["notification", "cancel_all" | "snooze" | "list" | "set_dnd", *_]:
            return said("\n".join(notifications(android))) if words[1] == "list" else Result()
        case ["uimode", "night", *rest] if "dark" in android.phone.state["apps"].get("settings", {}):
            own = android.phone.state["apps"]["settings"]
            if rest[:1] in (["yes"], ["no"]):
                own["dark"] = rest[0] == "yes"
            return said(f"Night mode: {'yes' if own['dark'] else 'no'}")
    return failed(f"cmd: Can't find service: {' '.join(words[:1])}", 20)


def service(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    """`service call notification 1` puts every notification away."""
    if list(words[:3]) == ["call", "notification", "1"]:
        ui = android.phone.state.get("ui")
        if ui is not None and ui["interrupt"] is not None and ui["interrupt"]["kind"] == "banner":
            ui["interrupt"] = None
        return said("Result: Parcel(00000000    '....')")
    return failed(f"service: Service {' '.join(words[1:2])} does not exist")


def notifications(android: Android) -> list[str]:
    """Keys of those that show, as Android writes them."""
    interrupt = (android.phone.state.get("ui") or {}).get("interrupt")
    if interrupt is None or interrupt["kind"] != "banner":
        return []
    return [f"0|{a.PREFIX}{interrupt.get('app', 'home')}|1|null|10001"]


def content(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    """`content query --uri content://tapforge.state/PATH`: a part of the phone's state as a row."""
    words = list(words)
    if words[:1] != ["query"] or "--uri" not in words[:-1]:
        return failed("[ERROR] Unsupported operation; the simulated phone has `content query --uri URI`")
    uri = words[words.index("--uri") + 1]
    if not uri.startswith("content://tapforge.state"):
        return failed(f"[ERROR] Could not find provider: {uri.removeprefix('content://').split('/')[0]}")
    try:
        value = part(android, uri.removeprefix("content://tapforge.state").strip("/").replace("/", "."))
    except LookupError as error:
        return said(f"No result found: {error}")
    return said(f"Row: 0 value={json.dumps(value, ensure_ascii=False)}")


def part(android: Android, path: str) -> object:
    """What lies at apps.settings.wifi of the phone's state. Raises LookupError that names what is there."""
    found: object = android.phone.state
    for step in [step for step in path.split(".") if step]:
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and len(step) < 7 and int(step) < len(found):
            found = found[int(step)]
        else:
            there = ", ".join(sorted(found)) if isinstance(found, dict) else f"{type(found).__name__}"
            raise LookupError(f"no {step!r}; there is {there[:400]}")
    return found
