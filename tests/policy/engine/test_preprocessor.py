"""Requests are made ready in a thread of their own, in their order, with a bounded store of frames."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tiny_samples import frame

from tapforge_trainer.engine import preprocessor
from tapforge_trainer.engine.preprocessor import Preprocessor
from tapforge_trainer.engine.wire import GenerateRequest
from tapforge_trainer.learner.frame_store import PixelFormat

FORM = PixelFormat(16, 2, (0.5,) * 3, (0.5,) * 3)
SHOTS = [frame(64, 96, k) for k in range(3)]
BYTES = {shot.name: shot.data for shot in SHOTS}
SIZE = 64 * 96 * 3
END = 30.0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Preprocessor]:
    """Without vLLM: a prompt is what it shows, and the thread that made it."""

    def prompt(self: Preprocessor, request: GenerateRequest) -> Any:
        shown = self._frames.at_hand(request.frames)
        return [patches.values.nbytes for patches in shown.values()], threading.get_ident()

    monkeypatch.setattr(preprocessor.Preprocessor, "prompt", prompt)
    return lambda bound: Preprocessor(FORM, 99, bound, lambda: False)


def request(key: str, *shots: int) -> GenerateRequest:
    return GenerateRequest(key, (1, 2), tuple(SHOTS[k].name for k in shots), 4, 1.0)


def test_frames_are_decoded_in_another_thread_and_stay_for_later_requests(make: Callable[[int], Preprocessor]) -> None:
    inputs = make(10 * SIZE)
    first = [request("0", 0, 1), request("1", 0)]
    ready, failed = inputs.run(lambda: inputs.prepare(first, BYTES)).result(END)
    assert not failed and [one.prompt[0] for one in ready] == [[SIZE, SIZE], [SIZE]]
    assert all(one.prompt[1] != threading.get_ident() for one in ready)
    ready, failed = inputs.run(lambda: inputs.prepare([request("2", 2)], BYTES)).result(END)
    assert [one.request.key for one in ready] == ["2"] and not failed
    inputs.run(lambda: inputs.prepare([request("probe-0", 2)], {}, counted=False)).result(END)
    assert (inputs.queries, inputs.hits) == (4, 1), "frames named, and those that had been there"


def test_what_was_dropped_is_named_and_what_is_broken_harms_no_other(make: Callable[[int], Preprocessor]) -> None:
    inputs = make(SIZE)
    ready, _ = inputs.prepare([request("0", 0, 1, 2)], BYTES)
    assert ready[0].prompt[0] == [SIZE] * 3, "what is asked for now is there, however much it is"
    ready, failed = inputs.prepare([request("1", 2), request("2", 0, 2)], {})
    assert [one.request.key for one in ready] == ["1"]
    assert [(result.key, result.missing) for result in failed] == [("2", (SHOTS[0].name,))]
    broken = {SHOTS[0].name: SHOTS[0].data[:50]}
    ready, failed = inputs.prepare([request("3", 0), request("4")], broken)
    assert [one.request.key for one in ready] == ["4"]
    assert failed[0].key == "3" and "can't be decoded" in failed[0].error


def test_an_abort_comes_after_what_it_aborts(make: Callable[[int], Preprocessor]) -> None:
    inputs, done, held = make(SIZE), [], threading.Event()
    inputs.run(lambda: held.wait(END))
    inputs.run(lambda: done.append(inputs.prepare([request("0", 0)], BYTES)[0][0].request.key))
    last = inputs.run(lambda: done.append("abort"))
    assert not done
    held.set()
    last.result(END)
    assert done == ["0", "abort"]
