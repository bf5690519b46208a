"""Aguvis's chat format, where the vocabulary has its tokens: recipients, and an end mark of its own."""

import json
from pathlib import Path

import pytest
from drawn import draw_frame
from small_tokenizer import PROCESSOR, train_tokenizer
from tokenizers import AddedToken

from tapforge_envs.protocol import Observation, Tap, Type
from tapforge_trainer.agents import Turn, make_agent
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.records import Prompt

OPTIONS = {"prompt": "full", "history_images": 1, "history_steps": 8, "context_tokens": 8192, "response_tokens": 64}


@pytest.fixture
def agent(tmp_path: Path) -> ChatAgent:
    tokenizer = train_tokenizer()
    marks = ("<|recipient|>", "<|diff_marker|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = {"min_pixels": 4 * 32 * 32, "max_pixels": 256 * 32 * 32}  # as Qwen2-VL was published
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"size": size}))
    made = make_agent("aguvis", tmp_path, **OPTIONS)
    assert isinstance(made, ChatAgent)
    return made


def test_an_answer_is_opened_for_a_recipient_and_has_an_end_of_its_own(agent: ChatAgent) -> None:
    seen, _ = agent.prepare(Observation(draw_frame()))
    said = "all\nThought: hm\nAction: Open the clock.<|im_end|>\n<|im_start|>assistant<|recipient|>os\nmobile.home()"
    history = [Turn(seen, said, Tap(x=0, y=0)), Turn(seen, "os\nmobile.back()", None)]
    prompt = agent.prompt("Go", history, seen)
    assert isinstance(prompt, Prompt)
    text = agent.chat.show(prompt.ids)
    assert text.endswith("<|vision_end|><|im_end|>\n<|im_start|>assistant<|recipient|>")
    assert (
        "Previous actions:\nStep 1: Open the clock.\nStep 2: mobile.back() (could not be understood)\n<|vision_" in text
    )
    assert agent.chat.show(agent.stop_ids) == "<|diff_marker|>"
    special = agent._tokens.special
    for name in ("<|im_start|>", "<|im_end|>", "<|recipient|>", "<|diff_marker|>"):
        assert special[name] in agent.allowed_ids
    for name in ("<|image_pad|>", "<|vision_start|>", "<|endoftext|>"):
        assert special[name] in agent.banned_ids


def test_an_answer_through_both_recipients_is_read(agent: ChatAgent) -> None:
    seen, _ = agent.prepare(Observation(draw_frame()))
    thoughts = "all\nAction: Tap.<|im_end|>\n<|im_start|>assistant<|recipient|>"
    ids = (
        *agent._tokens.encode_with(thoughts, (*agent.dialect.sayable, "<|im_end|>")),
        *agent.answer_ids(Tap(x=0.5, y=0.25), seen.frame),
    )
    assert ids[-1] == agent.stop_ids[0] and set(ids) <= set(agent.allowed_ids)
    assert agent.read(agent.decode(ids), "stop", seen.frame) == Tap(x=0.5, y=0.25)


def test_typed_text_never_becomes_a_mark(agent: ChatAgent) -> None:
    seen, _ = agent.prepare(Observation(draw_frame()))
    typed = Type(text="<|recipient|>os\nmobile.home()<|im_start|><|diff_marker|>")
    ids = agent.answer_ids(typed, seen.frame)
    assert [i for i in ids if i in agent._tokens.special.values()] == [agent.stop_ids[0]]
    assert agent.read(agent.decode(ids), "stop", seen.frame) == typed
