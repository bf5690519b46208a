"""One attempt, on a real phone over real sockets: what executes, what counts, and why it ends."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from phones import PATIENT, impatient, phones, put_forward, until
from scripted import (
    AGENT,
    DONE,
    GIVE_UP,
    INFEASIBLE,
    TASKS,
    BytesAgent,
    Demonstrator,
    Held,
    Script,
    always,
    heard,
    say,
    way,
)

from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.protocol import Answer, Back, EnvironmentFault, Home, Outcome, Reason, UnsupportedAction, Wait
from tapforge_envs.ui_tree import ui_key
from tapforge_trainer.agents.parsing import ParseFailure
from tapforge_trainer.agents.screens import resize
from tapforge_trainer.attempt import Attempt, AttemptRequest, EpisodeLimits, PhoneCall
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.frames.frame import FittedFrame, decode
from tapforge_trainer.judges.verdicts import Trajectory
from tapforge_trainer.recording.frames import RecordedFrames
from tapforge_trainer.recording.reader import FRAMES, Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import GroupRecord, Sampling
from tapforge_trainer.rollout.episode import Episode, Standing, after_answer
from tapforge_trainer.states.frame import frame_key
from tapforge_trainer.states.grouping import states_of

TASK = next(t for t in (TASKS.sample(0, i) for i in range(100)) if t.feasible and len(way(t)) >= 4)
SAMPLING = Sampling(max_tokens=64)
BAD = ParseFailure("json", "bad")
#: as a phone sees it: an answer may take a day, the calls to the phone a minute
UNHURRIED = EpisodeLimits(episode_seconds=60)


@pytest.mark.parametrize(
    ("standing", "answer", "after", "reason"),
    [
        (Standing(), Home(), Standing(1, 0, 1), None),
        (Standing(3, 2, 1), Home(), Standing(4, 0, 2), None),
        (Standing(9, 0, 9), Home(), Standing(10, 0, 10), Reason.STEP_LIMIT),
        (Standing(), BAD, Standing(1, 1, 0), None),
        (Standing(5, 2, 3), BAD, Standing(6, 3, 3), Reason.PARSE_FAILURES),
        (Standing(9, 0, 9), BAD, Standing(10, 1, 9), Reason.STEP_LIMIT),
        (Standing(9, 2, 7), BAD, Standing(10, 3, 7), Reason.PARSE_FAILURES),
        (Standing(), DONE, Standing(1, 0, 1), Reason.DONE),
        (Standing(), GIVE_UP, Standing(1, 0, 1), Reason.DONE),
        (Standing(9, 0, 9), DONE, Standing(10, 0, 10), Reason.DONE),
        (Standing(4, 1, 3), Answer(text="7"), Standing(5, 0, 4), Reason.DONE),
        (Standing(), INFEASIBLE, Standing(1, 0, 1), Reason.DECLARED_INFEASIBLE),
    ],
)
def test_what_follows_from_an_answer(standing, answer, after, reason):
    assert after_answer(standing, answer, max_steps=10, max_parse_failures=3) == (after, reason)


@asynccontextmanager
async def a_phone(offers="exact"):
    async with phones(offers=offers) as server, new_session() as session:
        yield server, TapforgeClient(server.url(), session, PATIENT, "phone-0")


def episode(generator, task=TASK, agent=AGENT, limits=None, **kw) -> Episode:
    attempt = Attempt("g000001", 1, 2, kw.pop("attempt", 0), kw.pop("issue", 0), task, seed=99)
    rewarded = kw.pop("rewarded", False)
    return Episode(AttemptRequest(attempt, SAMPLING, limits or EpisodeLimits(), rewarded=rewarded), agent, generator)


def play(generator, *faults, offers="exact", **kw):
    """(what was played, how many steps the phone executed)"""

    async def run():
        async with a_phone(offers) as (server, client):
            await server.set_faults(0, *faults)
            played = await impatient(episode(generator, **kw).play(client, "phone-0"), server.hung)
            running = server.slots[0].episode
            return played, len(running.results) if running else 0

    return asyncio.run(run())


def test_a_solved_task():
    played, executed = play(Demonstrator([TASK]), issue=3)
    record = played.record
    assert (record.reason, record.outcome, record.score) == (Reason.DONE, Outcome.SUCCESS, 1.0)
    assert record.valid and record.id == "g000001.2.3" and record.slot == "phone-0" and record.seed == 99
    steps = way(TASK)
    assert [s.index for s in record.steps] == list(range(len(steps)))
    assert [s.action for s in record.steps] == [a.model_dump() for _, a in steps]
    assert [s.frames for s in record.steps] == [(screen,) for screen, _ in steps]
    assert {f.name for f in played.frames.values()} == set(played.frames) == {screen for screen, _ in steps}
    assert all(s.state_key and s.app and s.parse_error is None for s in record.steps)
    assert executed == len(steps)
    assert record.started <= record.ended and played.broke is None


class Half(BytesAgent):
    """Its model sees half of a screen's width and height."""

    def prepare(self, observation):
        seen, pixels = super().prepare(observation)
        half = FittedFrame.of(resize(pixels(), seen.frame.width // 2, seen.frame.height // 2))
        return replace(seen, frame=half), half.pixels


@pytest.mark.parametrize("kept", [True, False])
def test_screens_are_kept_as_the_device_drew_them_where_that_is_asked_for(kept, tmp_path):
    known = Script(lambda step, prompt, sampling: way(TASK)[step][1])
    played, _ = play(known, agent=Half(), limits=EpisodeLimits(device_screens=kept), rewarded=True)
    record, frames = played.record, played.frames
    assert record.outcome is Outcome.SUCCESS and set(record.frames) == set(frames)
    assert all((step.screen is not None) == kept for step in record.steps) and (record.last_screen is not None) == kept
    assert {frames[step.frames[-1]].width for step in record.steps} == {48}
    recorder = Recorder(tmp_path / "rollout")
    recorder.episode(record, frames)
    recorder.close()
    recording = Recording(tmp_path / "rollout")
    (read,) = recording.episodes()
    assert read == record and recording.is_complete(read)
    shown = Trajectory.of(read, RecordedFrames(recording.folder / FRAMES, read.frames)).screens
    assert len(shown) == len(record.steps) + 1
    assert {decode(screen, "screen").shape for screen in shown} == {(160, 96, 3) if kept else (80, 48, 3)}


def test_a_screen_that_the_model_sees_as_it_is_is_kept_once():
    played, _ = play(Demonstrator([TASK]), limits=EpisodeLimits(device_screens=True))
    assert all(step.screen is None for step in played.record.steps)


def test_states_are_told_by_the_best_that_the_phone_offers():
    exact, ui, frame = (play(Demonstrator([TASK]), offers=offers)[0] for offers in ("exact", "ui", "frame"))
    assert all(s.state_key and not s.ui_key and not s.frame_key for s in exact.record.steps)
    assert all(s.ui_key and not s.state_key and not s.frame_key for s in ui.record.steps)
    assert all(s.frame_key and not s.state_key and not s.ui_key for s in frame.record.steps)
    # what is recorded is the tree itself, and the frame that the model saw gives the key again
    assert {s.ui_tree for s in ui.record.steps} == set(ui.ui_trees) != {None}
    assert all(ui_key(ui.ui_trees[s.ui_tree]) == s.ui_key for s in ui.record.steps)
    for step in frame.record.steps:
        assert frame_key(frame.frames[step.frames[-1]].pixels()).text() == step.frame_key
    assert not exact.ui_trees and not frame.ui_trees
    # on this way no two states look alike
    assert len({states_number(p) for p in (exact, ui, frame)}) == 1


def test_steps_of_a_phone_without_exact_keys_are_compared_by_their_states():
    won = play(Demonstrator([TASK]), offers="frame")[0].record
    lost = play(always(Home(), Home(), GIVE_UP), offers="frame", issue=1)[0].record
    batch = build_batch([GroupRecord("g000001", 1, TASK, 0, (won, lost))], BatchRules())
    assert batch.statistics.step_advantage_spread > 0
    assert batch.statistics.singleton_step_share < 1
    assert [c.state_group_size > 1 for c in batch.credits if c.step == 0] == [True, True]


def states_number(played) -> int:
    return len(set(states_of(played.record.steps)))


def test_a_task_given_up_is_judged_like_done():
    record = play(always(GIVE_UP))[0].record
    assert (record.reason, record.outcome, record.score) == (Reason.DONE, Outcome.FAILURE, 0.0)


def test_declared_infeasible_is_decided_by_the_task_and_not_by_the_judge():
    played, executed = play(always(INFEASIBLE), {"kind": "error", "calls": ["evaluate"]})
    assert (played.record.reason, played.record.outcome) == (Reason.DECLARED_INFEASIBLE, Outcome.FAILURE)
    assert played.record.score is None and executed == 1
    task = next(t for t in (TASKS.sample(0, i) for i in range(500)) if not t.feasible)
    assert play(always(INFEASIBLE), task=task)[0].record.outcome is Outcome.SUCCESS


def test_where_it_is_not_known_whether_a_task_can_be_done_saying_that_it_cannot_is_judged_as_any_other_end():
    open_task = TASK.model_copy(update={"feasible": None})
    record = play(always(INFEASIBLE), task=open_task)[0].record
    assert (record.reason, record.outcome, record.score) == (Reason.DECLARED_INFEASIBLE, Outcome.FAILURE, 0.0)
    broken = play(always(INFEASIBLE), {"kind": "error", "calls": ["evaluate"]}, task=open_task)[0].record
    assert (broken.reason, broken.outcome) == (Reason.JUDGE_ERROR, Outcome.INVALID)
    late = open_task.model_copy(update={"max_steps": 1})
    record = play(always(Home()), task=late)[0].record
    assert (record.reason, record.outcome, record.score) == (Reason.STEP_LIMIT, Outcome.FAILURE, None)


class Refusing:
    """A phone that has no Home."""

    def __init__(self, phone):
        self._phone = phone
        self.reset, self.evaluate, self.close = phone.reset, phone.evaluate, phone.close

    async def step(self, action, index):
        if isinstance(action, Home):
            raise UnsupportedAction("this phone has no home")
        return await self._phone.step(action, index)


async def test_an_action_that_the_phone_does_not_have_is_a_malformed_answer():
    """It neither breaks the phone nor uses up an index: the next step is taken."""
    async with a_phone() as (server, client):
        played = await episode(always(Home(), Back(), GIVE_UP)).play(Refusing(client), "phone-0")
        assert len(server.slots[0].episode.results) == 2
    record = played.record
    assert (record.reason, record.outcome) == (Reason.DONE, Outcome.FAILURE)
    assert [s.action is None for s in record.steps] == [True, False, False]
    assert "no home" in record.steps[0].parse_error and played.broke is None
    assert record.steps[0].frames == record.steps[1].frames


class Knowing:
    """A server that has the goal of a task, and knows that it can't be done."""

    def __init__(self, phone):
        self._phone = phone
        self.step, self.evaluate, self.close = phone.step, phone.evaluate, phone.close

    async def reset(self, task):
        return replace(await self._phone.reset(task), goal="Do the impossible.", feasible=False)


@pytest.mark.parametrize(("own", "asked"), [("", "Do the impossible."), ("Buy milk.", "Buy milk.")])
async def test_a_task_is_what_its_environment_says_it_is(own, asked):
    goals = []

    def answer(step, prompt, sampling):
        goals.append(heard(prompt)[1])
        return INFEASIBLE

    async with a_phone() as (_, client):
        task = TASK.model_copy(update={"goal": own})
        record = (await episode(Script(answer), task=task).play(Knowing(client), "phone-0")).record
    assert goals == [asked] and (record.task.goal, record.task.key) == (asked, TASK.key)
    assert (record.reason, record.outcome) == (Reason.DECLARED_INFEASIBLE, Outcome.SUCCESS)


async def test_too_many_actions_that_the_phone_does_not_have_end_the_episode_as_the_agents_failure():
    async with a_phone() as (_, client):
        limits = EpisodeLimits(max_parse_failures=2)
        record = (
            await episode(always(Home(), "what?", Back()), limits=limits).play(Refusing(client), "phone-0")
        ).record
    assert (record.reason, record.outcome) == (Reason.PARSE_FAILURES, Outcome.FAILURE)


def test_malformed_answers_execute_nothing_and_leave_the_screen():
    played, executed = play(always("what?", Home(), "{}", "hm"), limits=EpisodeLimits(max_parse_failures=2))
    record = played.record
    assert (record.reason, record.outcome) == (Reason.PARSE_FAILURES, Outcome.FAILURE)
    assert [s.action is None for s in record.steps] == [True, False, True, True]
    assert [bool(s.parse_error) for s in record.steps] == [True, False, True, True]
    assert executed == 1
    assert record.steps[0].frames == record.steps[1].frames
    assert record.steps[2].frames == record.steps[3].frames


def test_environment_steps_are_numbered_by_executed_actions():
    # A phone refuses a step from the future: malformed answers in between must not leave gaps.
    played, executed = play(always("x", Home(), "x", Back(), "x", DONE))
    assert played.record.reason is Reason.DONE and executed == 3


def test_the_step_limit_counts_answers_and_is_a_failure_even_when_the_task_is_solved():
    task = TASK.model_copy(update={"max_steps": 2})
    record = play(always("x", Home(), Home()), task=task)[0].record
    assert (record.reason, record.outcome, record.score) == (Reason.STEP_LIMIT, Outcome.FAILURE, None)
    assert len(record.steps) == 2
    solved = TASK.model_copy(update={"max_steps": len(way(TASK)) - 1})
    assert play(Demonstrator([TASK]), task=solved)[0].record.outcome is Outcome.FAILURE


def test_the_last_allowed_answer_may_be_the_end():
    task = TASK.model_copy(update={"max_steps": len(way(TASK))})
    assert play(Demonstrator([TASK]), task=task)[0].record.outcome is Outcome.SUCCESS


def test_a_prompt_that_outgrows_the_context_ends_the_episode_as_a_failure():
    agent = BytesAgent(context=AGENT.prompt(TASK.goal, [], _seen()).expanded_length + 10)
    record = play(always(Home()), agent=agent)[0].record
    assert (record.reason, record.outcome, len(record.steps)) == (Reason.CONTEXT_LIMIT, Outcome.FAILURE, 1)


def _seen():
    from tapforge_envs.phone import catalog

    phone = catalog.phone_for("quickstart", 96, 160)
    return phone.reset(TASK.seed, catalog.rules_of(TASK))


def test_an_answer_that_was_cut_off_is_a_parse_failure():
    cut = Script(lambda step, prompt, s: say(Home(), prompt, finish_reason="length") if step == 0 else DONE)
    record = play(cut)[0].record
    assert record.steps[0].parse_error.startswith("cut_off") and record.reason is Reason.DONE


@pytest.mark.parametrize(
    ("fault", "reason", "call", "steps"),
    [
        ({"kind": "error", "atStep": 1}, Reason.ENV_ERROR, "step", 2),
        ({"kind": "hung", "atStep": 1}, Reason.DEADLINE, "step", 2),
        ({"kind": "half", "atStep": 0}, Reason.ENV_ERROR, "step", 1),
        ({"kind": "wrong_size", "calls": ["reset"]}, Reason.ENV_ERROR, "reset", 0),
        ({"kind": "lost_task", "atStep": 1}, Reason.ENV_ERROR, "step", 2),
        ({"kind": "lying_health"}, Reason.ENV_ERROR, "reset", 0),
        ({"kind": "error", "calls": ["evaluate"]}, Reason.JUDGE_ERROR, "evaluate", 3),
        ({"kind": "hung", "calls": ["evaluate"]}, Reason.DEADLINE, "evaluate", 3),
    ],
)
def test_a_phone_that_breaks_makes_the_episode_invalid_and_keeps_its_steps(fault, reason, call, steps):
    played, _ = play(always(Home(), Back(), DONE), fault)
    record = played.record
    assert (record.reason, record.outcome, record.score) == (reason, Outcome.INVALID, None)
    assert (played.broke.name, len(record.steps)) == (call, steps)
    assert "phone-0" in record.message
    if call == "step":
        assert played.broke.action == record.steps[-1].action == (Home(), Back())[steps - 1].model_dump()
        assert "the phone failed" in record.steps[-1].note


def test_a_frame_that_the_agent_refuses_is_the_fault_of_the_call_that_brought_it():
    class Picky(BytesAgent):
        prepared = 0

        def prepare(self, observation):
            self.prepared += 1
            if self.prepared == 2:
                raise EnvironmentFault("the frame is no picture")
            return super().prepare(observation)

    played, _ = play(always(Home()), agent=Picky())
    assert (played.record.reason, played.record.outcome) == (Reason.ENV_ERROR, Outcome.INVALID)
    assert played.broke == PhoneCall("step", 0, Home().model_dump()) and len(played.record.steps) == 1


def test_the_time_that_the_model_takes_counts_against_no_deadline():
    async def run():
        async with a_phone() as (_, client):
            late = iter([3600] * 20)

            def answer(step, prompt, sampling):
                put_forward(next(late))
                return Home() if step < 2 else GIVE_UP

            return await episode(Script(answer), limits=UNHURRIED).play(client, "phone-0")

    played = asyncio.run(run())
    assert (played.record.reason, played.record.outcome) == (Reason.DONE, Outcome.FAILURE)
    assert len(played.record.steps) == 3 and played.broke is None


def test_calls_that_take_too_long_together_make_an_episode_invalid():
    async def run():
        async with a_phone() as (server, client):
            await server.set_faults(0, {"kind": "slow", "medianSeconds": 3600, "atStep": 1})
            one = episode(always(Wait()), limits=EpisodeLimits(episode_seconds=60))
            playing = asyncio.create_task(one.play(client, "phone-0"))
            await until(lambda: server.slots[0].episode and len(server.slots[0].episode.results) == 2)
            put_forward(60)
            return await playing

    played = asyncio.run(run())
    assert (played.record.reason, played.record.outcome) == (Reason.DEADLINE, Outcome.INVALID)
    assert "phone-0: step: the calls of this episode took longer than 60 s together" in played.record.message
    assert played.broke == PhoneCall("step", 1, Wait().model_dump())
    assert len(played.record.steps) == 2, "what was done before is kept"


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.RECLAIMED])
@pytest.mark.parametrize("where", ["model", "phone", "before"])
def test_a_stopped_episode_keeps_its_steps_and_has_no_outcome(reason, where):
    async def run():
        async with a_phone() as (server, client):
            if where == "phone":
                await server.set_faults(0, {"kind": "slow", "medianSeconds": 3600, "calls": ["step"]})
            generator = Held(lambda *a: Home(), steps=1)
            one = episode(generator)
            task = asyncio.create_task(one.play(client, "phone-0"))
            if where == "model":  # that is about to give its second answer
                await until(lambda: generator.held)
            elif where == "phone":  # that executes the first one
                await until(lambda: server.slots[0].episode and server.slots[0].episode.results)
            one.stop(reason)
            played = await task
            assert (played.record.reason, played.record.outcome, played.record.valid) == (reason, None, False)
            assert not task.cancelled() and task.cancelling() == 0
            assert (len(played.record.steps) >= 1) == (where == "model")

    asyncio.run(run())


def test_only_our_own_reasons_stop_an_episode():
    with pytest.raises(ValueError, match="not as done"):
        episode(always(DONE)).stop(Reason.DONE)


def test_cancelling_the_task_from_outside_is_no_record():
    async def run():
        async with a_phone() as (_, client):
            generator = Held(lambda *a: DONE)
            task = asyncio.create_task(episode(generator).play(client, "phone-0"))
            await until(lambda: generator.held)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_an_aborted_answer_is_our_doing():
    record = play(Script(lambda step, prompt, s: say(Home(), prompt, finish_reason="abort")))[0].record
    assert (record.reason, record.outcome) == (Reason.CANCELLED, None)


def test_an_engine_that_breaks_is_not_the_episodes_end():
    def broken(step, prompt, sampling):
        raise ConnectionResetError("the engine is gone")

    with pytest.raises(ConnectionResetError):
        play(Script(broken))


def test_every_step_has_its_own_seed_and_a_repeated_episode_the_same_ones():
    def seeds():
        found = []

        def answer(step, prompt, sampling):
            found.append(sampling)
            return Home() if step < 3 else DONE

        play(Script(answer))
        return found

    first, second = seeds(), seeds()
    assert first == second
    assert len({s.seed for s in first}) == 4
    assert {replace(s, seed=None) for s in first} == {SAMPLING}
