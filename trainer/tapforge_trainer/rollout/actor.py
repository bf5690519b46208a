"""A rollout worker as a Ray actor, and the driver's way to it (`rollout/worker_host.py`, `rollout/remote_players.py`).

- An attempt is one call with two return values: a small result that the driver awaits, and the episode's frames, which
  the driver holds by reference and never fetches. Return values outlive the worker's process, on its node.
- Rewards of an episode are one call, with its frames by reference: any worker may be asked.
- A call takes about a millisecond of the driver's loop. When many attempts begin at once, others get a turn after one
  of each worker.
- Neither `ray.cancel` nor retries of tasks or actors are used: the driver alone stops and starts again.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..agents.agent import Agent
from ..attempt import AttemptRequest, EpisodeResult
from ..frames.handles import FrameHandle
from ..judges.endpoint import Served
from ..judges.journal import VerdictRelay, Verdicts
from ..placement.actors import reason
from ..records import EpisodeRecord, EpisodeRewards, Generator
from ..rewards.rewarder import Rewarder, missing
from .baselines import baselines
from .remote_players import WorkerLost
from .worker import RolloutWorker
from .worker_host import Health, LeaseTerms, RewardTerms, Wanted, WorkerHost, WorkerReport

if TYPE_CHECKING:
    from tapforge_envs.clients.phones import PhoneAddress

    from ..engine.client import EngineClient
    from ..engine.wire import EngineConnection

#: threads that fit frames would each keep a heap of their own, which large screens fill: two are enough
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
#: for an answer of a worker that is up, seconds
_READY_SECONDS = 30.0
#: that the frames of one episode may take to come from another node
_FETCH_SECONDS = 120.0

MakePolicies = Callable[[Agent], Mapping[str, Generator]]
#: given where verdicts go, and lines for people
MakeRewarder = Callable[[Verdicts, Callable[[str], None]], Rewarder | None]
#: lines for people that are kept until the driver asks
_NOTES = 8


@dataclass(frozen=True, slots=True)
class Reached:
    """How the policy's engines and the models of `spec.models` are asked."""

    engines: EngineConnection
    models: Mapping[str, Served] = field(default_factory=dict)


class RolloutActor:
    """Methods are called by `RayCarrier` only. One event loop."""

    def __init__(self, make_agent: Callable[[], Agent], make_policies: MakePolicies, make_rewarder: MakeRewarder):
        self._make_agent, self._make_policies, self._make_rewarder = make_agent, make_policies, make_rewarder
        self._policies: dict[str, Generator] = {}
        self._client: EngineClient | None = None
        self._worker: RolloutWorker | None = None
        self._host: WorkerHost | None = None

    async def ready(self) -> None:
        agent = await asyncio.to_thread(self._make_agent)
        self._policies.update(self._make_policies(agent))
        verdicts, notes = VerdictRelay(), deque[str](maxlen=_NOTES)
        self._worker = RolloutWorker(agent, self._policies, rewarder=self._make_rewarder(verdicts, notes.append))
        self._host = WorkerHost(self._worker, self._use, verdicts=verdicts, notes=notes)

    async def play(self, request: AttemptRequest, terms: LeaseTerms) -> tuple[bytes, Any]:
        """The first value is pickled here: Ray's own pickler takes twice as long for records."""
        assert self._host is not None
        result = await self._host.play(request, terms)
        return pickle.dumps(replace(result, frames={})), result.frames

    async def reward(self, packed: bytes, handle: list[FrameHandle]) -> bytes:
        """The frames come inside a list, so that Ray leaves it to this process to fetch them."""
        from ray.exceptions import ObjectLostError

        assert self._host is not None
        record, terms = pickle.loads(packed)  # noqa: S301 (the driver's)
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                frames = handle[0] if isinstance(handle[0], Mapping) else await handle[0]
        except ObjectLostError as lost:
            return pickle.dumps(missing(record, f"its screens are lost: {reason(lost)}"))
        except TimeoutError:
            why = f"its screens are lost: they didn't come from their node within {_FETCH_SECONDS:g} s"
            return pickle.dumps(missing(record, why))
        return pickle.dumps(await self._host.reward(record, frames, terms))

    async def exchange(self, wanted: Wanted) -> WorkerReport:
        assert self._host is not None
        return self._host.exchange(wanted)

    async def health(self, phone: PhoneAddress) -> Health:
        assert self._host is not None
        return await self._host.health(phone)

    def process(self) -> int:
        return os.getpid()

    def _use(self, reached: Reached) -> None:
        from ..engine.client import EngineClient

        if self._worker is not None:
            self._worker.use_models(reached.models)
        if self._client is None:
            self._client = self._policies[""] = EngineClient(reached.engines)
        else:
            self._client.use(reached.engines.replicas)


class RayCarrier:
    """The driver's way to one actor."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._turn = asyncio.Lock()

    async def process(self) -> int:
        """Its number on its machine."""
        return await self._answer(self._actor.process.remote(), _READY_SECONDS)

    async def exchange(self, wanted: Wanted, seconds: float) -> WorkerReport:
        return await self._answer(self._actor.exchange.remote(wanted), seconds)

    async def play(self, request: AttemptRequest, terms: LeaseTerms) -> EpisodeResult:
        """Ends with the attempt, whose calls have deadlines, or with the worker."""
        async with self._turn:
            packed, frames = self._actor.play.options(num_returns=2).remote(request, terms)
            await asyncio.sleep(0)
        result: EpisodeResult = pickle.loads(await self._answer(packed, None))  # noqa: S301 (the worker's)
        return replace(result, frames=frames)

    async def reward(self, record: EpisodeRecord, frames: FrameHandle, terms: RewardTerms) -> EpisodeRewards:
        """Ends with the deadline of rewards, or with the worker."""
        async with self._turn:
            packed = self._actor.reward.remote(pickle.dumps((record, terms)), [frames])
            await asyncio.sleep(0)
        return pickle.loads(await self._answer(packed, None))  # noqa: S301 (the worker's)

    async def health(self, phone: PhoneAddress, seconds: float) -> Health:
        return await self._answer(self._actor.health.remote(phone), seconds)

    async def close(self) -> None:
        import ray

        ray.kill(self._actor)

    async def _answer(self, reference: Any, seconds: float | None) -> Any:
        from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, RayActorError, RayTaskError

        try:
            async with asyncio.timeout(seconds):
                return await reference
        except RayTaskError as error:  # first: it has the type of what was raised there, too
            raise error.cause from error
        except TimeoutError as error:
            raise WorkerLost(f"it gave no answer within {seconds} s", dead=False) from error
        except (ObjectLostError, NodeDiedError) as error:  # an answer that is too large to come inline dies with a node
            raise WorkerLost(f"its answer is lost: {reason(error)}", dead=False) from error
        except RayActorError as error:
            dead = isinstance(error, ActorDiedError)
            what = "ended" if dead else "is out of reach"
            raise WorkerLost(f"its process {what}: {reason(error)}", dead=dead) from error


def no_rewarder(verdicts: Verdicts, say: Callable[[str], None]) -> None:
    """For runs whose rewards are all computed from records."""


async def start_rollout_actor(
    make_agent: Callable[[], Agent],
    seconds: float,
    *,
    cpus: float,
    make_policies: MakePolicies = baselines,
    make_rewarder: MakeRewarder = no_rewarder,
) -> RayCarrier:
    """Returns when it can play. `cpus`: cores that Ray sets aside for it. `make_policies`: what answers beside the
    engines. `make_rewarder`: what asks for rewards. Raises WorkerLost."""
    import ray

    actor = (
        ray.remote(RolloutActor)
        .options(
            num_cpus=cpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": _ENVIRONMENT},
        )
        .remote(make_agent, make_policies, make_rewarder)
    )
    carrier = RayCarrier(actor)
    await carrier._answer(actor.ready.remote(), seconds)
    return carrier
