"""Memory of one GPU of each of `spec.models`, from the sizes in its config.json; quantized weights count with their
bits. Of a model whose sizes aren't known here nothing is concluded: vLLM looks when it starts. A model that no judge
asks has its line, and is not counted: the run doesn't start it. Pure but for reading config.json where it is at hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.models import ServedModel, models_asked

from ..agents.vision import tokens_per_frame
from ..learner.families import FolderError, ModelConfig, Shape, shape_of
from ..model_source.hub import cached_snapshot
from ..rollout.frame_budget import frame_pixels
from .engine import EngineLoad, batched_tokens, engine_moment, problem
from .estimate import Card
from .known import GIB, MIB, config_of

#: bits of a weight by the method that quantized it, where its config names no number
_BITS = {"awq": 4, "gptq": 4, "fp8": 8, "compressed-tensors": 8, "bitsandbytes": 8}


@dataclass(frozen=True, slots=True)
class ServedEstimate:
    """Of a model. Bytes are those of one GPU; None: the model's sizes are not known here."""

    name: str
    gpus: int
    weights: int | None = None
    kv_cache: int | None = None
    #: questions of full context that a server's cache holds at once
    at_once: int | None = None
    problem: str | None = None
    #: the run starts it; False: only `tapforge collect --teacher` does
    started: bool = True

    @property
    def words(self) -> str:
        return self._sizes if self.started else f"not counted, as a teacher alone: {self._sizes}"

    @property
    def _sizes(self) -> str:
        if self.weights is None or self.kv_cache is None:
            return f"{self.gpus} GPUs; its sizes are not known here, so vLLM alone can say whether it fits"
        if self.problem is not None:
            return f"{self.gpus} GPUs; too much: {self.problem}"
        return (
            f"{self.gpus} GPUs, each with {self.weights / GIB:.1f} GiB of weights and {self.kv_cache / GIB:.1f} of "
            f"cache: {self.at_once:,} questions of full context at once"
        )


def served_estimates(run: TrainingRun, card: Card) -> tuple[ServedEstimate, ...]:
    asked = models_asked(run.spec.models, run.spec.rewards, run.spec.stages)
    return tuple(replace(_estimate(run, model, card), started=model in asked) for model in run.spec.models)


def _estimate(run: TrainingRun, model: ServedModel, card: Card) -> ServedEstimate:
    try:
        config = _config(model)
        shape = None if config is None else shape_of(config)
    except (FolderError, OSError):
        config = shape = None
    if config is None or shape is None:
        return ServedEstimate(model.name, model.gpus)
    load = _load(run, model, shape, card)
    budget = min(int(model.gpu_memory_share * card.bytes), card.usable)
    weights = _weights(load, config.folder / "config.json")
    # What quantization spares is cache.
    moment = engine_moment(load, budget + int(load.weights - weights))
    trouble = problem(load, moment)
    if trouble is None and moment.total - load.weights + weights > card.usable:
        trouble = f"{(moment.total - load.weights + weights) / GIB:.1f} GiB of {card.usable / GIB:.1f}"
    cache = int(moment.bytes["kv_cache"])
    one = load.context * load.kv_bytes_per_token
    return ServedEstimate(model.name, model.gpus, int(weights), cache, cache // one, _renamed(trouble, model.name))


def _load(run: TrainingRun, model: ServedModel, shape: Shape, card: Card) -> EngineLoad:
    # A judge sends whole screens: the model's own processor alone bounds them.
    frame = min(frame_pixels(run) // shape.vision.cell**2, tokens_per_frame(model.context_tokens, 1, 1))
    return EngineLoad(
        shape,
        model.tensor_parallel,
        model.context_tokens,
        model.max_concurrent_sequences,
        batched_tokens(None, card.bytes, card.product),
        max(1, frame),
        4 if model.dtype == "float32" else 2,
        None if model.kv_cache_mib is None else model.kv_cache_mib * MIB,
    )


def _weights(load: EngineLoad, config: Path) -> float:
    """Bytes of one GPU."""
    how: Any = json.loads(config.read_text()).get("quantization_config") if config.is_file() else None
    if not isinstance(how, dict):
        return load.weights
    named = [how.get("bits"), how.get("w_bit"), *_bits_of_groups(how.get("config_groups"))]
    usual = _BITS.get(str(how.get("quant_method")), 8 * load.width)
    bits = max((one for one in named if isinstance(one, int) and one > 0), default=usual)
    return load.weights * min(1.0, bits / (8 * load.width))


def _bits_of_groups(groups: Any) -> list[Any]:
    """compressed-tensors names them for each group of layers."""
    found = groups.values() if isinstance(groups, dict) else ()
    weights = [one.get("weights") for one in found if isinstance(one, dict)]
    return [one.get("num_bits") for one in weights if isinstance(one, dict)]


def _renamed(trouble: str | None, name: str) -> str | None:
    return None if trouble is None else trouble.replace("engine.", f"models[{name}].")


def _config(model: ServedModel) -> ModelConfig | None:
    source = model.source
    if source.path is not None:
        return ModelConfig.of_folder(Path(source.path.folder), quantized=True)
    if source.hugging_face is not None:
        folder = cached_snapshot(source.hugging_face.repo, source.hugging_face.revision)
        if folder is None:
            return config_of(source.hugging_face.repo)
        return ModelConfig.of_folder(folder, quantized=True)
    if source.tiny is not None:
        from ..model_source.tiny_base import tiny_folder

        return ModelConfig.of_folder(tiny_folder(source.tiny.weights))
    return None
