"""Recorded steps that a run answers instead of using phones, and what an answer is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import UNIQUE, Fraction, Path, Spec


class StepReward(Spec):
    """What an answer to a recorded step is worth, from 0 to 1, by comparison with the recorded action. An action of
    another type is worth 0, and so is anything that is not an action."""

    type: Fraction = Field(
        0.5,
        description="for an action of the recorded type alone; the rest is for what it says: a place, a text, a "
        "direction, a status",
    )
    place: Literal["box", "distance"] = Field(
        "box", description="box: a place is right inside the recorded box, where there is one; distance: by distance"
    )
    tolerance: Fraction = Field(
        0.1, description="distance from the recorded place up to which a place is right, share of the screen's diagonal"
    )
    reach: Fraction = Field(
        0.0,
        description="distance at which a place is worth nothing, share of the diagonal: its worth falls linearly from "
        "tolerance on. Up to tolerance: what is further off is worth nothing",
    )
    text: Literal["exact", "normalized", "f1"] = Field(
        "normalized",
        description="when texts are equal. normalized: but for upper and lower case, signs and spaces; f1: shared "
        "words count",
    )


class DataSet(Spec):
    """Recorded steps instead of phones: each task is a step of a data set (`tapforge data`), shown as it was recorded,
    and an episode is one answer to it."""

    path: Path = Field(
        description="folder of the data set that is practised, or a URI: s3://BUCKET/FOLDER, "
        "hf://datasets/OWNER/NAME@REVISION/FOLDER; what a URI names is pinned as a model is",
    )
    held_out: Path | None = Field(
        None, description="folder or URI of the one that is measured on; without it the same, and nothing is held out"
    )
    outcomes: Annotated[
        tuple[Literal["success", "failure", "unknown"], ...], Field(min_length=1, max_length=3), UNIQUE
    ] = Field(("success", "unknown"), description="of the episodes whose steps count; unknown: the data doesn't say")
    reward: StepReward = Field(StepReward(), description="what an answer is worth")
