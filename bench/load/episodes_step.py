"""One contender's training step on whole episodes at a published model's width, in a process of its own: prints a line
of JSON, per episode.

    python -m load.episodes_step separate|blocks|trl|transformers [--threads 2] [--episodes 2] [--steps 15]
                                                                  [--pixels 1310720] [--model NAME]

Qwen3-VL-2B at 2 language layers and 2 vision blocks, random weights, fp32, LoRA of rank 16, a frozen tower, as in
`real_step.py`. Episodes of 15 steps on screens of 1080x2400, shown with at most `--pixels`, with answers of `ANSWER`
tokens; prompts as the 8B sample's file makes them. `separate`: a window that slides over three screens, each step a
sample; `blocks`: the file as it is, steps joined where they extend each other. TRL and transformers take the window
that slides, a row at a time, so that nothing is padded, and only every third step: their figures are scaled by tokens.
A step is forward, backward and AdamW, once, and nothing warms up: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from array import array
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.agents.drawn import draw_frame
from tests.families import real

from load.history import MODES, SAMPLE, words
from load.operations import counter
from load.real_step import LAYERS, MODEL, by_transformers, by_trl, padded, ranked
from tapforge_api import load
from tapforge_envs.protocol import Observation, Tap
from tapforge_trainer.agents import make_agent
from tapforge_trainer.agents.agent import Turn
from tapforge_trainer.agents.chat_agent import ChatAgent
from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.families import ModelConfig, shape_of
from tapforge_trainer.learner.flops import Costs
from tapforge_trainer.records import Prompt, ResponseSpan, Sample
from tapforge_trainer.run.adapters import adapter_options
from tapforge_trainer.samples import sequences

ANSWER = 80
#: of those that take a part
SHARE = 3
CONTENDERS = ("separate", "blocks", "trl", "transformers")


def recorded(
    folder: Path, mode: str, episodes: int, steps: int, pixels: int
) -> tuple[list[Sample], dict[str, FittedFrame]]:
    """A sample per step."""
    run = load(SAMPLE, (*MODES[mode], f"spec.model.maxPixels={pixels}"))
    agent = make_agent(run.spec.model.adapter.name, folder, **adapter_options(run))
    assert isinstance(agent, ChatAgent)
    said = np.asarray(words(agent, Tokens.load(folder)))
    made: list[Sample] = []
    frames: dict[str, FittedFrame] = {}
    for number in range(episodes):
        history: list[Turn] = []
        for step in range(steps):
            rng = np.random.default_rng((number, step))
            seen, _ = agent.prepare(Observation(draw_frame(1080, 2400, seed=1000 * number + step)))
            prompt = agent.prompt(f"Open the settings and turn on switch {number}", history, seen)
            assert isinstance(prompt, Prompt), prompt
            answer = tuple(rng.choice(said, ANSWER).tolist())
            frames |= {frame.name: frame for frame in prompt.frames}
            span = ResponseSpan(
                step=step,
                start=len(prompt.ids),
                end=len(prompt.ids) + ANSWER,
                logprobs=tuple(rng.uniform(-12, -9, ANSWER).tolist()),
                versions=(0,) * ANSWER,
                advantage=float(rng.normal()),
            )
            ids = array("i", (*prompt.ids, *answer))
            names = tuple(frame.name for frame in prompt.frames)
            made.append(Sample(f"e{number}", "g", ids, prompt.expanded_length + ANSWER, names, (span,)))
            history.append(Turn(seen, agent.decode(answer), Tap(x=0.5, y=0.5), answer))
    return made, frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--pixels", type=int, default=1_310_720)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    folder = real.folder(args.model, LAYERS, LAYERS)
    run = load(SAMPLE)
    mode = "blocks" if args.contender == "blocks" else "sliding"
    samples, frames = recorded(folder, mode, args.episodes, args.steps, args.pixels)
    episodes = float(args.episodes)
    step: Callable[[], Any]
    if args.contender in ("separate", "blocks"):
        given = list(sequences(samples)) if args.contender == "blocks" else samples
        step = ranked(folder, given, frames, run.spec.learner.tokens_per_micro_batch)
    else:
        given = samples[SHARE - 1 :: SHARE]
        model, batches = padded(folder, given, frames, 1)
        images = [[len(one.frames)] for one in given]
        step = by_trl(folder, model, batches, images) if args.contender == "trl" else by_transformers(model, batches)
        episodes *= sum(one.length for one in given) / sum(one.length for one in samples)
    counting, started, computed = counter(), time.perf_counter(), time.process_time()
    with counting:
        found = step()
    seconds, computed = time.perf_counter() - started, time.process_time() - computed
    figures = {
        "operations": round(counting.get_total_flops() / episodes),
        "tokens": round(sum(one.length for one in given) / episodes),
        "sequences": round(len(given) / episodes, 1),
        "seconds": round(seconds / episodes, 1),
        # of all threads: less than the threads had where others use the machine
        "cpu_seconds": round(computed / episodes, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    if isinstance(found, dict):
        figures["operations_by_formula"] = round(found["flops"] / episodes)
        # the logits, which the backward pass computes again: counted, and no part of the formula
        head = Costs.of(shape_of(ModelConfig.of_folder(folder))).predicted
        figures["operations_again"] = round(head * ANSWER * args.steps)
    if args.contender in ("trl", "transformers"):
        figures |= {"steps_taken": len(given), "version": version(args.contender)}
    print(json.dumps(figures), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
