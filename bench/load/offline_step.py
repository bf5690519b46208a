"""A contender of the comparison on recorded steps, in a process of its own: a line on stdin is an update of a kind.

    python -m load.offline_step ours|trl FOLDER ROWS_AT_ONCE

FOLDER has `set` (a data set), `rows.parquet` (its export) and `model`. Kinds of updates:

    recorded     loader, image processing, rewards and update, with answers that were made before (`recorded_answers`)
    generated    the same with answers that the model samples, and with new weights in the engine afterwards

Prints a line of JSON when it can begin, and one per update: wall seconds and CPU seconds of all its processes, samples,
tokens of the answers, and the sum of the rewards, by which contenders show that they did the same work.

Contenders:

- `ours`: what a run on a data set does: the worker that plays recorded steps, the batch with its advantages, the
  learner's process, the vLLM engine in its own
- `trl`: TRL's GRPOTrainer and transformers' processor on the exported rows, in micro-batches of ROWS_AT_ONCE; of its
  settings those that make it slower on a CPU and change no result are off (checkpointing of activations, bf16)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil

from load.usage import Usage
from tapforge_api.dataset import StepReward
from tapforge_envs.protocol import Action, Back, Tap, Task
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Agent
from tapforge_trainer.agents.parsing import ParseFailure
from tapforge_trainer.data.comparison import compare
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.placement.ray_start import start_ray

#: answers to a step, steps of an update, tokens of an answer at most
GROUP, STEPS, ANSWER = 8, 4, 24
REWARD = StepReward()
#: threads that wait for each other spin: with more than one, CPU seconds say nothing on a machine that is busy
THREADS = 1
LEARNING_RATE = 1e-5


def agent_of(model: Path) -> Agent:
    return make_agent(
        "qwen3-vl",
        model,
        context_tokens=512,
        prompt="compact",
        history_images=1,
        history_steps=8,
        response_tokens=ANSWER,
        image_first=True,
    )


def recorded_answers(agent: Agent, action: Action, row: int, frame: FittedFrame) -> list[tuple[int, ...]]:
    """To one step: three right ones, three taps elsewhere, another action, and one that is none."""
    rng = Random(row)
    said: list[Action] = [action] * 3 + [Tap(x=rng.random(), y=rng.random()) for _ in range(3)] + [Back()]
    broken = tuple(rng.choice(agent.allowed_ids) for _ in range(ANSWER))
    return [*(tuple(agent.answer_ids(one, frame)) for one in said), broken]


def worth(agent: Agent, ids: list[int], frame: FittedFrame, action: Action, size: tuple[int, int]) -> float:
    """What a run's stream `environment` gives an answer."""
    reason = "stop" if ids and ids[-1] in agent.stop_ids else "length"
    answer = agent.read(agent.decode(ids), reason, frame)
    return 0.0 if isinstance(answer, ParseFailure) else compare(answer, action, size, REWARD).worth(REWARD)


class Meter:
    """Prints what an update took."""

    def __init__(self) -> None:
        this = psutil.Process()
        pids = [this.pid, *(child.pid for child in this.children(recursive=True))]
        self._usage, self._wall = Usage(pids), 0.0

    def begin(self) -> None:
        self._usage.begin()
        self._wall = time.perf_counter()

    def end(self, samples: int, tokens: int, reward: float) -> None:
        say(
            seconds=time.perf_counter() - self._wall,
            cpu_seconds=self._usage.cpu_seconds,
            samples=samples,
            tokens=tokens,
            reward=round(reward, 4),
        )


def say(**figures: float) -> None:
    print(json.dumps(figures), file=sys.__stdout__, flush=True)


def asked() -> str:
    """The next update's kind; "" at the end."""
    return sys.stdin.readline().strip()


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(folder: Path, rows_at_once: int) -> None:
    start_ray()
    import ray

    try:
        asyncio.run(_ours(folder))
    finally:
        ray.shutdown()


async def _ours(folder: Path) -> None:
    from tapforge_envs.clients.phones import PhoneAddress
    from tapforge_envs.slots.lease_life import LeaseLife
    from tapforge_envs.slots.source import Lease
    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.attempt import Attempt, AttemptRequest
    from tapforge_trainer.batch import BatchRules, build_batch
    from tapforge_trainer.data.folder import DataFolder
    from tapforge_trainer.data.recorded import RecordedSteps
    from tapforge_trainer.data.recorded_tasks import PRACTISED, recorded_tasks
    from tapforge_trainer.engine.client import EngineClient
    from tapforge_trainer.engine.pool import Engines
    from tapforge_trainer.frames.handles import BatchFrames
    from tapforge_trainer.learner.client import Learner
    from tapforge_trainer.learner.frame_store import PixelFormat
    from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings, UpdateSettings
    from tapforge_trainer.records import Generation, Generator, GroupRecord, Prompt, Sampling
    from tapforge_trainer.rollout.worker import RolloutWorker
    from tapforge_trainer.sync.proof import make_probe
    from tapforge_trainer.sync.sync import synchronize

    model = folder / "model"
    agent, tokens, form = agent_of(model), Tokens.load(model), PixelFormat.of_folder(model)

    class Said:
        """A `Generator` of an answer that was recorded."""

        def __init__(self, ids: tuple[int, ...]):
            self._ids = ids

        async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
            stopped = "stop" if self._ids[-1] in agent.stop_ids else "length"
            count = len(self._ids)
            return Generation(prompt.ids, self._ids, (-0.5,) * count, (0,) * count, stopped, prompt.expanded_length)

    tasks = recorded_tasks(folder / "set", ("success", "unknown"))
    steps = RecordedSteps(agent, {PRACTISED: DataFolder(folder / "set")}, REWARD, 1)
    settings = EngineSettings(
        str(model), tokens.allowed_ids, tokens.stop_ids, context_tokens=512, threads=THREADS, kv_cache_mib=64
    )
    engines = Engines(settings, form, tokens.image_pad)
    learner = Learner(
        LearnerSettings(
            str(model), tokens.allowed_ids, freeze_vision=False, threads=THREADS, tokens_per_micro_batch=8192
        )
    )
    policies: dict[str, Generator] = {}
    for number in range(len(tasks)):
        task = tasks.at(number)
        action = steps.recorded(task).step.action
        assert action is not None
        blank = FittedFrame("", b"", 352, 736)
        for member, ids in enumerate(recorded_answers(agent, action, number, blank)):
            policies[f"{number}.{member}"] = Said(ids)
    try:
        await engines.ready()
        await learner.ready()
        policies[""] = EngineClient(engines.connection)
        worker = RolloutWorker(agent, policies, steps, earlier=steps.earlier)
        marks = tokens.image_pad, tokens.vision_start, tokens.vision_end
        probe = make_probe(form, tokens.allowed_ids, *marks, settings.context_tokens)
        rules = BatchRules("grpo", signal="reward", keep_zero_variance_groups=True)
        meter, at, version = Meter(), 0, 0
        lease = Lease("recorded", 1, PhoneAddress("recorded", ""), LeaseLife("recorded"))
        say(ready=1)

        async def group(number: int, task: Task, kind: str) -> tuple[GroupRecord, dict[str, Any]]:
            requests = [
                AttemptRequest(
                    Attempt(f"g{number}", number, member, 0, 0, task, seed=number * GROUP + member),
                    Sampling(ANSWER),
                    policy=f"{number % len(tasks)}.{member}" if kind == "recorded" else "",
                )
                for member in range(GROUP)
            ]
            played = await asyncio.gather(*(worker.play(request, lease) for request in requests))
            record = GroupRecord(f"g{number}", number, task, version, tuple(one.record for one in played))
            return record, {one.record.id: one.frames for one in played}

        while kind := await asyncio.to_thread(asked):
            meter.begin()
            numbers = range(at, at + STEPS)
            at += STEPS
            found = await asyncio.gather(*(group(n, tasks.at(n % len(tasks)), kind) for n in numbers))
            batch = build_batch([record for record, _ in found], rules)
            frames = BatchFrames({name: handle for _, handles in found for name, handle in handles.items()})
            await learner.update(batch.samples, frames, UpdateSettings(learning_rate=LEARNING_RATE), version)
            version += 1
            if kind == "generated":
                await synchronize(learner, engines, probe, version)
            said = [step for record, _ in found for episode in record.episodes for step in episode.steps]
            length = sum(len(step.generation.ids) for step in said)
            meter.end(len(said), length, sum(step.reward for step in said))
    finally:
        await engines.close()
        await learner.close()


# --- TRL --------------------------------------------------------------------------------------------------------------

#: the adapter's compact prompt
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trl(folder: Path, rows_at_once: int) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(THREADS)
    model, agent = folder / "model", agent_of(folder / "model")
    processor = AutoProcessor.from_pretrained(model)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    from pydantic import TypeAdapter

    reading = TypeAdapter(Action)
    rows = load_dataset(
        "parquet", data_files=str(folder / "rows.parquet"), split="train", cache_dir=str(folder / f"hf-{rows_at_once}")
    )
    rows = rows.add_column("number", list(range(len(rows))))
    rows = rows.add_column("prompt", [[{"role": "user", "content": goal}] for goal in rows["goal"]])
    rows = rows.select_columns(["prompt", "image", "action", "number"])
    blank = FittedFrame("", b"", 352, 736)
    answers = [
        recorded_answers(agent, reading.validate_json(action), number, blank)
        for number, action in enumerate(rows["action"])
    ]
    last = {"samples": 0, "tokens": 0, "reward": 0.0}

    def reward(completion_ids: list[list[int]], action: list[str], image: list[Any], **_: Any) -> list[float]:
        actions = map(reading.validate_json, action)
        found = [
            worth(agent, ids, blank, one, shown.size)
            for ids, one, shown in zip(completion_ids, actions, image, strict=True)
        ]
        last["samples"] += len(found)
        last["tokens"] += sum(map(len, completion_ids))
        last["reward"] += sum(found)
        return found

    class Trainer(GRPOTrainer):
        kind = "recorded"
        numbers: list[int] = []  # noqa: RUF012

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
            self.numbers = [one["number"] for one in inputs]
            return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **named: Any) -> Any:
            if self.kind == "generated":
                return super()._generate_single_turn(prompt_ids, *others, **named)
            return [list(answers[number][place % GROUP]) for place, number in enumerate(self.numbers)], None

    class Turns(TrainerCallback):
        """Between two updates it waits until it is asked."""

        meter: Meter

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter = Meter()
            say(ready=1)
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter.end(**last)
            self._wait(control)

        def _wait(self, control: Any) -> None:
            kind = asked()
            if not kind:
                control.should_training_stop = True
            trainer.kind = kind
            last.update(samples=0, tokens=0, reward=0.0)
            self.meter.begin()

    arguments = GRPOConfig(
        output_dir=str(folder / f"trl-{rows_at_once}"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
        max_steps=1_000_000,
        num_generations=GROUP,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=STEPS * GROUP // rows_at_once,
        gradient_checkpointing=False,
        max_completion_length=ANSWER,
        learning_rate=LEARNING_RATE,
        shuffle_dataset=False,
    )
    trainer = Trainer(
        model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=rows,
        processing_class=processor,
        callbacks=[Turns()],
    )
    trainer.train()


def main() -> None:
    contenders: dict[str, Callable[[Path, int], None]] = {"ours": ours, "trl": trl}
    contenders[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
