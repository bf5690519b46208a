"""What engines and ranks write, in the run's folder: a crash of CUDA, NCCL or vLLM says there what it was.

Ray keeps the output of its workers in a scratch folder of each node, which goes with the node. Where a run uses GPUs,
its actors write to `logs/` of the run's folder instead (`keep_output`), if their node has that folder; what Ray itself
wrote comes there in the end (`keep_ray_logs`). An error of engine or learner ends with the last lines (`last_lines`).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

#: stands for an actor's number
NUMBER: Final = "*"
#: last lines of a file that an error shows, of how many files, and how old these may be, seconds
_LINES: Final = 12
_FILES: Final = 3
_RECENT: Final = 300.0
#: bytes at the end of a file that are read
_END: Final = 64 * 1024
#: of Ray's own files, and as much of each is kept
_RAY_FILES: Final = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err")
_RAY_BYTES: Final = 4 * 1024 * 1024


def keep_output(file: str | None, number: int) -> None:
    """All that this process and its children write from here on is added to `file`. Not where its folder isn't: a node
    that doesn't share it."""
    if file is None or not Path(file).parent.is_dir():
        return
    descriptor = os.open(file.replace(NUMBER, str(number)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    print(f"--- process {os.getpid()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}", file=sys.stderr, flush=True)


def last_lines(folder: Path, now: float) -> str:
    """Of the files in it that were written to in the last minutes, the newest last; "" where there are none. `now`:
    unix seconds."""
    written = sorted((path.stat().st_mtime, path) for path in folder.glob("*.log"))
    recent = [path for when, path in written if now - when <= _RECENT and path.stat().st_size][-_FILES:]
    parts = [f"last lines of {path}:\n" + "\n".join(f"  {line}" for line in _tail(path)) for path in recent]
    return "\n".join(parts)


def keep_ray_logs(logs: Path | None, folder: Path) -> None:
    """`logs`: Ray's own of this node; None: there are none."""
    for path in [logs / name for name in _RAY_FILES] if logs is not None else []:
        if path.is_file() and (end := _end(path, _RAY_BYTES)):
            (folder / f"ray-{path.name}").write_bytes(end)


def _tail(path: Path) -> list[str]:
    lines = _end(path, _END).decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-_LINES:]


def _end(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count))
        return file.read()
