"""Text for pictures: in two sizes, broken into lines that fit.

Characters that the font lacks are counted, so that the caller can name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

#: characters of an answer that are looked at: the panel has room for fewer
_CHARACTERS = 1500
#: no font has this one: what it draws is what a font draws for a character that it lacks
_NO_CHARACTER = "\U0010ffff"


class FontUnreadable(ValueError):
    """A file that is not a font."""


@dataclass(frozen=True, slots=True)
class Typeface:
    """A font in one size."""

    font: ImageFont.FreeTypeFont
    #: from one line to the next
    line: int


class TextWriter:
    """Text in the two sizes of a picture; remembers the characters that the font lacks."""

    def __init__(self, font: Path | None):
        self.large, self.small = Typeface(_font(font, 17), 24), Typeface(_font(font, 14), 19)
        self._none = bytes(self.small.font.getmask(_NO_CHARACTER))
        self._known: dict[str, bool] = {}
        self.lacks: set[str] = set()

    def lines(self, text: str, kind: Typeface, width: int, most: int) -> list[str]:
        """Broken at blanks, and inside what is longer than a line; "…" at the end: text is left out."""
        text = text.strip().expandtabs(2)
        found = [line for whole in text[:_CHARACTERS].splitlines() for line in _broken(whole, kind.font, width)]
        if len(found) > most or len(text) > _CHARACTERS:
            found = found[:most]
            if found:
                while found[-1] and kind.font.getlength(f"{found[-1]} …") > width:
                    found[-1] = found[-1][:-1]
                found[-1] += " …"
        self.lacks |= {one for line in found for one in line if not self._has(one)}
        return found

    def _has(self, character: str) -> bool:
        if character not in self._known:
            # Of some fonts what is drawn for a character that they lack is empty, as a blank is.
            blank = character.isspace() and not any(self._none)
            self._known[character] = blank or bytes(self.small.font.getmask(character)) != self._none
        return self._known[character]


def _broken(text: str, font: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    begun = ""
    for word in text.split(" "):
        joined = f"{begun} {word}" if begun else word
        if font.getlength(joined) <= width:
            begun = joined
            continue
        if begun:
            yield begun
        begun = ""
        for character in word:
            if begun and font.getlength(begun + character) > width:
                yield begun
                begun = ""
            begun += character
    yield begun


def _font(path: Path | None, size: int) -> ImageFont.FreeTypeFont:
    if path is not None:
        try:
            return ImageFont.truetype(path, size)
        except OSError as error:
            raise FontUnreadable(f"{path} can't be read as a font: {error}; give a .ttf, .otf or .ttc file") from error
    # Matplotlib brings DejaVu Sans, and is not imported for it; Pillow looks for the name among the system's fonts.
    beside = find_spec("matplotlib")
    folders = (beside.submodule_search_locations or ()) if beside else ()
    for found in (*(f"{folder}/mpl-data/fonts/ttf/DejaVuSans.ttf" for folder in folders), "DejaVuSans.ttf"):
        try:
            return ImageFont.truetype(found, size)
        except OSError:
            continue
    usual = ImageFont.load_default(size)
    assert isinstance(usual, ImageFont.FreeTypeFont)  # with a size it is
    return usual
