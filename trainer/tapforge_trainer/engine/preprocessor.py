"""Requests made ready for vLLM in a thread of their own: frames decoded and cut, patches turned into tensors.

Neither the event loop that takes requests in nor the thread that samples ever waits for a frame. The thread takes
requests in the order in which they came, so that a frame is there before the requests that only name it, and an abort
comes after what it aborts. It alone touches the store of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tapforge_trainer.frames.frame import FrameError

from ..learner.frame_store import FrameStore, PixelFormat
from .wire import GenerateRequest, GenerateResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedInput:
    request: GenerateRequest
    #: as vLLM takes it (`prompts.py`)
    prompt: Any


class Preprocessor:
    """`normalize`: whether patches have to be scaled here; asked in the thread, when the engine can say it."""

    def __init__(self, form: PixelFormat, image_id: int, max_bytes: int, normalize: Callable[[], bool]):
        self._form, self._image_id, self._normalize = form, image_id, normalize
        self._frames = FrameStore(form, max_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="frames")
        #: frames that requests named, and how many of them were at hand
        self.queries = self.hits = 0

    def run(self, function: Callable[[], T]) -> Future[T]:
        """In the thread, after all that came before."""
        return self._thread.submit(function)

    def prepare(
        self, requests: Sequence[GenerateRequest], frames: dict[str, bytes], *, counted: bool = True
    ) -> tuple[list[PreparedInput], list[GenerateResult]]:
        """What is ready, and what failed. Called in the thread."""
        errors: dict[str, str] = {}
        new = {name for name in frames if name not in self._frames}
        for name, data in frames.items():
            try:
                self._frames.put(name, data)
            except FrameError as error:
                errors[name] = str(error)
        ready, failed = [], []
        for request in requests:
            if wrong := next((errors[name] for name in request.frames if name in errors), ""):
                failed.append(GenerateResult(request.key, error=wrong))
                continue
            missing = tuple(name for name in request.frames if name not in self._frames)
            if missing:
                failed.append(GenerateResult(request.key, missing=missing))
                continue
            if counted:
                self.queries += len(request.frames)
                self.hits += sum(name not in new for name in request.frames)
            try:
                ready.append(PreparedInput(request, self.prompt(request)))
            except Exception as error:  # noqa: BLE001 - this prompt is refused; others are unharmed
                failed.append(GenerateResult(request.key, error=f"{type(error).__name__}: {error}"))
        self._frames.trim()
        return ready, failed

    def prompt(self, request: GenerateRequest) -> Any:
        from .prompts import engine_input

        shown = self._frames.at_hand(request.frames)
        return engine_input(request.ids, request.frames, shown, self._form, self._image_id, normalize=self._normalize())

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
