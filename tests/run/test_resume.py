"""A run that is stopped by Ctrl-C and goes on, the second time on phones of which some are sick and one is dead."""

from __future__ import annotations

import json

import pytest
from whole import PHONES, SICK, Run, restarts

from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.telemetry.schema import EVENTS, VERSION, Summary

GROUPS = 4


def test_ctrl_c_ends_with_a_checkpoint_and_leaves_no_process(trained: Run, interrupted: Run) -> None:
    assert interrupted.finished.code == 130, interrupted.finished.said
    assert interrupted.finished.left_behind == []
    assert "Traceback" not in interrupted.finished.err
    assert "the same command resumes" in interrupted.finished.out
    updates = [event["update"] for event in interrupted.events("update")]
    assert interrupted.state["update"] == updates[-1] > trained.summary["updates"]


def test_a_run_goes_on_when_its_engine_dies(interrupted: Run) -> None:
    assert max(restarts(update) for update in interrupted.events("update")) == 1
    assert "engine 0 died" in interrupted.finished.err


def test_a_run_goes_on_from_its_checkpoint_when_a_rank_dies(interrupted: Run) -> None:
    """In the same driver, with the same phones."""
    (event,) = interrupted.events("restart")
    assert "a rank died during" in event["why"]
    events = list(read_events(interrupted.folder))
    again = next(k for k, e in enumerate(events) if k > events.index(event) and e["event"] == "update")
    assert events[again]["update"] == 1 + max(e["update"] for e in events[:again] if e["event"] == "checkpoint")
    assert sum(e["event"] == "started" for e in events) == 2, "of the sessions, one each"


def test_what_was_recorded_is_still_there(trained: Run, interrupted: Run, resumed: Run) -> None:
    for earlier, later in ((trained, interrupted), (interrupted, resumed)):
        before = (earlier.folder / "rollout" / "rollout-000001.jsonl").read_bytes()
        assert (later.folder / "rollout" / "rollout-000001.jsonl").read_bytes().startswith(before)
    names = [episode.id for episode in resumed.recording("rollout").episodes()]
    assert len(names) == len(set(names))


def test_it_goes_on_where_it_stopped(trained: Run, interrupted: Run, resumed: Run) -> None:
    assert resumed.finished.code == 0, resumed.finished.said
    assert resumed.finished.left_behind == []
    last = interrupted.state["update"] + 3
    assert sorted({event["update"] for event in resumed.events("update")}) == list(range(1, last + 1))
    assert resumed.summary["updates"] == last
    assert len(resumed.events("warm_start")) == 1
    assert resumed.summary["success_before"] == trained.summary["success_before"]
    assert resumed.summary["seconds_total"] > trained.summary["seconds_total"]
    first = trained.state["first_proof"]
    assert first["gap_tokens"] >= 48 and resumed.state["first_proof"] == interrupted.state["first_proof"] == first
    assert resumed.summary["episodes"] > interrupted.state["episodes"] > trained.summary["episodes"]


def test_syncs_are_proved_by_the_same_recorded_prompts_in_all_sessions(
    trained: Run, interrupted: Run, resumed: Run
) -> None:
    files = [run.folder / "proof" / "prompts.json" for run in (trained, interrupted, resumed)]
    assert len({file.read_bytes() for file in files}) == 1
    steps = {tuple(s.generation.prompt_ids) for e in trained.recording("rollout").episodes() for s in e.steps}
    assert all(tuple(one["ids"]) in steps and one["frames"] for one in json.loads(files[0].read_text()))
    assert trained.state["proof_prompts"] == resumed.state["proof_prompts"] != ""
    (tokens,) = {event["learner"]["gap_tokens"] for event in resumed.events("update")}
    assert tokens == trained.state["first_proof"]["gap_tokens"] == 16 * (3 + 2)


def test_a_logger_has_every_update_of_all_sessions_once(resumed: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(
        str(resumed.folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    logged.Reload()
    updates = sorted({event["update"] for event in resumed.events("update")})
    assert [event.step for event in logged.Scalars("learner/loss")] == updates
    assert [event.step for event in logged.Tensors("episodes")] == updates
    assert [event.step for event in logged.Images("episodes/1")] == updates
    assert not any("logger" in event["text"] for event in resumed.events("note"))


def test_the_same_tasks_come_in_the_same_order_without_a_gap(resumed: Run) -> None:
    """What was under way when the run ended may have been finished in any order."""
    orders = {group.order for group in resumed.recording("rollout").groups(dropped=True)}
    kept = sorted({group.order for group in resumed.recording("rollout").groups()})
    consumed = kept[: resumed.summary["updates"] * GROUPS]
    assert len(consumed) == resumed.summary["updates"] * GROUPS
    assert set(range(consumed[-1] + 1)) <= orders


def test_groups_under_way_at_the_stop_are_finished_and_not_played_twice(interrupted: Run, resumed: Run) -> None:
    """Each with the seed of its place, so that no member is another one's copy."""
    assert interrupted.state["unfinished"] != []
    groups = {group.order: group for group in resumed.recording("rollout").groups(dropped=True)}
    for left in interrupted.state["unfinished"]:
        group = groups[left["order"]]
        assert group.task.model_dump() == left["task"]
        assert set(left["episodes"]) <= {episode.id for episode in group.episodes}
        assert len({episode.seed for episode in group.episodes}) == len(group.episodes)


def test_the_kl_reference_stays_and_pulls(trained: Run, interrupted: Run, resumed: Run) -> None:
    weights = {(run.folder / "reference" / "model.safetensors").read_bytes() for run in (trained, interrupted, resumed)}
    assert len(weights) == 1
    assert resumed.events("update")[-1]["learner"]["kl_reference"] > 0


@pytest.mark.parametrize("kind", SICK[:3])
def test_sick_phones_cost_invalid_episodes_that_say_why(resumed: Run, phones: list[str], kind: str) -> None:
    sick = phones[SICK.index(kind)]
    # An episode that was still being played when the run ended has no outcome on any phone.
    here = [e for e in resumed.recording("rollout").episodes() if e.slot == sick]
    spoilt = [e for e in here if e.reason is not Reason.CANCELLED]
    assert spoilt != []
    assert {episode.outcome for episode in spoilt} == {Outcome.INVALID}
    assert all(sick in episode.message for episode in spoilt)


def test_invalid_episodes_are_counted_and_in_no_group_and_in_no_rate(interrupted: Run, resumed: Run) -> None:
    episodes = list(resumed.recording("rollout").episodes())
    invalid = {episode.id for episode in episodes if episode.outcome is Outcome.INVALID}
    assert 0 < resumed.summary["invalid_episodes"] <= len(invalid)
    assert interrupted.state["invalid"] == 0
    for group in resumed.recording("rollout").groups():
        assert 2 <= len(group.episodes) <= 4  # minValid; a place that only sick phones played is lost
        assert invalid.isdisjoint(episode.id for episode in group.episodes)
    for result in resumed.summary["success_after"].values():
        assert result["episodes"] == 16 - result["invalid"] > 0


def test_the_dead_phone_is_named_and_never_played_on(resumed: Run, phones: list[str]) -> None:
    assert len(phones) == PHONES + 1
    assert f"phones.txt:{len(phones) + 1}" in resumed.finished.err
    assert phones[-1] not in {episode.slot for episode in resumed.recording("rollout").episodes()}
    assert set(phones[len(SICK) : -1]) <= {episode.slot for episode in resumed.recording("rollout").episodes()}


def test_events_and_summaries_are_what_their_schemas_describe(trained: Run, resumed: Run) -> None:
    """The models refuse fields that they don't know, so none is missing in docs/reference either."""
    for event in read_events(resumed.folder):
        EVENTS[event["event"]].model_validate(event)
    for run in (trained, resumed):
        assert Summary.model_validate(run.summary).schema_ == VERSION
    assert {event["schema"] for event in resumed.events("started")} == {VERSION}
