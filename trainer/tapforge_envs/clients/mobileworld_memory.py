"""What a process has to know of a MobileWorld phone beyond a lease: a task that is not torn down, a call that
no caller waits for, and how many snapshots its emulator loaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

#: the emulator of MobileWorld's image dies after about 64 snapshots loaded; each `/task/init` loads one
_MANY_SNAPSHOTS: Final = 40


@dataclass
class PhoneMemory:
    """What has to be known of a phone beyond a lease."""

    #: initialised and not torn down
    task: str = ""
    #: what changes the phone and has not ended, whether a caller waits for it or not
    unfinished: asyncio.Task[Any] | None = None
    #: in words
    call: str = ""
    #: that were sent since the server was seen to start
    inits: int = 0

    def restarted(self) -> None:
        """The server is a new process: what was sent to the old one is gone with it."""
        if self.unfinished is not None:
            self.unfinished.cancel()
        self.task, self.unfinished, self.inits = "", None, 0

    def snapshots(self) -> str:
        """What a failed /task/init may be due to."""
        if self.inits < _MANY_SNAPSHOTS:
            return ""
        return (
            f"; it was task number {self.inits} there, and the emulator of MobileWorld's image dies after about 64 "
            "snapshots loaded: recycle its container after 40 to 50 episodes"
        )


@dataclass
class MobileWorldPhones:
    """The memory of one process, by URL. Belongs to one event loop."""

    known: dict[str, PhoneMemory] = field(default_factory=dict)

    def of(self, url: str) -> PhoneMemory:
        return self.known.setdefault(url, PhoneMemory())

    async def close(self) -> None:
        waiting = [memory.unfinished for memory in self.known.values() if memory.unfinished is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
