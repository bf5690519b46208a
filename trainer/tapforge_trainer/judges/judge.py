"""A judge: which screens are shown in which words, who is asked, and what the votes decide."""

from __future__ import annotations

from typing import Literal, Protocol

from tapforge_api.judge import JudgeSpec

from .verdicts import Trajectory, Verdict, VerdictMissing, Vote

Kind = Literal["task", "step"]
__all__ = ["Judge", "Kind", "Trajectory", "Verdict", "VerdictMissing", "Vote", "judge_of"]


class Judge(Protocol):
    """`task` and `step` raise VerdictMissing."""

    async def task(self, trajectory: Trajectory) -> Verdict: ...

    async def step(self, trajectory: Trajectory, index: int) -> Verdict: ...

    async def close(self) -> None: ...


def judge_of(spec: JudgeSpec, kind: Kind) -> Judge:
    raise NotImplementedError
