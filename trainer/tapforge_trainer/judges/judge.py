"""A judge: which screens are shown in which words, which models are asked, and what the votes decide.

    judge = judge_of(spec, "task", journal=VerdictJournal(folder / VERDICTS))
    verdict = await judge.task(trajectory)      # raises VerdictMissing

- A verdict of the journal or of the cache is not asked for again; the same question twice at once is asked once.
- A verdict is put into the journal before it is returned; `journal.flush` is the caller's, before it uses it.
- `VerdictMissing` comes within the spec's deadline, whatever endpoints do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tapforge_api.judge import JudgeModel, JudgeSpec

from .answers import read_answer
from .conventions import CONVENTIONS, Kind
from .endpoint import Endpoint, EndpointError, Endpoints, key_of
from .journal import VerdictCache, Verdicts, Written
from .openai_chat import Said, Wire, wire_of
from .prompt_file import Prompt, PromptError
from .question import Question, check, step_question, task_question
from .usage import Usage, estimated_tokens
from .verdicts import Trajectory, Verdict, VerdictMissing, Vote, shortened
from .voting import agree, counted, decide

__all__ = ["Judge", "Kind", "Trajectory", "Verdict", "VerdictMissing", "Vote", "divided", "judge_of"]


class JudgeError(ValueError):
    """A judge that can't be made: its prompt, its wire or its key. The message says what would help."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model, how it is spoken to, and its key."""

    model: JudgeModel
    wire: Wire
    endpoint: Endpoint
    key: str | None


@dataclass(frozen=True, slots=True)
class _Poll:
    """What the models of one panel said."""

    votes: tuple[Vote, ...]
    errors: tuple[EndpointError, ...]
    usage: Usage
    #: whether the models would say the same again: they are greedy, or have a seed
    repeats: bool


class Judge:
    """Made by `judge_of`. Belongs to one event loop."""

    def __init__(
        self,
        spec: JudgeSpec,
        prompt: Prompt,
        panels: Sequence[Sequence[_Asked]],
        usage: Usage,
        cache: VerdictCache,
        journal: Verdicts | None,
        owned: Endpoints | None,
    ):
        self.spec = spec
        #: totals of everything that was asked
        self.usage = usage
        self._prompt = prompt
        self._panels = panels
        self._cache = cache
        self._journal = journal
        self._owned = owned
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._judge = _digest(
            [_about(asked.model) for asked in panels[0]],
            [_about(asked.model) for panel in panels[1:] for asked in panel],
            spec.voting,
        )

    async def task(self, trajectory: Trajectory) -> Verdict:
        """Whether the task was done. Raises VerdictMissing."""
        question = await self._made(trajectory, None)
        return await self._verdict(question, trajectory.episode.id, None)

    async def step(self, trajectory: Trajectory, index: int) -> Verdict:
        """Whether step `index`, from 0, helped. Raises VerdictMissing."""
        question = await self._made(trajectory, index)
        return await self._verdict(question, trajectory.episode.id, index)

    async def close(self) -> None:
        if self._owned is not None:
            await self._owned.close()

    async def _made(self, trajectory: Trajectory, step: int | None) -> Question:
        """In a thread: screens are large."""
        keyed = self.spec.answer_key
        try:
            if step is None:
                return await asyncio.to_thread(task_question, self._prompt, trajectory, self.spec.screens, keyed)
            return await asyncio.to_thread(step_question, self._prompt, trajectory, step, keyed)
        except PromptError as error:
            raise VerdictMissing(f"episode {trajectory.episode.id}: {error}", permanent=True) from error

    async def _verdict(self, question: Question, episode: str, step: int | None) -> Verdict:
        content = _digest(self._judge, question.digest)
        key = _digest(content, episode, step)
        where = f"episode {episode}" + ("" if step is None else f" step {step + 1}")
        deadline = asyncio.get_running_loop().time() + self.spec.deadline_seconds
        lock = self._asking.setdefault(content, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline):
                await lock.acquire()
        except TimeoutError as error:
            self.usage.missing += 1
            raise VerdictMissing(
                f"{where} has no verdict: the same question of another one has no answer yet"
            ) from error
        try:
            found = self._journal.get(key) if self._journal is not None else None
            if found is None:
                found = self._cache.get(content)
            if found is not None:
                verdict = found.from_cache()
                self.usage.cached += 1
            else:
                verdict = await self._asked(question, where, deadline)
            self.usage.verdicts += 1
            self._cache.put(content, verdict)
            if self._journal is not None:
                self._journal.put(Written(key, content, episode, step, verdict))
            return verdict
        finally:
            lock.release()

    async def _asked(self, question: Question, where: str, deadline: float) -> Verdict:
        began = time.monotonic()
        poll = await self._poll(self._panels[0], question, deadline, cascade=False)
        votes, usage = poll.votes, poll.usage
        if len(self._panels) > 1 and not agree([vote.value for vote in votes]):
            self.usage.cascaded += 1
            poll = await self._poll(self._panels[1], question, deadline, cascade=True)
            votes += poll.votes
            usage.add(poll.usage)
        values = [vote.value for vote in poll.votes]
        value = decide(values, self.spec.voting)
        if value is None:
            self.usage.missing += 1
            raise self._missing(where, poll)
        reason = next((vote.reason for vote in poll.votes if vote.value == value), "")
        return Verdict(
            value=value,
            reason=reason,
            votes=votes,
            unreadable=sum(vote.value is None for vote in votes),
            prompt_tokens=usage.prompt_tokens,
            answer_tokens=usage.answer_tokens,
            money=usage.money,
            seconds=time.monotonic() - began,
            model=", ".join(dict.fromkeys(vote.model for vote in poll.votes)),
        )

    def _missing(self, where: str, poll: _Poll) -> VerdictMissing:
        votes = counted([vote.value for vote in poll.votes])
        words = f"{where} has no verdict: {votes}, and {self.spec.voting} of them decides nothing"
        permanent = poll.repeats
        unreadable = [vote for vote in poll.votes if vote.value is None]
        if poll.errors:
            words += f". {'; '.join(str(error) for error in poll.errors[:3])}"
            permanent = all(error.permanent for error in poll.errors)
        elif unreadable:
            words += f". {unreadable[0].model}: {unreadable[0].reason}"
        else:
            words += ": a tie; an odd number of votes has none"
        return VerdictMissing(words, permanent, poll.votes)

    async def _poll(self, panel: Sequence[_Asked], question: Question, deadline: float, cascade: bool) -> _Poll:
        usage = Usage()
        found = await asyncio.gather(*(self._votes(asked, question, deadline, cascade, usage) for asked in panel))
        votes = tuple(vote for votes, _ in found for vote in votes)
        usage.votes, usage.unreadable = len(votes), sum(vote.value is None for vote in votes)
        self.usage.add(usage)
        errors = tuple(error for _, error in found if error is not None)
        repeats = all(asked.model.temperature == 0 or asked.model.seed is not None for asked in panel)
        return _Poll(votes, errors, usage, repeats)

    async def _votes(
        self, asked: _Asked, question: Question, deadline: float, cascade: bool, usage: Usage
    ) -> tuple[list[Vote], EndpointError | None]:
        """One vote per sample. An endpoint that gives fewer answers at once than it is asked for is asked again."""
        model, error = asked.model, None
        votes: list[Vote] = []
        while len(votes) < model.samples:
            encoded = partial(_encoded, asked, question, model.samples - len(votes), len(votes))
            try:
                said: Said = await asked.endpoint.ask(
                    asked.wire.path,
                    encoded,
                    asked.wire.headers(asked.key),
                    model,
                    deadline,
                    lambda answer: asked.wire.read(answer, model),
                    usage,
                    asked.key,
                )
            except EndpointError as failed:
                error = failed
                missing = Vote(model.name, None, shortened(f"no answer: {failed}"), cascade)
                votes += [missing] * (model.samples - len(votes))
                break
            read, written = said.prompt_tokens, said.answer_tokens
            if not (read or written):
                usage.estimated += 1
                read = estimated_tokens((question.system, *question.parts))
                written = estimated_tokens(text for text, _ in said.texts)
            usage.answered(model, read, written)
            for text, why in said.texts[: model.samples - len(votes)]:
                if text is None:
                    votes.append(Vote(model.name, None, shortened(why), cascade))
                else:
                    answer = read_answer(text, question.key)
                    votes.append(Vote(model.name, answer.value, answer.reason, cascade))
        return votes, error


def judge_of(
    spec: JudgeSpec,
    kind: Kind,
    *,
    endpoints: Endpoints | None = None,
    usage: Usage | None = None,
    journal: Verdicts | None = None,
    cache: VerdictCache | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Judge:
    """`endpoints`, `usage`, `journal`, `cache`: what judges share; without them a judge has its own, and no journal.
    Asks nothing yet. Raises JudgeError."""
    name = spec.prompt or kind
    if CONVENTIONS[name].kind != kind:
        fitting = ", ".join(n for n, convention in CONVENTIONS.items() if convention.kind == kind)
        raise JudgeError(f"prompt {name} is for {CONVENTIONS[name].kind} judges; for {kind} judges there are {fitting}")
    given = endpoints or Endpoints()
    try:
        prompt = Prompt(name, Path(spec.prompt_file) if spec.prompt_file is not None else None)
        check(prompt, kind)
        panels = [
            [
                _Asked(model, wire_of(model), given.of(model), key_of(model.api_key, environ, model.name))
                for model in panel
            ]
            for panel in (spec.models, spec.cascade)
            if panel
        ]
    except (PromptError, ValueError) as error:
        raise JudgeError(str(error)) from error
    cache = cache or (journal.cache if journal is not None else VerdictCache())
    return Judge(
        spec, prompt, panels, usage if usage is not None else Usage(), cache, journal, None if endpoints else given
    )


def divided(spec: JudgeSpec, processes: int) -> JudgeSpec:
    """The judge for each of so many processes: together they ask no more questions at once than the spec says, as long
    as it says at least one for each."""

    def part(models: Sequence[JudgeModel]) -> tuple[JudgeModel, ...]:
        return tuple(
            model.model_copy(update={"concurrency": max(1, model.concurrency // processes)}) for model in models
        )

    return spec.model_copy(update={"models": part(spec.models), "cascade": part(spec.cascade)})


def _encoded(asked: _Asked, question: Question, count: int, first: int) -> bytes:
    return json.dumps(asked.wire.body(question, asked.model, count, first)).encode()


def _about(model: JudgeModel) -> list[Any]:
    """What of a model its votes depend on."""
    options = [(option.name, option.value) for option in model.options]
    return [model.wire, options, model.model, model.samples, model.temperature, model.max_tokens, model.seed]


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
