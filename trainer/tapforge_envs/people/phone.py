"""A phone as the page sees it."""

from __future__ import annotations

from typing import Any
from typing import Protocol as Interface

from pydantic import BaseModel, ConfigDict, Field

from ..protocol import Action, Answer, Frame, Terminate
from .episode import HumanAttempt


class StartRequest(BaseModel):
    """A task: by suite, template and number, by its key in the list, or by a goal of the person's own."""

    model_config = ConfigDict(extra="forbid")

    suite: str = Field("", max_length=200)
    template: str = Field("", max_length=200)
    split: str = Field("train", max_length=40)
    number: int = Field(0, ge=0, lt=1_000_000, description="the n-th task of this template and split")
    key: str = Field("", max_length=20_000)
    goal: str = Field("", max_length=2000)
    take: bool = Field(False, description="also from another page, or from a program that plays on the phone")


class PagePhone(Interface):
    """Calls end within the phone's deadlines. Refusals, faults of the phone among them, are
    `serving.claims.Refused`."""

    name: str

    @property
    def attempt(self) -> HumanAttempt | None:
        """None where no task of the page's was started."""
        ...

    async def catalog(self) -> dict[str, Any]:
        """Tasks that can be started."""
        ...

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        ...

    def frame(self) -> Frame | None: ...

    async def start(self, request: StartRequest) -> None: ...

    async def act(self, action: Action) -> None: ...

    async def finish(self, action: Terminate | Answer) -> None: ...

    async def leave(self) -> None:
        """Gives the phone back, and forgets what was played."""
        ...
