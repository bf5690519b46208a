"""Every template of the standard suite: solvable in each split, not by doing nothing, and not with other changes."""

from itertools import combinations

import pytest

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.standard import IMAGE, TEMPLATES
from tapforge_envs.phone.tasks import SEEDS, SPLITS, make_task
from tapforge_envs.protocol import FINAL_ACTIONS, Answer, Outcome, Reason, Terminate, outcome_of

ALL = pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)


def tasks_of(template, per_split=4):
    """Some tasks of each split, every one with another seed."""
    for place, split in enumerate(SPLITS):
        chosen = template.split(split)
        for number, params in enumerate(chosen[:: max(1, len(chosen) // per_split)]):
            yield make_task("standard", template, params, place * SEEDS + number)


def begin(task, template) -> Phone:
    phone = Phone(IMAGE, 128, 224)
    phone.begin(task.seed, template.rules(task.params))
    return phone


def outcome(phone: Phone, task) -> Outcome:
    reason = Reason.DECLARED_INFEASIBLE if phone.state["ended"] == "infeasible" else Reason.DONE
    score = phone.evaluate().value
    return outcome_of(reason, feasible=task.feasible, threshold=task.threshold, score=score)


@ALL
def test_its_plan_solves_it_in_every_split_within_its_steps(template):
    seen = 0
    for task in tasks_of(template):
        phone = begin(task, template)
        steps = 0
        for action in demonstration(phone, template, task.params):
            phone.act(action)
            steps += 1
        score = phone.evaluate()
        assert outcome(phone, task) is Outcome.SUCCESS, (task.key, score)
        assert score.value == 1 and not score.side_effects, (task.key, score)
        assert steps <= task.max_steps * 0.85, (task.key, steps)
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("suite", catalog.SUITES)
def test_what_is_done_is_done_whether_the_agent_ends_with_success_or_with_a_text(suite):
    """Families such as UI-TARS end every task with a text."""
    changes = 0
    for template in catalog.SUITES[suite].templates[::4]:
        params = template.combinations[0]
        task = make_task(suite, template, params, 0)
        said = []
        for end in (Terminate(status="success"), Answer(text="It is done."), Terminate(status="failure")):
            phone = catalog.phone_for(suite, 128, 224)
            phone.begin(task.seed, template.rules(task.params))
            steps = demonstration(phone, template, task.params)
            while not isinstance(action := next(steps), FINAL_ACTIONS):
                phone.act(action)
            phone.act(end)
            said.append(phone.evaluate().value)
        if action == Terminate(status="success"):
            changes += 1
            assert said == [1, 1, 0], task.key
        else:  # a question, or what can't be done
            assert said == [0, 0, 0], task.key
    assert changes


@ALL
def test_doing_nothing_solves_nothing(template):
    for task in tasks_of(template, 2):
        for end in (Terminate(status="success"), Terminate(status="failure"), Answer(text="yes"), Answer(text="")):
            phone = begin(task, template)
            phone.act(end)
            assert outcome(phone, task) is Outcome.FAILURE, task.key
        phone = begin(task, template)
        phone.act(Terminate(status="infeasible"))
        assert outcome(phone, task) is (Outcome.FAILURE if task.feasible else Outcome.SUCCESS)
        assert phone.evaluate().value == (0 if task.feasible else 1)


@ALL
def test_another_change_is_named_as_a_side_effect(template):
    task = next(tasks_of(template, 1))
    phone = begin(task, template)
    for action in demonstration(phone, template, task.params):
        if isinstance(action, FINAL_ACTIONS):
            phone.state["apps"]["settings"]["update_scheduled"] = True
            phone.state["apps"]["messages"]["threads"][-1]["texts"].append({"from": "me", "text": "oops"})
        phone.act(action)
    score = phone.evaluate()
    assert score.value == 0
    named = " ".join(score.side_effects)
    assert "settings.update_scheduled: is true, was false" in named
    assert "messages.threads: " in named and "oops" in named


@ALL
def test_a_careless_person_fails_where_the_plan_has_a_decision(template):
    for task in tasks_of(template, 1):
        asked = []

        def errs(asked=asked) -> bool:
            asked.append(True)
            return True

        phone = begin(task, template)
        for action in demonstration(phone, template, task.params, errs):
            phone.act(action)
        assert outcome(phone, task) is (Outcome.FAILURE if asked else Outcome.SUCCESS), task.key


def test_the_suite_is_as_large_as_promised():
    assert len(TEMPLATES) >= 40
    assert len({t.name for t in TEMPLATES}) == len(TEMPLATES)
    assert len([a for a in IMAGE.apps.values() if a.glyph]) >= 10
    assert sum(t.only == "test" for t in TEMPLATES) >= 8
    assert sum(not t.feasible for t in TEMPLATES) >= 6
    for split in SPLITS:
        assert len(catalog.tasks("standard", split).templates) >= 40


@ALL
def test_splits_share_no_combination(template):
    parts = [{tuple(sorted(c.items())) for c in template.split(split)} for split in SPLITS]
    assert sum(map(len, parts)) == len(template.combinations)
    for one, two in combinations(parts, 2):
        assert not one & two


def test_words_alone_do_not_tell_whether_it_can_be_done():
    """An infeasible template has a feasible twin with the same goals, and both hold out the same ones."""
    for template in TEMPLATES:
        if template.feasible:
            continue
        goals = {template.goal(c) for c in template.combinations}
        twins = [t for t in TEMPLATES if t.feasible and goals <= {t.goal(c) for c in t.combinations}]
        assert twins, template.name
        for split in SPLITS:
            here = {template.goal(c) for c in template.split(split)}
            assert here <= {twins[0].goal(c) for c in twins[0].split(split)}, (template.name, split)


def test_every_task_of_the_catalog_is_known_to_it():
    for split in SPLITS:
        tasks = catalog.tasks("standard", split)
        for index in range(200):
            task = tasks.sample(7, index)
            assert catalog.template_of(task).goal(task.params) == task.goal
