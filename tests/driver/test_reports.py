"""Reports to the operator over real TLS, and its answers: with an operator that is slow, away, refuses or changes its
mind."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_broker import Authority
from small_operator import RUN, SmallOperator

from tapforge_api.learning import Stop
from tapforge_api.progress import Orders as Answer
from tapforge_api.progress import Progress
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.reporter import Reporter, Timing
from tapforge_trainer.cluster.status_report import ending, report_of
from tapforge_trainer.run.shutdown import StopReason, StopSignal
from tapforge_trainer.telemetry.progress import Saved
from tapforge_trainer.telemetry.telemetry import ProgressView

ATTEMPT = RunAttempt(RUN, "lab", "uid-1", 2, Path("/nowhere"), restarts=1, cluster="tiny-2-abcde")
FAST = Timing(interval=0.01, answer=120.0, backoff_cap=0.02, final=240.0, retry=0.01)


def _view() -> ProgressView:
    return ProgressView(
        RUN,
        10,
        stage="Training",
        update=4,
        version=5,
        episodes=64,
        episodes_per_hour=1200.0,
        seconds_rl=40.0,
        judge_tokens=700,
        judge_money=0.25,
        curve=[0.25, 0.5],
        saved=Saved(3, 1_700_000_000.0, "/storage/update-00000003"),
        slots_wanted=12,
    )


def _reporter(
    operator: SmallOperator,
    authority: Authority,
    stop: StopSignal,
    view: ProgressView | None = None,
    times: Timing = FAST,
) -> Reporter:
    return Reporter(authority.access(operator.port), ATTEMPT, view or _view(), stop, times)


# --- what is said -----------------------------------------------------------------------------------------------------


async def test_a_report_says_how_far_the_run_is(operator: SmallOperator, authority: Authority) -> None:
    async with _reporter(operator, authority, StopSignal()):
        await operator.until(lambda: bool(operator.reports))
    report = operator.reports[0]
    assert (report.attempt, report.restarts, report.phase, report.final) == (2, 1, "Training", "")
    assert report.cluster == "tiny-2-abcde"
    assert report.advance.model_dump() == {
        "update": 4,
        "max_updates": 10,
        "episodes": 64,
        "success": 0.5,
        "episodes_per_hour": 1200.0,
        "policy_version": 5,
        "seconds_left": 60.0,
        "judge_tokens": 700,
        "judge_money": 0.25,
    }
    assert (report.leases.wanted, report.leases.held) == (12, 0)
    assert report.checkpoint is not None
    assert report.checkpoint.model_dump() == {
        "update": 3,
        "time": "2023-11-14T22:13:20Z",
        "path": "/storage/update-00000003",
    }


async def test_reports_are_in_order_also_over_restarts_of_the_driver(
    operator: SmallOperator, authority: Authority
) -> None:
    operator.orders = Answer(report_seconds=1)
    for _ in range(2):
        before = len(operator.reports)
        view = _view()
        async with _reporter(operator, authority, StopSignal(), view):
            await operator.until(lambda before=before: len(operator.reports) > before)
            view.update += 1
            await operator.until(lambda before=before: len(operator.reports) > before + 1)
    numbers = [report.sequence for report in operator.reports]
    assert numbers == sorted(set(numbers))
    assert operator.reports[-1].advance.update == 5
    assert operator.broken == []


@given(
    view=st.builds(
        ProgressView,
        name=st.just(RUN),
        max_updates=st.integers(1, 2**31 - 1),
        max_seconds=st.none() | st.floats(0, 1e12),
        stage=st.text(max_size=64),
        update=st.integers(0, 2**40),
        version=st.integers(0, 2**40),
        success=st.none() | st.floats(),
        episodes=st.integers(0, 2**50),
        episodes_per_hour=st.floats(),
        seconds_rl=st.floats(),
        curve=st.lists(st.floats(), max_size=2),
    ),
    message=st.text(max_size=9000),
)
def test_no_figure_makes_a_report_that_is_refused(view: ProgressView, message: str) -> None:
    report = report_of(ATTEMPT, 1, view, "failed", message)
    again = Progress.model_validate(json.loads(report.model_dump_json(by_alias=True)))
    assert again == report
    assert report.advance.success is None or 0 <= report.advance.success <= 1
    assert math.isfinite(report.advance.episodes_per_hour)
    if len(message) <= 4096:
        assert report.message == message
    else:
        assert report.message.startswith(message[:2000]) and report.message.endswith(message[-2000:])


@pytest.mark.parametrize(
    ("code", "left", "why", "saved", "final", "words"),
    [
        (0, 0, None, 4, "complete", ""),
        (2, 3, None, 4, "configuration", ""),
        (1, 3, None, 4, "", ""),
        (1, 0, None, 4, "failed", ""),
        (75, 3, StopReason.SUSPEND, 4, "stopped", "suspended; the run resumes after update 4"),
        (75, 3, StopReason.DEADLINE, 3, "stopped", "after update 3, without 1 update that there was no time to save"),
        (75, 3, StopReason.TERMINATE, None, "stopped", "SIGTERM.*no checkpoint yet"),
        (130, 0, StopReason.INTERRUPT, 2, "stopped", "Ctrl-C .* without 2 updates"),
    ],
)
def test_how_a_driver_says_that_it_ends(
    code: int, left: int, why: StopReason | None, saved: int | None, final: str, words: str
) -> None:
    import re

    view, stop = _view(), StopSignal()
    view.saved = None if saved is None else Saved(saved, 0.0, "x")
    stop.reason = why
    said = ending(code, stop, view, left)
    assert said[0] == final
    assert bool(said[1]) == bool(words) and re.search(words, said[1])


def test_a_driver_whose_judges_have_used_up_their_budget_says_so_and_what_to_raise() -> None:
    stop = StopSignal()
    stop.request(StopReason.JUDGE_BUDGET, remedy="judges have used 700 tokens: raise spec.stop.judgeTokens")
    final, message = ending(stop.exit_code, stop, _view(), 3)
    report = report_of(ATTEMPT, 1, _view(), final, message, stop.reason)
    assert (stop.exit_code, report.final, report.reason) == (75, "stopped", "JudgeBudgetSpent")
    assert report.message.startswith("judges have used 700 tokens: raise spec.stop.judgeTokens; the run resumes after")
    assert report_of(ATTEMPT, 1, _view(), "stopped", "", StopReason.SUSPEND).reason == ""


# --- what is answered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requested", ["suspend", "deadline"])
async def test_a_request_to_stop_is_carried_out_within_its_grace(
    operator: SmallOperator, authority: Authority, requested: str
) -> None:
    stop = StopSignal()
    async with _reporter(operator, authority, stop) as reporter:
        assert await reporter.answered(120)
        assert not stop.requested.is_set()
        operator.orders = Answer.model_validate({"stop": requested, "graceSeconds": 3600, "reportSeconds": 1})
        async with asyncio.timeout(120):
            await stop.requested.wait()
        assert (stop.reason, stop.aborted.is_set()) == (StopReason(requested), False)
        operator.orders = Answer.model_validate({"stop": requested, "graceSeconds": 0, "reportSeconds": 1})
        async with asyncio.timeout(120):
            await stop.aborted.wait()


async def test_a_driver_that_was_superseded_ends_at_once(operator: SmallOperator, authority: Authority) -> None:
    operator.orders = Answer(stop="superseded")
    stop = StopSignal()
    async with _reporter(operator, authority, stop):
        async with asyncio.timeout(120):
            await stop.aborted.wait()
    assert stop.reason is StopReason.SUPERSEDED


async def test_the_end_of_the_run_may_be_moved_under_way(operator: SmallOperator, authority: Authority) -> None:
    stop = StopSignal()
    operator.orders = Answer(limits=Stop(max_updates=20), report_seconds=1)
    async with _reporter(operator, authority, stop) as reporter:
        assert await reporter.answered(120)
        assert stop.limits == Stop(max_updates=20)
        operator.orders = Answer(report_seconds=1)
        await operator.until(lambda: len(operator.reports) >= 2)
    assert stop.limits == Stop(max_updates=20), "an answer that says nothing changes nothing"


# --- troubles ---------------------------------------------------------------------------------------------------------


async def test_nothing_that_the_operator_does_reaches_the_training(
    operator: SmallOperator, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [(503, b"not the leader"), (500, b""), (200, b"a proxy's page"), (404, b"{}"), (302, b""), (429, b"")]
    operator.refusing = list(refusals)
    stop = StopSignal()
    async with _reporter(operator, authority, stop) as reporter:
        assert await reporter.answered(120)
        assert operator.calls > len(refusals)
    assert not stop.requested.is_set()
    heard = [record.message for record in caplog.records if "reporter" in record.name]
    assert len(heard) == 2, heard
    assert "don't reach" in heard[0] and "reach the operator again" in heard[1] and str(len(refusals)) in heard[1]


async def test_an_operator_that_goes_away_is_found_again_also_with_a_new_token(authority: Authority) -> None:
    operator = SmallOperator()
    async with operator.serving(authority):
        reporter = _reporter(operator, authority, StopSignal())
        async with reporter:
            await operator.until(lambda: bool(operator.reports))
            operator.tokens = {"second-token"}
            before = operator.calls
            await operator.until(lambda: operator.calls > before + 1)
            seen = len(operator.reports)
            (authority.folder / "token").write_text("second-token\n")
            await operator.until(lambda: len(operator.reports) > seen)


async def test_a_silent_operator_costs_no_more_than_a_deadline(operator: SmallOperator, authority: Authority) -> None:
    operator.talks.clear()
    times = Timing(interval=0.01, answer=0.5, backoff_cap=0.02)  # long enough for an answer, once the operator talks
    async with _reporter(operator, authority, StopSignal(), times=times) as reporter:
        await operator.until(lambda: operator.calls >= 3)
        assert not await reporter.answered(0.0)
        operator.talks.set()
        assert await reporter.answered(120)


# --- the last report --------------------------------------------------------------------------------------------------


async def test_the_last_report_is_sent_until_it_is_answered(operator: SmallOperator, authority: Authority) -> None:
    async with _reporter(operator, authority, StopSignal()) as reporter:
        assert await reporter.answered(120)
        operator.refusing = [(503, b"")] * 4 + [(401, b"{}")] * 2
        assert await reporter.finish("failed", "the disk is full")
    (last,) = operator.finals
    assert last is operator.reports[-1], "nothing is said after it"
    assert (last.final, last.message) == ("failed", "the disk is full")
    assert last.sequence == max(report.sequence for report in operator.reports)


async def test_the_last_report_waits_for_an_operator_that_is_away(authority: Authority) -> None:
    operator = SmallOperator()
    with socket.socket() as kept:  # it never listens, and nobody else gets the port meanwhile
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        operator.port = kept.getsockname()[1]
        async with _reporter(operator, authority, StopSignal()) as reporter:
            finishing = asyncio.create_task(reporter.finish("complete", ""))
            await asyncio.sleep(0.1)
            assert not finishing.done()
            async with operator.serving(authority):
                assert await finishing
    assert [report.final for report in operator.finals] == ["complete"]


@pytest.mark.parametrize("trouble", ["away", "refused", "silent"])
async def test_the_last_report_is_given_up_in_the_end(
    authority: Authority, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    operator = SmallOperator()
    if trouble == "silent":
        operator.talks.clear()
    if trouble == "refused":
        operator.tokens = set()
    if trouble == "refused":
        times = Timing(interval=0.01, answer=120.0, backoff_cap=0.02, final=3600.0, retry=0.01)
    else:
        times = Timing(interval=0.01, answer=0.1, backoff_cap=0.02, final=0.3, retry=0.01)
    async with operator.serving(authority):
        port = 1 if trouble == "away" else operator.port  # where nobody listens
        reporter = Reporter(authority.access(port), ATTEMPT, _view(), StopSignal(), times)
        async with asyncio.timeout(120), reporter:
            assert not await reporter.finish("failed", "x")
    assert "the last report did not reach the operator" in caplog.text
