"""Where a run keeps its checkpoints, and how often it writes one."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from .base import Path, Positive, Rule, Seconds, Spec, Uri, not_both


class VolumeClaim(Spec):
    """A PersistentVolumeClaim of the run's namespace. With several Ray Pods it must be writable from several nodes."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] = (
        Field(description="metadata.name of the claim")
    )
    sub_path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/-]*$")] | None = (
        Field(None, description="folder of the volume, instead of its root")
    )


class Storage(Spec):
    """Where a run on a cluster keeps what has to outlast its Ray clusters, in a folder of its own below this root."""

    volume_claim: VolumeClaim = Field(description="a volume")


def _folder(field: str, attribute: str) -> Rule:
    return Rule(
        message=f"{field} must be a folder, not a URI: mount the storage, and name the folder that it is mounted at",
        cel=f"!has(self.{field}) || !self.{field}.matches('://')",
        holds=lambda o: getattr(o, attribute) is None or "://" not in getattr(o, attribute),
    )


class Checkpoints(Spec):
    """What is kept of a run, so that it can go on elsewhere."""

    directory: Path | None = Field(None, description="folder; without it runs/NAME/checkpoints")
    uri: Uri | None = Field(
        None,
        description="object storage such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, instead of directory: the same "
        "on a laptop and on a cluster. Credentials come from the environment",
    )
    storage: Storage | None = Field(
        None,
        description="where a run on a cluster keeps what has to last, instead of directory; without it and uri its "
        "checkpoints are lost with the Ray cluster. A laptop pays no attention",
    )
    every_updates: Positive = Field(10, description="updates between two checkpoints; there is always one at the end")
    every_seconds: Seconds = Field(
        900,
        description="seconds after which there is one all the same, behind the update under way; more where that would "
        "spend over a tenth of the time on writing. What a crash costs is at most that and an update",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(2, description="checkpoints kept; older ones are deleted")
    resume_from: Path | None = Field(
        None,
        description="folder or URI of a checkpoint to resume from; without it the run's newest. One of this run "
        "counts until there is one that was made after it; one of another run gives its weights only, and only until "
        "the run has its own",
    )
    export: bool = Field(True, description="write the final weights in Hugging Face's layout")

    rules: ClassVar[tuple[Rule, ...]] = (
        not_both("directory", "storage", "storage says where checkpoints are on a cluster"),
        not_both("directory", "uri", "each says where checkpoints are"),
        _folder("directory", "directory"),
    )
