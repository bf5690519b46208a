"""Chat messages -> token ids, by the model's own chat template.

Rules, in order:
1. Text can't become structure. The template is rendered with words that nobody can guess in place of the texts; only
   what the template itself wrote is looked through for special tokens, and the texts are put in as ordinary text.
2. The ids are those of the whole rendered text: text between two special tokens is encoded as one piece, so words and
   structure meet as they do where transformers renders and encodes (tests compare).
3. The template is Jinja in a sandbox that writes nothing, with the filters that Hugging Face gives it. A folder without
   one gets ChatML, the format of all its family.

What the template makes of a conversation depends on its shape alone (roles, and where texts and images stand), and is
remembered for it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

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


@dataclass(frozen=True, slots=True)
class Markup:
    """Text in which the family's harmless special tokens count (`Dialect.markup`)."""

    text: str


#: the place of an image
IMAGE: Final = None
Part = str | Markup | None


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
                    raise ValueError(f"{path} is no JSON object: {error}") from error
                if isinstance(found, list):  # several by name
                    found = next((one.get("template") for one in found if one.get("name") == "default"), None)
                if not isinstance(found, str):
                    continue
                text = found
            return ChatTemplate(text, str(path))
        return ChatTemplate(_CHATML, "ChatML, as the folder has no chat template")


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
        self._word = secrets.token_hex(16)
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
        texts = [part for message in messages for part in message.parts if part is not None]
        shape = tuple((m.role, tuple(part is not None for part in m.parts)) for m in messages)
        ids: list[int] = []
        plain: list[str] = []
        for piece in self._rendered(shape, answering):
            if isinstance(piece, _Slot):
                part = texts[piece.index]
                found = [part] if isinstance(part, str) else self._tokens.split(part.text, self._markup)
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

    def _render_shape(
        self, shape: tuple[tuple[str, tuple[bool, ...]], ...], answering: bool
    ) -> tuple[_Slot | str | int, ...]:
        """What the template makes of any conversation of this shape. `shape`: role, and of each part whether it is a
        text."""
        words: list[str] = []
        messages = []
        for role, parts in shape:
            given: list[Part] = []
            for is_text in parts:
                if is_text:
                    words.append(f"{self._word}{len(words):06d}")
                given.append(words[-1] if is_text else IMAGE)
            messages.append(Message(role, tuple(given)))
        rendered = self._render(messages, answering=answering)
        pieces: list[_Slot | str | int] = []
        places = {word: _Slot(index) for index, word in enumerate(words)}
        images = 0
        for piece in re.split(f"({self._word}[0-9]{{6}})", rendered):
            if piece in places:
                pieces.append(places.pop(piece))
            elif self._word in piece:
                raise ValueError(f"{self.template.origin} writes a message twice, or changes it")
            else:
                cut = self._tokens.split(piece)
                images += cut.count(self._tokens.image_pad)
                pieces.extend(cut)
        wanted = sum(not is_text for _, parts in shape for is_text in parts)
        if places or images != wanted:
            lost = f"{len(places)} of {len(words)} texts" if places else f"{images} of {wanted} images"
            raise ValueError(f"{self.template.origin} loses parts of a conversation: {lost}")
        return tuple(pieces)

    def _render(self, messages: Sequence[Message], *, answering: bool) -> str:
        import jinja2

        content = [{"role": m.role, "content": [_content(part) for part in m.parts]} for m in messages]
        try:
            rendered = self._compiled.render(
                messages=content, tools=self._tools, add_generation_prompt=answering and not self._opening
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.template.origin} can't be rendered: {error}") from error
        return str(rendered) + (self._opening if answering else "")


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a text, by its number among all texts."""

    index: int


def _content(part: Part) -> dict[str, str]:
    if part is None:
        return {"type": "image"}
    return {"type": "text", "text": part if isinstance(part, str) else part.text}


def as_json(value: object, indent: int | None = None) -> str:
    """`tojson` as Hugging Face has it: keys in their order, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compile(template: ChatTemplate) -> Any:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template.text)
    except jinja2.TemplateError as error:
        raise ValueError(f"{template.origin} is no chat template: {error}") from error
