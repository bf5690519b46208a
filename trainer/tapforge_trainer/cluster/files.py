"""Hands out the files of a run to `tapforge cluster`, inside a Pod that has the run's storage:
`python3 -m tapforge_trainer.cluster.files list | send | events`. Standard library only: it starts beside a driver.

    list WHAT...    one line of JSON: the newest attempt's folder ("" when there is none), and its files and sizes
    send            reads one line of JSON, {"folder", "files": [[path, offset, size], ...]}, and answers for each file
                    with a line {"path", "size"}, its bytes from offset to size, and a line {"sha256"} of all bytes up
                    to size; for one that is gone, or shorter by now, with a line {"path", "gone"}. The last line is
                    {"end"}; lines {"hashing"} come while what is there already is read
    events OFFSET   a line {"folder", "offset", "size"}, and so many bytes of its events.jsonl from there on, whole
                    lines; each attempt has a folder of its own

1. A size counts from when it was listed: what is appended meanwhile is not sent.
2. Of checkpoints only the one that `latest` names is listed, and with it what a resumed run needs beside it.
3. Nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

#: as `tapforge_api.attempt` names them
_STORAGE, _RUN = "TAPFORGE_STORAGE", "TAPFORGE_RUN"
_ATTEMPT: Final = re.compile(r"attempt-\d{8}(-\d{13,})?")
_EVENTS: Final = "events.jsonl"
_LATEST: Final = "checkpoints/latest"
_PART: Final = 1 << 20
#: bytes; a silent connection is one that is broken
_SIGN_OF_LIFE: Final = 256 * _PART
#: bytes of events that one answer has
_EVENT_BYTES: Final = 4 << 20

#: what can be asked for -> the files and folders of a run that it is
WHAT: Final[dict[str, tuple[str, ...]]] = {
    "summary": ("spec.yaml", "summary.json", "curve.png", _EVENTS),
    "replay": ("spec.yaml", "summary.json", "curve.png", _EVENTS, "replay.html", "rollout", "evaluation"),
    "checkpoint": ("spec.yaml", "checkpoints", "export", "reference"),
}


def belongs(path: str, what: Iterable[str]) -> bool:
    """Whether a file of a run is part of what is asked for."""
    return any(path == place or path.startswith(f"{place}/") for one in what for place in WHAT[one])


def newest_folder(storage: Path, run: str) -> Path | None:
    """Of the last attempt that began to write."""
    if not storage.is_dir():
        return None
    found = sorted(path for path in storage.iterdir() if _ATTEMPT.fullmatch(path.name))
    return next((path / run for path in reversed(found) if (path / run).is_dir()), None)


def listed(folder: Path, what: Sequence[str]) -> list[tuple[str, int]]:
    """Path and size of what there is."""
    latest = folder / _LATEST
    checkpoint = f"checkpoints/{latest.read_text().strip()}/" if latest.is_file() else None
    found = []
    for place, inner, names in os.walk(folder):
        inner.sort()
        for name in sorted(names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if name.startswith(".") and name != ".metadata":  # locks, and what is being written
                continue
            if not belongs(relative, what) or path.is_symlink():
                continue
            older = checkpoint is None or not relative.startswith(checkpoint)
            if relative.startswith("checkpoints/") and relative != _LATEST and older:
                continue
            try:
                found.append((relative, path.stat().st_size))
            except FileNotFoundError:  # removed just now
                continue
    return found


def send(request: dict[str, object], out: BinaryIO) -> None:
    folder, files = Path(str(request["folder"])), request["files"]
    assert isinstance(files, list)
    for path, offset, size in files:
        try:
            file = (folder / path).open("rb")
        except OSError as error:
            _say(out, {"path": path, "gone": str(error.strerror)})
            continue
        with file:
            if os.fstat(file.fileno()).st_size < size:
                _say(out, {"path": path, "gone": "it is shorter now"})
                continue
            digest = hashlib.sha256()
            for part in _parts(file, offset):
                digest.update(part)
                if file.tell() % _SIGN_OF_LIFE == 0:
                    _say(out, {"hashing": path})
                    out.flush()
            _say(out, {"path": path, "size": size})
            for part in _parts(file, size - offset):
                digest.update(part)
                out.write(part)
            _say(out, {"sha256": digest.hexdigest()})
    _say(out, {"end": True})


def _parts(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        part = file.read(min(_PART, size))
        if not part:
            sys.exit("a file was cut off while it was read")
        size -= len(part)
        yield part


def events(folder: Path | None, offset: int, out: BinaryIO) -> None:
    path = folder / _EVENTS if folder else None
    if path is None or not path.is_file():
        _say(out, {"folder": str(folder or ""), "offset": 0, "size": 0})
        return
    with path.open("rb") as file:
        offset = offset if offset <= os.fstat(file.fileno()).st_size else 0
        file.seek(offset)
        data = file.read(_EVENT_BYTES)
    data = data[: data.rfind(b"\n") + 1]
    _say(out, {"folder": str(folder), "offset": offset, "size": len(data)})
    out.write(data)


def _say(out: BinaryIO, line: dict[str, object]) -> None:
    out.write(json.dumps(line).encode() + b"\n")


def main(arguments: Sequence[str]) -> None:
    out = sys.stdout.buffer
    folder = newest_folder(Path(os.environ[_STORAGE]), os.environ[_RUN])
    match arguments:
        case ["list", *what]:
            files = listed(folder, what) if folder else []
            _say(out, {"folder": str(folder or ""), "files": files})
        case ["send"]:
            send(json.loads(sys.stdin.buffer.readline()), out)
        case ["events", offset]:
            events(folder, int(offset), out)
        case _:
            sys.exit("list WHAT..., send or events OFFSET")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
