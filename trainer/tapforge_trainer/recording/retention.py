"""What is recorded of the screens and how much of it is kept (`spec.recording`). Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

from ..attempt import seed_of


@dataclass(frozen=True, slots=True)
class Retention:
    frames: Literal["all", "sampled", "none"] = "all"
    #: of the groups, with frames: sampled
    share: float = 0.1
    #: what is drawn depends on
    seed: int = 0
    #: png is lossless
    encoding: Literal["png", "webp", "jpeg"] = "png"
    quality: int = 80
    #: of records, frames and their indexes together; None: no bound
    max_bytes: int | None = None

    def keeps(self, group: str) -> bool:
        """Whether the screens of this group's episodes are recorded: of all of them or of none. A group that is played
        again, and the same task in two measurements, have the same place in the order and are drawn alike."""
        if self.frames == "sampled":
            return seed_of(self.seed, "recorded", group.rpartition("-")[2]) < self.share * 2**63
        return self.frames == "all"

    def rereadable(self, group: str) -> bool:
        """Whether the frames of a group under way are sure to be in the recording, as the model saw them."""
        return self.keeps(group) and self.encoding == "png" and self.max_bytes is None

    def segment_bytes(self, most: int) -> int:
        """Of a file, so that what is removed at once is a small part of what is kept."""
        return most if self.max_bytes is None else min(most, max(1, self.max_bytes // 16))

    @property
    def lacks(self) -> str:
        """Which screens the recording never had, in words; "" if it had all."""
        if self.frames == "sampled":
            return f"only the screens of {self.share:.0%} of the groups were recorded (recording.frames: sampled)"
        return "no screens were recorded (recording.frames: none)" if self.frames == "none" else ""

    @property
    def removes(self) -> str:
        """What was removed of a recording that lacks its oldest frames."""
        bound = "" if self.max_bytes is None else f" of {self.max_bytes / 2**30:g} GiB"
        return f"the oldest screens were removed at the recording's bound{bound} (recording.maxGiB)"

    def as_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def of_json(text: str) -> Retention:
        """What a recorder wrote down. Fields of later versions are left out. Raises ValueError, TypeError."""
        names = {field.name for field in fields(Retention)}
        return Retention(**{name: value for name, value in json.loads(text).items() if name in names})
