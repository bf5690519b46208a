"""Which goals are the same, by their words and by what they mean: a measure without a model. Pure.

- **Words**: equal in whatever case, spacing and punctuation.
- **Meaning**: each goal is reduced to its content words. Words that say the same are one (`turn on`, `switch on`,
  `enable`), plural and other ends are cut, and articles, prepositions and politeness are left out. Two goals mean the
  same where these words share `SHARE` of all. They don't where a number, a time or a quoted text is in one
  only, where one turns on what the other turns off, or where the order of steps is all that differs.

It errs where a synonym is missing from its table (a duplicate stays), and where long goals differ in one name (one of
them is lost); numbers of both on the walks of the simulated phone are in docs/tasks.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: of the content words of two goals that mean the same
SHARE: Final = 0.9
_SAME: Final = (
    (r"\b(?:turn|switch) on\b|\b(?:turn|switch)(?= \S+(?: \S+)? on\b)|\benable\b|\bactivate\b", " enable "),
    (r"\b(?:turn|switch) off\b|\bdisable\b|\bdeactivate\b", " disable "),
    (r"\bdelete\b|\berase\b|\bget rid of\b|\bthrow away\b", " remove "),
    (r"\blaunch\b|\bstart\b|\bgo to\b|\bgo into\b", " open "),
    (r"\bcreate\b|\bmake\b|\binsert\b", " add "),
    (r"\btype\b|\benter\b", " write "),
    (r"\bchange\b|\badjust\b", " set "),
    (r"\bmark (?P<what>.*?) as (?:a )?favou?rites?\b|\bstar (?P<which>.*)", r" favorite \g<what>\g<which> "),
    (r"\be-?mails?\b", " mail "),
    (r"\bwi-?fi\b", " wifi "),
)
_LEFT_OUT: Final = frozenset(
    re.split(
        r"\s+",
        "a an the my your this that these those to in into on of and or please could you can would for from at by with "
        "app application screen phone then now it its is are be as i me up",
    )
)
_ORDER: Final = frozenset({"then", "before", "after", "afterwards", "first"})
_POLAR: Final = frozenset({"enable", "disable"})
#: "on" says too many other things
_NOT: Final = frozenset({"not", "no", "never", "without", "off"})
_WORD: Final = re.compile(r"[^\W_]+(?:[.:@'-][^\W_]+)*")
_QUOTED: Final = re.compile(r"[\"“']([^\"”']{1,200})[\"”']")


@dataclass(frozen=True, slots=True)
class Meaning:
    #: in order, without what says nothing
    words: tuple[str, ...]
    #: what has to be the same to the letter
    exact: frozenset[str]
    ordered: bool


def meaning(goal: str) -> Meaning:
    text = " ".join(goal.casefold().replace("\u2019", "'").split())
    exact = set(_QUOTED.findall(text))
    ordered = not _ORDER.isdisjoint(_WORD.findall(text))
    for pattern, word in _SAME:
        text = re.sub(pattern, word, text)
    words = [word for word in _WORD.findall(text) if word not in _LEFT_OUT]
    exact |= {word for word in words if any(c.isdecimal() for c in word) or word.endswith("n't")}
    exact |= (_POLAR | _NOT) & set(words)
    return Meaning(tuple(_cut(word) for word in words), frozenset(exact), ordered)


def _cut(word: str) -> str:
    for end in ("ing", "es", "ed", "s"):
        if len(word) > len(end) + 3 and word.endswith(end):
            return word[: -len(end)]
    return word


def mean_the_same(one: Meaning, other: Meaning) -> bool:
    if one.exact != other.exact:
        return False
    if one.words == other.words:
        return True
    a, b = Counter(one.words), Counter(other.words)
    if a == b:
        # which of two things is turned on, and which off, is a matter of order as well
        return not (one.ordered or other.ordered or one.exact >= _POLAR)
    return (a & b).total() >= SHARE * (a | b).total()


class Goals:
    """Goals that are there, each with where it is from."""

    def __init__(self, goals: Iterable[tuple[str, str]] = ()):
        self._by_words: dict[str, str] = {}
        self._meanings: list[tuple[Meaning, str]] = []
        for goal, source in goals:
            self.add(goal, source)

    def add(self, goal: str, source: str) -> None:
        self._by_words.setdefault(_plain(goal), source)
        self._meanings.append((meaning(goal), source))

    def same(self, goal: str) -> tuple[str, str] | None:
        """("words" or "meaning", where the one that is there is from), of one that is the same."""
        if (source := self._by_words.get(_plain(goal))) is not None:
            return "words", source
        found = meaning(goal)
        return next((("meaning", source) for there, source in self._meanings if mean_the_same(found, there)), None)


def _plain(goal: str) -> str:
    return " ".join(_WORD.findall(goal.casefold()))
