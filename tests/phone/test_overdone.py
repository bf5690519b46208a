"""What the judges of both suites say of a solution with one more thing done beside it and of the same thing done in
another app, and, of the quickstart suite, of every state on the way. docs/phones.md says how many states that are."""

from random import Random

import pytest

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.difference import canonical
from tapforge_envs.phone.own_check import content_of
from tapforge_envs.phone.tasks import SEEDS, SPLITS, make_task
from tapforge_envs.phone.walks.operations import operations
from tapforge_envs.phone.walks.walk import WalkError, played
from tapforge_envs.protocol import FINAL_ACTIONS, Terminate

DONE = Terminate(status="success")
ALL = [(name, template) for name, suite in catalog.SUITES.items() for template in suite.templates]
EVERY = pytest.mark.parametrize("suite, template", ALL, ids=[f"{name}-{template.name}" for name, template in ALL])


def tasks_of(suite, template):
    for place, split in enumerate(SPLITS):
        for number, params in enumerate(template.split(split)[:1]):
            yield make_task(suite, template, params, place * SEEDS + 300 + number)


def solved(suite, template, task, params=None):
    """The phone after the solution, and the action that is to end it."""
    phone = catalog.phone_for(suite, 128, 224)
    phone.begin(task.seed, template.rules(task.params))
    for action in demonstration(phone, template, params or task.params):
        if isinstance(action, FINAL_ACTIONS):
            return phone, action
        phone.act(action)
    raise AssertionError(f"{template.name} has no end")


def value(phone, end):
    fork = phone.fork()
    fork.act(end)
    return fork.evaluate().value


@EVERY
def test_one_more_thing_done_beside_a_solution_is_a_failure(suite, template):
    for task in tasks_of(suite, template):
        phone, end = solved(suite, template, task)
        ended = phone.fork()
        ended.act(end)
        right = ended.evaluate().value if template.feasible or suite == "standard" else 1 - value(phone, DONE)
        assert right == 1, task.key
        before = canonical(content_of(phone.state))
        others = operations(suite, phone.state)
        tried = 0
        for other in Random(task.key).sample(others, min(12, len(others))):
            over = phone.fork()
            try:
                list(played(over, other.steps))
            except WalkError:  # the solution has removed what it names
                continue
            if canonical(content_of(over.state)) != before:
                assert value(over, DONE if suite == "quickstart" else end) == 0, (task.key, other.kind, other.about)
                tried += 1
            if tried == 2:
                break
        assert tried >= 1, task.key


@EVERY
def test_the_same_thing_done_in_another_app_is_a_failure(suite, template):
    for task in tasks_of(suite, template):
        for params in template.combinations:
            apart = {name for name in params if params[name] != task.params.get(name)}
            if apart != {"app"} or "other" in params:
                continue
            try:
                phone, end = solved(suite, template, task, params)
            except LookupError:  # this phone doesn't have that app in sight
                continue
            assert value(phone, end) == 0 or not template.feasible, (task.key, params)


@pytest.mark.parametrize("template", catalog.suite("quickstart").templates, ids=lambda t: t.name)
def test_on_the_way_to_a_solution_nothing_is_done(template):
    for task in tasks_of("quickstart", template):
        phone = catalog.phone_for("quickstart", 128, 224)
        phone.begin(task.seed, template.rules(task.params))
        for action in demonstration(phone, template, task.params):
            last = isinstance(action, FINAL_ACTIONS)
            assert value(phone, DONE) == (last and template.feasible), task.key
            for status in ("failure", "infeasible"):
                assert value(phone, Terminate(status=status)) == 0, task.key
            if not last:
                phone.act(action)
