"""Judges of the standard phone: what was asked must be so, and everything else must be as it was.

A task says what it wants by a *wish*, which changes a copy of the content as a clean solution would. The content after
the episode is compared with that: where they differ and the wish had changed something, the task isn't done; where
they differ and the wish had changed nothing, it is a side effect, named by its place. Lists are compared without order,
texts without case and surplus blanks. What reading leaves behind (`state["traces"]`) is ignored.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tapforge_envs.protocol import Score

from .device import State, Trial

Apps = dict[str, Any]
Wish = Callable[[Apps], None]
#: characters of a named side effect
_NAME = 140
#: numbers in an answer that weren't asked for: a list of all numbers is not an answer
_STRAY_NUMBERS = 3
_ANSWER = 240


def judged(state: State) -> Apps:
    """The part of the state that a judge looks at."""
    apps: Apps = state["apps"]
    return apps


def judge_change(trial: Trial, wish: Wish) -> Score:
    """For tasks that end with a done thing."""
    if not trial.declared_done:
        return Score(0.0, f"ended with {trial.status!r} instead of success")
    missing, effects = compare(trial, wish)
    if missing:
        return Score(0.0, "not as asked: " + "; ".join(missing)[:400], effects)
    return Score(0.0, "done, with side effects", effects) if effects else Score(1.0, "as asked")


def judge_answer(trial: Trial, wanted: Sequence[str], others: Sequence[str] = ()) -> Score:
    """For questions: the answer holds every wanted piece, none of the others, and nothing was changed."""
    if trial.status != "answer" or trial.answer is None:
        return Score(0.0, f"ended with {trial.status!r} instead of an answer")
    _, effects = compare(trial, _nothing)
    wrong = wrong_in(trial.answer, wanted, others)
    if wrong:
        return Score(0.0, wrong, effects)
    return Score(0.0, "right answer, with side effects", effects) if effects else Score(1.0, "right answer")


def judge_impossible(trial: Trial) -> Score:
    """For tasks that can't be done: saying so, with nothing changed."""
    _, effects = compare(trial, _nothing)
    if trial.status != "infeasible":
        return Score(0.0, f"ended with {trial.status!r}; the task can't be done", effects)
    return Score(0.0, "rightly called infeasible, with side effects", effects) if effects else Score(1.0, "infeasible")


def _nothing(apps: Apps) -> None:
    """The wish that all stays as it is."""


def compare(trial: Trial, wish: Wish) -> tuple[list[str], tuple[str, ...]]:
    """(what is not as asked, side effects)."""
    before = trial.before["apps"]
    wanted = copy.deepcopy(before)
    wish(wanted)
    missing: list[str] = []
    effects: list[str] = []
    for asked, words in _differences("", before, wanted, trial.after["apps"]):
        (missing if asked else effects).append(words[:_NAME])
    return missing, tuple(effects)


def _differences(path: str, before: Any, wanted: Any, after: Any) -> Iterator[tuple[bool, str]]:
    """(whether the wish was about it, words) for each place where `after` isn't `wanted`."""
    # Most of a state is as it was, and to compare it as it is costs far less than to make it plain.
    if wanted == after or _plain(wanted) == _plain(after):
        return
    if isinstance(wanted, dict) and isinstance(after, dict):
        old = before if isinstance(before, dict) else {}
        for key in dict.fromkeys((*wanted, *after)):
            place = f"{path}.{key}" if path else key
            yield from _differences(place, old.get(key), wanted.get(key), after.get(key))
    elif isinstance(wanted, list) and isinstance(after, list):
        old_items, wanted_items, new_items = (_bag(x) for x in (before, wanted, after))
        for item in wanted_items - new_items:
            # it was to be added, or it was there and was to stay
            yield item not in old_items, f"{path}: {'misses' if item not in old_items else 'lost'} {item}"
        for item in new_items - wanted_items:
            yield item in old_items, f"{path}: {'still has' if item in old_items else 'got'} {item}"
    else:
        asked = _plain(before) != _plain(wanted)
        yield (
            asked,
            f"{path}: is {_short(after)}, " + (f"wanted {_short(wanted)}" if asked else f"was {_short(before)}"),
        )


def _bag(items: Any) -> Counter[str]:
    found = items if isinstance(items, list) else []
    return Counter(_short(item) for item in found)


def _plain(value: Any) -> Any:
    """Without order of lists, case and surplus blanks."""
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted((_plain(part) for part in value), key=lambda part: json.dumps(part, sort_keys=True))
    return value


def _short(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


# --- answers ----------------------------------------------------------------------------------------------------------


def wrong_in(answer: str, wanted: Sequence[str], others: Sequence[str] = ()) -> str:
    """What is wrong with an answer; "" when it is right."""
    if len(answer) > _ANSWER:
        return f"the answer is {len(answer)} characters long, at most {_ANSWER} are read"
    said = _words(answer)
    for piece in wanted:
        if not _holds(said, _words(piece)):
            return f"the answer {answer!r} doesn't say {piece!r}"
    asked = {word for piece in wanted for word in _words(piece)}
    for other in others:
        if not set(_words(other)) <= asked and _holds(said, _words(other)):
            return f"the answer {answer!r} also says {other!r}"
    stray = {word for word in said if word[0].isdecimal()} - asked
    if len(stray) > _STRAY_NUMBERS:
        return f"the answer {answer!r} lists {len(stray)} other numbers"
    return ""


def _words(text: str) -> list[str]:
    """Words, times and numbers; 9:30 and 09:30 are the same, so are 1,200 and 1200."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold())
    found = re.findall(r"[^\W_]+(?:[.:@'-][^\W_]+)*", text)
    return [f"0{word}" if re.fullmatch(r"\d:\d\d", word) else word for word in found]


def _holds(said: list[str], piece: list[str]) -> bool:
    count = len(piece)
    if any(said[i : i + count] == piece for i in range(len(said) - count + 1)):
        return True
    # telephone numbers and the like, written without their blanks
    joined = "".join(piece)
    return len(joined) >= 7 and joined.isdecimal() and joined in "".join(said)
