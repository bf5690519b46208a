"""One attempt at a task on a leased phone: observe, ask, act, until it ends for one of `protocol.Reason`.

Rules:
1. A malformed answer executes nothing: the screen stays, the answer counts as a step, and too many in a row end the
   episode. Environment steps are numbered by executed actions, step records by answers. An action that the environment
   doesn't have, or refuses before it executes anything, is a malformed answer too.
2. A final action (answer, terminate) is sent to the phone; then the judge is asked, but for a declared infeasibility,
   which the task itself decides. Where rewards say how episodes end, and not the environment, neither is asked.
3. Whatever the phone does wrong ends in a record with that reason, with the steps so far. What the engine or our own
   code does wrong is raised: it would happen to every episode.
4. Deadlines are the phone's: only its calls count against them. The time that the model takes is the policy's, which is
   bounded by steps and tokens; a slow engine makes no episode invalid and no phone dirty.
5. `outcome_of` alone makes an outcome of it.
6. A task without a goal has the one that its environment says; whether it can be done is the environment's to say.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tapforge_envs.protocol import (
    FINAL_ACTIONS,
    Action,
    Environment,
    EnvironmentFault,
    Observation,
    Outcome,
    Reason,
    StepResult,
    Task,
    Terminate,
    UnknownTask,
    UnsupportedAction,
    needs_score,
    outcome_of,
)

from ..agents.agent import Agent, ContextLimit, Prepared, Turn
from ..agents.parsing import ParseFailure
from ..agents.screens import as_drawn
from ..attempt import AttemptRequest, EpisodeResult, PhoneCall, seed_of
from ..frames.frame import FittedFrame
from ..records import EpisodeRecord, Generation, Generator, Prompt, StepRecord
from ..states.reading import StateReading, is_free, read_state

T = TypeVar("T")
#: what was seen and answered before a task's first screen; may raise EnvironmentFault
Earlier = Callable[[Task], Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an episode is."""

    answers: int = 0
    malformed_in_a_row: int = 0
    executed: int = 0


def after_answer(
    standing: Standing, answer: Action | ParseFailure, max_steps: int, max_parse_failures: int
) -> tuple[Standing, Reason | None]:
    """The new standing, and why the episode ends after this answer (its action executed), or None."""
    answers = standing.answers + 1
    if isinstance(answer, ParseFailure):
        now = Standing(answers, standing.malformed_in_a_row + 1, standing.executed)
        if now.malformed_in_a_row >= max_parse_failures:
            return now, Reason.PARSE_FAILURES
    else:
        now = Standing(answers, 0, standing.executed + 1)
        if isinstance(answer, FINAL_ACTIONS):
            infeasible = isinstance(answer, Terminate) and answer.status == "infeasible"
            return now, Reason.DECLARED_INFEASIBLE if infeasible else Reason.DONE
    return now, Reason.STEP_LIMIT if answers >= max_steps else None


def as_stated(task: Task, first: Observation) -> Task:
    """The task with what its environment says of it after the reset."""
    feasible = task.feasible if first.feasible is None else first.feasible
    return task.model_copy(update={"goal": task.goal or first.goal, "feasible": feasible})


class Stopped(Exception):
    """The episode ends by our own doing, in the middle of a step."""


class Episode:
    def __init__(
        self,
        request: AttemptRequest,
        agent: Agent,
        generator: Generator,
        clock: Callable[[], float] = time.time,
        earlier: Earlier | None = None,
    ):
        """`earlier`: what came before the first screen, where it was recorded; called in a thread."""
        self._attempt = request.attempt
        self._task = request.attempt.task
        self._agent = agent
        self._generator = generator
        self._sampling = request.sampling
        self._limits = request.limits
        self._verified, self._rewarded = request.verified, request.rewarded
        self._clock, self._earlier = clock, earlier
        self._steps: list[StepRecord] = []
        self._frames: dict[str, FittedFrame] = {}
        self._ui_trees: dict[str, str] = {}
        self._last_frame: str | None = None
        #: the current screen and the last one as the device drew them, where these are kept
        self._screen: str | None = None
        self._last_screen: str | None = None
        self._call: PhoneCall | None = None
        self._slot = ""
        #: that calls to the phone took up to now
        self._phone_seconds = 0.0
        self._stop: Reason | None = None
        self._runner: asyncio.Task[Any] | None = None

    @property
    def answers(self) -> int:
        """Model answers so far."""
        return len(self._steps)

    def stop(self, reason: Reason) -> None:
        """Ends the episode as `cancelled` or `reclaimed` wherever it is; `play` returns with the steps so far."""
        if outcome_of(reason, feasible=True, threshold=1.0, score=1.0) is not None:
            raise ValueError(f"an episode is stopped as cancelled or reclaimed, not as {reason}")
        self._stop = reason
        if self._runner is not None:
            self._runner.cancel()

    async def play(self, environment: Environment, slot: str) -> EpisodeResult:
        started, self._slot = self._clock(), slot
        score: float | None = None
        broke: PhoneCall | None = None
        unknown = False
        self._runner = asyncio.current_task()
        try:
            if self._stop is not None:
                raise Stopped("before it began")
            reason, score, message = await self._until_the_end(environment)
        except EnvironmentFault as fault:
            reason, message, broke = fault.reason, str(fault), self._call
            unknown = isinstance(fault, UnknownTask)
        except Stopped as stopped:
            reason, message = self._stop or Reason.CANCELLED, str(stopped)
        except asyncio.CancelledError:
            if self._stop is None or self._runner is None:
                raise
            self._runner.uncancel()
            reason, message = self._stop, f"stopped after {len(self._steps)} answers"
        finally:
            self._runner = None
        task = self._task
        judged = reason in (Reason.DONE, Reason.DECLARED_INFEASIBLE) and not self._verified
        outcome = None if judged else outcome_of(reason, feasible=task.feasible, threshold=task.threshold, score=score)
        awaits = self._rewarded and (judged or outcome in (Outcome.SUCCESS, Outcome.FAILURE))
        record = EpisodeRecord(
            id=self._attempt.episode,
            group=self._attempt.group,
            task=task,
            attempt=self._attempt.rerun,
            slot=slot,
            seed=self._attempt.seed,
            reason=reason,
            outcome=outcome,
            score=score,
            message=message,
            steps=tuple(self._steps),
            started=started,
            ended=self._clock(),
            last_frame=self._last_frame,
            last_screen=self._last_screen,
            awaits_rewards=awaits,
        )
        size = sum(len(frame.data) for frame in self._frames.values())
        return EpisodeResult(
            self._attempt, record, self._frames, broke, self._phone_seconds, self._ui_trees, size, unknown_task=unknown
        )

    async def _until_the_end(self, environment: Environment) -> tuple[Reason, float | None, str]:
        limits = self._limits
        first = await self._on_phone(PhoneCall("reset"), environment.reset(self._task))
        task = self._task = as_stated(self._task, first)
        if not task.goal.strip():
            what = f"neither the task {task.key} nor its environment says a goal: write one into the task file"
            raise UnknownTask(f"{self._slot}: reset: {what}")
        seen, state = await self._see(first)
        history = [] if self._earlier is None else list(await asyncio.to_thread(self._earlier, self._task))
        standing = Standing()
        while True:
            prompt = self._agent.prompt(task.goal, history, seen)
            if isinstance(prompt, ContextLimit):
                return Reason.CONTEXT_LIMIT, None, str(prompt)
            generation, seconds_model = await self._ask(prompt, standing.answers)
            text = self._agent.decode(generation.ids)
            answer = self._agent.read(text, generation.finish_reason, seen.frame)
            step = self._step_record(standing.answers, seen, state, prompt, generation, text, seconds_model)
            result: StepResult | None = None
            begun = time.perf_counter()
            if not isinstance(answer, ParseFailure):
                wire = answer.model_dump()
                try:
                    call = PhoneCall("step", standing.answers, wire)
                    result = await self._on_phone(call, environment.step(answer, standing.executed))
                except UnsupportedAction as refused:
                    self._call, answer = None, ParseFailure("unsupported_action", str(refused))
                except EnvironmentFault as fault:
                    self._steps.append(replace(step, action=wire, note=f"the phone failed: {fault}"))
                    raise
                else:
                    step = replace(step, action=wire)
            standing, reason = after_answer(standing, answer, task.max_steps, limits.max_parse_failures)
            if isinstance(answer, ParseFailure) or result is None:
                self._steps.append(replace(step, parse_error=str(answer)))
                history.append(Turn(seen, text, None, generation.ids))
            else:
                seconds = time.perf_counter() - begun
                self._steps.append(replace(step, reward=result.reward, note=result.note, seconds_environment=seconds))
                history.append(Turn(seen, text, answer, generation.ids))
                if result.done and reason in (None, Reason.STEP_LIMIT):
                    reason = Reason.DONE
                if reason is None:
                    seen, state = await self._see(result.observation)
            if reason is not None:
                if self._rewarded and result is not None:
                    await self._see_last(result.observation)
                if not (needs_score(reason, task.feasible) and self._verified):
                    return reason, None, ""
                return reason, *await self._judge(environment)

    async def _judge(self, environment: Environment) -> tuple[float, str]:
        try:
            score = await self._on_phone(PhoneCall("evaluate"), environment.evaluate())
        except EnvironmentFault as fault:
            if fault.reason is Reason.ENV_ERROR:
                raise EnvironmentFault(str(fault), Reason.JUDGE_ERROR) from fault
            raise
        self._call = None
        effects = f"; side effects: {', '.join(score.side_effects)}" if score.side_effects else ""
        return score.value, score.reason + effects

    async def _on_phone(self, call: PhoneCall, answer: Coroutine[Any, Any, T]) -> T:
        """What the phone answers, while the calls of the episode together keep within their deadlines: that of an
        episode, past which the phone is to blame, and that of the group, past which we stop it ourselves."""
        self._call = call
        loop, limit = asyncio.get_running_loop(), self._limits.episode_seconds
        if ours := self._attempt.phone_seconds is not None and self._attempt.phone_seconds < limit:
            limit = self._attempt.phone_seconds
        begun, before = loop.time(), self._phone_seconds
        try:
            async with asyncio.timeout(limit - before) as alarm:
                return await answer
        except TimeoutError as error:
            if not alarm.expired():
                raise
            begun = -math.inf
            if ours:
                raise Stopped(f"its group goes on without it: calls to phones took it more than {limit:g} s") from error
            why = f"{self._slot}: {call.name}: the calls of this episode took longer than {limit:g} s together"
            raise EnvironmentFault(why, Reason.DEADLINE) from error
        finally:
            self._phone_seconds = min(limit, before + loop.time() - begun)

    async def _ask(self, prompt: Prompt, step: int) -> tuple[Generation, float]:
        for frame in prompt.frames:
            self._frames[frame.name] = frame
        sampling = replace(self._sampling, seed=seed_of(self._attempt.seed, step))
        begun = time.perf_counter()
        generation = await self._generator.generate(prompt, sampling)
        seconds = time.perf_counter() - begun
        if generation.finish_reason == "abort":
            raise Stopped(f"the engine aborted the answer of step {step}")
        return generation, seconds

    async def _see(self, observation: Observation) -> tuple[Prepared, StateReading]:
        """The frame is decoded here, once: for the model, for its name and for the state's key."""
        frame = observation.frame
        if frame.width * frame.height > self._limits.thread_pixels or not is_free(observation):
            seen, state, drawn = await asyncio.to_thread(self._read, observation)
        else:
            seen, state, drawn = self._read(observation)
        self._screen = None if drawn is seen.frame else drawn.name
        if self._screen is not None:
            self._frames[drawn.name] = drawn
        # A frame that the agent can't accept is still the fault of the call that brought it.
        self._call = None
        if state.ui_tree is not None and observation.ui_tree is not None:
            self._ui_trees[state.ui_tree] = observation.ui_tree
        return seen, state

    async def _see_last(self, observation: Observation) -> None:
        """The screen that the last action left: rewards look at it, the policy doesn't."""
        seen, _ = await self._see(observation)
        self._frames[seen.frame.name] = seen.frame
        self._last_frame, self._last_screen = seen.frame.name, self._screen

    def _read(self, observation: Observation) -> tuple[Prepared, StateReading, FittedFrame]:
        seen, pixels = self._agent.prepare(observation)
        drawn = as_drawn(observation.frame, seen.frame) if self._limits.device_screens else seen.frame
        return seen, read_state(observation, pixels), drawn

    def _step_record(
        self,
        index: int,
        seen: Prepared,
        state: StateReading,
        prompt: Prompt,
        generation: Generation,
        text: str,
        seconds_model: float,
    ) -> StepRecord:
        return StepRecord(
            episode=self._attempt.episode,
            index=index,
            frames=tuple(f.name for f in prompt.frames),
            state_key=seen.state_key,
            app=seen.app,
            generation=generation,
            text=text,
            action=None,
            parse_error=None,
            reward=0.0,
            note="",
            seconds_model=seconds_model,
            seconds_environment=0.0,
            window=seen.window,
            ui_tree=state.ui_tree,
            ui_key=state.ui_key,
            frame_key=state.frame_key,
            screen=self._screen,
        )
