"""The commands of the pages, found by their fences: ```sh, and the lines behind `$ ` of ```console.

A command is its words as a shell splits them, without comments, redirections, variables before it and what it is piped
into. Here-documents and the text between commands of a loop are left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FENCE: Final = re.compile(r"^( *)```(sh|console)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_HERE: Final = re.compile(r"<<-?'?(\w+)'?\n.*?^ *\1$", re.MULTILINE | re.DOTALL)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
#: words of a loop around commands
_LOOP: Final = frozenset({"for", "do", "done"})
#: a command inside of another word; its words are no words of ours
_SUBSTITUTED: Final = re.compile(r"\$\([^()]*\)")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0].removeprefix(".venv/bin/")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path, root: Path) -> Iterator[Command]:
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        first = text.count("\n", 0, fence.start(3)) + 1
        for line, source in _sources(_HERE.sub("", fence[3]), console=fence[2] == "console"):
            for words in _split(source):
                if words[0] in _LOOP:
                    continue
                yield Command(str(page.relative_to(root)), first + line, words)


def _sources(block: str, console: bool) -> Iterator[tuple[int, str]]:
    """Number of the first line, and the text of each command: lines that a backslash or a quote joins."""
    held, begun = "", 0
    for number, line in enumerate(block.splitlines()):
        if not held:
            begun = number
            if console:
                if not line.lstrip().startswith("$ "):
                    continue
                line = line.lstrip()[2:]
        held += line + "\n"
        if line.endswith("\\"):
            held = held[:-2] + " "
        elif _quotes_end(held):
            yield begun, held
            held = ""
    assert not held.strip(), f"a quote that never ends: {held}"


def _quotes_end(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _split(source: str) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(_SUBSTITUTED.sub("SUBSTITUTED", source), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    skip = piped = False
    for word in [*lexer, ";"]:
        if set(word) <= set("<>"):
            skip = True
        elif set(word) <= set("|&;"):
            while words and _VARIABLE.fullmatch(words[0]):
                words.pop(0)
            if words and not piped:
                yield tuple(words)
            words, piped = [], word == "|"
        elif skip:
            skip = False
        else:
            words.append(word)
