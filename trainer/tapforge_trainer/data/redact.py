"""What is private is taken out of a data set: places of screens, words, whole episodes.

Promises:
- A place is black in the pixels themselves, and the UI tree of such a step is dropped: it may hold the same words.
- Words are replaced wherever an episode has texts: goals, parameters and their names, answers, typed texts, UI trees,
  rows that it is of, and in what the data set was made of. They are found behind JSON's and XML's escapes as well
  (`escapes.py`). Token ids of a step whose answer or action is another one now are dropped.
- What names an episode stays (its id, suite and template); `Redacted.named` counts those that hold such words.
- The folder is written anew, so that neither lines nor screens of what was taken out are left in it; in place the old
  one is removed when the new one is whole. What was looked for is not written down, only how often it was found.
- A screen that another episode shows as well stays there; `Redacted.shared` counts them.

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
from .escapes import said
from .folder import ABOUT, EPISODES, SCREENS, DataFolder, DataWriter, Rejected

#: of an action, what is one of a few words
_KINDS: Final = frozenset({"type", "direction", "status"})


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
    #: episodes whose id, suite or template holds what was replaced elsewhere
    named: int = 0
    #: screens of what was deleted or made black that other episodes show, where they stay
    shared: int = 0
    #: names of screens with black places, by those without
    painted: dict[str, str] = field(default_factory=dict, repr=False)
    #: names of screens that were to go, and of those that stay
    taken: set[str] = field(default_factory=set, repr=False)
    kept: set[str] = field(default_factory=set, repr=False)


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
        raise DataError(f"{error.pattern!r} is not a regular expression: {error}") from error
    if empty := [text for text, pattern in zip(texts, patterns, strict=True) if pattern.search("")]:
        raise DataError(f"the regular expression {empty[0]!r} is found in an empty text; make it narrower")
    return Rules(tuple(made), patterns, frozenset(deleted), frozenset(only) or None)


def redact(folder: Path, into: Path | None, rules: Rules) -> Redacted:
    """`into` None: in place. Raises DataError, also where an episode is named that isn't there, and where a text that
    is replaced leaves no sound episode."""
    folder = folder.resolve()  # what a link names is written anew, and not the link
    old = folder.with_name(f".{folder.name}.before")
    if old.exists() and not folder.exists():  # of a command that was killed between the two
        old.rename(folder)
    data = DataFolder(folder)
    shutil.rmtree(old, ignore_errors=True)
    others = sorted(path.name for path in folder.iterdir() if path.name not in (ABOUT, EPISODES, SCREENS))
    if into is None and others:
        raise DataError(
            f"{folder} holds {others[0]}, which is not of the data set: it may hold the same words; move or delete it"
        )
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
                found.taken.update(episode.screens)
            else:
                writer.episode(_redacted(episode, data, writer, rules, found))
        found.episodes, found.shared = writer.episodes, len(found.taken & found.kept)
        counts = {"deleted": found.deleted, "screens": found.screens, "texts": found.texts}
        made_of, _ = _replaced(data.about["made_of"], rules.texts)
        writer.finish({**made_of, "redacted": counts}, Rejected())
    return found


def _redacted(episode: Episode, data: DataFolder, writer: DataWriter, rules: Rules, found: Redacted) -> Episode:
    if rules.only is not None and episode.id not in rules.only:
        rules = replace(rules, boxes=(), texts=())
    document = episode.model_dump(mode="json", exclude_none=True)
    for step in document["steps"]:
        _redact_step(step, rules, found)
        step["screen"] = _screen(step["screen"], data, writer, rules, found)
    if "last_screen" in document:
        document["last_screen"] = _screen(document["last_screen"], data, writer, rules, found)
    for part, name in ((document["task"], "goal"), (document["task"], "params"), (document["provenance"], "row")):
        part[name], count = _replaced(part[name], rules.texts)
        found.texts += count
    document["before"], count = _replaced(document["before"], rules.texts)
    found.texts += count
    names = (episode.id, episode.task.suite, episode.task.template)
    found.named += any(said(name, rules.texts) != name for name in names)
    try:
        return Episode.model_validate(document)
    except ValidationError as error:
        raise DataError(
            f"episode {episode.id}: a text that is replaced is none that it can do without ({wrong(error)}); make the "
            "regular expression narrower"
        ) from error


def _redact_step(step: dict[str, Any], rules: Rules, found: Redacted) -> None:
    """Its texts, in place."""
    before = step.get("answer"), step.get("action")
    for name in ("ui_tree", "app", "answer"):
        if name in step:
            step[name], count = _replaced(step[name], rules.texts)
            found.texts += count
    if "action" in step:
        words = {name: value for name, value in step["action"].items() if name not in _KINDS}
        replaced, count = _replaced(words, rules.texts)
        step["action"] = step["action"] | replaced
        found.texts += count
    if before != (step.get("answer"), step.get("action")):
        step["ids"] = []
    if rules.boxes:
        found.screens += 1
        step["ui_tree"] = ""


def _screen(name: str, data: DataFolder, writer: DataWriter, rules: Rules, found: Redacted) -> str:
    if not rules.boxes:
        found.kept.add(name)
        return writer.screen(data.screen(name))
    found.taken.add(name)
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


def _replaced(part: Any, texts: Sequence[re.Pattern[str]]) -> tuple[Any, int]:
    """With all texts below replaced, keys included, and how many were."""
    if isinstance(part, str):
        new = said(part, texts)
        return new, int(new != part)
    if isinstance(part, list):
        some = [_replaced(value, texts) for value in part]
        return [value for value, _ in some], sum(count for _, count in some)
    if not isinstance(part, dict):
        return part, 0
    made: dict[str, Any] = {}
    total = 0
    for key, value in part.items():
        name, (made_value, count) = said(key, texts), _replaced(value, texts)
        total += count + (name != key)
        alone, number = name, 2
        while alone in made:  # two names that are one now
            alone, number = f"{name} {number}", number + 1
        made[alone] = made_value
    return made, total
