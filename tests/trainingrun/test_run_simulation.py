"""A run through whatever can happen to it: RayJobs that fail, vanish and are suspended by a queue, drivers that report,
users who change their minds, operators that crash between any two writes and come back as another release.

The model holds what an API server would hold. What the planner wants is carried out one write after the other; a crash
leaves the rest undone, or lets a create that was under way arrive much later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runs_made import DISK, NOON, SAFE, UID, job, made, pool, report

from tapforge_api.learning import Stop
from tapforge_operator.kube.types import RayHead, RayJob
from tapforge_operator.trainingrun import plan, rayjob
from tapforge_operator.trainingrun.plan import plan_run
from tapforge_operator.trainingrun.state import DryRunResult, Observed, RunHistory, RunPlan
from tapforge_operator.trainingrun.status import ended, events, is_true
from tapforge_operator.trainingrun.templates import StoredConfig

STATES = st.sampled_from(
    [
        ("", "Initializing", ""),
        ("PENDING", "Running", ""),
        ("RUNNING", "Running", ""),
        ("FAILED", "Running", ""),
        ("SUCCEEDED", "Running", ""),
        ("", "Suspending", ""),
        ("", "Suspended", ""),
        ("", "Retrying", ""),
        ("SUCCEEDED", "Complete", ""),
        ("STOPPED", "Complete", ""),
        ("FAILED", "Failed", "exit code 1"),
        ("FAILED", "Failed", "exit code 2"),
        ("FAILED", "Failed", "exit code 75"),
        ("FAILED", "Failed", "exit code -9"),
        ("FAILED", "Failed", "the actor died"),
        ("RUNNING", "Failed", "submission has failed"),
        ("", "ValidationFailed", "no"),
    ]
)
#: that judges may use at first, and more each time that it is raised
_TOKENS = 100
TERMINAL = ("Complete", "Failed", "ValidationFailed")


class RunMachine(RuleBasedStateMachine):
    @initialize(limit=st.integers(0, 3), storage=st.booleans(), deadline=st.sampled_from([None, 300]))
    def begin(self, limit: int, storage: bool, deadline: int | None) -> None:
        cluster = {"image": "i", "backoffLimit": limit, "suspendGraceSeconds": 60, "ttlSecondsAfterFinished": 500}
        if deadline:
            cluster["activeDeadlineSeconds"] = deadline
        checkpoints = SAFE if storage else {}
        source = {"pool": {"name": "phones", "slots": 4}}
        stop = {"judgeTokens": _TOKENS}
        self.run = made(cluster=cluster, checkpoints=checkpoints, environment={"source": source}, stop=stop)
        self.limit = limit
        self.now = NOON
        self.pool = pool()
        self.jobs: dict[str, RayJob] = {}
        self.head: RayHead | None = None
        self.furthest = self.gains = 0
        self.config = StoredConfig()
        self.created: Counter[int] = Counter()
        self.in_flight: list[int] = []
        self.sequence = 0
        self.final = ""
        self.release = 0
        self.told: list[str] = []
        self.suspensions = self.spendings = self.used = 0
        self.skips = 0
        self.operator_starts()

    # --- the operator -------------------------------------------------------------------------------------------------

    def operator_starts(self) -> None:
        self.history = RunHistory()
        self.report = None
        self.reported = 0.0
        self.made = 0
        self.head = self.head if self.head is not None and not self.head.gone else None
        self.skips += self.run.status.attempt.phase == "Intended"

    def plan(self) -> RunPlan:
        seen = Observed(
            jobs=tuple(self.jobs.values()),
            pool=self.pool,
            volume=DISK,
            config=self.config,
            head=self.head,
            report=self.report,
            reported=self.reported,
            dry_run=DryRunResult(self.run.generation),
            created_job=self.made,
        )
        planned = plan_run(self.run, seen, self.history, self.now)
        self.history = planned.history
        return planned

    def write(self, planned: RunPlan) -> None:
        before = self.run.status
        self.told += [event.reason for event in events(before, planned.status)]
        self.run = replace(self.run, status=planned.status)

    def create(self, number: int) -> None:
        """As the API server does: a name is there once."""
        if all(one.attempt != number for one in self.jobs.values()):
            self.created[number] += 1
            uid = f"job-{number}-{self.created[number]}"
            self.jobs[uid] = replace(job(number), uid=uid)

    def act(self, planned: RunPlan, steps: int = 99) -> None:
        for one in planned.delete_jobs:
            if steps and one.uid in self.jobs:
                steps -= 1
                self.jobs[one.uid] = replace(self.jobs[one.uid], deleting=True)
        if planned.create_job:
            assert not ended(self.run.status)
            others = [one for one in self.jobs.values() if one.attempt != planned.create_job]
            assert not others, "a new attempt begins when nothing of the others is left"
            spent = self.run.spec.stop.spent_on_judges(self.run.status.progress.judge_tokens, 0.0)
            assert not (spent and is_true(self.run.status, "Suspended")), spent
            if steps:
                steps -= 1
                self.ensure_config()
            if steps:
                self.create(planned.create_job)
                self.made = planned.create_job

    def ensure_config(self) -> None:
        data = rayjob.config_map(self.run)["data"]
        config = StoredConfig(data[rayjob.RUN_KEY], data[rayjob.TEMPLATES_KEY])
        assert config.run, "no attempt begins before the run is resolved"
        assert self.config in (StoredConfig(), config), "attempts see the same run"
        self.config = config

    @rule(times=st.integers(1, 4))
    def passes(self, times: int) -> None:
        for _ in range(times):
            planned = self.plan()
            self.write(planned)
            self.act(planned)
            self.now += 1

    @rule(steps=st.integers(0, 3), written=st.booleans(), late=st.booleans())
    def crashes(self, steps: int, written: bool, late: bool) -> None:
        planned = self.plan()
        if written:
            self.write(planned)
            self.act(planned, steps)
            if late and steps < 2 and planned.create_job:
                self.in_flight.append(planned.create_job)
        self.operator_starts()

    @rule()
    def is_upgraded(self) -> None:
        self.release += 1
        plan.resolve = lambda run, release=self.release: f"{rayjob.resolve(run)}# {release}\n"  # type: ignore[assignment]
        self.operator_starts()

    @precondition(lambda self: self.in_flight)
    @rule()
    def a_late_create_arrives(self) -> None:
        self.create(self.in_flight.pop())

    # --- everybody else -----------------------------------------------------------------------------------------------

    @precondition(lambda self: any(one.deployment not in TERMINAL for one in self.jobs.values()))
    @rule(state=STATES, data=st.data())
    def kuberay_says(self, state: tuple[str, str, str], data: st.DataObject) -> None:
        open_ = sorted(one.uid for one in self.jobs.values() if one.deployment not in TERMINAL)
        uid = data.draw(st.sampled_from(open_))
        status, deployment, message = state
        told = replace(self.jobs[uid], job_status=status, deployment=deployment, message=message)
        self.jobs[uid] = replace(told, suspended=deployment.startswith("Suspend"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), finalised=st.booleans())
    def a_rayjob_vanishes(self, data: st.DataObject, finalised: bool) -> None:
        """Deleted by somebody, or at last by KubeRay."""
        uid = data.draw(st.sampled_from(sorted(self.jobs)))
        if finalised or self.jobs[uid].deleting:
            del self.jobs[uid]
        else:
            self.jobs[uid] = replace(self.jobs[uid], deleting=True)

    @rule(
        final=st.sampled_from(["", "", "", "complete", "failed", "configuration", "stopped"]),
        late=st.booleans(),
        update=st.integers(0, 5),
        spent=st.booleans(),
    )
    def the_driver_reports(self, final: str, late: bool, update: int, spent: bool) -> None:
        number = self.run.status.attempt.number - late
        if number >= 1 and any(one.attempt == number for one in self.jobs.values()):
            self.sequence += 1
            made = {"checkpoint": {"update": update, "path": "p"}} if update else {}
            limit = self.run.spec.stop.judge_tokens
            if spent and final == "stopped" and limit is not None:
                made["reason"], self.used = "JudgeBudgetSpent", limit
                self.spendings += 1
            advance = {"update": update, "maxUpdates": 10, "judgeTokens": self.used}
            self.report = report(number, self.sequence, final=final, advance=advance, **made)
            self.reported = self.now
            self.gains += update > self.furthest
            self.furthest = max(update, self.furthest)

    @rule(word=st.sampled_from(["", "", "EvictionByEvictionAPI", "NodeLost"]), gone=st.booleans())
    def the_head_is_heard_of(self, word: str, gone: bool) -> None:
        number = self.run.status.attempt.number
        if number and any(one.attempt == number for one in self.jobs.values()):
            self.head = RayHead("team", "head", f"head-{number}", "1", UID, number, disruption=word, gone=gone)

    @rule(on=st.booleans())
    def the_user_suspends_or_resumes(self, on: bool) -> None:
        self.suspensions += on and not self.run.spec.suspend
        spec = self.run.spec.model_copy(update={"suspend": on})
        self.run = replace(self.run, spec=spec, generation=self.run.generation + 1)

    @rule()
    def the_user_raises_what_judges_may_use(self) -> None:
        self.limits(self.used + _TOKENS)

    def limits(self, tokens: int | None) -> None:
        spec = self.run.spec.model_copy(update={"stop": Stop(judge_tokens=tokens)})
        self.run = replace(self.run, spec=spec, generation=self.run.generation + 1)

    @rule(ready=st.integers(0, 4))
    def phones_come_and_go(self, ready: int) -> None:
        self.pool = pool(ready=ready)

    @rule()
    def the_config_map_is_deleted(self) -> None:
        self.config = StoredConfig()

    @rule(seconds=st.sampled_from([1, 20, 70, 200]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    # --- what always holds --------------------------------------------------------------------------------------------

    @property
    def interruptions(self) -> int:
        """After which a run that goes on does so with a new attempt, and which count as no failure."""
        return self.suspensions + self.spendings

    @invariant()
    def no_attempt_has_two_rayjobs(self) -> None:
        assert all(count == 1 for count in self.created.values()), self.created

    @invariant()
    def lost_clusters_are_replaced_only_so_often(self) -> None:
        status = self.run.status
        assert status.failures <= self.limit + 1
        assert status.failures <= self.limit or ended(status)
        counted = (1 + self.gains) * self.limit
        assert status.lost_clusters <= counted + 1
        assert sum(self.created.values()) <= 1 + counted + status.disruptions + self.interruptions + self.skips

    @invariant()
    def the_end_is_the_end(self) -> None:
        status = self.run.status
        if ended(status):
            word = "complete" if is_true(status, "Complete") else "failed"
            assert self.final in ("", word) and status.completion_time
            self.final = word
        else:
            assert not self.final

    @invariant()
    def the_run_stays_as_it_was_resolved(self) -> None:
        first = getattr(self, "first", "")
        if first:
            assert self.run.status.resolved == first
        elif self.run.status.resolved:
            self.first = self.run.status.resolved

    @invariant()
    def conditions_make_sense(self) -> None:
        status = self.run.status
        if not status.conditions:
            return
        kinds = [c.type for c in status.conditions]
        assert kinds == ["Ready", "Reconciling", "Stalled", "Suspended", "Complete", "Failed"]
        assert sum(is_true(status, kind) for kind in ("Ready", "Reconciling", "Stalled")) == 1
        assert not (is_true(status, "Complete") and is_true(status, "Failed"))
        assert all(c.reason for c in status.conditions)

    def teardown(self) -> None:
        """Left in peace, the run comes to its end."""
        if not hasattr(self, "run"):
            return
        self.the_user_suspends_or_resumes(True)
        for _ in range(200):
            self.passes(1)
            for uid in [uid for uid, one in self.jobs.items() if one.deleting]:
                del self.jobs[uid]
            self.now += 10
        assert ended(self.run.status) or not self.jobs, "a suspended run has no RayJob"
        assert ended(self.run.status) or is_true(self.run.status, "Suspended")
        self.the_user_suspends_or_resumes(False)
        self.limits(None)
        self.pool = pool()
        for _ in range(200):
            self.passes(1)
            for uid, one in list(self.jobs.items()):
                self.jobs[uid] = replace(one, job_status="SUCCEEDED", deployment="Complete", suspended=False)
                if one.deleting:
                    del self.jobs[uid]
            self.now += 10
        assert ended(self.run.status), self.run.status
        assert self.run.status.conditions[0].reason == self.told[-1], "its end was told"
        settled = self.plan()
        assert settled.status == self.run.status and not settled.create_job and not settled.delete_jobs
        assert not self.jobs, "after ttlSecondsAfterFinished nothing is left"


@pytest.fixture(autouse=True)
def _one_release_after_another() -> object:
    yield
    plan.resolve = rayjob.resolve


TestRun = RunMachine.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False)


def test_the_model_is_of_one_run() -> None:
    assert job().run_uid == UID
