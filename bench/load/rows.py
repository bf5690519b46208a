"""A process that goes through the recorded steps of a data set as a run on it would, and says what that takes.

    python -m load.rows FOLDER MODEL COUNT EVERY

Each step is drawn as a task, read with its screen and compared with an answer. Of the first WARM ones, which fill what
is kept of screens up to its bounds, and of every EVERY-th one afterwards the prompt is made as well, which decodes and
resizes its screens. Prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

from load.canned import HEIGHT, WIDTH
from load.machine import resident_mib
from tapforge_api.dataset import StepReward
from tapforge_envs.protocol import Frame, Observation, Tap
from tapforge_trainer.agents import make_agent
from tapforge_trainer.data.comparison import compare
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.data.imitation import ImitationData
from tapforge_trainer.data.recorded import RecordedSteps
from tapforge_trainer.data.recorded_tasks import PRACTISED, recorded_tasks
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.tasks.source import TaskSource

SEED, WARM = 7, 1_500


def main() -> None:
    folder, model, count, every = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    agent = make_agent(
        "qwen3-vl", model, context_tokens=1024, prompt="compact", history_images=1, history_steps=8, response_tokens=24
    )
    # Libraries that a run's start loads beside its engines.
    blank = FittedFrame.of(np.zeros((HEIGHT, WIDTH, 3), np.uint8)).data
    agent.prepare(Observation(Frame.of(blank, WIDTH, HEIGHT)))
    begun = time.perf_counter()
    tasks = recorded_tasks(folder, ("success", "unknown"))
    steps = RecordedSteps(agent, {PRACTISED: DataFolder(folder)}, StepReward(), 1)
    source = TaskSource(tasks, SEED)
    first = source.next()
    agent.prompt(first.goal, steps.earlier(first), agent.prepare(steps.recorded(first).observation)[0])
    start = time.perf_counter() - begun

    looks: dict[int, float] = {}
    keys: list[str] = []
    begun, prompts = time.perf_counter(), 0
    for number in range(1, count):
        task = source.next()
        found = steps.recorded(task)
        frame = found.observation.frame
        assert found.step.action is not None
        compare(Tap(x=0.5, y=0.5), found.step.action, (frame.width, frame.height), steps.reward, found.step.target)
        if number < WARM or number % every == 0:
            agent.prompt(task.goal, found.history, agent.prepare(found.observation)[0])
            prompts += 1
        if number >= count - 3:
            keys.append(task.key)
        if number + 1 in (count // 10, count):
            gc.collect()
            looks[number + 1] = resident_mib()
    seconds = time.perf_counter() - begun
    # A run that is resumed begins behind the last one that a checkpoint counted.
    resumed = TaskSource(recorded_tasks(folder, ("success", "unknown")), SEED, count - 3)
    begun = time.perf_counter()
    imitation = ImitationData(agent, DataFolder(folder), ("success", "unknown"))
    imitation.batch([0])
    figures = {
        "rows": count,
        "rows_start_s": start,
        "rows_growth_mib": looks[count] - looks[count // 10],
        "rows_mib": looks[count],
        "rows_per_s": (count - 1) / seconds,
        "prompts": prompts,
        "resumed_to_the_sample": [resumed.next().key for _ in keys] == keys,
        "imitation_start_s": time.perf_counter() - begun,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
