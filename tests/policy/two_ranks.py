"""Two learner ranks in two processes over gloo, without Ray: they stay for a whole module of tests, and run what it
asks for. Functions come from test modules and take the rank's index and a store of their own first."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: seconds that a call may take on a busy machine
END = 240.0


class TwoRanks:
    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(index, str(folder / "store"), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(index, store, *arguments)` returns on each of them."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found = []
        for pipe in self._pipes:
            assert pipe.poll(END), f"{function.__name__} took longer than {END:.0f} s"
            found.append(pipe.recv())
        for error, _ in found:
            assert error is None, error
        return [value for _, value in found]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(30)


@contextmanager
def two_ranks(folder: Path) -> Iterator[TwoRanks]:
    ranks = TwoRanks(folder)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(index: int, path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(seconds=END))
    number = 0
    while True:
        function, arguments = pipe.recv()
        number += 1
        try:
            found = None, function(index, dist.PrefixStore(str(number), store), *arguments)
        except Exception:  # noqa: BLE001 - the test reports it
            found = traceback.format_exc(), None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(found)
