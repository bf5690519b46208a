"""A sync that brings other bytes than the learner's is refused, each time and with the tensor's name: faults in a real
engine, and what is said of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
import pytest_asyncio
import torch
from both_ends import TOLERANCE, Hand, ask, gap, prompts_of, shake
from tiny_samples import Tiny

from tapforge_trainer.engine.pool import Engines
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.learner.digest import contents, digest
from tapforge_trainer.sync.proof import Probe
from tapforge_trainer.sync.received import Report, difference, unread
from tapforge_trainer.sync.sync import SyncMismatch, synchronize


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    import sys

    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


# --- in the engine's process ------------------------------------------------------------------------------------------


def _model(actor: Any) -> Any:
    return actor._sampler._llm.model_executor.driver_worker.worker.get_model()


def _after_loading(actor: Any, fault: Callable[[Any], None]) -> None:
    """`fault` is the last thing that happens to a model when weights come."""
    from tapforge_trainer.sync.transfer import CPUWeightTransfer as Transfer

    actor.whole = Transfer.finish_weight_update, Transfer.receive_weights, actor._sampler.renew
    finish = Transfer.finish_weight_update

    def faulty(self: Any) -> None:
        finish(self)
        fault(self.model)

    Transfer.finish_weight_update = faulty


def _mended(actor: Any) -> None:
    from tapforge_trainer.sync.transfer import CPUWeightTransfer as Transfer

    if whole := vars(actor).pop("whole", None):
        Transfer.finish_weight_update, Transfer.receive_weights, actor._sampler.renew = whole
    if shared := vars(actor).pop("shared", None):  # nothing is loaded into it: no weights mend it
        shared[0].weight = shared[1]


def _a_packed_layer_stays(actor: Any) -> None:
    layer = _model(actor).language_model.model.layers[1].mlp.down_proj
    old = layer.cpu_linear
    _after_loading(actor, lambda model: setattr(layer, "cpu_linear", old))


def _one_number_stays(actor: Any) -> None:
    norm = _model(actor).language_model.model.layers[0].input_layernorm.weight
    old = norm[3].clone()
    _after_loading(actor, lambda model: norm.data[3:4].copy_(old))


def _the_head_is_another(actor: Any) -> None:
    import torch

    head = _model(actor).language_model.lm_head
    actor.shared = head, head.weight
    old = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _after_loading(actor, lambda model: setattr(head, "weight", old))


def _nothing_is_loaded(actor: Any) -> None:
    renew = actor._sampler.renew
    _after_loading(actor, lambda model: None)
    actor._sampler.renew = lambda mode, load, version: renew(mode, lambda llm: None, version)


def _nothing_is_received(actor: Any) -> None:
    from tapforge_trainer.sync.transfer import CPUWeightTransfer as Transfer

    _after_loading(actor, lambda model: None)
    Transfer.receive_weights = lambda self, info: None


def _a_bit_turns_on_the_way(actor: Any) -> None:
    from safetensors.torch import load

    from tapforge_trainer.sync.transfer import CPUWeightTransfer as Transfer

    def receive(self: Any, info: Any) -> None:
        weights = load(bytes(info.payload))
        weights["model.visual.merger.norm.bias"][0] += 1e-3
        self.model.load_weights(iter(weights.items()))

    _after_loading(actor, lambda model: None)
    Transfer.receive_weights = receive


def _once(actor: Any, fault: Callable[[Any], None]) -> None:
    """`fault` is in one round of weights."""
    from tapforge_trainer.sync.transfer import CPUWeightTransfer as Transfer

    fault(actor)
    finish, (whole, *_) = Transfer.finish_weight_update, actor.whole

    def once(self: Any) -> None:
        Transfer.finish_weight_update = whole
        finish(self)

    Transfer.finish_weight_update = once


def _frames_stay(actor: Any) -> None:
    """Those that were encoded with the weights before, in the next round of weights."""
    llm = actor._sampler._llm
    reset = llm.reset_encoder_cache
    llm.reset_encoder_cache = lambda: setattr(llm, "reset_encoder_cache", reset)


# --- here -------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def actor(both: tuple[Engines, Learner]) -> AsyncIterator[Any]:
    actor = both[0]._engines[0].actor
    yield actor
    await actor.__ray_call__.remote(_mended)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_a_packed_layer_stays, r"layers\.1\.mlp\.down_proj\.weight \(packed\) has other bytes than model\.language_"),
        (
            _one_number_stays,
            r"layers\.0\.input_layernorm\.weight has other bytes than model\.language_",
        ),
        (_the_head_is_another, r"lm_head\.weight.* has other bytes than model\.language_model\.embed_tokens\."),
        (_nothing_is_loaded, "engine 0 got no weights"),
        (_nothing_is_received, r"engine 0 did not get model\..* and \d+ more"),
        (
            _a_bit_turns_on_the_way,
            r"engine 0 got other bytes of model\.visual\.merger\.norm\.bias than the",
        ),
    ],
)
async def test_what_an_engine_does_not_hold_is_named(
    both: tuple[Engines, Learner],
    fresh: Learner,
    probe: Probe,
    next_version: int,
    actor: Any,
    fault: Callable[[Any], None],
    said: str,
) -> None:
    """Weights that moved by less than the log-probabilities of a probe show."""
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    await fresh.run(shake, 1e-5, "")
    await actor.__ray_call__.remote(fault)
    with pytest.raises(SyncMismatch, match=f"{said}.*once more: .*{said}"):
        await synchronize(fresh, engines, probe, next_version + 1)
    await actor.__ray_call__.remote(_mended)
    assert await synchronize(fresh, engines, probe, next_version + 2) < TOLERANCE


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("fault", ["a packed layer", "a frame"])
async def test_a_fault_that_happens_once_is_mended_by_another_full_set_and_what_was_in_flight_is_asked_again(
    tiny: Tiny,
    both: tuple[Engines, Learner],
    fresh: Learner,
    probe: Probe,
    next_version: int,
    hand: Hand,
    actor: Any,
    fault: str,
) -> None:
    engines = both[0]
    await synchronize(fresh, engines, probe, next_version)
    await fresh.run(shake, 0.1, "")
    prompts = prompts_of(tiny, 8)
    await hand.hold()
    running = asyncio.create_task(ask(engines, prompts))
    await hand.until(lambda seen: len(seen.in_flight) == len(prompts))
    if fault == "a frame":
        await actor.__ray_call__.remote(_frames_stay)
    else:
        await actor.__ray_call__.remote(_once, _a_packed_layer_stays)
    assert await synchronize(fresh, engines, probe, next_version + 1) < TOLERANCE
    figures = engines.metrics
    assert figures["sync_resends"] == 1 and figures["gap_p90"] < TOLERANCE and figures["gap_tokens"] == 48
    assert "failed_gap_mean" not in figures, "bytes and caches that are wrong leave nothing to compare"
    said = await running
    assert {version for one in said for version in one.versions} == {next_version + 1}
    assert await gap(tiny, fresh, prompts, said) < TOLERANCE
    await synchronize(fresh, engines, probe, next_version + 2)
    assert engines.metrics["sync_resends"] == 0


def test_each_worker_of_each_engine_is_judged() -> None:
    sent, whole = {"a": 1, "b": 2}, Report({"a": 1, "b": 2}, {})
    assert difference(sent, (), [(0, [whole, whole]), (1, [whole])]) == ""
    assert difference(sent, (), [(0, [whole]), (1, [whole, None])]) == "engine 1 (worker 1) got no weights"
    assert difference(sent, (), [(2, [Report({"a": 1}, {})])]) == "engine 2 did not get b"
    assert "other bytes of b than the learner sent" in difference(sent, (), [(0, [Report({"a": 1, "b": 3}, {})])])
    assert "other bytes of c than" in difference(sent, (), [(0, [Report({"a": 1, "b": 2, "c": 0}, {})])])
    assert "got a and does not hold it: q.weight has" in difference(sent, (), [(0, [Report(sent, {"a": "q.weight"})])])
    assert "sent a and 1 more without the adapter" in difference(sent, ("a", "b"), [(0, [whole])])
    assert difference(sent, (), [(0, [whole, Report(sent, {}, {"a": "is packed"})])]) == ""
    assert unread([(0, [whole, Report(sent, {}, {"a": "is packed"})])]) == {"a": "is packed"}
    assert difference({}, (), [(0, [Report({}, {})])]) == "the learner sent no weights"


class Kept(torch.nn.Module):
    """A model that keeps what arrives as a test wants it to."""

    def __init__(self, keep: Callable[[Kept], None]):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 6, bias=False), torch.nn.LayerNorm(4, bias=False)
        self.keep = keep

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                parameter = self.get_parameter(name)
                parameter.copy_(tensor.double() if self.keep is _converted else tensor)
            self.keep(self)


def _as_it_came(model: Kept) -> None:
    """Nothing."""


def _converted(model: Kept) -> None:
    """Before it is copied."""


def _narrower(model: Kept) -> None:
    model.layer.weight = torch.nn.Parameter(model.layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


def _transposed(model: Kept) -> None:
    model.layer.weight = torch.nn.Parameter(model.layer.weight.t().contiguous())


def _padded(model: Kept) -> None:
    model.layer.weight = torch.nn.Parameter(torch.nn.functional.pad(model.layer.weight, (0, 4))[:, :4])


def _stale(model: Kept) -> None:
    model.layer.weight[5, 3] += 1e-6


@pytest.mark.parametrize(
    ("keep", "wrong", "why"),
    [
        (_as_it_came, "", ""),
        (_converted, "", "no parameter is known"),
        (_narrower, "", "layer.weight has torch.float8_e4m3fn, loaded were torch.float32"),
        (_transposed, "", "another layout"),
        (_padded, "", "another layout"),
        (_stale, "layer.weight", ""),
    ],
)
def test_what_is_kept_in_a_way_that_is_not_understood_is_named_and_no_fault(
    keep: Callable[[Kept], None], wrong: str, why: str
) -> None:
    from tapforge_trainer.sync.arrivals import Arrivals

    weights = {"layer.weight": torch.randn(6, 4), "norm.weight": torch.randn(4)}
    known = None
    for _ in range(2):  # places are noted in the first round and known in the second
        model = Kept(keep)
        arrivals = Arrivals(model, known)
        with torch.no_grad():
            model.load_weights(iter(weights.items()))
        report = arrivals.read()
        known = arrivals.pieces
        assert report.digests == {name: int(digest(tensor)) for name, tensor in weights.items()}
        assert report.wrong == ({"layer.weight": wrong} if wrong else {})
        assert ("layer.weight" in report.unread) == bool(why) and why in report.unread.get("layer.weight", "")


def test_a_packed_copy_is_read_where_its_kernel_gives_back_what_it_was_made_of() -> None:
    from tapforge_trainer.sync import arrivals

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((8, 48), (96, 64), (2048, 1024)):
            assert arrivals._gives_back(arrivals._packed_like(shape, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 3, 2, 2, 2)])
def test_a_digest_is_of_every_bit_in_its_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = int(digest(tensor))
    assert found == int(digest(tensor.clone()))
    flat = tensor.flatten()
    for place in range(flat.numel()):
        other = flat.clone()
        other[place] = -other[place]
        assert int(digest(other.reshape(shape))) != found, "the sign is one bit"
    assert flat.numel() < 2 or int(digest(flat.flip(0).reshape(shape))) != found
    assert int(contents(flat.flip(0))) == int(contents(tensor))
    padded = torch.cat([flat, flat.new_zeros(9)])
    assert int(contents(padded)) == int(contents(tensor)) and int(contents(padded[1:])) != int(contents(tensor))


def test_a_digest_is_the_same_of_a_view_in_parts_and_as_numbers_without_a_device() -> None:
    tensor = torch.randn(6, 4000, generator=torch.Generator().manual_seed(0))
    assert int(digest(tensor[:, ::2])) == int(digest(tensor[:, ::2].contiguous()))
    assert int(digest(tensor.t())) == int(digest(tensor.t().contiguous())) != int(digest(tensor))
    # Two signs at once: the sum of their places' factors has to count.
    flipped = tensor.clone()
    flipped[0, :2] = -flipped[0, :2]
    assert int(digest(flipped)) != int(digest(tensor))
    large = torch.arange(3 * 2**21, dtype=torch.int32).reshape(3 * 2**11, 2**10)
    assert int(digest(large)) == 0 or int(digest(large)) != int(digest(large.flip(0)))
