"""A headless Chromium that a test drives as a person would: by clicks at places and by keys. (`tapforge_envs.web` has
one that reaches no network, this machine's own ports included.)"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from e2e import packages

DEADLINE = 60


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._numbers = itertools.count(1)
        #: what the page complained of
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE):
            while True:
                said = await self._socket.receive_json()
                if said.get("id") == number:
                    assert "error" not in said, said
                    return said["result"]
                if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    self.complaints.append(json.dumps(said["params"]))

    async def value(self, expression: str) -> Any:
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Raises TimeoutError when it doesn't come true."""
        async with asyncio.timeout(DEADLINE):
            while not await self.value(f"!!({expression})"):  # noqa: ASYNC110 (an element by itself is no value)
                await asyncio.sleep(0.05)

    async def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """`x`, `y`: shares of the element's box."""
        await self.stroke(selector, (x, y), (x, y))

    async def stroke(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        found = f"document.querySelector({json.dumps(selector)})"
        await self.value(f"{found}.scrollIntoView({{block: 'nearest'}})")
        box = await self.value(f"(() => {{ const b = {found}.getBoundingClientRect();"
                               " return [b.left, b.top, b.width, b.height]; })()")  # fmt: skip
        places = [(box[0] + share[0] * box[2], box[1] + share[1] * box[3]) for share in (start, end)]
        for kind, (x, y) in (("mousePressed", places[0]), ("mouseMoved", places[1]), ("mouseReleased", places[1])):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def tab(url: str, profile: Path, width: int = 1280, height: int = 1000) -> AsyncIterator[Tab]:
    """A browser of its own with one page at `url`; it ends with the block."""
    packages.ensure(packages.CHROMIUM)
    process = await asyncio.create_subprocess_exec(
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
        f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-port=0", "about:blank",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)}, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE):
            written = profile / "DevToolsActivePort"
            while len(lines := written.read_text().split("\n") if written.exists() else []) < 2:
                assert process.returncode is None, "the browser has ended"
                await asyncio.sleep(0.05)
        port = lines[0]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                target = next(t for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**26) as socket:
                page = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
                )
                await page.call("Page.navigate", url=url)
                await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
                yield page
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
        await process.wait()
