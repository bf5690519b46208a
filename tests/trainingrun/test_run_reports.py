"""What drivers say and are told: in order, out of order, twice, too late; and answers that wait for the status."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runs_made import UID, report

from tapforge_api.progress import Orders
from tapforge_operator.trainingrun import progress as module
from tapforge_operator.trainingrun.progress import Reports, TryLater


class Desk:
    """Reports of one run, with a keeper that has planned attempt 2."""

    def __init__(self) -> None:
        self.requeued: list[str] = []
        self.reports = Reports(self.requeued.append)
        self.settle()

    def settle(self, attempt: int = 2, stop: Any = "", checkpoint: int = -1, written: Any = None) -> None:
        self.reports.settle(UID, attempt, Orders(stop=stop), checkpoint, written)


async def test_the_newest_report_counts() -> None:
    desk = Desk()
    for sequence, update in ((5, 1), (9, 3), (7, 2), (9, 4)):
        assert (await desk.reports.take(UID, report(2, sequence, update))).stop == ""
    newest, at = desk.reports.newest(UID)
    assert newest is not None and newest.advance.update == 3 and at > 0
    assert desk.requeued == [UID, UID], "what is old wakes nobody"


async def test_an_earlier_attempt_is_told_that_it_is_over_and_a_later_one_to_wait() -> None:
    desk = Desk()
    assert (await desk.reports.take(UID, report(1))).stop == "superseded"
    assert desk.reports.newest(UID)[0] is None
    with pytest.raises(TryLater):
        await desk.reports.take(UID, report(3))
    with pytest.raises(TryLater):
        await desk.reports.take("another run", report(2))


async def test_orders_are_repeated_in_every_answer() -> None:
    desk = Desk()
    desk.settle(stop="suspend")
    assert [(await desk.reports.take(UID, report(2, n))).stop for n in (1, 2, 1)] == ["suspend"] * 3


@pytest.mark.parametrize("fields", [{"final": "stopped"}, {"checkpoint": {"update": 4, "path": "p"}}])
async def test_an_end_and_a_checkpoint_are_answered_when_they_are_written(fields: dict[str, Any]) -> None:
    desk = Desk()
    said = report(2, 7, **fields)
    waiting = asyncio.create_task(desk.reports.take(UID, said))
    desk.settle(written=report(2, 6))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    desk.settle(stop="suspend", written=report(2, 8))
    assert (await waiting).stop == "suspend", "a later one was written: this one is in it"


async def test_a_checkpoint_that_is_known_waits_for_nothing() -> None:
    desk = Desk()
    desk.settle(checkpoint=4)
    async with asyncio.timeout(60):
        await desk.reports.take(UID, report(2, 7, checkpoint={"update": 4, "path": "p"}))


async def test_an_answer_that_takes_too_long_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITTEN", 0.02)
    desk = Desk()
    with pytest.raises(TryLater, match="could not be written"):
        await desk.reports.take(UID, report(2, 7, final="complete"))
    newest, _ = desk.reports.newest(UID)
    assert newest is not None and newest.final == "complete", "it was heard all the same"


async def test_who_waits_is_put_off_when_the_leadership_ends_or_the_attempt_is_over() -> None:
    for happens in (lambda desk: desk.reports.clear(), lambda desk: desk.settle(attempt=3)):
        desk = Desk()
        waiting = asyncio.create_task(desk.reports.take(UID, report(2, 7, final="complete")))
        await asyncio.sleep(0)
        happens(desk)
        with pytest.raises(TryLater):
            await waiting


async def test_a_new_attempt_begins_without_reports() -> None:
    desk = Desk()
    await desk.reports.take(UID, report(2, 7, 5))
    desk.settle(attempt=3)
    assert desk.reports.newest(UID) == (None, 0.0)
    assert (await desk.reports.take(UID, report(3, 1))).stop == ""


@pytest.mark.parametrize("gone", [False, True])
async def test_the_driver_of_a_deleted_run_waits_for_nobody(gone: bool) -> None:
    desk = Desk()
    end = report(2, 7, final="stopped")
    waiting = asyncio.create_task(desk.reports.take(UID, end))
    await asyncio.sleep(0)
    desk.reports.dismiss(UID)
    if gone:
        desk.reports.end(UID)
    async with asyncio.timeout(60):  # who is kept waiting all the same is put off after 20 s
        assert (await waiting).stop == ""
        assert (await desk.reports.take(UID, report(2, 8, final="stopped"))).stop == ""


async def test_a_run_that_was_missed_by_mistake_is_written_of_again() -> None:
    desk = Desk()
    desk.reports.end(UID)
    desk.settle()
    waiting = asyncio.create_task(desk.reports.take(UID, report(2, 7, final="stopped")))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    desk.settle(written=report(2, 7))
    await waiting


async def test_deleted_runs_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DISMISSED", 2)
    desk = Desk()
    for uid in ("a", "b", "c"):
        desk.reports.dismiss(uid)
    with pytest.raises(TryLater):
        await desk.reports.take("a", report(2, 1))
    await desk.reports.take("c", report(2, 1))
