"""Stages of a run: what each is by itself, when one ends, and what is said of them before the run."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from counted import parts

from tapforge_api import dump_set, load
from tapforge_envs.protocol import Task
from tapforge_trainer.learner.checkpoint_storage import FORMAT, CheckpointFolder
from tapforge_trainer.loop import reinforce
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.run.plan import plan, render
from tapforge_trainer.run.report import stage_orders
from tapforge_trainer.run.shutdown import Interrupted, StopSignal
from tapforge_trainer.run.stage_errors import rule_errors
from tapforge_trainer.session import judges_may_go_on, newest_progress
from tapforge_trainer.tasks.lines import line_of
from tapforge_trainer.tasks.regimes import other_templates, tasks_by_regime
from tapforge_trainer.tasks.stages import of_stage, stages_of
from tapforge_trainer.telemetry.progress import Progress, begin_stage, finished, stage_ended

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
JUDGED = (
    "{success: judge, verifier: ignored, streams: [{name: judge, judge: {prompt: simulated-phone, models: "
    '[{url: "http://127.0.0.1:1/v1", model: m, samples: 3, temperature: 1.0}]}}]}'
)


def run_of(*stages, more=()):
    return load(SAMPLE, ["spec.evaluation.episodes=20", f"spec.stages=[{', '.join(stages)}]", *more])


def test_a_stage_is_a_run_with_what_it_says_and_the_rest_of_the_file():
    run = run_of(
        "{stop: {maxUpdates: 3}}",
        f"{{tasks: {{split: test}}, rewards: {JUDGED}, temperature: 0.5, learningRate: 1e-6, stop: {{maxUpdates: 2}}}}",
    )
    first, second = stages_of(run)
    assert (first.spec.tasks, first.spec.rewards, first.spec.rollout) == (
        run.spec.tasks, run.spec.rewards, run.spec.rollout,
    )  # fmt: skip
    assert second.spec.tasks.split == "test" and second.spec.rewards.verifier == "ignored"
    assert (second.spec.rollout.temperature, second.spec.learner.learning_rate) == (0.5, 1e-6)
    assert second.spec.rollout.group_size == run.spec.rollout.group_size
    assert second.spec.evaluation == run.spec.evaluation
    alone = load(SAMPLE)
    assert stages_of(alone) == (alone,) and of_stage(alone, 0) is alone


def test_a_stage_ends_by_its_own_stop_and_the_run_by_its_own_or_with_the_last_stage():
    run = run_of("{stop: {maxUpdates: 3}}", "{stop: {maxUpdates: 4, targetSuccess: 0.5}}")
    stop, stages = run.spec.stop, run.spec.stages
    progress = Progress(update=2, tasks=9, success=0.9, practice={"a": 1}, unfinished=[{}], episodes=7, next_order=5)
    assert stage_ended(stages, progress) == "" and not finished(stop, stages, progress)
    progress.update = 3
    assert stage_ended(stages, progress) == "3 updates of stage 1" and not finished(stop, stages, progress)
    begin_stage(progress)
    assert (progress.stage, progress.stage_began, progress.stages_drawn, progress.tasks) == (1, 3, [9], 0)
    assert (progress.practice, progress.unfinished) == ({}, [])
    assert progress.success is None, "it was of the stage before"
    assert (progress.update, progress.episodes, progress.next_order) == (3, 7, 5)
    assert stage_ended(stages, progress) == ""
    progress.success = 0.5
    assert finished(stop, stages, progress) == "50% success over all attempts of an update in stage 2"
    progress.success, progress.update = None, 7
    assert finished(stop, stages, progress) == "4 updates of stage 2"
    short = stop.model_copy(update={"max_updates": 2})
    assert finished(short, stages, Progress(update=2)) == "2 updates", "the run's own limit holds in every stage"
    assert Progress.of({"update": 4}).stage == 0 and stage_ended((), Progress(update=4)) == ""


def test_the_plan_has_the_stages_and_says_what_they_share_with_what_is_measured_on_purpose(tmp_path):
    run = run_of(
        "{tasks: {templates: [count]}, stop: {maxUpdates: 3}}",
        f"{{tasks: {{split: test, templates: [open, switch]}}, rewards: {JUDGED}, stop: {{maxUpdates: 2}}}}",
    )
    found = plan(run, inspect(run, tmp_path), tmp_path)
    text = render(found)
    assert found.updates == 5 and found.episodes == 5 * 128 and found.held_out is None
    assert "stage 1     suite quickstart, split train, templates count" in text
    assert "stage 2     suite quickstart, split test, templates open, switch" in text
    assert "3 votes each" in text and "learning rate 0.00015; ends after 2 updates" in text
    (note,) = [note for note in found.notes if "measured tasks" in note]
    assert "on purpose, for those stages read neither their verifiers nor their labels" in note
    # with their verifier it is no purpose
    asked = run_of("{tasks: {split: test, templates: [open, switch]}, stop: {maxUpdates: 2}}")
    (note,) = [n for n in plan(asked, inspect(asked, tmp_path), tmp_path).notes if "measured tasks" in n]
    assert note.endswith("evaluation.tasks should name others")
    # a budget is of the judges of all stages
    limited = ["spec.stop.judgeTokens=1000"]
    bounded = run_of("{stop: {maxUpdates: 3}}", f"{{rewards: {JUDGED}, stop: {{maxUpdates: 2}}}}", more=limited)
    said = plan(bounded, inspect(bounded, tmp_path), tmp_path)
    assert said.judge_budget.startswith("1,000 tokens; then") and not any("limit judges" in n for n in said.notes)
    priced = JUDGED.replace("samples", "price: {prompt: 1}, samples")
    more = ["spec.stop.judgeMoney=5"]
    inspect(run_of("{stop: {maxUpdates: 3}}", f"{{rewards: {priced}, stop: {{maxUpdates: 2}}}}", more=more), tmp_path)
    few = run_of("{stop: {maxUpdates: 30}}", "{stop: {maxUpdates: 20}}")
    assert any("ends the run before its last stage" in note for note in plan(few).notes)
    # the sample's rate rises over 8 updates
    short = run_of("{stop: {maxUpdates: 8}}", "{stop: {maxUpdates: 7}}")
    (note,) = [note for note in plan(short).notes if "warmupUpdates" in note]
    assert note.startswith("stage 2 ends after 7 updates, before learner.warmupUpdates (8) are over")


@pytest.mark.parametrize(
    "stage, words",
    [
        ("{tasks: {file: nowhere.jsonl}, stop: {maxUpdates: 1}}", "spec.stages[1]: spec.tasks.file: "),
        ("{tasks: {suite: elsewhere}, stop: {maxUpdates: 1}}", "spec.stages[1]: spec.tasks: unknown suite"),
        ("{tasks: {file: GOALS}, stop: {maxUpdates: 1}}", "spec.stages[1]: spec.tasks.file: "),
        ("{learningRate: 1, stop: {maxUpdates: 1}}", "spec.stages[1]: spec.learner.learningRate: 1 moves every weight"),
        ("{tasks: {sampler: {name: nearhalf}}, stop: {maxUpdates: 1}}", "spec.stages[1]: spec.tasks.sampler: "),
    ],
)
def test_what_is_wrong_with_a_stage_is_said_before_the_run(tmp_path, stage, words):
    goals = tmp_path / "goals.jsonl"
    task = Task(suite="quickstart", template="proposed-home", params={"number": "0-0"}, goal="Open Mail", feasible=None)
    goals.write_text(line_of(task, {"by": "model"}))
    run = run_of("{stop: {maxUpdates: 1}}", stage.replace("GOALS", str(goals)))
    with pytest.raises(ConfigurationError) as error:
        inspect(run, tmp_path)
    assert words in str(error.value), error.value


def test_templates_that_no_stage_practises_are_the_other_ones():
    run = run_of("{tasks: {templates: [open, open_two]}, stop: {maxUpdates: 1}}", "{stop: {maxUpdates: 1}}")
    alone = {task.template for task in other_templates(load(SAMPLE), 60).tasks}
    assert {task.template for task in other_templates(run, 60).tasks} == alone == {"count", "count_then_open"}
    counted = run_of("{tasks: {templates: [count]}, stop: {maxUpdates: 1}}", "{stop: {maxUpdates: 1}}")
    assert {task.template for task in other_templates(counted, 30).tasks} == {"count_then_open"}
    held_out = tasks_by_regime(counted, ["templates", "instances"])
    assert {task.template for task in held_out["templates"].tasks} == {"count_then_open"}
    assert "count" in {task.template for task in held_out["instances"].tasks}


async def test_the_last_update_of_a_stage_is_measured_where_the_run_goes_on(tmp_path):
    """Else nothing says what the stage came to: the measurement at the end is of the last one."""
    stages = "stages=[{stop: {maxUpdates: 1}}, {stop: {maxUpdates: 1}}]"
    async with parts(tmp_path, "evaluation.everyUpdates=1", stages) as context:
        whole, progress = context.run, Progress()
        await reinforce(replace(context, run=of_stage(whole, 0), whole=whole), progress)
        begin_stage(progress)
        await reinforce(replace(context, run=of_stage(whole, 1), whole=whole), progress)
    assert progress.update == 2
    assert progress.practice["memory"]["update"] == 1, "what is known of a stage's tasks is by its own updates"
    assert [event["update"] for event in read_events(tmp_path) if event["event"] == "evaluation"] == [1]


def test_a_stage_that_the_run_went_back_before_has_no_groups():
    begun = [{"event": "reinforcement", "update": 0}, {"event": "stage", "stage": 2, "update": 3, "order": 40}]
    assert stage_orders(begun) == {2: 40}
    went_on = [*begun, {"event": "reinforcement", "update": 3}, {"event": "reinforcement", "update": 5}]
    assert stage_orders(went_on) == {2: 40}
    back = [*went_on, {"event": "reinforcement", "update": 2}]
    assert stage_orders(back) == {}
    assert stage_orders([*back, {"event": "stage", "stage": 2, "update": 3, "order": 44}]) == {2: 44}


def saved(place, progress):
    update = progress.update
    draft, state = place.draft(update), {"format": FORMAT, "update": update, "time": 1.0, "driver": asdict(progress)}
    place.begin(draft, state)
    place.publish(draft, state, {}, 1)


@pytest.mark.parametrize("updates, refused", [(2, True), (3, False), (4, False)])
def test_a_spent_budget_of_judges_holds_up_the_stage_that_asks_them_alone(tmp_path, updates, refused):
    judged, more = f"{{rewards: {JUDGED}, stop: {{maxUpdates: 3}}}}", ["spec.stop.judgeTokens=1000"]
    run = run_of(judged, "{stop: {maxUpdates: 3}}", more=more)
    progress, place = Progress(update=updates, judge_tokens=1000), CheckpointFolder(tmp_path)
    if updates > 3:
        progress.stage, progress.stage_began = 1, 3
    saved(place, progress)
    stop = StopSignal()
    if refused:
        with pytest.raises(Interrupted):
            judges_may_go_on(run, place, stop)
    else:
        judges_may_go_on(run, place, stop)
    assert stop.requested.is_set() == refused


def test_a_stage_keeps_the_rules_between_fields_that_the_file_keeps():
    """Of recorded steps: they are the tasks, and form alone is not to be learned."""
    named = "{tasks: {file: t.jsonl}, stop: {maxUpdates: 1}}"
    form = "{rewards: {streams: [{name: environment}, {name: neat, reward: format}]}, stop: {maxUpdates: 1}}"
    run = load(
        "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: offline}\n"
        "spec: {environment: {source: {dataset: {path: d}}}, stages: ["
        f"{{stop: {{maxUpdates: 1}}}}, {named}, {form}]}}\n"
    )
    right, tasks, rewards = map(rule_errors, stages_of(run))
    assert right == []
    assert tasks == ["spec.tasks.file must be left out with environment.source.dataset: its steps are the tasks"]
    assert [why.split(":")[0] for why in rewards] == ["spec.rewards.streams"]


def test_a_checkpoint_of_a_stage_that_the_file_does_not_have_is_refused_in_words(tmp_path):
    """Where checkpoints are kept apart from the run's folder, which is lost."""
    two, place = run_of("{stop: {maxUpdates: 1}}", "{stop: {maxUpdates: 1}}"), CheckpointFolder(tmp_path)
    saved(place, Progress(update=1, stage=1, stage_began=1, spec=dump_set(two)))
    assert newest_progress(two, place).stage == 1
    with pytest.raises(ConfigurationError, match="spec.stages"):
        newest_progress(run_of("{stop: {maxUpdates: 1}}"), place)
