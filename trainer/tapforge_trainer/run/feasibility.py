"""Whether the numbers of a run can work together: every pair of fields that depend on each other. Pure.

`judge(run, model)` adds up what the file and the model's sizes tell:

- an error where nothing can come of the run: an engine that refuses to start, episodes that end at their first step;
- a note where it can, but hardly as meant, with the number that would do.

What needs the model (`run/model_facts.py` finds it without a download) is left out where it isn't known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.environment import Adb, Settle

from ..placement.settings import ENGINE_RANKS
from .adapters import prompted_of

#: AdamW moves a weight by about the rate in each step, and a weight of these models is about 0.02
_HOPELESS_RATE = 0.1
ATTENTION_ON_CPUS = (
    "spec.learner.attention: flash-attn has kernels for GPUs alone, and the run computes on CPUs: leave it out there"
)
#: parameters from which on a model is a published one, whose usual rates are known
_LARGE = 100_000_000
#: the largest usual rate of AdamW for all weights of a large model, and for adapters; what to take instead
_USUAL_RATE, _USUAL_LORA_RATE = (1e-4, "1e-6"), (1e-2, "2e-5")
#: tokens of an earlier screen in a prompt beside the screen itself: its frame, and a short answer
_TURN = 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a run's model before it is loaded. Lengths are tokens."""

    #: folder or repository
    name: str
    model_type: str
    #: of the model's makers; None: several may be right
    adapter: str | None
    heads: int
    kv_heads: int
    parameters: int
    #: keys and values of a token in 16 bits, bytes
    cache_bytes: int
    #: the longest context that the model's positions have; None: config.json says none
    positions: int | None
    #: of the run's screen as the model sees it; None: the phones have screens of their own
    screen: int | None
    #: the same screen without the bound that leaves room for texts (`agents/vision.py:tokens_per_frame`)
    whole_screen: int | None
    #: of first prompts without their screens: at least, of the shortest goal, and at most, of the longest. None: not
    #: known
    text: tuple[int, int] | None
    #: pixels on a side of a visual token; None: not known
    cell: int | None = None
    #: `prompted_of` the run that exported it; None: not known
    prompted: Mapping[str, Any] | None = None
    #: why the adapter can't be that of such a model; "": it may be
    adapter_refused: str = ""
    #: why engines take no LoRA adapters of such a model alone; "": they do
    merged_only: str = ""
    #: why steps of a history in blocks don't extend each other, as far as it is known
    broken: tuple[str, ...] = ()
    #: whether the learner computes once what samples begin with together
    shares_prompts: bool = True


@dataclass(frozen=True, slots=True)
class Judgement:
    #: complete sentences that begin with a field
    errors: tuple[str, ...]
    notes: tuple[str, ...]


def judge(run: TrainingRun, model: ModelFacts | None) -> Judgement:
    errors, notes = [*_impossible(run)], [*_odd(run)]
    if model is not None:
        errors += [*_model_impossible(run, model)]
        if not errors:
            notes += [*_model_odd(run, model)]
    return Judgement(tuple(errors), tuple(notes))


# --- the file alone ---------------------------------------------------------------------------------------------------


def _impossible(run: TrainingRun) -> Iterator[str]:
    engine, learner, model = run.spec.engine, run.spec.learner, run.spec.model
    if engine.max_batched_tokens is not None and engine.max_batched_tokens < engine.max_concurrent_sequences:
        yield (
            f"spec.engine.maxBatchedTokens: {engine.max_batched_tokens} tokens in a pass are fewer than "
            f"maxConcurrentSequences ({engine.max_concurrent_sequences}), each of which takes one: give at least that "
            "many"
        )
    if model.lora is not None and run.spec.sync.lora == "adapter" and model.lora.rank > ENGINE_RANKS[-1]:
        yield (
            f"spec.model.lora.rank: engines take adapters of a rank up to {ENGINE_RANKS[-1]} with sync.lora adapter, "
            f"not of {model.lora.rank}; lower it, or set sync.lora: merged"
        )
    if learner.attention == "flash-attn" and run.spec.device == "cpu":
        yield ATTENTION_ON_CPUS
    if model.lora is None and learner.learning_rate >= _HOPELESS_RATE:
        yield (
            f"spec.learner.learningRate: {learner.learning_rate:g} moves every weight by more than its own size in "
            "each step, after which the model says nothing; usual are 1e-6 for all weights and 2e-5 for LoRA"
        )


def _odd(run: TrainingRun) -> Iterator[str]:
    spec = run.spec
    if spec.learner.attention == "flash-attn":
        yield (
            "learner.attention: flash-attn has never run in this learner, and has to be installed where its ranks are; "
            "make bench-gpu (part attention) compares it with torch's kernel"
        )
    if spec.learner.checkpointed_share < 1 and spec.learner.activation_checkpointing is False:
        yield (
            f"learner.checkpointedShare ({spec.learner.checkpointed_share:g}) does nothing: with "
            "activationCheckpointing false no layer is computed again"
        )
    learner, stop, evaluation, environment = spec.learner, spec.stop, spec.evaluation, spec.environment
    calls = environment.call_seconds
    if learner.warmup_updates >= stop.max_updates > 1:
        yield (
            f"learner.warmupUpdates ({learner.warmup_updates}) is not less than stop.maxUpdates ({stop.max_updates}): "
            f"the learning rate never reaches learningRate; {max(1, stop.max_updates // 10)} would do"
        )
    if evaluation.every_updates >= stop.max_updates and evaluation.every_updates > 0:
        yield (
            f"evaluation.everyUpdates ({evaluation.every_updates}) is not less than stop.maxUpdates "
            f"({stop.max_updates}): nothing is measured between the first update and the last; "
            f"{max(1, stop.max_updates // 4)} would do"
        )
    if evaluation.repeats > 1 and not evaluation.sampled:
        yield "evaluation.repeats counts for sampled answers only, and evaluation.sampled is false: 1 will do"
    if stop.target_success == 0:
        yield "stop.targetSuccess is 0: the run ends after its first update"
    for name, seconds in (("resetSeconds", calls.reset), ("evaluateSeconds", calls.evaluate)):
        if seconds > calls.episode:
            yield (
                f"environment.deadlines.{name} ({seconds:g}) is longer than episodeSeconds ({calls.episode:g}): the "
                "latter decides"
            )
    if environment.protocol == "tapforge" and environment.settle != Settle():
        yield "environment.settle has no effect with protocol tapforge: its servers answer with a settled frame"
    if environment.protocol != "adb" and environment.adb != Adb():
        yield f"environment.adb has no effect with protocol {environment.protocol}"
    if spec.tasks.max_tasks is not None and spec.tasks.max_tasks < spec.rollout.groups_per_update // 4:
        yield (
            f"tasks.maxTasks ({spec.tasks.max_tasks}) is less than a quarter of rollout.groupsPerUpdate "
            f"({spec.rollout.groups_per_update}): an update practises each task more than four times"
        )


# --- with the model ---------------------------------------------------------------------------------------------------


def _model_impossible(run: TrainingRun, model: ModelFacts) -> Iterator[str]:
    spec = run.spec
    context, answer, parallel = spec.model.context_tokens, spec.rollout.response_tokens, spec.engine.tensor_parallel
    if model.adapter_refused:
        yield f"spec.model.adapter.name: {model.adapter_refused}"
    if spec.sync.lora == "adapter" and model.merged_only:
        yield f"spec.sync.lora: adapter can't be had with {model.name}: {model.merged_only}; set it to merged"
    if model.heads % parallel or (model.kv_heads % parallel and parallel % model.kv_heads):
        fitting = [n for n in range(1, model.heads + 1) if _divides(model, n)]
        yield (
            f"spec.engine.tensorParallel: {parallel} GPUs can't share the {model.heads} heads ({model.kv_heads} of "
            f"keys and values) of {model.name}; {', '.join(map(str, fitting))} can"
        )
    cache, needed = spec.engine.kv_cache_mib, context * model.cache_bytes // min(parallel, model.kv_heads)
    if cache is not None and cache * 2**20 < needed:
        yield (
            f"spec.engine.kvCacheMiB: {cache} MiB hold no answer of {context} tokens (model.contextTokens), which take "
            f"{-(-needed // 2**20)} MiB on each device with {model.name}; give at least that, or fewer contextTokens"
        )
    if model.text is not None and (model.screen or 1) + model.text[0] + answer > context:
        least, screen = (model.screen or 1) + model.text[0], "its screen"
        if model.screen is not None:
            screen += f" of {model.screen} visual tokens"
        roughly = "" if model.text[0] == model.text[1] else "at least "
        smaller = ", or a smaller model.maxPixels" if (model.screen or 0) > least // 2 else ""
        yield (
            f"spec.model.contextTokens: {context} is too little: the shortest first prompt takes {roughly}{least} "
            f"tokens with {screen}, and an answer up to {answer} (rollout.responseTokens), so that every episode would "
            f"end at its first step; give at least {_enough(model, model.text[1]) + answer}{smaller}"
        )


def _enough(model: ModelFacts, text: int) -> int:
    """Tokens of a prompt with which its first screen and `text` fit. A screen that nothing else bounds takes three
    quarters, and the rest has to hold the text."""
    whole = model.whole_screen
    bounded = whole is not None and whole == model.screen
    quarter = 4 * text + 4
    return text + whole if whole is not None and (bounded or text + whole < quarter) else quarter


def _divides(model: ModelFacts, parallel: int) -> bool:
    return model.heads % parallel == 0 and (model.kv_heads % parallel == 0 or parallel % model.kv_heads == 0)


def _prompted_otherwise(run: TrainingRun, name: str, trained: Mapping[str, Any]) -> Iterator[str]:
    now = prompted_of(run)
    differ = [field for field in now if field in trained and trained[field] != now[field]]
    if differ:
        there, here = (", ".join(f"{f}: {json.dumps(of[f])}" for f in differ) for of in (trained, now))
        yield f"model.adapter prompts otherwise than the run that trained {name}: {here}, and there {there}"


def _model_odd(run: TrainingRun, model: ModelFacts) -> Iterator[str]:
    spec = run.spec
    context, answer, images = spec.model.context_tokens, spec.rollout.response_tokens, spec.model.adapter.images
    blocks = spec.model.adapter.history.blocks
    field, fewest = "model.adapter.historyImages", 1
    if blocks is not None:
        field, fewest = "model.adapter.history.blocks.upTo", blocks.keep + 1
    for why in model.broken:
        yield (
            "model.adapter.history.blocks: steps may not extend each other, and each is a sequence of its own then, "
            f"whose whole prompt engines compute: {why}"
        )
    if not model.shares_prompts:
        yield (
            f"the learner computes the prompt of every answer anew, also where a group's are equal: {model.model_type} "
            "models share none, as their family says (shares_prompts)"
        )
    if model.prompted is not None and spec.warm_start is None:
        yield from _prompted_otherwise(run, model.name, model.prompted)
    # The default doesn't count as chosen, also where an API server wrote it into the file.
    chosen = context != type(spec.model).model_fields["context_tokens"].default
    if chosen and model.positions is not None and context > model.positions:
        yield (
            f"model.contextTokens ({context}) is more than the {model.positions} positions that {model.name} has, and "
            f"an engine may refuse to start with it; {model.positions} will do"
        )
    named = spec.model.adapter.name.removesuffix("-computer")
    if named in _ONE_FAMILY and model.model_type not in _ONE_FAMILY[named]:
        own = f"; the one of its makers is {model.adapter}" if model.adapter else "; docs/models.md has those that fit"
        yield (
            f"model.adapter.name {spec.model.adapter.name} asks and reads as {' and '.join(_ONE_FAMILY[named])} models "
            f"were trained, and {model.name} is {model.model_type}: its coordinates mean something else{own}"
        )
    if model.text is not None:
        least, most = ((model.screen or 1) + text for text in model.text)
        if most + answer > context:
            enough = _enough(model, model.text[1]) + answer
            yield (
                f"model.contextTokens ({context}) may be too little for the first prompt: it takes up to {most} "
                f"tokens, and an answer up to {answer}; {enough} will do"
            )
        elif model.screen is not None and images > 1:
            turn = model.screen + _TURN
            shown = 1 + (context - answer - least) // turn
            if shown < images:
                needed = least + (images - 1) * turn + answer
                fewer = f"{field.rpartition('.')[2]} {shown}, " if shown >= fewest else ""
                yield (
                    f"{field} is {images}, but {shown} screens of {model.screen} visual tokens have room: give "
                    f"model.contextTokens {needed}, {fewer}or a smaller model.maxPixels"
                )
    if (
        model.screen is not None
        and model.whole_screen is not None
        and images > 1
        and 8 * model.screen < model.whole_screen
    ):
        yield (
            f"{field} is {images}, so that a screen is shrunk from {model.whole_screen} to {model.screen} visual "
            f"tokens: small text can't be read; {field.rpartition('.')[2]} {max(fewest, images // 8)} or more "
            "model.contextTokens would do"
        )
    if model.parameters >= _LARGE:
        usual, instead = _USUAL_RATE if spec.model.lora is None else _USUAL_LORA_RATE
        rates = {"learner.learningRate": spec.learner.learning_rate}
        if spec.warm_start is not None:
            rates["warmStart.learningRate"] = spec.warm_start.learning_rate
        for field, rate in rates.items():
            if rate > usual:
                what = "all weights" if spec.model.lora is None else "LoRA's adapters"
                size = f"{model.parameters / 1e9:.1f} billion parameters"
                yield f"{field} ({rate:g}) is large for {what} of a model with {size}: {instead} is usual"


#: adapters that are right for one kind of model -> its model types
_ONE_FAMILY = {"qwen3-vl": ("qwen3_vl", "qwen3_vl_moe"), "qwen2.5-vl": ("qwen2_5_vl",)}
