"""What the standard suite's judges say of states on the way to a solution and beside it: nearly done, undone again, and
done with other things than the task names. docs/phones.md says how many states that are."""

import copy

import pytest

from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.standard import IMAGE, TEMPLATES
from tapforge_envs.phone.tasks import SEEDS, SPLITS, make_task
from tapforge_envs.protocol import FINAL_ACTIONS, Answer, Home, Terminate

ALL = pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
DONE = Terminate(status="success")


def tasks_of(template, count=1):
    for place, split in enumerate(SPLITS):
        for number, params in enumerate(template.split(split)[:count]):
            yield make_task("standard", template, params, place * SEEDS + 100 + number)


def begin(task, template) -> Phone:
    phone = Phone(IMAGE, 128, 224)
    phone.begin(task.seed, template.rules(task.params))
    return phone


def said(phone: Phone, end) -> float:
    """Of a copy of the phone, ended now."""
    fork = phone.fork()
    fork.act(end)
    return fork.evaluate().value


@ALL
def test_nothing_is_done_until_the_content_is_as_in_the_end_and_nothing_any_more_when_it_was_undone(template):
    for task in tasks_of(template):
        phone, states = begin(task, template), []
        for action in demonstration(phone, template, task.params):
            if isinstance(action, FINAL_ACTIONS):
                break
            states.append((copy.deepcopy(phone.state["apps"]), said(phone, DONE)))
            phone.act(action)
        changed = action == DONE
        final = phone.state["apps"]
        states.append((copy.deepcopy(final), said(phone, DONE)))
        for apps, value in states:
            assert value == (changed and apps == final), task.key
        assert (final != states[0][0]) == changed, task.key
        phone.act(Home())
        phone.state["apps"] = states[0][0]
        assert said(phone, DONE) == 0, task.key


@ALL
def test_what_is_done_with_other_things_is_not_done(template):
    """Plans of the same template with other parameters, as far as this phone has what they name."""
    for task in tasks_of(template):
        others = [params for params in template.combinations if params != task.params]
        for params in others[:: max(1, len(others) // 3)]:
            phone = begin(task, template)
            try:
                for action in demonstration(phone, template, params):
                    phone.act(action)
            except (LookupError, RuntimeError):  # the plan names what isn't there
                continue
            ended, apps = phone.state["ended"], phone.state["apps"]
            own = begin(task, template)
            for action in demonstration(own, template, task.params):
                own.act(action)
            same = (apps, phone.state["answer"], ended) == (own.state["apps"], own.state["answer"], own.state["ended"])
            if not same and not isinstance(action, Answer):
                assert phone.evaluate().value == (0 if task.feasible else ended == "infeasible"), (task.key, params)
