"""What a run and the operator's broker say to each other: the trainer's client and the operator's server, over TLS, by
the environment and the certificates that the operator gives a run's Pod; and each of them with one that is a release
newer (it says a field more) or older (a field less).

Writer and reader of a question: `BrokerCalls` -> `broker.http.parse`; of an answer: `broker.http.answer` ->
`BrokerCalls`; of claims on Pods: `broker.claim_record.Keys`, of one release and the other.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from brokers_office import NAME, NAMESPACE, UID, Office, more, opened
from claim_cluster import KEYS, Lab
from hypothesis import given
from hypothesis import strategies as st
from operators_part import environment, made, pods_of, ray_job, seen

from tapforge_api.base import Spec
from tapforge_api.claims import Acquire, Given, Held, Release, Renew
from tapforge_api.learning import Stop
from tapforge_api.progress import Orders, Progress
from tapforge_envs.slots.broker_calls import Access, BrokerCalls
from tapforge_operator.broker import http
from tapforge_operator.broker.claim_record import ClaimRecord, Reading
from tapforge_operator.config import Settings, broker_address
from tapforge_operator.trainingrun import rayjob
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.reporter import Reporter
from tapforge_trainer.cluster.status_report import Final, report_of
from tapforge_trainer.run.shutdown import StopReason, StopSignal
from tapforge_trainer.telemetry.progress import Saved
from tapforge_trainer.telemetry.telemetry import ProgressView

SECONDS = 120.0


@pytest.fixture(params=["of today", "newer"])
async def office(request: pytest.FixtureRequest) -> AsyncIterator[Office]:
    async with opened(Lab(3), newer=request.param == "newer") as office:
        yield office


@pytest.fixture
def told(office: Office, tmp_path: Path) -> dict[str, str]:
    return office.told(tmp_path)


async def test_claims_from_their_question_to_their_end(office: Office, told: dict[str, str]) -> None:
    """`rayjob.ray_job`, `broker_config_map` -> `Access.of`; `BrokerCalls` <-> the broker."""
    async with BrokerCalls(Access.of(told)) as calls:
        ask = Acquire(request="request-1", slots=2, session="driver", number=1)
        claims = (await calls.acquire("phones", ask, SECONDS)).claims
        assert len(claims) == 2 and (await calls.acquire("phones", ask, SECONDS)).claims == claims
        held = tuple(Held(id=one.id, secret=one.secret, episodes=3) for one in claims)
        renewed = await calls.renew(Renew(claims=held, session="driver", settled=1), SECONDS)
        assert [one.state for one in renewed.claims] == ["held", "held"]
        given = tuple(Given(id=one.id, secret=one.secret, verdict="dirty") for one in claims)
        ended = await calls.release(Release(claims=given), SECONDS)
        assert [one.state for one in ended.claims] == ["lost", "lost"]
        assert not (await calls.acquire("phones", ask, SECONDS)).claims, "its claims have ended"


async def test_a_report_arrives_as_it_was_made_and_its_orders_are_obeyed(office: Office, told: dict[str, str]) -> None:
    """`status_report.report_of`, `Reporter` -> `Reports`; `Orders` of the run's plan -> `Reporter` -> `StopSignal`."""
    attempt = RunAttempt.of(told)
    assert attempt is not None
    view = ProgressView(NAME, 10, stage="Training", update=4, episodes=64, curve=[0.25])
    orders = Orders(stop="suspend", grace_seconds=50, limits=Stop(max_updates=7), report_seconds=600)
    office.reports.settle(UID, attempt.number, orders, -1, None)
    stop = StopSignal()
    async with Reporter(Access.of(told), attempt, view, stop) as reporter:
        assert await reporter.answered(SECONDS)
        report, _ = office.reports.newest(UID)
        assert report is not None and report == report_of(attempt, report.sequence, view)
        assert stop.requested.is_set() and stop.reason is StopReason.SUSPEND
        assert stop.limits is not None and stop.limits.max_updates == 7
        office.reports.dismiss(UID)  # nobody writes its end into a status
        assert await reporter.finish("stopped", "as asked")
    report, _ = office.reports.newest(UID)
    assert report is not None and (report.final, report.message) == ("stopped", "as asked")


hosts = st.one_of(
    st.from_regex(r"[a-z0-9.@_\[\]:-]{0,12}", fullmatch=True), st.sampled_from(["broker.example", "[fd00::9]"])
)
addresses = st.builds(
    lambda scheme, host, rest: f"{scheme}{host}{rest}",
    st.sampled_from(["https://", "http://", "HTTPS://", "https:", ""]),
    hosts,
    st.sampled_from(["", ":443", ":0", ":", ":99999", "/", "/claims/", "?a=b", "#a", "/a b", "\n"]),
)


@given(addresses)
def test_an_address_that_the_operator_takes_is_one_that_drivers_take(text: str) -> None:
    """`config.broker_address` -> `rayjob.ray_job` -> `Access.of`, whose certificate has to be good for the host."""
    try:
        address = broker_address(text)
    except ValueError:
        return
    settings = Settings("me", broker_url=address)
    run = seen(made({"cluster": {"image": "i"}}, NAME), NAMESPACE)
    head = environment(pods_of(ray_job(run, 1, rayjob.Broker(settings.broker, "")))["head"])
    assert Access.of(head).url.host in settings.called


# --- questions --------------------------------------------------------------------------------------------------------

ids = st.text("abz019._-", min_size=8, max_size=20)
private = st.text(min_size=16, max_size=40)
times = st.floats(5, 3600)
questions: st.SearchStrategy[Spec] = st.one_of(
    st.builds(Acquire, request=ids, slots=st.integers(1, 256), ttl_seconds=times, hold_seconds=times, session=ids),
    st.builds(Renew, claims=st.lists(st.builds(Held, id=ids, secret=private), min_size=1, max_size=3).map(tuple)),
    st.builds(Release, claims=st.lists(st.builds(Given, id=ids, secret=private), min_size=1, max_size=3).map(tuple)),
)
figures = st.one_of(st.none(), st.floats(), st.floats(0, 1))
views = st.builds(
    ProgressView,
    name=st.just(NAME),
    max_updates=st.integers(0, 2**31 - 1),
    stage=st.sampled_from(["Loading", "Training"]),
    update=st.integers(0, 2**40),
    version=st.integers(0, 2**40),
    episodes=st.integers(0, 2**53),
    episodes_per_hour=st.floats(),
    success=figures,
    seconds_rl=st.floats(0, 1e12),
    saved=st.none()
    | st.builds(Saved, st.integers(0, 2**31 - 1), st.floats(0, 4e9), st.just("/storage/update-00000003")),
)


def _sent(message: Spec) -> bytes:
    """As `BrokerCalls` does."""
    return message.model_dump_json(by_alias=True).encode()


@given(questions)
def test_a_question_is_read_as_it_was_asked_by_a_newer_trainer_too(question: Spec) -> None:
    """`BrokerCalls` -> `broker.http.parse`."""
    body = _sent(question)
    assert http.parse(body, type(question)) == question
    assert http.parse(json.dumps(more(json.loads(body))).encode(), type(question)) == question


@given(views, st.sampled_from(get_args(Final)), st.text(max_size=5000), st.integers(1, 999))
def test_no_report_is_refused_whatever_a_run_came_to(
    view: ProgressView, final: Final, message: str, number: int
) -> None:
    """`status_report.report_of` -> `broker.http.parse`."""
    report = report_of(RunAttempt(NAME, NAMESPACE, UID, number, Path("/nowhere")), 1, view, final, message)
    body = _sent(report)
    assert len(body) < http.SMALL
    assert http.parse(body, Progress) == report
    assert http.parse(json.dumps(more(json.loads(body))).encode(), Progress) == report


@pytest.mark.parametrize("question", [Acquire(request="request-1"), Progress(attempt=1, sequence=1)])
def test_a_question_without_what_an_older_trainer_did_not_say_is_read(question: Spec) -> None:
    """`BrokerCalls` of the release before -> `broker.http.parse`: what this one added has a default."""
    whole = json.loads(_sent(question))
    required = {name for name, field in type(question).model_fields.items() if field.is_required()}
    for name in set(whole) - required:
        less = {field: value for field, value in whole.items() if field != name}
        assert http.parse(json.dumps(less).encode(), type(question)) == question


def test_every_order_to_stop_is_one_that_the_driver_knows() -> None:
    """`Orders.stop` -> `StopReason`."""
    words = get_args(Orders.model_fields["stop"].annotation)
    assert "" in words and {StopReason(word) for word in words if word} < set(StopReason)


# --- claims that are stored -------------------------------------------------------------------------------------------

#: annotations as they lie on Pods, under the key of these tests
STORED = {
    "of this release": (
        '{"fence":117440512,"hold":1200.0,"holder":"run/lab/train/u-1","key":"430789b753e8","number":3,"pod":"lab/'
        'train-head/p-1","priority":-5,"request":"request-1","run":"train","session":"driver","signature":"cf9cd9b'
        'b89f87f51fb16d0f19d6130f42d255c93d06281fc8b7af5a8c7f33988","ttl":60.0,"v":1}'
    ),
    "of one that says a field more": (
        '{"fence":117440512,"hold":1200.0,"holder":"run/lab/train/u-1","key":"430789b753e8","laterField":{"deep":['
        '1]},"number":3,"pod":"lab/train-head/p-1","priority":-5,"request":"request-1","run":"train","session":"dr'
        'iver","signature":"bc0ebefdadaa18f1ca75071137c6fbf7adb4454428c98c84d5343e200a815630","ttl":60.0,"v":1}'
    ),
    "of one that knew no number": (
        '{"fence":117440512,"hold":1200.0,"holder":"run/lab/train/u-1","key":"430789b753e8","pod":"lab/train-head/'
        'p-1","priority":-5,"request":"request-1","run":"train","session":"driver","signature":"86848522dff9a95479'
        'd700a278f3babe407d543b422630dac9176b9944afab40","ttl":60.0,"v":1}'
    ),
}
RECORD = ClaimRecord(
    "uid-1", 7 << 24, "run/lab/train/u-1", "train", "request-1", -5, 60.0, 1200.0, "lab/train-head/p-1", "driver", 3
)


@pytest.mark.parametrize("release", STORED)
def test_a_claim_that_another_release_wrote_stands(release: str) -> None:
    """`claim_record.Keys.write` -> `Keys.read`, over an upgrade and back."""
    expected = replace(RECORD, number=0) if "no number" in release else RECORD
    assert KEYS.read(STORED[release], RECORD.uid) == Reading(expected)


def test_what_is_written_today_is_what_is_kept_here() -> None:
    """Whoever changes the form of claims keeps the present one as the one of the release before."""
    assert KEYS.write(RECORD) == STORED["of this release"]
