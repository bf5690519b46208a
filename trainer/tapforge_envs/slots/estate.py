"""What a holder of claims leaves behind when it is killed: their names and secrets, in a file that its successor reads.

A process that ends well gives its phones back. The claims of one that was killed would stand until they expire, and the
process that is started in its place would wait for phones that nobody uses.

1. The file has the claims that are this process's, after every change, complete or as before.
2. Only who comes after the process in its place reads it: not the process itself, and nobody while it lives.
3. It is a shortcut. Where it can't be read or written, claims end by themselves as ever.

Who lives is known by numbers of processes: the file has to be where only processes of the same Pod come.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from tapforge_api.claims import Given

log = logging.getLogger(__name__)

_CLAIMS = TypeAdapter(tuple[Given, ...])


class Estate:
    def __init__(self, path: Path) -> None:
        self._path = path

    def of_the_dead(self) -> tuple[Given, ...]:
        """What the last process that wrote here still held; nothing while it lives."""
        try:
            written = json.loads(self._path.read_bytes())
            if psutil.pid_exists(int(written["process"])):
                return ()
            return _CLAIMS.validate_python(written["claims"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            log.warning("claims left in %s can't be read, and end by themselves: %s", self._path, error)
            return ()

    def write(self, claims: Iterable[Given]) -> None:
        """These are ours now."""
        left = [claim.model_dump(mode="json", by_alias=True) for claim in claims]
        new = self._path.with_suffix(".new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"process": os.getpid(), "claims": left}, file)
            new.replace(self._path)
        except OSError as error:
            log.warning("claims are not noted in %s for a successor: %s", self._path, error)
