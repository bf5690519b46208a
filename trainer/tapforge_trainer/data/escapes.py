"""Words replaced in a text that may be JSON, XML or an action as a model wrote it, also behind escapes. Pure.

Promises: strings of JSON that hold such words in escapes are written anew, and the text around them stays as it was. A
text that holds them in another way (entities of XML, escapes outside JSON's strings) is replaced as a whole.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Final

#: what replaces words
MARK: Final = "[redacted]"
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_SHORT: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def said(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """The text without what the patterns find."""
    if not patterns:
        return text
    if "\\" in text:
        text = _STRING.sub(lambda found: _string(found[0], patterns), text)
    for pattern in patterns:
        text = pattern.sub(MARK, text)
    plain = _plain(text)
    return MARK if plain != text and _holds(plain, patterns) else text


def _string(literal: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """A string of JSON."""
    if "\\" not in literal:
        return literal
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return literal
    new = value
    for pattern in patterns:
        new = pattern.sub(MARK, new)
    return literal if new == value else json.dumps(new, ensure_ascii=literal.isascii())


def _holds(plain: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    left = plain.replace(MARK, "\ufffc")
    return any(pattern.search(left) for pattern in patterns)


def _plain(text: str) -> str:
    """Without escapes."""
    if "\\" in text:
        text = _ESCAPE.sub(_character, text)
        # Halves of a character beyond U+FFFF are one.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.unescape(text) if "&" in text else text


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _SHORT.get(found[3], found[3])
