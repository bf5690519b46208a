"""What other packages add to prompts: a plug-in from a distribution that is made here."""

from collections.abc import Callable
from pathlib import Path

import pytest
from drawn import draw_frame

from tapforge_envs.protocol import Back, Observation
from tapforge_trainer.agents import ContextLimit, Turn, make_agent
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.agents.context import ContextError, context_names
from tapforge_trainer.records import Prompt

SHOT = "<|vision_start|><|image_pad|><|vision_end|>"
PLUGIN = """
from pathlib import Path

from tapforge_envs.protocol import Frame
from tapforge_trainer.agents import Added

PICTURE = Path(__file__).with_name("picture.png").read_bytes()


def hints(goal, history, seen):
    return Added(text=f"Hint for {goal}: {len(history)} done, {seen.app} in front. <|im_end|>\\n")


def pictures(goal, history, seen):
    return Added(images=[Frame.of(PICTURE, 96, 160)])


def first_and_last(goal, history, seen):
    return Added(history=[*history[:1], *history[-1:]] if len(history) > 2 else None)


def screens_again(goal, history, seen):
    return Added(images=[turn.seen.frame for turn in history[:1]])


def broken_picture(goal, history, seen):
    return Added(images=[Frame.of(b"no picture", 96, 160)])


def failing(goal, history, seen):
    raise KeyError("memory")


def wrong(goal, history, seen):
    return "text"


def long(goal, history, seen):
    return Added(text="word " * 100_000)


not_a_function = 5
"""
NAMES = ("hints", "pictures", "first_and_last", "screens_again", "broken_picture", "failing", "wrong", "long")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someones_contexts.py").write_text(PLUGIN)
    (tmp_path / "picture.png").write_bytes(draw_frame(96, 160, seed=99).data)
    info = tmp_path / "someones_contexts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-contexts\nVersion: 1.0\n")
    points = "".join(f"{name} = someones_contexts:{name}\n" for name in (*NAMES, "not_a_function"))
    points += "lost = someones_lost:hints\n"
    (info / "entry_points.txt").write_text(f"[tapforge.contexts]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))


Made = Callable[..., ChatAgent]


@pytest.fixture
def made(plugin: None, model_folder: Path) -> Made:
    def build(context: str, **changes) -> ChatAgent:
        options = {"history_images": 2, "history_steps": 8, "context_tokens": 8192, "response_tokens": 64}
        agent = make_agent("qwen3-vl", model_folder, **{"prompt": "full", **options, **changes, "context": context})
        assert isinstance(agent, ChatAgent)
        return agent

    return build


def asked(agent: ChatAgent, steps: int) -> tuple[str, Prompt]:
    seen = [agent.prepare(Observation(draw_frame(96, 160, seed=n), app="Clock"))[0] for n in range(steps + 1)]
    history = [Turn(one, f"answer {n}", Back()) for n, one in enumerate(seen[:-1])]
    prompt = agent.prompt("Go", history, seen[-1])
    assert isinstance(prompt, Prompt)
    assert len(agent.expand(prompt)) == prompt.expanded_length
    assert prompt.frames[-1] == seen[-1].frame
    return agent.decode(prompt.ids).split("<|im_end|>\n<|im_start|>user\n", 1)[-1], prompt


def test_text_stands_after_the_task_and_is_text(made: Made) -> None:
    text, _ = asked(made("hints"), 1)
    assert text.startswith(f"Task: Go\nHint for Go: 1 done, Clock in front. <|im_end|>\n{SHOT}<|im_end|>\n")
    other, _ = asked(made("hints"), 1)
    assert text == other
    compact, _ = asked(made("hints", prompt="compact"), 1)
    assert "Go\n backHint for Go" in compact


def test_an_image_comes_first_and_counts_among_the_images(made: Made) -> None:
    text, prompt = asked(made("pictures", history_images=3), 4)
    assert text.startswith(f"{SHOT}Task: Go\n")
    assert len(prompt.frames) == 3
    picture = made("hints").prepare(Observation(draw_frame(96, 160, seed=99)))[0].frame
    assert prompt.frames[0] == picture
    assert picture not in prompt.frames[1:]
    _, compact = asked(made("pictures", prompt="compact", history_images=3), 4)
    assert compact.frames == prompt.frames


def test_an_earlier_screen_can_be_shown_again(made: Made) -> None:
    agent = made("screens_again")
    _, prompt = asked(agent, 3)
    assert prompt.frames[0] == agent.prepare(Observation(draw_frame(96, 160, seed=0)))[0].frame
    assert len(prompt.frames) == 2


def test_the_history_can_be_another_one(made: Made) -> None:
    text, _ = asked(made("first_and_last", history_images=1), 5)
    assert "Step 1: answer 0\nStep 2: answer 4\n" in text and "answer 2" not in text


def test_what_a_context_adds_is_never_dropped(made: Made) -> None:
    agent = made("long")
    seen, _ = agent.prepare(Observation(draw_frame()))
    assert isinstance(agent.prompt("Go", [], seen), ContextLimit)


@pytest.mark.parametrize(
    ("context", "part"),
    [
        ("failing", "the context 'failing' failed: KeyError: 'memory'"),
        ("wrong", "the context 'wrong' gave a str instead of an Added"),
        ("broken_picture", "the context 'broken_picture' adds an image that is none"),
    ],
)
def test_a_context_that_fails_is_named(made: Made, context: str, part: str) -> None:
    agent = made(context)
    seen, _ = agent.prepare(Observation(draw_frame()))
    with pytest.raises(ContextError, match=part):
        agent.prompt("Go", [], seen)


def test_more_images_than_have_room_are_refused(made: Made) -> None:
    agent = made("pictures", history_images=1)
    seen, _ = agent.prepare(Observation(draw_frame()))
    with pytest.raises(ContextError, match="adds 1 images where 0 have room .* raise model.adapter.historyImages"):
        agent.prompt("Go", [], seen)


@pytest.mark.parametrize(
    ("context", "part"),
    [
        ("hintz", "unknown context 'hintz'; did you mean 'hints'"),
        ("not_a_function", "is not a function"),
        ("lost", "can't be loaded: No module named 'someones_lost'"),
    ],
)
def test_a_context_that_is_not_there_is_refused_before_anything_starts(made: Made, context: str, part: str) -> None:
    assert "hints" in context_names()
    with pytest.raises(ContextError, match=part):
        made(context)
