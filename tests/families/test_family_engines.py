"""vLLM engines of every family answer with transformers' log-probabilities, with the folder's weights and with those
that come in later. Each engine is a process of its own (`engine_answers.py`)."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real
from engine_answers import END, Job

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.families import families
from tapforge_trainer.placement.settings import LoraSettings

pytestmark = pytest.mark.long

#: fp32; the log-probabilities of a prompt's tokens have a spread (standard deviation) of 1.2
TOLERANCE = 5e-5
LORA = LoraSettings(6, 12.0)
IMAGE, START, VISION_START, VISION_END = 151655, 151644, 151652, 151653
#: of every family, then a tied head; with config.json as it was published, where that has another layout
FAMILIES = [
    ("qwen2.5-vl-7b-tiny", True),
    ("qwen3-vl-30b-a3b-tiny", False),
    ("qwen3-vl-8b-tiny", False),
    ("qwen2-vl-7b-tiny", True),
    ("qwen2.5-vl-3b-tiny", False),
]


@dataclass(frozen=True)
class Asked:
    """Prompts with none, one and two frames, one of them longer than 128 tokens of text."""

    frames: list[FittedFrame]
    #: ids with one placeholder per frame, and the frames' indices
    prompts: list[tuple[tuple[int, ...], tuple[int, ...]]]

    @staticmethod
    def of(name: str) -> Asked:
        cell = 2 * real.patch_size(name)
        sizes = [(8, 17), (6, 6)]  # cells; the first as narrow as a phone's screen
        frames = [
            FittedFrame.of(np.random.default_rng(k).integers(0, 256, (h * cell, w * cell, 3), dtype=np.uint8))
            for k, (w, h) in enumerate(sizes)
        ]
        shown = [((0,), 9), ((1, 0), 9), ((), 9), ((1,), 150)]
        return Asked(frames, [_prompt(which, words, seed) for seed, (which, words) in enumerate(shown)])

    def requests(self, tokens: int = 8) -> list[dict[str, Any]]:
        return [
            {
                "ids": ids,
                "frames": tuple(self.frames[k].name for k in shown),
                "max_tokens": tokens,
                "temperature": 1.0,
                "seed": seed,
                "ignore_stop": True,
            }
            for seed, (ids, shown) in enumerate(self.prompts)
        ]


def _prompt(shown: Sequence[int], words: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    ids = [START, *rng.integers(0, 151643, words).tolist()]
    ids += [token for _ in shown for token in (VISION_START, IMAGE, VISION_END)]
    return (*ids, *rng.integers(0, 151643, 5).tolist()), tuple(shown)


def engine_answers(job: Job, folder: Path) -> list[list[Any]]:
    """Rounds of results: with the engine's first weights, then with each of the job's."""
    answers = folder / "answers"
    given = replace(job, answers=str(answers))
    here = str(Path(__file__).parent)
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    script = str(Path(here) / "engine_answers.py")
    given_bytes = pickle.dumps(given)
    done = subprocess.run(
        [sys.executable, script], input=given_bytes, env=environment, capture_output=True, timeout=END, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return pickle.loads(answers.read_bytes())  # noqa: S301


def gap(
    name: str,
    folder: Path,
    asked: Asked,
    answers: Sequence[Any],
    since: int = 0,
    adapter: Mapping[str, Any] | None = None,
) -> float:
    """The largest difference of a sampled token's log-probability to what transformers says of it; of tokens of policy
    version `since` or newer. `adapter`: matrices that the folder's weights are merged with."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor

    model = real.model_class(name).from_pretrained(folder, dtype=torch.float32).eval()
    for layer in {key.rpartition(".lora_")[0] for key in adapter or {}}:
        first, second = (adapter[f"{layer}.lora_{part}.weight"] for part in "AB")
        model.get_submodule(layer).weight.data += second @ first
    processor = AutoImageProcessor.from_pretrained(folder)
    allowed = torch.zeros(model.get_input_embeddings().weight.shape[0], dtype=torch.bool)
    allowed[list(Tokens.load(folder).allowed_ids)] = True
    worst = 0.0
    for (_, shown), answer in zip(asked.prompts, answers, strict=True):
        assert not answer.error and not answer.missing, answer
        prompt, said = (np.frombuffer(ids, np.int32).tolist() for ids in (answer.prompt_ids, answer.ids))
        ids = torch.tensor([prompt + said])
        options: dict[str, Any] = {}
        if shown:
            images = [Image.fromarray(asked.frames[k].pixels()) for k in shown]
            options = dict(processor(images, return_tensors="pt"))
            options["mm_token_type_ids"] = (ids == IMAGE).int()
        with torch.no_grad():
            logits = model(input_ids=ids, **options).logits[0, len(prompt) - 1 : -1]
        logp = torch.where(allowed, logits, float("-inf")).log_softmax(-1)
        mine = logp.gather(1, torch.tensor(said)[:, None])[:, 0].numpy()
        begin = min(start for version, start, _ in answer.versions if version >= since)
        worst = max(worst, float(np.abs(mine - np.frombuffer(answer.logprobs, np.float32))[begin:].max()))
    return worst


def job_of(
    name: str, asked: Asked, folder: Path, weights: Sequence[Path], sleeping: bool = False, **settings: Any
) -> Job:
    options: dict[str, Any] = {"context_tokens": 1024, "max_sequences": 8, "kv_cache_mib": 64} | settings
    frames = {frame.name: frame.data for frame in asked.frames}
    return Job(
        {"model": str(folder), **options}, asked.requests(), frames, [str(one) for one in weights], sleeping=sleeping
    )


@pytest.mark.parametrize("name, flat", FAMILIES)
def test_an_engine_answers_as_transformers_before_and_after_new_weights(name: str, flat: bool, tmp_path: Path) -> None:
    """New weights have the learner's names: those of transformers' model, whatever the folder's are."""
    first, second = (real.folder(name, 3, 3, flat=flat, seed=seed) for seed in (0, 1))
    asked = Asked.of(name)
    before, after = engine_answers(job_of(name, asked, first, [second]), tmp_path)
    assert gap(name, first, asked, before) < TOLERANCE
    assert {answer.versions for answer in before} == {((0, 0, 8),)}
    assert gap(name, second, asked, after) < TOLERANCE
    assert {answer.versions for answer in after} == {((1, 0, 8),)}
    assert gap(name, first, asked, after) > 0.1, "the weights are no others"


def test_answers_go_on_after_a_sleep_with_the_weights_that_came_on_waking(tmp_path: Path) -> None:
    """On CPUs no memory is freed; that vLLM keeps the requests and wakes by parts is the same."""
    name = "qwen3-vl-8b-tiny"
    first, second = (real.folder(name, 3, 3, seed=seed) for seed in (0, 1))
    asked = Asked.of(name)
    _, slept = engine_answers(job_of(name, asked, first, [second], sleeping=True), tmp_path)
    for answer in slept[:-1]:
        (old, begin, middle), (new, from_there, end) = answer.versions
        assert (old, begin, new, end) == (0, 0, 1, 40) and 0 < middle == from_there < 40
    assert slept[-1].versions == ((1, 0, 40),), "it came while the engine slept"
    assert gap(name, second, asked, slept, since=1) < TOLERANCE
    assert gap(name, second, asked, slept) > 0.1, "the first tokens are of the weights before"


@pytest.mark.parametrize("name", ["qwen3-vl-8b-tiny", "qwen2.5-vl-7b-tiny"])
def test_an_engine_of_two_workers_answers_and_takes_weights_as_one_of_one_does(name: str, tmp_path: Path) -> None:
    """Each worker has half of every layer, and loads its half of each tensor that comes."""
    first, second = (real.folder(name, 3, 3, seed=seed) for seed in (0, 1))
    asked = Asked.of(name)
    before_segments = set(os.listdir("/dev/shm"))
    try:
        before, after = engine_answers(job_of(name, asked, first, [second], tensor_parallel=2), tmp_path)
    finally:
        for left in set(os.listdir("/dev/shm")) - before_segments:
            if left.startswith("vllm_dist_"):
                (Path("/dev/shm") / left).unlink(missing_ok=True)
    assert gap(name, first, asked, before) < TOLERANCE
    assert gap(name, second, asked, after) < TOLERANCE


def adapter_of(name: str, seed: int) -> dict[str, Any]:
    """Random matrices for the layers that LoRA adapts in a family, as the learner sends them."""
    import torch

    pattern, generator = re.compile(families()[real.family(name)].lora_pattern()), torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = real.model_class(name)(real.config(name, 3, 3))
    found = {}
    for key, layer in model.named_modules():
        if pattern.fullmatch(key):
            sizes = {"A": (LORA.rank, layer.in_features), "B": (layer.out_features, LORA.rank)}
            for part, size in sizes.items():
                found[f"{key}.lora_{part}.weight"] = 0.05 * torch.randn(size, generator=generator)
    return found


@pytest.mark.parametrize(
    "name, flat, parallel",
    [(*one, 1) for one in FAMILIES[:-1] if "a3b" not in one[0]] + [("qwen3-vl-8b-tiny", False, 2)],
)
def test_an_engine_answers_with_the_adapter_that_came_last(
    name: str, flat: bool, parallel: int, tmp_path: Path
) -> None:
    """Alone, beside the weights of the folder; on two workers as well."""
    from safetensors.torch import save_file

    folder, asked = real.folder(name, 3, 3, flat=flat), Asked.of(name)
    adapters = [adapter_of(name, seed) for seed in (0, 1)]
    for number, adapter in enumerate(adapters):
        save_file(adapter, tmp_path / str(number))
    job = job_of(name, asked, folder, [], lora=LORA, tensor_parallel=parallel)
    given = replace(job, adapters=[str(tmp_path / str(number)) for number in range(2)])
    first, *later = engine_answers(given, tmp_path)
    assert gap(name, folder, asked, first) < TOLERANCE
    for adapter, answers in zip(adapters, later, strict=True):
        assert gap(name, folder, asked, answers, adapter=adapter) < TOLERANCE
        assert gap(name, folder, asked, answers) > 0.1, "the adapter changes nothing"
