"""A rank's memory in closed form: properties that hold for every model and setting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_trainer.learner.families import Shape, shape_of
from tapforge_trainer.memory.known import config_of, published
from tapforge_trainer.memory.learner import CATEGORIES, LearnerLoad, moments, peak, resident

LORA = ("q_proj", "k_proj", "v_proj", "o_proj")


def shape(name: str) -> Shape:
    found = config_of(f"Qwen/{name}-Instruct")
    assert found is not None
    return shape_of(found)


SHAPES = {name: shape(name) for name in published()}


@st.composite
def loads(draw: st.DrawFn) -> LearnerLoad:
    tokens = draw(st.integers(64, 65536))
    lora = draw(st.sampled_from([0, 16, 64]))
    flag = st.booleans()
    return LearnerLoad(
        SHAPES[draw(st.sampled_from(sorted(SHAPES)))],
        ranks=draw(st.sampled_from([1, 2, 3, 4, 8, 64])),
        tokens=tokens,
        patches=4 * draw(st.integers(0, tokens)),
        responses=draw(st.integers(1, tokens)),
        width=draw(st.sampled_from([2, 4])),
        lora=lora,
        targets=LORA if lora else (),
        freeze_vision=bool(lora) or draw(flag),
        reference=draw(flag),
        activation_checkpointing=draw(flag),
        checkpointed_share=draw(st.sampled_from([0.3, 1.0])),
        sharded_gradients=draw(flag),
        cpu_offload=draw(flag),
        reshard_after_forward=draw(flag),
        accumulates=draw(flag),
    )


@given(loads())
@settings(max_examples=300, deadline=None)
def test_categories_sum_to_the_peak_and_the_peak_is_the_largest_moment(load: LearnerLoad) -> None:
    found, every = peak(load), list(moments(load))
    assert set(found.bytes) == set(CATEGORIES)
    assert sum(found.bytes.values()) == found.total == max(moment.total for moment in every)
    assert all(size >= 0 for moment in every for size in moment.bytes.values())
    assert found.total >= resident(load).total


@given(loads(), st.sampled_from([2, 3, 4]))
@settings(max_examples=300, deadline=None)
def test_more_ranks_never_need_more_bytes(load: LearnerLoad, times: int) -> None:
    assert peak(replace(load, ranks=load.ranks * times)).total <= peak(load).total + len(CATEGORIES)


@given(loads(), st.integers(1, 8192))
@settings(max_examples=300, deadline=None)
def test_more_tokens_patches_or_answers_never_need_fewer(load: LearnerLoad, more: int) -> None:
    now = peak(load).total
    assert peak(replace(load, tokens=load.tokens + more)).total >= now
    assert peak(replace(load, patches=load.patches + 4 * more)).total >= now
    assert peak(replace(load, responses=load.responses + more)).total >= now


@given(loads())
@settings(max_examples=300, deadline=None)
def test_what_saves_memory_saves_memory(load: LearnerLoad) -> None:
    now = peak(load).total
    off = replace(load, activation_checkpointing=False)
    on = [peak(replace(load, activation_checkpointing=True, checkpointed_share=share)).total for share in (1, 0.5, 0.1)]
    assert on[0] <= on[1] * 1.02 and on[1] <= on[2] * 1.02 and on[2] <= peak(off).total * 1.02
    assert peak(replace(load, cpu_offload=True)).total <= now
    assert peak(replace(load, reference=False)).total <= now
    assert peak(replace(load, accumulates=False)).total <= now + len(CATEGORIES)


def test_adapters_need_neither_masters_nor_moments_of_the_model() -> None:
    full = LearnerLoad(SHAPES["Qwen3-VL-8B"], ranks=4, tokens=8192, patches=4096, responses=1024)
    adapted = replace(full, lora=32, targets=LORA)
    assert adapted.trained < full.trained / 100
    assert resident(adapted).total < resident(full).total / 3
    assert peak(adapted).total < peak(full).total / 2


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_reference_is_a_sharded_copy_and_adapters_need_copies_of_themselves(name: str) -> None:
    load = LearnerLoad(SHAPES[name], ranks=4, tokens=8192, patches=4096, responses=1024)
    more = resident(replace(load, reference=True)).total - resident(load).total
    assert abs(more - 2 * load.shape.text / 4) <= 1
    adapted = replace(load, lora=8, targets=LORA)
    more = resident(replace(adapted, reference=True)).total - resident(adapted).total
    assert abs(more - 8 * adapted.trained / 4) <= 1
