"""A vLLM engine inside this process, driven by one thread of its own. No Ray.

Why inside: `LLMEngine` in the actor's process needs one process instead of two, starts in two thirds of the time,
samples as fast on one core as the asynchronous front end does on two, and lets *us* decide between two steps what
happens next.

Rules:
- Everything that touches vLLM runs on the engine's thread: as a step, or as a call between two steps (`call`).
- Requests come ready made: their frames are decoded in another thread (`preprocessor.py`).
- A request is answered exactly once, by `on_done`, with its result or with the error that names what was wrong with it.
- Only allowed tokens can be sampled, and log-probabilities are vLLM's processed ones: after mask and temperature.
- Asleep, nothing is sampled and the devices' memory is free: weights and caches are gone. Requests come in and wait;
  those in flight are computed again after new weights. Waking is part of a round of weights: memory for weights, the
  weights, memory for the cache.
- New weights arrive between two steps. Requests in flight either go on with them ("keep": their cache is dropped and
  recomputed, and every token knows its version) or finish before ("wait"). While an update is unproven, results are
  held back; they leave by `release` or turn into errors by `discard`. Where another update follows, clients ask again
  instead, and nothing is sampled for them until that one is proven.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..learner.frame_store import PixelFormat
from ..placement.settings import EngineSettings, PauseMode, SleepPart
from ..placement.start_stage import stage_of_thread
from .cache_use import CacheUse
from .preprocessor import PreparedInput, Preprocessor
from .vllm import adapter_request, build, image_id
from .wire import DEAD, PROBE, REPEAT, CacheCounts, GenerateRequest, GenerateResult

T = TypeVar("T")


class Sampler:
    """Start it, wait for `ready`, then `submit`."""

    def __init__(self, settings: EngineSettings, on_done: Callable[[list[GenerateResult]], None]):
        self.settings = settings
        self.ready: Future[None] = Future()
        #: why nothing is sampled any more, as soon as that is so
        self.dead: Future[str] = Future()
        self._on_done = on_done
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._death: BaseException | None = None
        folder = Path(settings.model)
        bound = settings.frames_mib * 1024 * 1024
        self._inputs = Preprocessor(PixelFormat.of_folder(folder), image_id(folder), bound, self._normalizes)
        #: no step until new weights are in
        self._paused = False
        #: its devices' memory is free
        self._asleep = False
        self._draining = False
        #: why nothing may be sampled: the weights are half loaded
        self._broken = ""
        #: requests that came while draining
        self._queued: list[PreparedInput] = []
        #: results held back while an update is unproven
        self._held: list[GenerateResult] | None = None
        self._unfinished: set[str] = set()
        #: what was in each cache when the last weights were in and nothing was computed with them: `sync` looks at it
        self.kept: dict[str, int] = {}
        self._use = CacheUse()
        self._llm: Any = None
        self._version = 0
        self._thread = threading.Thread(target=self._main, name="vllm", daemon=True)
        self._thread.start()

    @property
    def stage(self) -> str:
        """What it does until it is ready."""
        return stage_of_thread(self._thread.ident)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerateRequest], frames: dict[str, bytes]) -> None:
        def refused(error: BaseException | None) -> None:
            if error is not None:  # the engine is dead
                self._on_done([GenerateResult(request.key, error=str(error)) for request in requests])

        def prepare() -> None:
            ready, failed = self._inputs.prepare(requests, frames, counted=not requests[0].key.startswith(PROBE))
            if failed:
                self._on_done(failed)
            if ready:
                self.call(lambda: self._add(ready)).add_done_callback(lambda call: refused(call.exception()))

        if requests:
            self._inputs.run(prepare).add_done_callback(lambda prepared: refused(prepared.exception()))

    def abort(self, keys: Sequence[str]) -> None:
        """Ends requests that no client waits for any more."""
        self._inputs.run(lambda: self.call(lambda: self._abort(keys)))

    @property
    def cache_counts(self) -> CacheCounts:
        return self._use.counts(self._inputs.queries, self._inputs.hits)

    def renew(self, mode: PauseMode, load: Callable[[Any], None], version: int) -> Future[None]:
        """Pause, load new weights by `load(llm)`, drop every cache, go on; results are held back from now on."""
        return self.call(lambda: self._renew(mode, load, version))

    def pause(self, mode: PauseMode) -> Future[None]:
        """The first half of `renew`, where weights come in by calls of their own; `proceed` is the second."""
        return self.call(lambda: self._pause(mode))

    def proceed(self, version: int) -> Future[None]:
        return self.call(lambda: self._proceed(version))

    def sleep(self, mode: PauseMode) -> Future[None]:
        """Pauses as `pause` does, and frees the devices' memory."""
        return self.call(lambda: self._sleep(mode))

    def wake(self, part: SleepPart) -> Future[None]:
        """Takes memory for `part` again; there is nothing in it. Steps go on with `proceed`."""
        return self.call(lambda: self._wake(part))

    def collective(self, method: str | Callable[[Any], Any], **arguments: Any) -> Future[Any]:
        """A method of vLLM's workers, or a function of one: what each of them returns."""
        return self.call(lambda: self._llm.collective_rpc(method, kwargs=arguments))

    def release(self) -> Future[None]:
        """The update is proven: what was held back leaves."""
        return self.call(self._release)

    def discard(self, why: str, again: bool = False) -> Future[None]:
        """The update is wrong: nothing sampled with it leaves; every request turns into an error. `again`: another
        update follows. Clients ask again for what was sampled, and what they ask waits for that one."""
        return self.call(lambda: self._discard(why, again))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the engine's thread, between two steps."""
        done: Future[T] = Future()
        self._calls.put((function, done))
        if self._death is not None:
            self._refuse(self._death)
        return done

    def stop(self, timeout: float = 10.0) -> None:
        self._inputs.stop()
        self._calls.put(None)
        self._thread.join(timeout)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._llm = build(self.settings)
            self._use.watch(self._llm)
            self._llm.set_weight_version("0")
        except BaseException as error:  # noqa: BLE001 - the waiter for `ready` gets it
            self.ready.set_exception(error)
            self.dead.set_result(f"{DEAD}: {type(error).__name__}: {error}")
            return
        self.ready.set_result(None)
        try:
            while self._turn():
                pass
            self._death = RuntimeError("the engine was stopped")
        except BaseException as error:  # noqa: BLE001 - nothing can be sampled any more: every waiter gets the reason
            self._death = error
            held, self._held = self._held or [], None
            waiting = sorted({*self._unfinished, *(prepared.request.key for prepared in self._queued)})
            self._deliver(held + [GenerateResult(key, error=_dead(error)) for key in waiting])
        self._refuse(self._death)
        self.dead.set_result(_dead(self._death))

    def _refuse(self, why: BaseException) -> None:
        """Answers every call that is still in the queue."""
        while True:
            try:
                call = self._calls.get(block=False)
            except queue.Empty:
                return
            if call is not None:
                call[1].set_exception(RuntimeError(_dead(why)))

    def _turn(self) -> bool:
        """Calls first, then one step."""
        idle = self._paused or not self._llm.has_unfinished_requests()
        while idle or not self._calls.empty():
            call = self._calls.get()  # ends with the next call, at the latest by `stop`
            if call is None:
                return False
            function, done = call
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)
            idle = False
        if not self._paused and self._llm.has_unfinished_requests():
            self._step()
        return True

    def _step(self) -> None:
        finished = [output for output in self._llm.step() if output.finished]
        done = [_result(output) for output in finished]
        for output in finished:
            self._use.answered(output)
        if done:
            self._unfinished.difference_update(result.key for result in done)
            self._deliver(done)

    def _deliver(self, done: list[GenerateResult]) -> None:
        if self._held is not None:
            self._held.extend(result for result in done if not result.key.startswith(PROBE))
            done = [result for result in done if result.key.startswith(PROBE)]
        if done:
            self._on_done(done)

    def _add(self, prepared: Sequence[PreparedInput]) -> None:
        failed: list[GenerateResult] = []
        for one in prepared:
            request = one.request
            if self._broken:
                failed.append(GenerateResult(request.key, error=self._broken))
                continue
            if self._draining and not request.key.startswith(PROBE):
                self._queued.append(one)
                continue
            try:
                adapter = adapter_request(self.settings, self._version)
                self._llm.add_request(request.key, one.prompt, self._sampling(request), lora_request=adapter)
                self._unfinished.add(request.key)
            except Exception as error:  # noqa: BLE001 - vLLM refuses this prompt; others are unharmed
                failed.append(GenerateResult(request.key, error=f"{type(error).__name__}: {error}"))
        if failed:
            self._on_done(failed)

    def _normalizes(self) -> bool:
        """Whether patches are scaled before they reach the model. Waits for the engine."""
        from .prompts import normalizes_bytes

        self.ready.result()
        return not normalizes_bytes(self._llm)

    def _sampling(self, request: GenerateRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            seed=request.seed,
            max_tokens=request.max_tokens,
            logprobs=0,
            detokenize=False,
            stop_token_ids=[] if request.ignore_stop else list(self.settings.stop_ids),
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            prompt_logprobs=0 if request.scored else None,
        )

    def _abort(self, keys: Sequence[str]) -> None:
        gone = set(keys)
        self._queued = [one for one in self._queued if one.request.key not in gone]
        self._llm.abort_request([key for key in keys if key in self._unfinished])
        self._unfinished -= gone

    # --- new weights --------------------------------------------------------------------------------------------------

    def _renew(self, mode: PauseMode, load: Callable[[Any], None], version: int) -> None:
        self._pause(mode)
        try:
            load(self._llm)
        except Exception as error:
            self._discard(f"loading the weights of version {version} failed: {type(error).__name__}: {error}")
            raise
        self._proceed(version)

    def _pause(self, mode: PauseMode) -> None:
        if mode == "wait":
            self._draining = True
            seconds = self.settings.answer_seconds
            deadline = time.monotonic() + seconds
            while self._llm.has_unfinished_requests():
                if time.monotonic() > deadline:
                    self._draining = False
                    self._admit()
                    raise TimeoutError(
                        f"{len(self._unfinished)} requests did not finish within {seconds:.0f} s before a weight "
                        "sync; shorten responses or set sync.midEpisode"
                    )
                self._step()
        self._paused = True
        if self.settings.device == "cuda":
            # A step that was scheduled ahead may still run there. vLLM drops what it samples (`_proceed`), but its
            # collectives must not meet those that bring the weights.
            self._llm.collective_rpc("synchronize_device")

    def _sleep(self, mode: PauseMode) -> None:
        self._pause(mode)
        if self._asleep:  # each step of a warm start asks for it
            return
        # Level 2: weights come from the learner, so the host's memory keeps no copy, but where adapters come alone.
        self._llm.sleep(level=2 if self.settings.lora is None else 1, mode="keep")
        self._asleep = True

    def _wake(self, part: SleepPart) -> None:
        self._llm.wake_up(tags=[part])
        self._asleep = False
        if part == "weights":
            self._llm.collective_rpc(clear_scratch)

    def _proceed(self, version: int) -> None:
        self._broken, self._version = "", version
        self._llm.set_weight_version(str(version))
        self._use.dropping(self._llm)
        # Keys and values, processed images and image embeddings are all functions of the old weights.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache, so answers would mix old and new weights")
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()
        self.kept = self._left_in_caches()
        self._held = []
        self._paused = False

    def _left_in_caches(self) -> dict[str, int]:
        """Entries that a request could hit now, by cache. vLLM's answers to resets say nothing of them."""
        scheduler = self._llm.engine_core.engine_core.scheduler
        blocks = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        return {
            "prefix cache": len(blocks),
            "encoder cache": len(scheduler.encoder_cache_manager.cached),
            "workers' encoder cache": max(self._llm.collective_rpc(encoded_frames)),
        }

    def _admit(self) -> None:
        queued, self._queued = self._queued, []
        if queued:
            self._add(queued)

    def _release(self) -> None:
        held, self._held = self._held or [], None
        self._draining = False
        self._admit()
        self._deliver(held)

    def _discard(self, why: str, again: bool = False) -> None:
        if self._paused:  # half of the new weights may be in: the next full set mends that
            self._broken, self._paused = why, False
        held, self._held = self._held or [], None
        failed = {*self._unfinished, *(result.key for result in held)}
        self._abort(list(self._unfinished))
        self._draining = again
        if not again:
            failed.update(one.request.key for one in self._queued)
            self._queued = []
        self._deliver([GenerateResult(key, error=f"{REPEAT}: {why}" if again else why) for key in sorted(failed)])


def encoded_frames(worker: Any) -> int:
    """Called on vLLM's workers: how many they keep."""
    return len(worker.model_runner.encoder_cache)


def clear_scratch(worker: Any) -> None:
    """Called on vLLM's workers when the memory of their weights is there again, with whatever lies in it. vLLM puts
    back buffers and takes parameters anew. What Qwen3-VL adds to the first layers' inputs lies in neither: it is
    written and zeroed again around a step with frames, and every other step takes it for zero."""
    for tensor in getattr(worker.get_model(), "deepstack_input_embeds", ()):
        tensor.zero_()


def _dead(why: BaseException) -> str:
    return f"{DEAD}: {type(why).__name__}: {why}"


def _result(output: Any) -> GenerateResult:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
    if output.prompt_logprobs is not None:
        of_prompt = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        logprobs = [float("nan") if entry is None else entry[token].logprob for entry, token in of_prompt]
    return GenerateResult(
        key=output.request_id,
        prompt_ids=np.asarray(output.prompt_token_ids, np.int32).tobytes(),
        ids=np.asarray(ids, np.int32).tobytes(),
        logprobs=np.asarray(logprobs, np.float32).tobytes(),
        versions=tuple((int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
        finish_reason=completion.finish_reason,
    )
