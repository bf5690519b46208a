"""What changed in a phone's content, as JSON that is small enough for a task's parameters.

A change names a place by its keys. A value there is another one (`is`), is gone (`gone`), or, of a list, lost some
items and got others (`minus`, `plus`): lists are compared without order, as the phone's judges do. `changes` finds
them, `apply` makes them: apply(before, changes(before, after)) is `after` but for the order of lists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

#: characters of a check, and changes in it
_LONGEST: Final = 20_000
_MOST: Final = 50


class Change(BaseModel):
    """Exactly one of `becomes`, `gone`, and `minus` with `plus` is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    at: tuple[str, ...] = Field(min_length=1, max_length=8)
    becomes: Any = Field(None, alias="is")
    gone: bool = False
    minus: tuple[Any, ...] = ()
    plus: tuple[Any, ...] = ()

    @property
    def of_list(self) -> bool:
        return bool(self.minus or self.plus)


_CHANGES: Final = TypeAdapter(Annotated[list[Change], Field(min_length=1, max_length=_MOST)])


def changes(before: Any, after: Any, at: tuple[str, ...] = ()) -> Iterator[Change]:
    """In the order of the keys. Nothing for contents that are equal but for the order of lists."""
    if before == after and _text(before) == _text(after):  # to Python, False is 0
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            if key not in after:
                yield Change(at=(*at, key), gone=True)
            elif key not in before:
                yield Change(at=(*at, key), becomes=after[key])
            else:
                yield from changes(before[key], after[key], (*at, key))
    elif isinstance(before, list) and isinstance(after, list):
        old, new = _bag(before), _bag(after)
        minus, plus = _items(old - new), _items(new - old)
        if minus or plus:
            yield Change(at=at, minus=minus, plus=plus)
    else:
        yield Change(at=at, becomes=after)


def apply(content: Any, made: Iterable[Change]) -> None:
    """Changes `content`. Raises LookupError, which names the place, where there is none such in it."""
    for change in made:
        place, key = _place(content, change), change.at[-1]
        if change.gone:
            place.pop(key)
        elif change.of_list:
            left = Counter(_text(item) for item in place[key])
            if missing := _bag(change.minus) - left:
                raise LookupError(f"{'.'.join(change.at)} has no {next(iter(missing))[:80]}")
            left = left - _bag(change.minus) + _bag(change.plus)
            place[key] = list(_items(left))
        else:
            place[key] = change.becomes


def _place(content: Any, change: Change) -> dict[str, Any]:
    """What holds the last key of a change's place."""
    place = content
    for key in change.at[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    key = change.at[-1]
    if (
        not isinstance(place, dict)
        or (change.gone and key not in place)
        or (change.of_list and not isinstance(place.get(key), list))
    ):
        raise LookupError(f"there is no {'.'.join(change.at)} in this phone's content")
    return place


def written(made: Iterable[Change]) -> str:
    """As one line of JSON."""
    plain = [
        {"at": list(c.at), "gone": True} if c.gone
        else {"at": list(c.at), "minus": list(c.minus), "plus": list(c.plus)} if c.of_list
        else {"at": list(c.at), "is": c.becomes}
        for c in made
    ]  # fmt: skip
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def read(text: str) -> tuple[Change, ...]:
    """Raises ValueError, which says what is wrong."""
    if len(text) > _LONGEST:
        raise ValueError(f"the check has {len(text):,} characters; at most {_LONGEST:,} are read")
    try:
        found = _CHANGES.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"the check: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from error
    for change in found:
        said = change.model_fields_set
        if sum((change.gone, change.of_list, "becomes" in said)) != 1:
            raise ValueError(f"the check: {'.'.join(change.at)} says neither or several of is, gone, and minus or plus")
    return tuple(found)


def canonical(content: Any) -> str:
    """Equal for contents that are equal but for the order of lists."""
    return json.dumps(_sorted(content), sort_keys=True)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(part) for part in value), key=_text)
    return value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _bag(items: Iterable[Any]) -> Counter[str]:
    return Counter(_text(item) for item in items)


def _items(bag: Counter[str]) -> tuple[Any, ...]:
    return tuple(json.loads(text) for text in bag.elements())
