"""One page of MiniWoB++ as an `Environment`.

Promises, in order of weight:
1. The score is the page's own raw reward (-1 to 1, without its time decay): as it is when above 0, else 0. An episode
   that the page has not ended has score 0. Tasks have a threshold just above 0: success is a raw reward above 0.
2. The same task gives the same page: its random numbers are seeded as MiniWoB++ seeds them, its clock stands still but
   for `page_seconds` in every step, and the mouse, the clipboard and the focus begin anew.
3. A page has no time limit: a slow agent sees what a quick one sees. Steps are bounded by the task.
4. What the browser does wrong is an `EnvironmentFault` that names the slot and the call; the page is then closed, and
   the next reset begins with a new one. No step is sent twice.
5. There is no exact state key: a page keeps state in closures, out of reach. The element tree is used instead.

Errors of an action that a page doesn't have (home, open_app, ...) are `UnsupportedAction`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from uuid import uuid4

from tapforge_envs import protocol as p
from tapforge_envs.clients.pictures import frame_of

from . import catalog, keys
from .cdp import CdpError, Session
from .chromium import BrowserError
from .pages import Pages, prepared

#: CSS pixels of every page
WIDTH, HEIGHT = 160, 210
#: between the first and the last point of a stroke
_POINTS = 8
#: CSS pixels of a wheel's notch, and notches of a scroll that names none
_NOTCH, _NOTCHES = 40, 2
#: a raw reward, with room for the rounding of sums
_MOST = 1 + 1e-6
_BUTTONS = {"left": 1, "right": 2, "middle": 4}


@dataclass(frozen=True, slots=True)
class PageOptions:
    #: pixels of a frame per CSS pixel
    scale: float = 1.0
    #: what the page's clock shows as passed after every action
    page_seconds: float = 0.5
    #: seconds for one call to the browser; a step is a handful of them
    call_seconds: float = 15.0


@cache
def _script() -> str:
    return resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")


class WebEnvironment:
    """One slot. `instance` names the page that it has: another one after a crash."""

    def __init__(self, slot: str, pages: Pages, options: PageOptions | None = None) -> None:
        self.slot = slot
        self.instance = uuid4().hex
        self._pages = pages
        self._options = options or PageOptions()
        self._page: Session | None = None
        self._opening = asyncio.Lock()
        #: what the browser may load as the page
        self._url = ""
        self._loaded = asyncio.Event()
        self._clipboard = ""
        self._note = ""
        self._seen: dict[str, Any] | None = None
        self._ended = False

    # --- the environment ----------------------------------------------------------------------------------------------

    async def reset(self, task: p.Task) -> p.Observation:
        page = catalog.page_of(task)
        self._seen, self._ended, self._clipboard, self._note = None, False, "", ""
        async with self._faults("reset"):
            await self._load(page)
            mode = json.dumps(task.params.get("mode", ""))
            begin = f"__tapforge.begin({json.dumps(str(task.seed))}, {mode}, {self._options.page_seconds * 1000})"
            seen = await self._evaluate(begin)
            goal = seen.get("goal")
            if not isinstance(goal, str) or not goal:
                raise p.EnvironmentFault(f"{self.slot}: reset: page {page} names no goal, but {goal!r}")
            return await self._observed(seen, goal)

    async def step(self, action: p.Action, index: int) -> p.StepResult:
        if self._seen is None:
            raise p.EnvironmentFault(f"{self.slot}: step {index}: no task was set by reset")
        self._refuse(action)
        async with self._faults(f"step {index}"):
            if self._over:
                return p.StepResult(await self._observed(self._seen), done=True, note="the episode had ended")
            self._note = ""
            await self._act(action)
            seconds = self._options.page_seconds + (action.seconds if isinstance(action, p.Wait) else 0)
            observation = await self._observed(await self._evaluate(f"__tapforge.observe({seconds * 1000})"))
            self._ended = isinstance(action, p.FINAL_ACTIONS)
            return p.StepResult(observation, done=self._over, note=self._note)

    async def evaluate(self) -> p.Score:
        if self._seen is None:
            raise p.EnvironmentFault(f"{self.slot}: evaluate: no task was set by reset")
        return score_of(self._seen)

    async def close(self) -> None:
        """Ends the episode; the page stays for the next one."""
        self._seen = None

    async def shut(self) -> None:
        """Closes the page."""
        self._seen = None
        await self._drop()

    @property
    def sick(self) -> str:
        """Why no episode can run here now; empty: none that is known."""
        return self._page.gone or "" if self._page is not None else ""

    async def restore(self) -> None:
        """A page where there is none that lives. Raises EnvironmentFault."""
        async with self._faults("health"):
            await self._live_page()

    @property
    def _over(self) -> bool:
        return self._ended or (self._seen is not None and self._seen["done"])

    # --- the page -----------------------------------------------------------------------------------------------------

    async def _live_page(self) -> Session:
        async with self._opening:  # a health check may meet a reset: they share the page that one of them opens
            if self._page is not None and self._page.gone is not None:
                await self._drop()
            if self._page is None:
                await self._open_page()
            assert self._page is not None
            return self._page

    async def _open_page(self) -> None:
        page = await self._pages.open(WIDTH, HEIGHT)
        self._page, self.instance = page, uuid4().hex
        page.listener = self._hear
        try:
            for method, params in prepared(WIDTH, HEIGHT, self._options.scale, _script()):
                await self._call(method, params)
        except BaseException:  # a page that is half set up is not used
            self._page = None
            await self._pages.drop(page)
            raise

    async def _load(self, name: str) -> None:
        """A document of its own for each episode: nothing that the one before left in scripts is there."""
        page = await self._live_page()
        await self._mouse("mouseMoved", (0.0, 0.0))
        self._url = catalog.url(name)
        self._loaded.clear()
        answer = await self._call("Page.navigate", {"url": self._url})
        if error := answer.get("errorText"):
            raise p.EnvironmentFault(f"{self.slot}: reset: {self._url} can't be loaded: {error}")
        async with asyncio.timeout(self._options.call_seconds):
            await self._loaded.wait()
        if page.gone is not None:
            raise CdpError(page.gone)

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        assert self._page is not None
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Page.javascriptDialogOpening":
            self._note = f"the page said {str(params.get('message', ''))[:200]!r}; it was accepted"
            self._page.post("Page.handleJavaScriptDialog", {"accept": True})
        elif method == "Fetch.requestPaused":
            id, url = params["requestId"], params["request"]["url"]
            if url.partition("#")[0] == self._url:
                self._page.post("Fetch.continueRequest", {"requestId": id})
            else:
                self._note = f"a link to {url[:200]} was not followed: pages stay where they are"
                self._page.post("Fetch.failRequest", {"requestId": id, "errorReason": "Aborted"})

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert self._page is not None
        return await self._page.call(method, params, seconds=self._options.call_seconds)

    async def _evaluate(self, expression: str) -> Any:
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = await self._call("Runtime.evaluate", params)
        if wrong := answer.get("exceptionDetails"):
            words = wrong.get("exception", {}).get("description") or wrong.get("text")
            raise CdpError(f"the page's script failed: {str(words)[:500]}")
        return answer["result"].get("value")

    async def _observed(self, seen: dict[str, Any], goal: str = "") -> p.Observation:
        self._seen = seen
        shot = await self._screenshot()
        try:
            frame = frame_of(base64.b64decode(shot["data"]))
        except ValueError as error:
            raise CdpError(f"the screenshot is not a picture: {error}") from error
        want = (round(WIDTH * self._options.scale), round(HEIGHT * self._options.scale))
        if (frame.width, frame.height) != want:
            raise CdpError(f"the screenshot is {frame.width}x{frame.height} pixels instead of {want[0]}x{want[1]}")
        tree = json.dumps(seen["tree"], ensure_ascii=False, separators=(",", ":"))
        return p.Observation(frame, app=self._url.rpartition("/")[2].removesuffix(".html"), ui_tree=tree, goal=goal)

    async def _screenshot(self) -> dict[str, Any]:
        """Waits for a frame of the compositor's. One in some hundred never comes where several pages are busy: the page
        is then put in front and asked again, which changes nothing that a script sees."""
        assert self._page is not None
        how = {"format": "png", "optimizeForSpeed": True}
        for _ in range(2):
            with suppress(TimeoutError):
                soon = self._options.call_seconds / 5
                return await self._page.call("Page.captureScreenshot", how, seconds=soon)
            await self._call("Page.bringToFront", {})
        return await self._call("Page.captureScreenshot", how)

    @asynccontextmanager
    async def _faults(self, call: str) -> AsyncIterator[None]:
        """What goes wrong inside is a fault in words, and the page is closed."""
        try:
            yield
        except p.EnvironmentFault:
            await self._lose()
            raise
        except TimeoutError as error:
            await self._lose()
            what = str(error) or f"no answer within {self._options.call_seconds:g} s"
            raise p.EnvironmentFault(f"{self.slot}: {call}: {what}", p.Reason.DEADLINE) from error
        except (CdpError, BrowserError, KeyError, TypeError) as error:
            why = self._page.gone if self._page is not None and self._page.gone else str(error)
            await self._lose()
            raise p.EnvironmentFault(f"{self.slot}: {call}: {why}") from error
        except asyncio.CancelledError:
            self._seen = None
            raise

    async def _lose(self) -> None:
        self._seen = None
        await self._drop()

    async def _drop(self) -> None:
        page, self._page = self._page, None
        self.instance = uuid4().hex
        if page is not None:
            await self._pages.drop(page)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _refuse(self, action: p.Action) -> None:
        """Before anything is executed."""
        match action:
            case p.OpenApp() | p.Home() | p.Back() | p.AppSwitch() | p.AskUser():
                raise p.UnsupportedAction(f"a web page has no action {action.type}")
            case p.Key() if keys.named(action.name) is None:
                raise p.UnsupportedAction(f"a browser has no key {action.name!r}")
            case p.Hotkey() if keys.combination(action.keys) is None:
                raise p.UnsupportedAction(f"a page has no keys {'+'.join(action.keys)} to press together")
            case p.Type() if (ends := p.keystrokes(action.text).count(p.Enter())) > keys.MAX_ENTERS:
                raise p.UnsupportedAction(f"type: {ends} line ends; a page takes {keys.MAX_ENTERS} in one step at most")
            case _:
                pass

    async def _act(self, action: p.Action) -> None:
        match action:
            case p.Tap():
                await self._click(self._at(action.x, action.y))
            case p.DoubleTap():
                at = self._at(action.x, action.y)
                await self._click(at)
                await self._click(at, count=2)
            case p.TripleClick():
                at = self._at(action.x, action.y)
                for count in (1, 2, 3):
                    await self._click(at, count=count)
            case p.RightClick():
                await self._click(self._at(action.x, action.y), button="right")
            case p.MiddleClick():
                await self._click(self._at(action.x, action.y), button="middle")
            case p.LongPress():
                at = self._at(action.x, action.y)
                await self._mouse("mouseMoved", at)
                await self._mouse("mousePressed", at, "left")
                await self._evaluate(f"__tapforge.advance({action.seconds * 1000})")
                await self._mouse("mouseReleased", at, "left")
            case p.Swipe() | p.Drag():
                await self._stroke(self._at(action.x, action.y), self._at(action.x2, action.y2))
            case p.Scroll():
                await self._scroll(self._at(action.x, action.y), action.direction, action.notches or _NOTCHES)
            case p.Move():
                await self._mouse("mouseMoved", self._at(action.x, action.y))
            case p.Type():
                await self._type(action.text)
            case p.Enter():
                await self._press(keys.ENTER)
            case p.Key():
                press = keys.named(action.name)
                assert press is not None
                await self._press(press)
            case p.Hotkey():
                await self._hotkey(action.keys)
            case _:  # wait and the final actions touch nothing
                pass

    def _at(self, x: float, y: float) -> tuple[float, float]:
        """The middle of the frame's pixel, in CSS pixels."""
        scale = self._options.scale
        return (
            (p.pixel(x, round(WIDTH * scale)) + 0.5) / scale,
            (p.pixel(y, round(HEIGHT * scale)) + 0.5) / scale,
        )

    async def _mouse(self, type: str, at: tuple[float, float], button: str = "none", count: int = 1) -> None:
        pressed = 0 if button == "none" or type == "mouseReleased" else _BUTTONS[button]
        event = {"type": type, "x": at[0], "y": at[1], "button": button, "buttons": pressed}
        await self._call("Input.dispatchMouseEvent", event | ({} if type == "mouseMoved" else {"clickCount": count}))

    async def _click(self, at: tuple[float, float], button: str = "left", count: int = 1) -> None:
        await self._mouse("mouseMoved", at)
        await self._mouse("mousePressed", at, button, count)
        await self._mouse("mouseReleased", at, button, count)

    async def _stroke(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        await self._mouse("mouseMoved", start)
        await self._mouse("mousePressed", start, "left")
        for n in range(1, _POINTS + 1):
            part = n / _POINTS
            at = (start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part)
            await self._mouse("mouseMoved", at, "left")
        await self._mouse("mouseReleased", end, "left")

    async def _scroll(self, at: tuple[float, float], direction: str, notches: int) -> None:
        x, y = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[direction]
        far = notches * _NOTCH
        wheel = {"type": "mouseWheel", "x": at[0], "y": at[1], "deltaX": x * far, "deltaY": y * far}
        await self._call("Input.dispatchMouseEvent", wheel)

    async def _press(self, press: keys.Press, modifiers: int = 0) -> None:
        for event in press.events(modifiers):
            await self._call("Input.dispatchKeyEvent", event)

    async def _type(self, text: str) -> None:
        for piece in keys.writing(text):
            if isinstance(piece, str):
                await self._call("Input.insertText", {"text": piece})
            else:
                await self._press(*piece)

    async def _hotkey(self, names: Sequence[str]) -> None:
        found = keys.combination(names)
        assert found is not None
        held, pressed, modifiers = found
        if modifiers == keys.CTRL and [press.key.lower() for press in pressed] in (["c"], ["x"], ["v"]):
            await self._clip(pressed[0].key.lower())
            return
        for press in held:
            await self._call("Input.dispatchKeyEvent", press.events(modifiers)[0])
        for press in pressed:
            await self._press(press, modifiers)
        for press in reversed(held):
            await self._call("Input.dispatchKeyEvent", press.events()[1])

    async def _clip(self, key: str) -> None:
        """Copy, cut and paste with a clipboard of this page: the browser has one for all of its pages."""
        if key == "v":
            await self._call("Input.insertText", {"text": self._clipboard})
            return
        selected = await self._evaluate("__tapforge.selection()")
        if selected:
            self._clipboard = str(selected)
            if key == "x":
                await self._press(keys.named("del") or keys.ENTER)


def score_of(seen: dict[str, Any]) -> p.Score:
    """Raises EnvironmentFault for a reward that no page gives."""
    if not seen["done"]:
        return p.Score(0.0, "the page has not ended the episode")
    raw = seen["raw"]
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw) or abs(raw) > _MOST:
        raise p.EnvironmentFault(f"the page's raw reward is {raw!r}, must lie in -1 to 1", p.Reason.JUDGE_ERROR)
    words = f"raw reward {raw:g}" + (f": {seen['reason']}" if seen["reason"] else "")
    return p.Score(min(1.0, max(0.0, float(raw))), words)
