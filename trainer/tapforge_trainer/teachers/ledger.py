"""What a teacher has used and where it failed, a line of JSON each, so that a command that is killed knows it again.

    {"tokens": [prompt, answer]}        of an answer that came
    {"failed": kind, "why": words}      of a request that failed
    {"part": 3, "numbers": [..]}        tasks, by number, that are begun in the folder of this part
    {"ended": 3}                        all of them were played

A line that was cut off by a kill is left out and written over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..data.folder import Rejected


class Ledger:
    """Has one writer at a time. Raises OSError."""

    def __init__(self, path: Path):
        self.prompt_tokens = self.answer_tokens = self.answers = 0
        self.failed = Rejected()
        #: numbers of tasks by part
        self.parts: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        whole = 0
        if path.exists():
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].splitlines():
                self._take(json.loads(line))
        self._file = path.open("ab")
        os.truncate(path, whole)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    def answered(self, prompt: int, answer: int) -> None:
        self._write({"tokens": [prompt, answer]})

    def failure(self, kind: str, why: str) -> None:
        self._write({"failed": kind, "why": why[:400]})

    def begin(self, numbers: list[int]) -> int:
        """A new part."""
        part = max(self.parts, default=-1) + 1
        self._write({"part": part, "numbers": numbers})
        return part

    def end(self, part: int) -> None:
        self._write({"ended": part})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "tokens" in line:
            prompt, answer = line["tokens"]
            self.prompt_tokens, self.answer_tokens = self.prompt_tokens + prompt, self.answer_tokens + answer
            self.answers += 1
        elif "failed" in line:
            self.failed.add(line["failed"], "request", line["why"])
        elif "part" in line:
            self.parts[line["part"]] = line["numbers"]
        elif "ended" in line:
            self.ended.add(line["ended"])
