"""A headless Chromium as a process, and pages in it.

- The browser never outlives this process (the kernel ends it), and leaves no profile behind.
- Each page has a browser context of its own: no cookies, caches or storage in common.
- Nothing is fetched from a network: no host name resolves, and a page may go only where `page.py` sends it.
- No page is slowed down because another one is in front.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from .cdp import CdpError, Connection, Session

#: names of the command, in the order in which they are tried
COMMANDS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
#: Debian packages that bring it, and the fonts whose widths the pages were made for
PACKAGES = ("chromium", "fonts-liberation")

_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    # containers allow no sandbox; the only pages are those of a package that is pinned
    "--no-sandbox",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--allow-file-access-from-files",
    # a container's /dev/shm has 64 MiB
    "--disable-dev-shm-usage",
    "--disable-gpu",
    # pages that aren't in front run at full speed
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-ipc-flooding-protection",
    # the same picture everywhere
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--disable-smooth-scrolling",
    "--disable-partial-raster",
    "--lang=en-US",
    # nothing that a person's browser does by itself
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-prompt-on-repost",
    "--disable-hang-monitor",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication,HttpsUpgrades",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
)
#: seconds in which a browser that is asked to end has to
_END_SECONDS = 5.0
#: bytes of a line of its log
_LINE = 1024 * 1024
_READY = re.compile(r"DevTools listening on (ws://\S+)")


class BrowserError(Exception):
    """No browser can be had. The message says why and what to do."""


def command() -> str:
    """Raises BrowserError where there is none."""
    for name in COMMANDS:
        if found := shutil.which(name):
            return found
    raise BrowserError(f"no Chromium on PATH (looked for {', '.join(COMMANDS)}); on Debian: apt install {PACKAGES[0]}")


class Browser:
    """One process. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, profile: str, seconds: float) -> None:
        self._process = process
        self._profile = profile
        self._seconds = seconds
        self._said: deque[str] = deque(maxlen=20)
        self._http = aiohttp.ClientSession()
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stderr = asyncio.create_task(self._collect(), name="read a browser's stderr")
        self._contexts: dict[str, str] = {}
        self.connection: Connection

    @classmethod
    async def start(cls, seconds: float = 60.0, call_seconds: float = 15.0) -> Browser:
        """`seconds`: from the start of the process to its connection; `call_seconds`: for a call to the browser.
        Raises BrowserError."""
        chromium = command()
        profile = tempfile.mkdtemp(prefix="tapforge-chromium-")
        try:
            # setpriv: the kernel ends the browser with us. A session of its own: Ctrl-C is for us alone.
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LINE,
                env={**os.environ, "HOME": profile, "TZ": "UTC", "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            _remove(profile)
            raise BrowserError(f"{chromium} can't be started: {error}") from error
        except BaseException:
            _remove(profile)
            raise
        browser = cls(process, profile, call_seconds)
        try:
            async with asyncio.timeout(seconds):
                url = await browser._listening
            browser.connection = await Connection.open(browser._http, url, call_seconds)
        except (TimeoutError, BrowserError, aiohttp.ClientError, OSError) as error:
            words = browser.last_words()
            await browser.close()
            raise BrowserError(
                f"Chromium was not ready within {seconds:g} s: {error or 'no answer'}; it said: {words}"
            ) from error
        except BaseException:
            await browser.close()
            raise
        return browser

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self.connection.closed.is_set()

    def last_words(self) -> str:
        return " | ".join(list(self._said)[-3:]) or "nothing"

    async def new_page(self, width: int, height: int) -> Session:
        """A page of this many CSS pixels in a context of its own. Raises CdpError, TimeoutError."""
        context = (await self._call("Target.createBrowserContext", {"disposeOnDetach": True}))["browserContextId"]
        where = {"url": "about:blank", "browserContextId": context, "width": width, "height": height}
        target = (await self._call("Target.createTarget", where))["targetId"]
        id = (await self._call("Target.attachToTarget", {"targetId": target, "flatten": True}))["sessionId"]
        self._contexts[id] = context
        return self.connection.attach(id)

    async def close_page(self, page: Session) -> None:
        """Whatever state it is in. A page that can't be closed goes with the browser."""
        context = self._contexts.pop(page.id, None)
        page.lose("the page was closed")
        if context is not None and self.alive:
            try:
                await self._call("Target.disposeBrowserContext", {"browserContextId": context})
            except (CdpError, TimeoutError):
                self.kill()

    def kill(self) -> None:
        """At once, with every process that it started."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def close(self) -> None:
        """Asks it to end: a browser that does so leaves no process of its own behind as a zombie, where orphans
        are not reaped. One that doesn't is killed."""
        if hasattr(self, "connection"):
            if self.alive:
                with suppress(CdpError, TimeoutError):
                    await self.connection.call("Browser.close", seconds=_END_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_SECONDS):
                        await self._process.wait()
            await self.connection.close()
        await self._http.close()
        self.kill()
        await self._process.wait()
        self._stderr.cancel()
        await asyncio.gather(self._stderr, return_exceptions=True)
        await asyncio.to_thread(_remove, self._profile)

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        return await self.connection.call(method, params, seconds=self._seconds)

    async def _collect(self) -> None:
        assert self._process.stderr is not None
        while line := await _line(self._process.stderr):
            text = line.decode("utf-8", "replace").strip()
            self._said.append(text)
            if (ready := _READY.search(text)) and not self._listening.done():
                self._listening.set_result(ready[1])
        if not self._listening.done():
            self._listening.set_exception(BrowserError("it ended"))
            self._listening.exception()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next one, or what there is of one that is too long: a pipe that is not read would stop the browser."""
    try:
        return await stream.readline()
    except ValueError:
        return b"(a line that is too long)"


def _remove(profile: str) -> None:
    # Its processes may still write for a moment.
    for _ in range(5):
        shutil.rmtree(profile, ignore_errors=True)
        if not Path(profile).exists():
            return
        time.sleep(0.05)
