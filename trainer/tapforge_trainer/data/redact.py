"""What is private is taken out of a data set: places of screens, words, whole episodes.

Promises:
- A place is black in the pixels themselves, and the UI tree of such a step is dropped: it may hold the same words.
- Words are replaced wherever an episode has texts: goals, parameters, answers, typed texts, UI trees. Token ids of an
  answer that is another one now are dropped.
- The folder is written anew, so that neither lines nor screens of what was taken out are left in it; in place the old
  one is removed when the new one is whole. What was looked for is not written down, only how often it was found.

A recording that a data set was made of, and files that were exported from it, are not touched: they are made anew, or
deleted.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from PIL import Image
from pydantic import ValidationError

from .episodes import Box, DataError, Episode, wrong
from .folder import EPISODES, DataFolder, DataWriter, Rejected

#: what stands in the place of words
_MARK: Final = "[redacted]"
#: texts that name something and say nothing
_NAMES: Final = frozenset({"id", "type", "suite", "template", "screen", "last_screen", "outcome", "source", "row"})


@dataclass(frozen=True, slots=True)
class Rules:
    boxes: tuple[Box, ...] = ()
    texts: tuple[re.Pattern[str], ...] = ()
    #: ids of episodes that go
    deleted: frozenset[str] = frozenset()
    #: ids of those that boxes and texts are of; None: all
    only: frozenset[str] | None = None


@dataclass
class Redacted:
    episodes: int = 0
    deleted: int = 0
    #: of steps whose screen has a black place now, and of texts in which something was replaced
    screens: int = 0
    texts: int = 0
    #: names of screens with black places, by those without
    painted: dict[str, str] = field(default_factory=dict, repr=False)


def rules_of(
    boxes: Sequence[str] = (), texts: Sequence[str] = (), deleted: Sequence[str] = (), only: Sequence[str] = ()
) -> Rules:
    """As they are typed: boxes as LEFT,TOP,RIGHT,BOTTOM in shares of the screen, texts as regular expressions. Raises
    DataError."""
    made = []
    for box in boxes:
        try:
            left, top, right, bottom = map(float, box.split(","))
            made.append(Box(left=left, top=top, right=right, bottom=bottom))
        except ValidationError as error:
            raise DataError(f"the box {box}: {wrong(error)}") from error
        except ValueError as error:
            due = "LEFT,TOP,RIGHT,BOTTOM in shares of the screen, as 0,0,1,0.05"
            raise DataError(f"the box {box} is not {due}") from error
    try:
        patterns = tuple(re.compile(text) for text in texts)
    except re.error as error:
        raise DataError(f"{error.pattern!r} is no regular expression: {error}") from error
    return Rules(tuple(made), patterns, frozenset(deleted), frozenset(only) or None)


def redact(folder: Path, into: Path | None, rules: Rules) -> Redacted:
    """`into` None: in place. Raises DataError, also where an episode is named that isn't there, and where a text that
    is replaced leaves no sound episode."""
    data = DataFolder(folder)
    named = rules.deleted | (rules.only or frozenset())
    if missing := named - {episode.id for episode in data} if named else frozenset():
        raise DataError(f"{folder} has no episode {min(missing)}; ids are in its {EPISODES}")
    if len(rules.deleted) == len(data):
        raise DataError(f"nothing would be left of {folder}: remove the folder")
    unfinished = into or folder.with_name(f".{folder.name}.redacted")
    if into is None:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a command that was killed
    try:
        found = _written(data, unfinished, rules)
    except BaseException:
        if into is None:  # nothing of it may be left lying about
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if into is None:
        old = folder.with_name(f".{folder.name}.before")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old)
    return found


def _written(data: DataFolder, folder: Path, rules: Rules) -> Redacted:
    found = Redacted()
    with DataWriter(folder) as writer:
        for episode in data:
            if episode.id in rules.deleted:
                found.deleted += 1
            else:
                writer.episode(_redacted(episode, data, writer, rules, found))
        found.episodes = writer.episodes
        counts = {"deleted": found.deleted, "screens": found.screens, "texts": found.texts}
        writer.finish({**data.about["made_of"], "redacted": counts}, Rejected())
    return found


def _redacted(episode: Episode, data: DataFolder, writer: DataWriter, rules: Rules, found: Redacted) -> Episode:
    if rules.only is not None and episode.id not in rules.only:
        rules = replace(rules, boxes=(), texts=())
    document = episode.model_dump(mode="json", exclude_none=True)
    for step in document["steps"]:
        answer = step.get("answer")
        found.texts += _replace(step, rules.texts)
        if step.get("answer") != answer:
            step["ids"] = []
        step["screen"] = _screen(step["screen"], data, writer, rules, found)
        if rules.boxes:
            found.screens += 1
            step["ui_tree"] = ""
    if "last_screen" in document:
        document["last_screen"] = _screen(document["last_screen"], data, writer, rules, found)
    found.texts += _replace(document["task"], rules.texts)
    before = [_said(words, rules.texts) for words in document["before"]]
    found.texts += sum(one != other for one, other in zip(before, document["before"], strict=True))
    document["before"] = before
    try:
        return Episode.model_validate(document)
    except ValidationError as error:
        raise DataError(
            f"episode {episode.id}: a text that is replaced is none that it can do without ({wrong(error)}); make the "
            "regular expression narrower"
        ) from error


def _screen(name: str, data: DataFolder, writer: DataWriter, rules: Rules, found: Redacted) -> str:
    if not rules.boxes:
        return writer.screen(data.screen(name))
    if name not in found.painted:
        found.painted[name] = writer.screen(_blackened(data.screen(name), rules.boxes))
    return found.painted[name]


def _blackened(image: bytes, boxes: Sequence[Box]) -> bytes:
    """As PNG: another lossy pass would change the rest."""
    with Image.open(io.BytesIO(image)) as opened:
        pixels = opened.convert("RGB")
    width, height = pixels.size
    for box in boxes:
        left, top = int(box.left * width), int(box.top * height)
        right, bottom = -int(-box.right * width // 1), -int(-box.bottom * height // 1)
        pixels.paste((0, 0, 0), (left, top, right, bottom))
    out = io.BytesIO()
    pixels.save(out, "PNG")
    return out.getvalue()


def _replace(part: Any, texts: Sequence[re.Pattern[str]]) -> int:
    """In all texts below, in place. Returns of how many."""
    count = 0
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, dict | list):
            count += _replace(value, texts)
        elif isinstance(value, str) and key not in _NAMES and (said := _said(value, texts)) != value:
            part[key] = said
            count += 1
    return count


def _said(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(_MARK, text)
    return text
