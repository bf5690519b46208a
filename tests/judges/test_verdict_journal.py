"""A verdict that was written is never asked for again, whatever happened after it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from judged_episodes import played, serving, some, spec

from tapforge_envs.phone import catalog
from tapforge_trainer.judges.journal import (
    JournalError,
    VerdictCache,
    VerdictJournal,
    VerdictRelay,
    Written,
    written_down,
)
from tapforge_trainer.judges.judge import Trajectory, Verdict, Vote, judge_of
from tapforge_trainer.judges.server import JudgeServer


async def test_after_a_kill_only_what_was_not_flushed_is_asked_again(tmp_path: Path) -> None:
    path, server = tmp_path / "run" / "verdicts.jsonl", JudgeServer("simulated-phone")
    trajectories = list(some(6))
    async with serving(server) as url:
        journal = VerdictJournal(path)
        judge = judge_of(spec(url), "task", journal=journal)
        first = [await judge.task(one) for one in trajectories[:4]]
        journal.flush()
        await judge.task(trajectories[4])  # and the process is killed
        await judge.close()
        assert server.requests == 5 and len(path.read_text().splitlines()) == 4

        journal = VerdictJournal(path)
        assert len(journal) == 4 and journal.dropped is None
        judge = judge_of(spec(url), "task", journal=journal)
        again = [await judge.task(one) for one in trajectories]
        assert [one.value for one in again[:4]] == [one.value for one in first]
        assert [one.cached for one in again] == [True] * 4 + [False] * 2
        assert server.requests == 7 and judge.usage.cached == 4
        journal.close()
        # another judge has verdicts of its own
        other = judge_of(spec(url, voting="any"), "task", journal=(reopened := VerdictJournal(path)))
        assert not (await other.task(trajectories[0])).cached
        reopened.close()
        await judge.close()
        await other.close()


async def test_a_last_line_that_was_cut_off_is_asked_again_and_others_are_an_error(tmp_path: Path) -> None:
    path, server = tmp_path / "verdicts.jsonl", JudgeServer("simulated-phone")
    trajectories = list(some(3))
    async with serving(server) as url:
        journal = VerdictJournal(path)
        judge = judge_of(spec(url), "task", journal=journal)
        for one in trajectories:
            await judge.task(one)
        journal.close()
        whole = path.read_bytes()
        for cut in (1, 40, len(whole.splitlines()[-1])):
            path.write_bytes(whole[:-cut])
            journal = VerdictJournal(path)
            assert len(journal) == 2 and "removed" in str(journal.dropped)
            again = judge_of(spec(url), "task", journal=journal)
            assert [(await again.task(one)).cached for one in trajectories] == [True, True, False]
            journal.close()
            await again.close()
            assert len(VerdictJournal(path)) == 3
        lines = whole.splitlines(keepends=True)
        path.write_bytes(lines[0] + b"{}\n" + lines[2])
        with pytest.raises(JournalError, match=r"verdicts.jsonl:2: broken verdict"):
            VerdictJournal(path)
        await judge.close()


@pytest.mark.parametrize(
    "broken", [bytes(4096), b"[" * 100_000 + b"\n", b'{"step": 1e999, "episode": "e"}\n', b"\xff\n"]
)
def test_whatever_a_last_line_holds_it_is_removed(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_bytes(broken)
    journal = VerdictJournal(path)
    journal.close()
    assert len(journal) == 0 and "removed" in str(journal.dropped) and path.read_bytes() == b""


async def test_steps_that_were_judged_before_a_kill_are_not_asked_again(tmp_path: Path) -> None:
    path, server = tmp_path / "verdicts.jsonl", JudgeServer("simulated-phone")
    trajectory = max(some(6), key=lambda one: len(one.episode.steps))
    steps = range(len(trajectory.episode.steps))
    async with serving(server) as url:
        judged = spec(url, prompt="simulated-phone-step", model={"price": {"prompt": 2, "answer": 2}})
        journal = VerdictJournal(path)
        judge = judge_of(judged, "step", journal=journal)
        async with written_down(journal):
            first = [await judge.step(trajectory, step) for step in steps[:2]]
            async with asyncio.timeout(60):
                while len(path.read_text().splitlines()) < 2:  # noqa: ASYNC110 - a thread writes it
                    await asyncio.sleep(0.05)
        await judge.close()  # and the process is killed: the journal is not closed
        requests = server.requests
        journal = VerdictJournal(path)
        assert journal.tokens == sum(one.prompt_tokens + one.answer_tokens for one in first) > 0
        assert journal.money == pytest.approx(journal.tokens * 2e-6)
        assert [line.step for line in journal.of(trajectory.episode.id)] == [0, 1]
        judge = judge_of(judged, "step", journal=journal)
        again = [await judge.step(trajectory, step) for step in steps]
        assert [one.value for one in again[:2]] == [one.value for one in first]
        assert server.requests == requests + len(steps) - 2
        # Elsewhere, a judge that is given what is known doesn't ask either, and what it asks for is passed on once.
        relay = VerdictRelay()
        relay.know(journal.of(trajectory.episode.id)[:-1])
        await judge.close()
        judge, requests = judge_of(judged, "step", journal=relay), server.requests
        assert [(await judge.step(trajectory, step)).value for step in steps] == [one.value for one in again]
        assert server.requests == requests + 1
        _, (new,) = relay.new(0)
        assert new.step == steps[-1] and relay.new(1) == (1, ())
        await judge.close()
        journal.close()


def test_a_journal_that_can_not_be_written_says_so_each_time(tmp_path: Path) -> None:
    journal = VerdictJournal(tmp_path / "verdicts.jsonl")
    journal.put(Written("k", "c", "e", None, verdict()))
    assert journal._file is not None
    journal._file.close()
    journal._file = open("/dev/full", "ab")  # noqa: SIM115 - the journal closes it
    for _ in range(2):
        with pytest.raises(JournalError, match="can't be written: .*No space left"):
            journal.flush()


async def test_equal_questions_are_asked_once(tmp_path: Path) -> None:
    server = JudgeServer("simulated-phone")
    task = catalog.tasks("quickstart", "train").sample(1, 0)
    same = [played(task, name) for name in ("a", "b", "c")]
    async with serving(server) as url:
        journal = VerdictJournal(tmp_path / "verdicts.jsonl")
        judge = judge_of(spec(url), "task", journal=journal)
        found = await asyncio.gather(*(judge.task(one) for one in same))
        assert server.requests == 1 and sorted(one.cached for one in found) == [False, True, True]
        journal.close()
        lines = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
        assert sorted(line["episode"] for line in lines) == ["a", "b", "c"]
        assert len({line["key"] for line in lines}) == 3 and len({line["content"] for line in lines}) == 1
        fewer = Trajectory(same[0].episode, same[0].screens[:-1])
        assert not (await judge.task(fewer)).cached or server.requests == 1
        await judge.close()


def verdict(value: float = 1.0) -> Verdict:
    return Verdict(value, "r", (Vote("m", value, "r"), Vote("m", None, "u", True)), 1, 10, 2, 0.5, "m")


def test_a_verdict_reads_back_and_none_is_outside_its_range() -> None:
    assert Verdict.of(json.loads(json.dumps(verdict().as_json()))) == verdict()
    with pytest.raises(ValueError, match="outside"):
        Verdict.of({**verdict().as_json(), "value": 1.5})


def test_the_cache_is_bounded_and_the_first_verdict_of_a_key_stays(tmp_path: Path) -> None:
    cache = VerdictCache(2)
    for name in "abc":
        cache.put(name, verdict())
    assert [cache.get(name) is not None for name in "abc"] == [False, True, True]
    journal = VerdictJournal(tmp_path / "verdicts.jsonl")
    journal.put(Written("k", "c", "e", None, verdict(1.0)))
    journal.put(Written("k", "c", "e", None, verdict(0.0)))
    journal.close()
    reopened = VerdictJournal(tmp_path / "verdicts.jsonl")
    assert len(reopened) == 1 and reopened.get("k") == verdict(1.0)
    reopened.close()
    with pytest.raises(JournalError, match="closed"):
        reopened.flush()
