"""Chat templates: where they are found, what they may do, and what is refused before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
from drawn import draw_frame

from tapforge_envs.protocol import Observation
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.chat import IMAGE, Chat, ChatTemplate, Markup, Message
from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.records import Prompt

OPTIONS = {"prompt": "full", "history_images": 2, "history_steps": 8, "context_tokens": 8192, "response_tokens": 64}
TURN = "{{ '<|im_start|>' + m.role + '\\n' }}"
PARTS = "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
PARTS += "{{ p.text }}{% endif %}{% endfor %}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{{% for m in messages %}}{TURN}{PARTS}{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}{OPEN}"


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(model_folder, tmp_path / "model")
    return tmp_path / "model"


def first_prompt(folder: Path, name: str = "qwen3-vl") -> str:
    agent = make_agent(name, folder, **OPTIONS)
    seen, _ = agent.prepare(Observation(draw_frame()))
    prompt = agent.prompt("Go", [], seen)
    assert isinstance(prompt, Prompt)
    return agent.decode(prompt.ids)


def marked(mark: str) -> str:
    return PLAIN.replace("'<|im_end|>\\n'", f"'{mark}<|im_end|>\\n'")


def test_templates_are_found_where_folders_have_them(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": marked("first")}))
    assert "first<|im_end|>" in first_prompt(folder)
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": marked("second")}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert "second<|im_end|>" in first_prompt(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": marked("third")}))
    assert "third<|im_end|>" in first_prompt(folder)
    (folder / "chat_template.jinja").write_text(marked("fourth"))
    assert "fourth<|im_end|>" in first_prompt(folder)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% for %}", "is not a chat template"),
        ("{{ raise_exception('no tools here') }}", "can't be rendered: no tools here"),
        ("{{ messages.nothing.more }}", "can't be rendered"),
        ("{{ ''.__class__.__mro__ }}", "can't be rendered"),
        ("{{ messages.append(1) }}", "can't be rendered"),
        ("hello", "loses parts of a conversation"),
        (PLAIN.replace("p.text", "p.text | upper"), "loses parts|changes it"),
        (PLAIN.replace("p.text }}", "p.text }}{{ p.text }}"), "writes a message twice"),
        (PLAIN.replace("{{ p.text }}", "{{ p.text[:5] }}"), "loses parts"),
        (PLAIN.replace("<|image_pad|>", ""), "loses parts of a conversation: 0 of 1 images"),
    ],
)
def test_a_template_that_can_not_work_is_refused_before_anything_starts(folder: Path, template: str, part: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=part):
        make_agent("qwen3-vl", folder, **OPTIONS)


def test_a_template_that_wants_turns_to_alternate_is_refused_for_adapters_that_do_not(folder: Path) -> None:
    check = "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    check += "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(check + PLAIN)
    assert "Task: Go" in first_prompt(folder)
    with pytest.raises(ValueError, match="chat_template.jinja can't be rendered: roles must alternate"):
        make_agent("mai-ui", folder, **OPTIONS)


def test_a_broken_json_file_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not a JSON object"):
        make_agent("qwen3-vl", folder, **OPTIONS)


def test_pieces_are_encoded_as_one_text_between_special_tokens(tokens: Tokens) -> None:
    chat = Chat(tokens, ChatTemplate(PLAIN, "here"))
    whole = chat.ids([Message("user", ("a b", " c", IMAGE, "d\n", "\ne"))])
    text = "<|im_start|>user\na b c<|vision_start|><|image_pad|><|vision_end|>d\n\ne<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.show(whole) == text
    expected = [id for one in tokens.split(text) for id in ([one] if isinstance(one, int) else tokens.encode(one))]
    assert list(whole) == expected


def test_only_marks_of_the_family_count_and_only_in_markup(tokens: Tokens) -> None:
    chat = Chat(tokens, ChatTemplate(PLAIN, "here"), markup=("<|vision_pad|>",))
    pad = tokens.special["<|vision_pad|>"]
    spelled = "<|vision_pad|><|im_end|>"
    assert chat.ids([Message("user", (spelled,))]).count(pad) == 0
    marked = chat.ids([Message("user", (Markup(spelled),))])
    assert marked.count(pad) == 1 and marked.count(tokens.im_end) == 1
