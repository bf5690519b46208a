"""What a run keeps on disk of its episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Spec


class Recording(Spec):
    """What is recorded of the screens, and how much of it is kept. Steps, answers, log-probabilities and rewards are
    always recorded."""

    frames: Literal["all", "sampled", "none"] = Field(
        "all",
        description="whose screens are recorded: all: every episode's; sampled: those of a share of the groups, whole "
        "groups, drawn by seed and issue order; none. Groups under way whose screens are not recorded are played again "
        "after a restart",
    )
    screens: Literal["model", "device"] = Field(
        "model",
        description="model: screens as the model saw them; device: also as the device drew them, where that is another "
        "size. Judges are shown these",
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="share of the groups whose screens are recorded with frames: sampled"
    )
    encoding: Literal["png", "webp", "jpeg"] = Field(
        "png",
        description="png: lossless, as the model saw them; webp, jpeg: smaller and lossy, for viewing only: nothing is "
        "learned from such a recording, and groups under way are played again after a restart",
    )
    quality: Annotated[int, Field(ge=1, le=100)] = Field(80, description="of webp and jpeg; png pays no attention")
    max_gib: Annotated[float, Field(ge=0.1, le=1_048_576)] | None = Field(
        None,
        alias="maxGiB",
        description="size of the recording, GiB, from which on the oldest screens are removed, then the oldest "
        "records; what a checkpoint needs is spared. Without it everything is kept",
    )
