"""The recorder in a process of its own, on the driver's node, and the driver's way to it.

- It is the only writer of the run's folder: workers and ranks on other nodes need no disk of the run.
- Frames in another process come as a reference (`frames/handles.py`), which the driver passes on inside a list, so that
  Ray fetches nothing before the call: the recorder fetches them itself, and no pixel passes through the driver.
- Calls are done in the order in which they were made, a bounded number of bytes at a time. The rest waits in the
  driver, as references: `flush` waits for all of it, a batch for `flush`, and the rollout admits no more than its
  batches hold.
- A call takes about a millisecond of the driver's loop, and others get a turn after each. Episodes go as pickled bytes:
  Ray's own pickler takes twice as long for them.
- Every call has a deadline. Nothing is tried again: the first failure ends the recording and reaches the driver, and
  what was on its way already is not written.
- A driver that is gone takes the recorder with it, at most `WATCH_SECONDS` later; one whose folder was taken over by a
  later attempt (`cluster/storage.py`) has no path to write to any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..attempt import EpisodeResult
from ..frames.handles import FrameHandle
from ..placement.actors import reason
from ..records import EpisodeRecord, EpisodeRewards, GroupRecord
from .learner_tokens import LearnerTokens
from .reader import RecordingError
from .recorder import Recorder
from .retention import Retention

log = logging.getLogger(__name__)

#: for the start of the process, and for a call once those before it are done, seconds
START_SECONDS, CALL_SECONDS = 120.0, 300.0
#: of which fetching an episode's frames may take
FETCH_SECONDS: Final = 120.0
#: how often the recorder looks whether its driver lives
WATCH_SECONDS: Final = 1.0
#: frames that are on their way at once
IN_FLIGHT_BYTES: Final = 256 << 20
IN_FLIGHT_CALLS: Final = 64
#: what a frame is taken for until some were written
_FRAME_BYTES: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class WrittenEpisode:
    """What became of an episode."""

    #: of its frames, as they came
    frames: int = 0
    bytes: int = 0
    #: its frames were lost on their way: the steps are recorded without them
    lost: bool = False


class RecorderActor:
    """Called by `RecorderProcess` and `RemoteRecording` only, one call at a time."""

    def __init__(self, driver: int, born: str | None):
        self._recorders: dict[str, Recorder] = {}
        if born is not None and _born(driver) == born:  # else Ray alone notices its end
            threading.Thread(target=_end_with, args=(driver, born), name="driver-watch", daemon=True).start()

    def process(self) -> int:
        return os.getpid()

    def open(self, folder: Path, retention: Retention, spared: Callable[[], Collection[str]]) -> None:
        self._recorders[str(folder)] = Recorder(folder, retention, spared=spared)

    def episode(self, folder: str, packed: bytes, handle: list[FrameHandle]) -> WrittenEpisode:
        with self._recorder(folder) as recorder:
            record, ui_trees = _unpack(packed)
            frames = self._fetched(record.id, handle[0]) if recorder.keeps(record.group) else {}
            recorder.episode(record, frames or {}, ui_trees)
        if frames is None:
            return WrittenEpisode(lost=True)
        return WrittenEpisode(len(frames), sum(len(frame.data) for frame in frames.values()))

    def rewards(self, folder: str, episode: str, rewards: EpisodeRewards) -> None:
        with self._recorder(folder) as recorder:
            recorder.rewards(episode, rewards)

    def group(self, folder: str, record: GroupRecord, dropped: str | None) -> None:
        with self._recorder(folder) as recorder:
            recorder.group(record, dropped)

    def learner_tokens(self, folder: str, update: int, episodes: Sequence[LearnerTokens]) -> None:
        with self._recorder(folder) as recorder:
            recorder.learner_tokens(update, episodes)

    def sync(self, folder: str) -> None:
        with self._recorder(folder) as recorder:
            recorder.sync()

    def close(self, folder: str) -> None:
        self._recorders.pop(folder).close()

    @contextmanager
    def _recorder(self, folder: str) -> Iterator[Recorder]:
        if folder not in self._recorders:
            raise RecordingError(f"{folder} is closed, by close() or by an error that was raised before")
        try:
            yield self._recorders[folder]
        except BaseException:
            with suppress(RecordingError):
                self._recorders.pop(folder).close()
            raise

    def _fetched(self, episode: str, handle: FrameHandle) -> Mapping[str, Any] | None:
        """None: they are lost."""
        if isinstance(handle, Mapping):
            return handle
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError

        try:
            return ray.get(handle, timeout=FETCH_SECONDS)
        except ObjectLostError:
            return None
        except GetTimeoutError as error:
            why = f"the frames of episode {episode} could not be fetched within {FETCH_SECONDS:g} s"
            raise RecordingError(f"{why}: look at the network between the nodes, and at their object stores") from error


class RecorderProcess:
    """An `OpenRecording`: begins recordings in the actor. Belongs to one event loop."""

    def __init__(self, actor: Any, process: int):
        self._actor = actor
        self.process = process

    @staticmethod
    async def start(seconds: float = START_SECONDS) -> RecorderProcess:
        """On this node. Raises RecordingError."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": here}
        driver = os.getpid()
        actor = ray.remote(RecorderActor).options(**options).remote(driver, _born(driver))
        return RecorderProcess(actor, await _answer(actor.process.remote(), seconds))

    async def __call__(
        self, folder: Path, retention: Retention, spared: Callable[[], Collection[str]] = frozenset
    ) -> RemoteRecording:
        folder = folder.absolute()
        await _answer(self._actor.open.remote(folder, retention, spared), CALL_SECONDS)
        return RemoteRecording(self._actor, str(folder))

    async def close(self) -> None:
        """After the recordings, which write what they have when they are closed."""
        import ray

        await asyncio.to_thread(ray.kill, self._actor)


@dataclass(slots=True)
class _Call:
    name: str
    args: tuple[Any, ...]
    #: as far as known
    bytes: int = 0
    done: asyncio.Future[None] | None = None
    answer: Any = None


class RemoteRecording:
    """A `RecordWriter` by way of the actor."""

    def __init__(self, actor: Any, folder: str):
        self._actor, self._folder = actor, folder
        self._on_error: Callable[[BaseException], None] | None = None
        self._error: BaseException | None = None
        self._waiting: deque[_Call] = deque()
        self._flying: deque[_Call] = deque()
        self._task: asyncio.Task[None] | None = None
        self._frames, self._bytes = 1, _FRAME_BYTES
        #: episodes whose frames were lost on their way
        self.lost = 0

    def report_to(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        if self._error is not None:
            on_error(self._error)

    def episode(self, result: EpisodeResult) -> None:
        size = len(result.record.frames) * self._bytes // self._frames
        self._put(_Call("episode", (_packed(result), [result.frames]), size))

    def rewards(self, episode: str, rewards: EpisodeRewards) -> None:
        self._put(_Call("rewards", (episode, rewards)))

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        # The steps of its episodes came before it.
        episodes = tuple(replace(episode, steps=()) for episode in record.episodes)
        self._put(_Call("group", (replace(record, episodes=episodes), dropped)))

    def learner_tokens(self, update: int, episodes: Sequence[LearnerTokens]) -> None:
        self._put(_Call("learner_tokens", (update, episodes)))

    async def flush(self) -> None:
        await self._done("sync")

    async def close(self) -> None:
        await self._done("close")
        if self._error is not None:
            raise self._error

    @property
    def in_flight(self) -> int:
        """Bytes of frames on their way."""
        return sum(call.bytes for call in self._flying)

    async def _done(self, name: str) -> None:
        if self._error is not None:
            return
        call = _Call(name, (), done=asyncio.get_running_loop().create_future())
        self._put(call)
        assert call.done is not None
        await call.done

    def _put(self, call: _Call) -> None:
        if self._error is not None:
            return
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send(), name="recorder")

    async def _send(self) -> None:
        """Until nothing waits, or the first failure."""
        try:
            while self._waiting or self._flying:
                await self._launch()
                call = self._flying[0]
                answer = await _answer(call.answer, CALL_SECONDS)
                self._flying.popleft()
                if isinstance(answer, WrittenEpisode):
                    self._note(call, answer)
                if call.done is not None and not call.done.done():
                    call.done.set_result(None)
            self._task = None
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    async def _launch(self) -> None:
        while self._waiting and len(self._flying) < IN_FLIGHT_CALLS:
            if self._flying and self.in_flight + self._waiting[0].bytes > IN_FLIGHT_BYTES:
                break
            call = self._waiting.popleft()
            self._flying.append(call)  # first: the caller of one that can't be made gets the error, too
            call.answer = getattr(self._actor, call.name).remote(self._folder, *call.args)
            call.args = ()  # the driver's hold on the frames is the scheduler's alone
            await asyncio.sleep(0)

    def _note(self, call: _Call, written: WrittenEpisode) -> None:
        self._frames += written.frames
        self._bytes += written.bytes
        if written.lost:
            self.lost += 1
            log.warning("the frames of an episode were lost before they were recorded; its steps are recorded")

    def _fail(self, error: BaseException) -> None:
        self._error = error
        left = [*self._flying, *self._waiting]
        self._flying.clear()
        self._waiting.clear()
        if self._on_error is not None:
            self._on_error(error)
        for call in left:
            if call.done is not None and not call.done.done():
                call.done.set_result(None)


def _packed(result: EpisodeResult) -> bytes:
    return pickle.dumps((result.record, result.ui_trees))


def _unpack(packed: bytes) -> tuple[EpisodeRecord, Mapping[str, str]]:
    return pickle.loads(packed)  # noqa: S301 (the driver's)


async def _answer(reference: Any, seconds: float) -> Any:
    """Raises what the recorder raised, and RecordingError for one that ended or doesn't answer."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        async with asyncio.timeout(seconds):
            return await reference
    except TimeoutError as error:
        why = f"the recorder's process gave no answer within {seconds:g} s: does the disk of the run's folder hang?"
        raise RecordingError(why) from error
    except RayActorError as error:
        raise RecordingError(f"the recorder's process ended: {reason(error)}") from error
    except RayTaskError as error:
        if isinstance(error.cause, RecordingError):
            raise error.cause from error
        raise error.as_instanceof_cause() from error


def _born(process: int) -> str | None:
    """When a process began, in words of the kernel's: a number alone may be given to another one. None: it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, LookupError):
        return None


def _end_with(driver: int, born: str) -> None:
    while _born(driver) == born:
        time.sleep(WATCH_SECONDS)
    os._exit(1)  # half an entry at the end is cut off when the recording is opened next
