"""Data sets made of data sets: parts, several as one, and parquet for others to read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from .episodes import DataError, Episode
from .folder import DataFolder, DataWriter, Rejected

#: of whose parts none is in two: an episode, its task, its template
By = Literal["episode", "task", "template"]
#: of a group in a parquet file: they hold images
_ROWS = 64
#: episodes of two sets that are looked for in each other
_COMPARED = 10_000


def split(folder: Path, first: Path, second: Path, *, share: float, by: By, seed: int) -> tuple[int, int]:
    """`share` of what `by` says goes to `second`, the rest to `first`, by hash: the same whatever the order, and more
    episodes change nothing for those that were there. Returns the episodes of both. Raises DataError."""
    if not 0 < share < 1:
        raise DataError(f"the share {share:g} is not between 0 and 1")
    data = DataFolder(folder)
    keys: dict[By, Callable[[Episode], str]] = {
        "episode": lambda episode: episode.content,
        "task": lambda episode: episode.task.goal,
        "template": lambda episode: f"{episode.task.suite}/{episode.task.template}",
    }

    def chosen(episode: Episode) -> bool:
        digest = hashlib.sha256(f"{seed}:{keys[by](episode)}".encode()).digest()
        return int.from_bytes(digest[:8]) < share * 2**64

    held_out = sum(map(chosen, data))
    if held_out in (0, len(data)):  # before anything is written
        raise DataError(f"{first if held_out else second} would be empty: choose another --share, or another --by")
    counts = []
    for path, wanted in ((first, False), (second, True)):
        part = (episode for episode in data if chosen(episode) is wanted)
        made_of = {"split": str(folder), "by": by, "share": share if wanted else 1 - share, "seed": seed}
        counts.append(_copy(part, data, path, made_of))
    return counts[0], counts[1]


def merge(folders: Sequence[Path], into: Path) -> int:
    """Episodes that say the same come once. Returns the episodes. Raises DataError."""
    seen, rejected, count = set[str](), Rejected(), 0
    with DataWriter(into) as writer:
        for folder in folders:
            data = DataFolder(folder)
            for episode in data:
                count += 1
                if episode.content in seen:
                    rejected.add("duplicate", f"{folder}/{episode.id}", "says what an earlier one says")
                    continue
                seen.add(episode.content)
                for name in episode.screens:
                    writer.screen(data.screen(name))
                writer.episode(episode.model_copy(update={"id": f"merged-{count:07d}"}))
        writer.finish({"merged": [str(folder) for folder in folders]}, rejected)
        return writer.episodes


def repeated(imitated: Path, held_out: Path) -> str:
    """How many episodes of `held_out` are in `imitated` as well, in words; "": none. Compares the first `_COMPARED` of
    each. Raises DataError."""
    known = {episode.content for episode in islice(DataFolder(imitated), _COMPARED)}
    contents = [episode.content for episode in islice(DataFolder(held_out), _COMPARED)]
    count = sum(content in known for content in contents)
    return f"of {len(contents):,} held-out episodes {count:,} are imitated as well" if count else ""


def _copy(episodes: Iterator[Episode], data: DataFolder, into: Path, made_of: Mapping[str, Any]) -> int:
    with DataWriter(into) as writer:
        for episode in episodes:
            for name in episode.screens:
                writer.screen(data.screen(name))
            writer.episode(episode)
        writer.finish(made_of, Rejected())
        return writer.episodes


# --- parquet ----------------------------------------------------------------------------------------------------------


def export(folder: Path, into: Path) -> int:
    """One parquet file, a row per step, in the layout that Hugging Face's viewer shows: `image` is {bytes, path}, and
    `episode`, `step`, `goal`, `answer`, `action` (JSON), `target`, `outcome`, `rewards` (JSON), `source` and `row` are
    beside it. Returns the rows. Raises DataError, OSError."""
    import pyarrow
    import pyarrow.parquet

    if into.exists():
        raise DataError(f"{into} is there already; name another file, or remove it")
    data = DataFolder(folder)
    image = {"_type": "Image"}
    texts = ("episode", "goal", "answer", "action", "outcome", "rewards", "source", "row")
    schema = pyarrow.schema(
        [
            ("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])),
            ("step", pyarrow.int32()),
            ("target", pyarrow.list_(pyarrow.float64())),
            *((name, pyarrow.string()) for name in texts),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": {"image": image}}})},
    )
    unfinished, count = into.with_name(f".{into.name}.{os.getpid()}"), 0
    rows: list[dict[str, Any]] = []
    try:
        with pyarrow.parquet.ParquetWriter(unfinished, schema) as writer:
            for episode in data:
                for place in range(len(episode.steps)):
                    rows.append(_row(episode, place, data))
                    count += 1
                    if len(rows) == _ROWS:
                        writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                        rows = []
            if rows:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        unfinished.rename(into)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _row(episode: Episode, place: int, data: DataFolder) -> dict[str, Any]:
    step = episode.steps[place]
    box = step.target
    return {
        "image": {"bytes": data.screen(step.screen), "path": step.screen},
        "step": place,
        "target": None if box is None else [box.left, box.top, box.right, box.bottom],
        "episode": episode.id,
        "goal": episode.task.goal,
        "answer": step.answer,
        "action": None if step.action is None else step.action.model_dump_json(),
        "outcome": episode.outcome,
        "rewards": json.dumps(step.rewards),
        "source": episode.provenance.source,
        "row": episode.provenance.row,
    }
