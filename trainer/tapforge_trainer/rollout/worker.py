"""Plays attempts: owns the way to the phones, the fitting of frames, the step loop and the keys of states. No Ray.

- It decides nothing: the driver says what is played on which lease, with which policy, and when an attempt is stopped.
- An attempt that is stopped returns its steps so far. Nothing here is tried again.
- After the end of an episode it is asked for the episode's rewards, whose screens it has.
- After the end of a lease's life no call to its phone begins, and one under way is cut off (`lease_life`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.protocol import Environment, EnvironmentFault, Outcome, Reason
from tapforge_envs.slots.lease_life import LeasedPhone
from tapforge_envs.slots.source import Lease, Verdict

from ..agents.agent import Agent
from ..attempt import AttemptRequest, EpisodeResult
from ..data.recorded import RecordedSteps
from ..frames.handles import FrameHandle
from ..judges.endpoint import Served
from ..judges.journal import VerdictJournal
from ..records import EpisodeRecord, EpisodeRewards, Generator
from ..rewards.rewarder import Rewarder
from .episode import Earlier, Episode


class RolloutWorker:
    """Belongs to one event loop. A `Player` for the driver that has it in its own process."""

    def __init__(
        self,
        agent: Agent,
        policies: Mapping[str, Generator],
        clients: PhoneClients | RecordedSteps | None = None,
        rewarder: Rewarder | None = None,
        journal: VerdictJournal | None = None,
        earlier: Earlier | None = None,
    ):
        """`policies` by name; "" is the one that learns. `clients` and `rewarder` are closed with the worker; without
        `rewarder` no attempt may ask for rewards. `journal`: of its verdicts, where it is written in this process.
        `earlier`: what came before the first screen of a task; without it nothing."""
        self._agent, self._rewarder, self._journal, self._earlier = agent, rewarder, journal, earlier
        self._policies = policies
        self._clients: PhoneClients | RecordedSteps = clients or PhoneClients()
        self._playing: dict[str, Episode] = {}

    @property
    def steps(self) -> dict[str, int]:
        """Model answers so far of every attempt that is being played."""
        return {name: episode.answers for name, episode in self._playing.items()}

    async def play(self, request: AttemptRequest, lease: Lease) -> EpisodeResult:
        """Raises what the engine or our own code does wrong; what the phone does wrong is in the result."""
        episode = Episode(request, self._agent, self._policies[request.policy], earlier=self._earlier)
        name = request.attempt.episode
        if name in self._playing:
            raise ValueError(f"episode {name} is being played already; names are unique")
        self._playing[name] = episode
        try:
            phone = LeasedPhone(self._clients.open(lease.phone), lease.life)
            result = await episode.play(phone, lease.slot)
            verdict, why = await _put_down(phone, result)
            return replace(result, verdict=verdict, why=why)
        finally:
            del self._playing[name]

    def stop(self, episode: str, reason: Reason) -> None:
        """Ends the attempt as `cancelled` or `reclaimed`. One that is not being played has ended by itself."""
        if (playing := self._playing.get(episode)) is not None:
            playing.stop(reason)

    async def reward(self, record: EpisodeRecord, frames: FrameHandle) -> EpisodeRewards:
        """`frames`: a mapping."""
        if self._rewarder is None:
            raise ValueError(f"episode {record.id} awaits rewards, and this worker was started without any to ask for")
        return await self._rewarder.rewards(record, frames)

    def use_models(self, models: Mapping[str, Served]) -> None:
        """Where judges ask the run's own models from here on, by name."""
        if self._rewarder is not None:
            self._rewarder.use_models(models)

    async def verdicts_written(self) -> None:
        if self._journal is not None:
            await asyncio.to_thread(self._journal.flush)

    def metrics(self) -> dict[str, float]:
        """None: its loop is the driver's."""
        return {}

    async def health(self, phone: PhoneAddress) -> str:
        """Asks a phone from here, where it is used: the instance of its server, or an EnvironmentFault."""
        return await self._clients.health(phone)

    async def close(self) -> None:
        await self._clients.close()
        if self._rewarder is not None:
            await self._rewarder.close()


async def _put_down(phone: Environment, result: EpisodeResult) -> tuple[Verdict, str]:
    """Ends the episode on the phone. A phone that broke is not asked any more; one that has no such task is well."""
    record = result.record
    if record.outcome is Outcome.INVALID and not result.unknown_task:
        return Verdict.DIRTY, record.message
    try:
        await phone.close()
    except EnvironmentFault as fault:
        return Verdict.DIRTY, str(fault)
    return (Verdict.CLEAN if record.valid or record.awaits_rewards else Verdict.UNPROVEN), ""
