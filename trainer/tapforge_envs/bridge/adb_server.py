"""An adb server of the bridge's own, for a container beside an emulator: started and ended with it.

- It listens on one port of 127.0.0.1, never on adb's usual one (5037): that one belongs to the machine's user.
- A process that already listens on the port belongs to another owner: it is neither used nor ended, but an error.
- When the server ends by itself, it is not started again; the caller sees it by the server's process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..clients.adb.wire import AdbError, AdbServer, ServerAddress, short

USUAL_PORT = 5037
#: seconds
_START, _END = 30.0, 5.0


class AdbServerError(Exception):
    """It can't be had; says why and what to do."""


@asynccontextmanager
async def own_adb_server(port: int, start_seconds: float = _START) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its process, once it answers. Raises AdbServerError."""
    if port == USUAL_PORT:
        raise AdbServerError(f"port {USUAL_PORT} is where the machine's own adb server listens: give another one")
    if shutil.which("adb") is None:
        raise AdbServerError("there is no adb here: install Debian's package adb, or Android's platform-tools")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise AdbServerError(f"port {port} can't be had for an adb server: {error.strerror}") from error
    address = f"tcp:localhost:{port}"
    # Linux ends it with us, however we end; its port would be taken else.
    ends_with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ADB_SERVER", "ANDROID_ADB_SERVER"))}
    process = await asyncio.create_subprocess_exec(
        *ends_with_us,
        *("adb", "-L", address, "server", "nodaemon"),
        env=kept,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the bridge: it puts keyboards back through this server
    )
    said = bytearray()
    listener = asyncio.get_running_loop().create_task(_drain(process, said))
    try:
        await _answers(process, port, said, start_seconds)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _END)
            except TimeoutError:
                process.kill()
                await process.wait()
        await listener


async def _drain(process: asyncio.subprocess.Process, said: bytearray) -> None:
    """Keeps its last words, which are many."""
    assert process.stderr is not None
    while data := await process.stderr.read(4096):
        said += data
        del said[:-4096]


async def _answers(process: asyncio.subprocess.Process, port: int, said: bytearray, seconds: float) -> None:
    server = AdbServer(ServerAddress(port=port))
    try:
        async with asyncio.timeout(seconds):
            while process.returncode is None:
                try:
                    await server.version()
                    return
                except AdbError:
                    await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise AdbServerError(f"adb's server on port {port} doesn't answer within {seconds:g} s") from error
    raise AdbServerError(f"adb's server on port {port} ended at once: {short(bytes(said[-300:]))}")


async def attached(server: AdbServer, seconds: float) -> list[str]:
    """Serials of the devices that can be used. Raises AdbServerError when there is none."""
    try:
        async with asyncio.timeout(seconds):
            devices = await server.devices()
    except TimeoutError as error:
        raise AdbServerError(f"no answer from the adb server at {server.address} within {seconds:g} s") from error
    except AdbError as error:
        raise AdbServerError(str(error)) from error
    if found := [device.serial for device in devices if device.state == "device"]:
        return found
    listed = "".join(f"; {device.serial} is {device.state}" for device in devices) or ": `adb devices` lists none"
    raise AdbServerError(f"auto: no phone can be used{listed}")
