"""Chat messages -> token ids, by the model's own chat template.

Rules, in order:
1. Text can't become structure. The template is rendered with unguessable words in place of the texts; only
   what the template itself wrote is looked through for special tokens, and the texts are put in as ordinary text.
2. The ids are those of the whole rendered text: text between two special tokens is encoded as one piece, so words and
   structure meet as they do where transformers renders and encodes (tests compare).
3. The template has the language and the variables that transformers gives it (`template_language.py`,
   `named_tokens.py`). One that changes texts is refused, but for blanks or line ends that it strips: these are stripped
   here, too. A folder without a template gets ChatML, the format of all its family.

What the template makes of a conversation depends on its shape alone (roles, and where texts, blank ones and images
stand), and is remembered for it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from .template_language import compiled
from .tokens import Tokens

#: in the order in which Hugging Face looks
_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_CHATML: Final = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
#: where text may be cut without another encoding: after a line's end that a letter follows
_LINES: Final = re.compile(r"(?<=\n)(?=[A-Za-z])")
#: line ends before and after a word that stands for a text: what is left of them shows how the template strips texts.
#: The numbers tell one word's from the next one's, and from the few that a template writes itself
_BEFORE, _AFTER = 101, 211
_LEFT, _RIGHT = "\n" * _BEFORE + " \x1f", "\x1f " + "\n" * _AFTER
#: a text that was written as JSON
_ESCAPED: Final = r"\n" * 7
_REMEDY: Final = (
    "a model folder for training needs a chat template that writes every text once and as it is, and <|image_pad|> for "
    "every image: put the one of the model card into chat_template.jinja"
)


@dataclass(frozen=True, slots=True)
class Markup:
    """Text in which the family's harmless special tokens count (`Dialect.markup`)."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A text by the ids that a model has sampled for it, which are not encoded again. Templates add the end mark."""

    text: str
    ids: Sequence[int]


#: the place of an image
IMAGE: Final = None
Part = str | Markup | Said | None
#: of a conversation's shape: an image, a text (True), or a blank one as it is, for which templates may do something
#: else
Kind = Literal[True] | str | None


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's text, and the file that it came from."""

    text: str
    origin: str

    @staticmethod
    def of_folder(folder: Path) -> ChatTemplate:
        """Raises ValueError for a file that can't be read."""
        for name in _FILES:
            path = folder / name
            if not path.is_file():
                continue
            text = path.read_text(encoding="utf-8")
            if name.endswith(".json"):
                try:
                    found = json.loads(text).get("chat_template")
                except (ValueError, AttributeError) as error:
                    raise ValueError(f"{path} is not a JSON object: {error}") from error
                if isinstance(found, list):  # several by name
                    found = next((one.get("template") for one in found if one.get("name") == "default"), None)
                if not isinstance(found, str):
                    continue
                text = found
            return ChatTemplate(text, str(path))
        return ChatTemplate(_CHATML, "ChatML, as the folder has no chat template")


#: of a conversation that is rendered elsewhere: what its texts say is all there is to say
CHATML: Final = ChatTemplate(_CHATML, "ChatML")


class Chat:
    """Conversations of one model. `tools`: schemas for the template; `writes_tools` says whether it shows them."""

    def __init__(
        self,
        tokens: Tokens,
        template: ChatTemplate,
        *,
        tool: dict | None = None,
        markup: Sequence[str] = (),
        opening: str = "",
    ):
        self.template = template
        self._tokens, self._markup, self._opening = tokens, tuple(markup), opening
        # With letters of both cases and a sign of HTML, which a template that changes texts changes.
        self._word = f"{secrets.token_hex(16)}Zz&"
        self._slots = re.compile(f"(\n{{{_BEFORE}}} \x1f| \x1f)?{self._word}([0-9]{{6}})(\x1f \n{{{_AFTER}}}|\x1f )?")
        self._compiled = _compile(template)
        self._tools: list[dict] | None = None if tool is None else [tool]
        self._rendered = lru_cache(maxsize=1024)(self._render_shape)
        self.writes_tools = tool is not None and tool["function"]["name"] in self._render(
            [Message("user", ("probe",))], answering=False
        )
        if not self.writes_tools:
            self._tools = None
            self._rendered.cache_clear()
        tail = self.text([Message("user", ("probe",))]).rpartition("<|im_start|>")[2]
        #: reasoning that the template itself opens: answers begin inside it
        self.opened = "<think>" if "<think>" in tail and "</think>" not in tail else ""

    def ids(self, messages: Sequence[Message], *, answering: bool = True) -> tuple[int, ...]:
        """One placeholder per image. `answering`: the model's turn is next."""
        shape = tuple((m.role, tuple(map(_kind, m.parts))) for m in messages)
        texts = [part for m in messages for part in m.parts if part is not None and _kind(part) is True]
        ids: list[int] = []
        plain: list[str] = []
        for piece in self._rendered(shape, answering):
            if isinstance(piece, _Slot):
                part = texts[piece.index]
                found: list[str | int]
                if isinstance(part, Said):  # with the blanks at its ends, whatever the template strips
                    found = list(part.ids)
                else:
                    said = piece.stripped(_text(part))
                    found = [said] if isinstance(part, str) else self._tokens.split(said, self._markup)
            else:
                found = [piece]
            for one in found:
                if isinstance(one, str):
                    plain.append(one)
                else:
                    self._flush(plain, ids)
                    ids.append(one)
        self._flush(plain, ids)
        return tuple(ids)

    def text(self, messages: Sequence[Message], *, answering: bool = True) -> str:
        """As people compare it with a model card."""
        return self.show(self.ids(messages, answering=answering))

    def show(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens by their names."""
        return self._tokens.show(ids)

    def _flush(self, plain: list[str], ids: list[int]) -> None:
        if plain:
            for line in _LINES.split("".join(plain)):
                ids.extend(self._tokens.encode(line))
            plain.clear()

    def _render_shape(self, shape: tuple[tuple[str, tuple[Kind, ...]], ...], answering: bool) -> tuple[_Piece, ...]:
        """What the template makes of any conversation of this shape. `shape`: role, and of each part what it is."""
        count = 0
        messages = []
        for role, kinds in shape:
            given: list[Part] = []
            for kind in kinds:
                given.append(f"{_LEFT}{self._word}{count:06d}{_RIGHT}" if kind is True else kind)
                count += kind is True
            messages.append(Message(role, tuple(given)))
        rendered = self._render(messages, answering=answering)
        pieces: list[_Piece] = []
        left = set(range(count))
        images = end = 0

        def written(text: str) -> None:
            nonlocal images
            if self._word in text or "\x1f" in text or _ESCAPED in text:  # twice, in part, or written as JSON
                raise ValueError(f"{self.template.origin} writes a message twice, or changes it; {_REMEDY}")
            cut = self._tokens.split(text)
            images += cut.count(self._tokens.image_pad)
            pieces.extend(cut)

        for found in self._slots.finditer(rendered):
            written(rendered[end : found.start()])
            index, end = int(found[2]), found.end()
            if index not in left:
                raise ValueError(f"{self.template.origin} writes a message twice, or changes it; {_REMEDY}")
            left.remove(index)
            pieces.append(
                _Slot(index, _STRIPS[(found[1] or "").strip("\x1f")], _STRIPS[(found[3] or "").strip("\x1f")])
            )
        written(rendered[end:])
        wanted = sum(kind is IMAGE for _, kinds in shape for kind in kinds)
        if left or images != wanted:
            lost = f"{len(left)} of {count} texts" if left else f"{images} of {wanted} images"
            raise ValueError(f"{self.template.origin} loses parts of a conversation: {lost}; {_REMEDY}")
        return tuple(pieces)

    def _render(self, messages: Sequence[Message], *, answering: bool) -> str:
        import jinja2

        content = [{"role": m.role, "content": [_content(part) for part in m.parts]} for m in messages]
        try:
            rendered = self._compiled.render(
                messages=content,
                tools=self._tools,
                documents=None,
                add_generation_prompt=answering and not self._opening,
                **self._tokens.named,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.template.origin} can't be rendered: {error}; {_REMEDY}") from error
        return str(rendered) + (self._opening if answering else "")


#: what is left of the blanks beside a word -> what the template strips of a text: nothing, line ends, all blanks
_STRIPS: Final[dict[str, str | None]] = {"\n" * _BEFORE + " ": "", " " + "\n" * _AFTER: "", " ": "\n", "": None}


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a text, by its number among those that are not blank; and the characters that the template strips
    of its ends, None: all blanks."""

    index: int
    left: str | None
    right: str | None

    def stripped(self, text: str) -> str:
        return text.lstrip(self.left).rstrip(self.right)


_Piece = _Slot | str | int


def _text(part: str | Markup | Said) -> str:
    return part if isinstance(part, str) else part.text


def _kind(part: Part) -> Kind:
    if part is None:
        return IMAGE
    if isinstance(part, Said):
        return True
    text = _text(part)
    # \x1f counts as a blank to Python and to no template.
    return True if text.strip() or "\x1f" in text else text


def _content(part: Part) -> dict[str, str]:
    return {"type": "image"} if part is None else {"type": "text", "text": _text(part)}


def _compile(template: ChatTemplate) -> Any:
    import jinja2

    try:
        return compiled(template.text)
    except jinja2.TemplateError as error:
        raise ValueError(f"{template.origin} is not a chat template: {error}; {_REMEDY}") from error
