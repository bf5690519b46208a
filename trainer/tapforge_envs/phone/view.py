"""How an app describes a page: a title, items from top to bottom, and what a tap on each does.

A view is built anew from the state whenever it is needed, for drawing and for every gesture, so what is seen and what
is done can't drift apart. `do` closures change the state; building a view never does.

What an app remembers only while it is open (scroll, focus, text that was typed, an open question) lives in the *frame*
of its page, `state["ui"]["frames"][-1]`; it is gone when the page is left. Content lives in `state["apps"][name]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .screen import Color, Kind

State = dict[str, Any]
Do = Callable[[], None]

#: relative height of a list row; ten fit between the app bar and the navigation bar
ROW = 0.084
#: characters of running text in a line, and the relative height of one
LINE_CHARS = 36
LINE = 0.031


@dataclass(slots=True)
class Item:
    """One thing on a page."""

    id: str
    kind: Kind = "item"
    text: str = ""
    detail: str = ""
    trail: str = ""
    glyph: str | None = None
    badge: str = ""
    on: bool | None = None
    color: Color = (90, 90, 90)
    height: float = ROW
    do: Do | None = None
    hold: Do | None = None
    #: items side by side instead of one, with equal widths
    parts: tuple[Item, ...] = ()
    #: relative shares of the parts' widths; equal without
    shares: tuple[float, ...] = ()


@dataclass(slots=True)
class Dialog:
    title: str
    text: str
    #: (id, text, on, do); a tap on any closes the dialog first
    choices: tuple[tuple[str, str, Do | None], ...]
    chosen: str = ""


def blank_frame() -> State:
    return {"scroll": None, "focus": None, "fields": {}, "ask": None}


def frame_of(state: State) -> State:
    """The memory of the page in front."""
    frame: State = state["ui"]["frames"][-1]
    return frame


def go(state: State, page: str) -> None:
    """One page deeper."""
    nav = state["nav"]
    nav["stack"].append(nav["page"])
    nav["page"] = page
    state["ui"]["frames"].append(blank_frame())


def up(state: State) -> None:
    """Back to the page before; on an app's first page nothing happens."""
    nav = state["nav"]
    if nav["stack"]:
        nav["page"] = nav["stack"].pop()
        state["ui"]["frames"].pop()


def toast(state: State, text: str) -> None:
    """A few words that are gone with the next action."""
    state["ui"]["toast"] = text


@dataclass
class View:
    state: State
    title: str
    color: Color
    items: list[Item] = field(default_factory=list)
    actions: list[Item] = field(default_factory=list)
    footer: list[Item] = field(default_factory=list)
    fab: Item | None = None
    dialog: Dialog | None = None
    #: what Enter does in a field, by the field's name
    enter: dict[str, Do] = field(default_factory=dict)
    #: fields that take several lines
    long_fields: set[str] = field(default_factory=set)
    starts: dict[str, str] = field(default_factory=dict)
    #: horizontal scrolling: "right" shows what lies to the right
    swiped: Callable[[str], bool] | None = None
    #: how often an id was given
    names: dict[str, int] = field(default_factory=dict)
    #: shows its end first, as a chat does
    from_end: bool = False

    # --- building ---

    def _own(self, id: str) -> str:
        """Two rows that read the same are still two: the second is called `id#2`."""
        count = self.names[id] = self.names.get(id, 0) + 1
        return id if count == 1 else f"{id}#{count}"

    def row(self, id: str, text: str, detail: str = "", **rest: Any) -> None:
        """A list row; `do` for a tap, `hold` for a long press."""
        self.items.append(Item(self._own(id), "item", text, detail, color=rest.pop("color", self.color), **rest))

    def switch(self, id: str, text: str, on: bool, do: Do, detail: str = "", **rest: Any) -> None:
        self.row(id, text, detail, on=on, do=do, **rest)

    def heading(self, text: str) -> None:
        self.items.append(Item(f"heading:{text}", "heading", text, color=self.color, height=0.045))

    def prose(self, id: str, text: str, **rest: Any) -> None:
        """Running text, broken into lines; a long one becomes several items so that it can be scrolled."""
        lines = wrapped(text)
        for start in range(0, len(lines), 6):
            part = lines[start : start + 6]
            name = id if start == 0 else f"{id}:{start}"
            self.items.append(
                Item(name, "prose", "\n".join(part), color=self.color, height=LINE * len(part) + 0.018, **rest)
            )

    def button(self, id: str, text: str, do: Do, color: Color | None = None) -> None:
        self.items.append(Item(id, "action", text, color=color or self.color, height=0.078, do=do))

    def tool(self, id: str, glyph: str, do: Do) -> None:
        """An icon in the app bar."""
        self.actions.append(Item(id, "glyph", glyph=glyph, color=self.color, do=do))

    def floating(self, id: str, glyph: str, do: Do) -> None:
        """The round button over the list."""
        self.fab = Item(id, "fab", glyph=glyph, color=self.color, do=do)

    def line(self, id: str, parts: Sequence[Item], height: float = 0.07, shares: Sequence[float] = ()) -> None:
        """Items side by side."""
        for part in parts:
            part.id = self._own(part.id)
        self.items.append(Item(id, height=height, parts=tuple(parts), shares=tuple(shares)))

    def input(
        self, name: str, label: str, start: str = "", enter: Do | None = None, lines: int = 1, footer: bool = False
    ) -> Item:
        """A text field; `value(name)` is what it holds."""
        self.starts[name] = start
        if enter is not None:
            self.enter[name] = enter
        if lines > 1:
            self.long_fields.add(name)
        frame = frame_of(self.state)

        def focus() -> None:
            frame["focus"] = name

        item = Item(
            f"field:{name}",
            "input",
            self.value(name),
            label,
            on=frame["focus"] == name,
            color=self.color,
            height=0.078 + LINE * (lines - 1),
            do=focus,
        )
        if not footer:
            self.items.append(item)
        return item

    def value(self, name: str) -> str:
        value: str = frame_of(self.state)["fields"].get(name, self.starts.get(name, ""))
        return value

    def clear(self, name: str) -> None:
        frame_of(self.state)["fields"][name] = ""

    # --- questions ---

    def ask(self, name: str) -> Do:
        """A tap that opens the dialog of this name."""
        frame = frame_of(self.state)

        def do() -> None:
            frame["ask"] = name
            frame["focus"] = None

        return do

    def asked(self, name: str) -> bool:
        return bool(frame_of(self.state)["ask"] == name)

    def confirm(self, name: str, title: str, text: str, yes: str, do: Do) -> None:
        """The dialog that `ask(name)` opens: yes or Cancel."""
        if self.asked(name):
            self.dialog = Dialog(title, text, (("cancel", "Cancel", None), ("yes", yes, do)))

    def choose(
        self, name: str, title: str, options: Sequence[str], do: Callable[[str], None], chosen: str = ""
    ) -> None:
        """The dialog that `ask(name)` opens: one of up to eight options."""
        if self.asked(name):
            choices = tuple((option, option, _bound(do, option)) for option in options)
            self.dialog = Dialog(title, "", choices, chosen or "-")

    # --- moving ---

    def to(self, page: str) -> Do:
        """A tap that goes one page deeper."""
        return lambda: go(self.state, page)

    def open(self, app: str) -> Do:
        """A tap that brings another app to the front."""

        def do() -> None:
            self.state["nav"]["open"] = app

        return do


def _bound(do: Callable[[str], None], option: str) -> Do:
    return lambda: do(option)


def wrapped(text: str, chars: int = LINE_CHARS) -> list[str]:
    """Lines of at most `chars` characters; single words that are longer are cut."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            while len(word) > chars:
                if line:
                    lines.append(line)
                    line = ""
                lines.append(word[:chars])
                word = word[chars:]
            if line and len(line) + 1 + len(word) > chars:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines
