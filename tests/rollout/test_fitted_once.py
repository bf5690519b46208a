"""An episode on screens larger than the model takes: each is decoded and fitted once, off the event loop."""

import asyncio
import io
import random
import threading

import pytest
from PIL import Image
from scripted import TASKS

from tapforge_envs.protocol import Back, Frame, Home, Observation, Score, StepResult, Terminate
from tapforge_trainer.agents import make_agent, vision
from tapforge_trainer.attempt import Attempt, AttemptRequest, EpisodeLimits
from tapforge_trainer.frames import frame as frames
from tapforge_trainer.records import Generation, Sampling
from tapforge_trainer.rollout.episode import Episode
from tapforge_trainer.states import reading
from tapforge_trainer.states.frame import frame_key
from tapforge_trainer.tiny.folder import write_processor
from tapforge_trainer.tiny.tokenizer import write_tokenizer

WIDTH, HEIGHT, STEPS = 300, 660, 6


def draw(seed: int) -> Frame:
    dice = random.Random(seed)
    image = Image.new("RGB", (WIDTH, HEIGHT), (dice.randrange(256), 90, 20))
    for _ in range(20):
        image.paste((dice.randrange(256), dice.randrange(256), 0), (dice.randrange(WIDTH), dice.randrange(HEIGHT)) * 2)
        image.paste((0, dice.randrange(256), 9), (0, dice.randrange(HEIGHT), dice.randrange(1, WIDTH), HEIGHT))
    out = io.BytesIO()
    image.save(out, "PNG")
    return Frame.of(out.getvalue(), WIDTH, HEIGHT)


class Album:
    """A phone whose screens were drawn before."""

    def __init__(self, screens: list[Frame], state_key: str | None = None):
        self.screens, self.state_key = screens, state_key

    async def reset(self, task):
        return Observation(self.screens[0], state_key=self.state_key)

    async def step(self, action, index):
        screen = self.screens[min(index + 1, STEPS - 1)]  # what comes after the last action nobody looks at
        return StepResult(Observation(screen, state_key=self.state_key))

    async def evaluate(self):
        return Score(1.0)


class Taps:
    def __init__(self, agent):
        self.agent, self.prompts = agent, []

    async def generate(self, prompt, sampling):
        self.prompts.append(prompt)
        last = len(self.prompts) == STEPS
        action = Terminate(status="success") if last else (Home(), Back())[len(self.prompts) % 2]
        ids = self.agent.answer_ids(action, prompt.frames[-1])
        return Generation(prompt.ids, ids, (-0.5,) * len(ids), (0,) * len(ids), "stop", prompt.expanded_length)


@pytest.fixture
def agent(tmp_path):
    write_tokenizer(tmp_path)
    write_processor(tmp_path)
    return make_agent(
        "qwen3-vl",
        tmp_path,
        prompt="full",
        history_images=3,
        history_steps=8,
        context_tokens=8192,
        response_tokens=64,
        max_pixels=100_000,
    )


class Counted:
    """Calls of a function, and the threads that they were made in."""

    def __init__(self, monkeypatch, module, name):
        self.threads = []
        function = getattr(module, name)

        def counting(*args):
            self.threads.append(threading.current_thread())
            return function(*args)

        monkeypatch.setattr(module, name, counting)


def play(agent, album):
    taps = Taps(agent)
    attempt = Attempt("g000001", 1, 0, 0, 0, TASKS.sample(0, 0).model_copy(update={"max_steps": 50}), seed=9)
    episode = Episode(AttemptRequest(attempt, Sampling(64), EpisodeLimits()), agent, taps)
    return asyncio.run(episode.play(album, "phone-0")), taps.prompts


def test_each_screen_is_decoded_once_and_off_the_event_loop(agent, monkeypatch):
    fitted, own = Counted(monkeypatch, vision, "decode_screen"), Counted(monkeypatch, frames, "decode")
    played, prompts = play(agent, Album([draw(seed) for seed in range(STEPS)]))
    assert len(played.record.steps) == STEPS, played.record.message
    assert len(fitted.threads) == STEPS and not own.threads
    assert threading.main_thread() not in fitted.threads
    # history shows the very same frames again, and the episode's result holds each once
    assert [len(p.frames) for p in prompts] == [1, 2, 3, 3, 3, 3]
    shown = [p.frames[-1] for p in prompts]
    for at, prompt in enumerate(prompts):
        assert all(a is b for a, b in zip(prompt.frames, shown[max(0, at - 2) : at + 1], strict=True))
    assert played.frames == {frame.name: frame for frame in shown} and len(played.frames) == STEPS
    assert [s.frames[-1] for s in played.record.steps] == [f.name for f in shown]
    assert [s.frame_key for s in played.record.steps] == [frame_key(f.pixels()).text() for f in shown]


def test_a_screen_that_did_not_change_is_not_fitted_again(agent, monkeypatch):
    fitted = Counted(monkeypatch, vision, "decode_screen")
    played, _ = play(agent, Album([draw(seed // 3) for seed in range(STEPS)]))
    assert len(fitted.threads) == len(played.frames) == 2
    assert len(played.record.steps) == STEPS


def test_with_exact_keys_no_key_is_made_of_the_frame(agent, monkeypatch):
    keys, own = Counted(monkeypatch, reading, "frame_key"), Counted(monkeypatch, frames, "decode")
    played, _ = play(agent, Album([draw(seed) for seed in range(STEPS)], state_key="s"))
    assert {(s.state_key, s.frame_key) for s in played.record.steps} == {("s", None)}
    assert not keys.threads and not own.threads
