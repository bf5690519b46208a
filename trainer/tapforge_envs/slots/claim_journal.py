"""The claim journal: the claims that a process holds, in a file that the process started in its place reads.

A process that ends in order releases its phones. The claims of one that was killed would stand until they expire, and
its successor would wait for phones that no process uses.

1. The file lists the claims of this process after every change, complete or as before.
2. Only a later process reads it, and only once the process that wrote it no longer exists. That one may be of
   another release.
3. It is an optimisation. Where it can't be read or written, claims expire as ever.

Whether a process exists is decided by its number: the file belongs where only processes of the same Pod come.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import ValidationError

from tapforge_api.claims import Given
from tapforge_api.reading import read_record

log = logging.getLogger(__name__)


class ClaimJournal:
    def __init__(self, path: Path) -> None:
        self._path = path

    def unreleased(self) -> tuple[Given, ...]:
        """The claims that the last process to write here still held; nothing while it exists."""
        try:
            written = json.loads(self._path.read_bytes())
            if psutil.pid_exists(int(written["process"])):
                return ()
            return tuple(read_record(Given, claim) for claim in written["claims"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            log.warning("the claim journal %s can't be read, its claims expire by themselves: %s", self._path, error)
            return ()

    def write(self, claims: Iterable[Given]) -> None:
        """`claims` are all that this process holds now."""
        left = [claim.model_dump(mode="json", by_alias=True) for claim in claims]
        new = self._path.with_suffix(".new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"process": os.getpid(), "claims": left}, file)
            new.replace(self._path)
        except OSError as error:
            log.warning(
                "the claim journal %s can't be written, claims expire if this process is killed: %s", self._path, error
            )
