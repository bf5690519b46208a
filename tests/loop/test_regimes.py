"""`tapforge eval --regimes`: which tasks are held out how, and the figures of passes over them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.protocol import ACTION, Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord, EpisodeRewards, Generation, StepRecord
from tapforge_trainer.run.evaluation import parts_of_before
from tapforge_trainer.run.references import Reference, agreement, references_of
from tapforge_trainer.run.regimes import figures, lines, page
from tapforge_trainer.tasks.lines import line_of
from tapforge_trainer.tasks.regimes import apps_of, other_templates, tasks_by_regime
from tapforge_trainer.tasks.source import TaskError
from tapforge_trainer.tasks.walked import write_walked

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
NO_START = "spec.warmStart=null"


def run_of(*settings):
    return load(SAMPLE, ["spec.evaluation.episodes=40", *settings])


def test_templates_that_are_not_practised_are_held_out_by_template_and_no_task_is_in_two_regimes():
    found = tasks_by_regime(run_of(), ["instances", "templates"])
    assert {task.template for task in found["templates"].tasks} == {"count", "count_then_open"}
    assert len(found["instances"].tasks) == len(found["templates"].tasks) == 40
    practised = set(run_of().spec.tasks.templates)
    assert {task.template for task in found["instances"].tasks} <= practised
    again = tasks_by_regime(run_of("spec.seed=9"), ["instances", "templates"])
    assert again == found, "the run's seed chooses none of them"
    assert {task.template for task in other_templates(run_of(), 30).tasks} == {"count", "count_then_open"}
    assert other_templates(run_of("spec.tasks.templates=null"), 30) is None
    # so that a start which was killed before the last of them measures again
    assert parts_of_before(run_of("spec.evaluation.greedy=false")) == {"sampled", "other_templates"}
    assert parts_of_before(run_of("spec.tasks.templates=null")) == {"sampled", "greedy"}


def test_a_task_whose_app_was_never_practised_is_held_out_by_app(tmp_path):
    walked = tmp_path / "walked.jsonl"
    write_walked(walked, suite="quickstart", count=8, seed=0, most=1, apps=("clock", "shop"), rollouts=8)
    run = run_of(f"spec.tasks={{file: {walked}}}", NO_START, "spec.evaluation.tasks.suite=quickstart")
    found = tasks_by_regime(run, ["templates", "apps"])
    for task in found["templates"].tasks:
        assert set(apps_of(task, {})) <= {"clock", "shop"}
    for task in found["apps"].tasks:
        assert set(apps_of(task, {})) - {"clock", "shop"}
    with pytest.raises(TaskError, match="no measured task has a practised template"):
        tasks_by_regime(run, ["instances"])


def test_columns_of_task_files_say_template_and_app(tmp_path):
    def file(name, *tasks):
        path = tmp_path / name
        path.write_text(
            "\n".join(line_of(Task(suite="s", template=t, seed=n), about) for n, (t, about) in enumerate(tasks))
        )
        return path

    practised = file("a.jsonl", ("one", {"app": "Mail"}), ("two", {"apps": ["Mail", "Clock"]}))
    # the first one is practised itself: it isn't held out at all
    measured = file(
        "b.jsonl", ("one", {"app": "Clock"}), ("three", {"app": "Mail"}), ("four", {"app": "Maps"}), ("two", {}),
        ("one", {"app": "Clock"}),
    )  # fmt: skip
    settings = [
        f"spec.tasks={{file: {practised}}}", NO_START, "spec.environment.source={urls: {list: [http://127.0.0.1:1]}}",
    ]  # fmt: skip
    run = run_of(*settings, f"spec.evaluation.tasks={{file: {measured}}}")
    found = tasks_by_regime(run, ["instances", "templates", "apps"])
    assert {name: sorted(t.template for t in tasks.tasks) for name, tasks in found.items()} == {
        "instances": ["one", "two"], "templates": ["three"], "apps": ["four"],
    }  # fmt: skip
    assert Task(suite="s", template="one", seed=0) not in found["instances"].tasks
    with pytest.raises(TaskError, match="without being practised itself"):
        tasks_by_regime(run_of(*settings), ["instances"])
    broken = file("c.jsonl", ("one", {"apps": 5}))
    with pytest.raises(TaskError, match="about.apps is 5"):
        tasks_by_regime(run_of(*settings, f"spec.evaluation.tasks={{file: {broken}}}"), ["instances"])


@pytest.mark.parametrize("suite", list(catalog.SUITES))
def test_the_apps_of_every_template_of_ours_are_known(suite):
    image = catalog.suite(suite).image
    for template in catalog.suite(suite).templates:
        params = template.combinations[0]
        apps = apps_of(Task(suite=suite, template=template.name, params=params), {})
        assert apps and set(apps) <= set(image.apps), template.name


@pytest.mark.parametrize(
    "settings, regime, words",
    [
        (["spec.tasks.templates=null"], "templates", "every template is practised"),
        ([], "apps", "no measured task is held out by app"),
    ],
)
def test_a_regime_without_tasks_is_named(settings, regime, words):
    with pytest.raises(TaskError, match=words):
        tasks_by_regime(run_of(*settings), [regime])


def episode(task, won, steps=2, reason=Reason.DONE, finish="stop"):
    generation = Generation((1, 2), (3, 4), (-0.1, -0.1), (1, 1), finish, 20)
    step = StepRecord("e", 0, (), None, None, generation, "", None, None, 0.0, "", 0.0, 0.0)
    outcome = Outcome.SUCCESS if won else Outcome.FAILURE
    return EpisodeRecord("e", "g", task, 0, "s", 0, reason, outcome, None, "", (step,) * steps, 10.0, 13.0)


def test_the_figures_of_three_passes():
    one, two = (Task(suite="quickstart", template=name, params={"n": name}) for name in ("a", "b"))
    lost = replace(episode(two, False), outcome=Outcome.INVALID, reason=Reason.DEADLINE)
    passes = [
        [episode(one, True), episode(two, False, reason=Reason.STEP_LIMIT)],
        [episode(one, True, finish="length"), episode(two, True)],
        [episode(one, True), lost],
    ]
    found = figures(passes, {one.key: (Reference("home", None, {}),)}, seed=0)
    # its first answer was no action each time
    assert (found["type_accuracy"], found["parameter_accuracy"], found["money_per_success"]) == (0, None, None)
    assert (found["success"], found["episodes"], found["invalid"], found["tasks"]) == (4 / 5, 5, 1, 2)
    assert found["passes"] == [0.5, 1.0, 1.0] and found["half_range"] == 0.25
    # the second task has only two valid episodes
    assert (found["tasks_with_k"], found["pass_at_k"], found["all_pass_at_k"]) == (1, 1.0, 1.0)
    assert (found["step_limit"], found["answer_limit"]) == (1 / 5, 2 / 10)
    assert (found["steps_of_successes"], found["steps_of_demonstrator"]) == (2, 1)
    assert found["seconds_per_success"] == 15 / 4
    assert (found["tokens_read_per_success"], found["tokens_written_per_success"]) == (50, 5)
    assert found["interval_by_template"][0] < 0.8 < found["interval_by_template"][1]
    nothing = figures([[]], {}, seed=0)
    assert nothing["success"] is None and nothing["pass_at_k"] is None
    result = {"passes": 3, "temperature": 1.0, "seed": 5, "regimes": {"instances": found, "apps": nothing}}
    text = "\n".join(lines(json.loads(json.dumps(result))))
    assert "80.0 %" in text and "by app" in text and "25.0 points" in text
    html = page("<run>", result)
    assert "&lt;run&gt;" in html and "80.0 %" in html and "<script" not in html and "http" not in html


def test_answers_are_compared_with_a_demonstrators_up_to_the_first_difference():
    task = next(t for t in tasks_by_regime(run_of(), ["instances"])["instances"].tasks if t.template == "switch")
    references = references_of([task, Task(suite="elsewhere", template="x")])
    assert set(references) == {task.key}
    phone = catalog.phone_for("quickstart", 96, 160)
    template = catalog.template_of(task)
    phone.reset(task.seed, template.rules(task.params))
    right = []
    for action in demonstration(phone, template, task.params):
        right.append(ACTION.dump_python(action))
        phone.act(action)
    assert len(references[task.key]) == len(right) == 4

    def playing(*actions):
        steps = [replace(episode(task, True).steps[0], action=action) for action in actions]
        return replace(episode(task, True), steps=tuple(steps))

    beside = {**right[1], "x": (right[1]["x"] + 1 / 3) % 1}
    near = {**right[0], "x": right[0]["x"] + 0.1}
    # all of it; a touch within the same icon; another place, after which nothing is compared; another action
    for actions, expected in (
        (right, (4, 4, 4)),
        ([near, *right[1:]], (4, 4, 4)),
        ([right[0], beside, *right[2:]], (2, 2, 1)),
        ([right[0], {"type": "home"}, *right[2:]], (2, 1, 1)),
        ([*right[:3], {"type": "terminate", "status": "failure"}], (4, 4, 3)),
        ([None, *right], (1, 0, 0)),
    ):
        found = agreement([playing(*actions)], references)
        assert (found.compared, found.typed, found.same) == expected, actions
    # a scroll is right by its direction alone, and so is the swipe of models that have no other word
    down = {task.key: (Reference("scroll", None, {"direction": "down"}),)}
    scrolled = {"type": "scroll", "direction": "down", "x": 0.4, "y": 0.9, "notches": 5}
    swiped = {"type": "swipe", "x": 0.5, "y": 0.8, "x2": 0.5, "y2": 0.2}
    for action, same in ((scrolled, 1), (swiped, 1), ({**swiped, "y2": 0.9}, 0), ({**swiped, "x2": 1.0, "y2": 0.7}, 0)):
        found = agreement([playing(action)], down)
        assert (found.compared, found.typed, found.same) == (1, 1, same), action
    held = Reference("long_press", (0.2, 0.2, 0.4, 0.4), {})
    assert held.same({"type": "long_press", "x": 0.3, "y": 0.3, "seconds": 2.0})
    # prices of judges, over successes
    usage = {"money": 0.5, "requests": 2}
    rewards = EpisodeRewards({}, Outcome.SUCCESS, Reason.DONE, usage=usage)
    paid = figures([[replace(playing(*right), rewards=rewards)]], references, seed=0)
    assert (paid["type_accuracy"], paid["parameter_accuracy"], paid["money_per_success"]) == (1.0, 1.0, 0.5)
    text = "\n".join(lines({"passes": 1, "temperature": 1.0, "seed": 5, "regimes": {"instances": paid}}))
    assert "right type of action" in text and "money per success" in text and "0.5000" in text
