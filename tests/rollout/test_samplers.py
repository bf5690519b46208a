"""Samplers by name, what they prefer, and that a run that was interrupted goes on with the same tasks."""

import json
import sys
from collections import Counter
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_api import load
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord, GroupRecord
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.plan import plan, render
from tapforge_trainer.tasks.memory import CooldownRule, DifficultyMemory, GroupResult
from tapforge_trainer.tasks.samplers.registry import make_sampler
from tapforge_trainer.tasks.selection import task_source
from tapforge_trainer.tasks.source import FixedTasks, TaskError, TaskSource

TASKS = FixedTasks(tuple(Task(suite="s", template=f"t{n % 3}", seed=n) for n in range(12)))


EASY, HALF, HARD, NEW = range(4)
KNOWN = {EASY: 1.0, HALF: 0.5, HARD: 0.0}


def remembering(rates: dict[int, float]) -> DifficultyMemory:
    memory = DifficultyMemory()
    memory.take(
        1, [GroupResult(0, TASKS.tasks[n].key, f"of {n}", round(1000 * rate), 1000) for n, rate in rates.items()]
    )
    return memory


def sampled(name: str, memory: DifficultyMemory, **options: str) -> Counter[int]:
    """How often each task is drawn, by its seed."""
    source = TaskSource(TASKS, 1, sampler=make_sampler(name, options), memory=memory)
    return Counter(task.seed for task in source.take(3000))


def templates(found: Counter[int]) -> Counter[str]:
    total = Counter[str]()
    for seed, count in found.items():
        total[f"t{seed % 3}"] += count
    return total


def test_near_half_prefers_what_varies_and_starves_nothing():
    found = sampled("near_half", remembering(KNOWN), floor="0.2")
    assert found.keys() == set(range(12))
    assert 3.5 < found[HALF] / found[EASY] < 7 and 3.5 < found[HALF] / found[HARD] < 7
    assert 0.8 < found[HALF] / found[NEW] < 1.2, "what is not known may be near one half"


def test_band_has_a_share_outside():
    found = sampled("band", remembering(KNOWN), low="0", high="0.3", outside="0.1")
    assert 7 < found[HARD] / found[HALF] < 15 and found[EASY] > 0


def test_stages_follow_the_updates():
    memory = DifficultyMemory()
    plan = "0: t0=2, t1=1; 10: *=1"
    found = templates(sampled("stages", memory, plan=plan))
    assert found.keys() == {"t0", "t1"} and 1.8 < found["t0"] / found["t1"] < 2.2
    memory.take(10, [])
    found = templates(sampled("stages", memory, plan=plan))
    assert found.keys() == {"t0", "t1", "t2"} and min(found.values()) > 900


@given(st.integers(0, 1000), st.integers(1, 40))
def test_uniform_is_the_order_as_it_was(seed, count):
    plain = [TASKS.sample(seed, n) for n in range(count)]
    source = TaskSource(TASKS, seed, ahead=6)
    assert source.take(count) == plain and source.state == count
    memory = DifficultyMemory()
    assert TaskSource(TASKS, seed, sampler=make_sampler("uniform", {}), memory=memory).take(count) == plain


def test_what_pauses_is_passed_over_unless_all_do():
    memory = DifficultyMemory(cooldown=CooldownRule(after_failed=1))
    source = TaskSource(TASKS, 1, memory=memory)
    first = TASKS.tasks[0]
    memory.take(1, [GroupResult(0, first.key, "t0", 0, 4)])
    assert first not in source.take(40)
    memory.take(2, [GroupResult(n, task.key, "t0", 0, 4) for n, task in enumerate(TASKS.tasks)])
    assert source.next() in TASKS.tasks, "a run goes on"


# --- a run with results -----------------------------------------------------------------------------------------------


def group_of(order: int, task: Task) -> GroupRecord:
    """What a task comes to depends on the task and the group's order alone."""
    rng = Random(f"{order} {task.key}")
    outcomes = [Outcome.SUCCESS if rng.random() < task.seed / 11 else Outcome.FAILURE for _ in range(4)]
    return group_with(order, task, outcomes)


def group_with(order: int, task: Task, outcomes: list[Outcome]) -> GroupRecord:
    episodes = tuple(
        EpisodeRecord(f"g{order}.{n}.0", f"g{order}", task, 0, "a", n, Reason.DONE, outcome, None, "", (), 0.0, 1.0)
        for n, outcome in enumerate(outcomes)
    )
    return GroupRecord(f"g{order}", order, task, 0, episodes)


class Run:
    """A rollout without phones: two groups an update, one version of staleness; every third group is dropped."""

    def __init__(self, name: str, options: dict[str, str], state: str = ""):
        at = json.loads(state) if state else {}
        memory = DifficultyMemory(half_life=5, cooldown=CooldownRule(after_failed=1, after_solved=3, updates=4))
        sampler = make_sampler(name, options)
        self.source = TaskSource(
            TASKS, 3, at.get("tasks", 0), sampler=sampler, memory=memory, ahead=4, practice=at.get("practice")
        )
        self.update, self.order = at.get("update", 0), at.get("order", 0)
        self.under_way = [(order, Task(**task)) for order, task in at.get("under_way", [])]
        self.drawn: list[str] = []

    def draw(self) -> None:
        """One task, and an update when enough groups are there."""
        task = self.source.next()
        self.drawn.append(task.key)
        if self.order % 3 == 2:
            self.source.dropped(group_of(self.order, task))
        else:
            self.under_way.append((self.order, task))
        self.order += 1
        if len(self.under_way) == 4:
            self.update += 1
            batch, self.under_way = self.under_way[:2], self.under_way[2:]
            self.source.learned(self.update, [group_of(order, task) for order, task in batch])

    def checkpoint(self) -> str:
        return json.dumps(
            {
                "tasks": self.source.state,
                "practice": self.source.practice,
                "update": self.update,
                "order": self.order,
                "under_way": [(order, task.model_dump()) for order, task in self.under_way],
            }
        )


ALL = {
    "uniform": {},
    "near_half": {"floor": "0.05"},
    "band": {},
    "stages": {"plan": "0: t0=1; 5: t1=1, *=0.3; 12: *=1"},
}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 60))
def test_a_run_that_is_interrupted_after_any_draw_goes_on_with_the_same_tasks(name, first):
    whole = Run(name, ALL[name])
    for _ in range(80):
        whole.draw()
    one = Run(name, ALL[name])
    for _ in range(first):
        one.draw()
    two = Run(name, ALL[name], one.checkpoint())
    for _ in range(80 - first):
        two.draw()
    assert one.drawn + two.drawn == whole.drawn
    assert two.source.memory == whole.source.memory


def test_when_phones_finish_changes_no_draw():
    """With no group dropped, tasks are the same whether phones ask for them late or as soon as there is room."""

    def drawn(eager: bool) -> list[str]:
        source = TaskSource(TASKS, 3, sampler=make_sampler("near_half", {}), ahead=4)
        tasks, learned = [source.next() for _ in range(4)], 0
        while len(tasks) < 40:
            if not eager:  # the second update may be over before the first group in its place begins
                source.learned(learned // 2 + 1, [group_of(n, tasks[n]) for n in (learned, learned + 1)])
                tasks += [source.next(), source.next()]
            else:
                source.learned(learned // 2 + 1, [group_of(n, tasks[n]) for n in (learned, learned + 1)])
                source.learned(learned // 2 + 2, [group_of(n, tasks[n]) for n in (learned + 2, learned + 3)])
                tasks += [source.next() for _ in range(4)]
                learned += 2
            learned += 2
        return [task.key for task in tasks]

    assert drawn(True) == drawn(False)


def mixed_groups(name: str, rule: CooldownRule | None, seed: int) -> float:
    """Share of groups with both outcomes in 60 updates of 16 groups of 8: of 100 tasks 30 always fail, 30 always
    succeed and 40 do either, at rates that stay as they are."""
    tasks = FixedTasks(tuple(Task(suite="s", template=f"t{n % 10}", seed=n) for n in range(100)))
    rng = Random(seed)
    rate = [0.0] * 30 + [1.0] * 30 + [rng.uniform(0.1, 0.9) for _ in range(40)]
    source = TaskSource(tasks, seed, sampler=make_sampler(name, {}), memory=DifficultyMemory(50, rule), ahead=32)
    under_way, mixed = [source.next() for _ in range(32)], 0
    for update in range(60):
        groups = []
        for place, task in enumerate(under_way[:16]):
            outcomes = [Outcome.SUCCESS if rng.random() < rate[task.seed] else Outcome.FAILURE for _ in range(8)]
            mixed += len(set(outcomes)) == 2
            groups.append(group_with(16 * update + place, task, outcomes))
        source.learned(update + 1, groups)
        under_way = under_way[16:] + [source.next() for _ in range(16)]
    return mixed / (60 * 16)


@pytest.mark.parametrize(
    ("name", "rule", "least", "most"),
    [
        ("uniform", None, 0.34, 0.38),
        ("near_half", None, 0.55, 0.61),
        ("band", None, 0.70, 0.75),
        ("uniform", CooldownRule(2, 2, 20), 0.65, 0.70),
        ("near_half", CooldownRule(2, 2, 20), 0.69, 0.75),
    ],
)
def test_more_groups_teach_where_many_tasks_are_too_hard_or_solved(name, rule, least, most):
    """docs/tasks.md has these shares."""
    assert least < mean(mixed_groups(name, rule, seed) for seed in range(4)) < most


# --- in a file --------------------------------------------------------------------------------------------------------

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: chosen}
spec:
  model: {source: {tiny: {}}}
  tasks: {suite: quickstart, templates: [open, switch]}
"""


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("{name: nearHalf}", "unknown sampler 'nearHalf'; did you mean 'near_half'"),
        ("{name: near_half, options: [{name: flor, value: '1'}]}", "unknown option of near_half 'flor'; did you mean"),
        ("{name: near_half, options: [{name: floor, value: '0'}]}", r"floor is 0; it lies in \[0.001, 1\]"),
        ("{name: band, options: [{name: low, value: '0.9'}]}", r"high is 0.8; it lies in \[0.9, 1\]"),
        ("{name: band, options: [{name: low, value: wide}]}", "should be a number, not 'wide'"),
        ("{name: stages}", "plan"),
        ("{name: stages, options: [{name: plan, value: '5: *=1'}]}", "first stage begins at update 5; .* begin at 0"),
        ("{name: stages, options: [{name: plan, value: '0: open'}]}", "'open' is not TEMPLATE=WEIGHT"),
        ("{name: stages, options: [{name: plan, value: '0: a=0'}]}", "gives no template a weight above 0"),
        ("{name: stages, options: [{name: plan, value: '0: *=1; 0: *=1'}]}", "write them in order"),
        ("{name: stages, options: [{name: plan, value: '*=1'}]}", "doesn't begin with an update and a colon"),
        ("{name: stages, options: [{name: plan, value: '0: *=1; 9: opn=1'}]}", "stage 9 .* none of .*: open, switch"),
    ],
)  # fmt: skip
def test_a_sampler_that_makes_no_sense_is_refused_before_a_run(sampler, words, tmp_path):
    with pytest.raises(ConfigurationError, match=f"spec.tasks.sampler: .*{words}"):
        inspect(load(SPEC, (f"tasks.sampler={sampler}",)), tmp_path)


def test_a_plan_prints_the_sampler_with_its_options_and_what_does_nothing():
    assert "sampler     uniform, every task in its turn\n" in render(plan(load(SPEC)))
    chosen = load(SPEC, ("tasks.sampler.name=near_half", "tasks.cooldown={afterFailed: 2, updates: 9}"))
    text = render(plan(chosen))
    assert "near_half (floor 0.1); results count half after 50 updates; a task pauses for 9 updates after 2" in text
    assert "tasks.cooldown has no effect: suite quickstart" in text
    assert "no effect" not in render(plan(load(SPEC, ("tasks.maxTasks=20", "tasks.cooldown={afterSolved: 2}"))))
    assert "tasks.halfLife has no effect" in render(plan(load(SPEC, ("tasks.halfLife=3",))))


def test_a_sampler_of_another_package(tmp_path, monkeypatch):
    (tmp_path / "mine_samplers.py").write_text(
        "class Mine:\n"
        "    def __init__(self, *, weight: float = 1.0):\n        self.weight = weight\n"
        "    def __call__(self, task, memory):\n        return self.weight if task.template == 'switch' else 0.0\n"
    )
    info = tmp_path / "mine_samplers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-samplers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tapforge.samplers]\nmine = mine_samplers:Mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    run = load(SPEC, ("tasks.sampler.name=mine",))
    assert {task.template for task in task_source(run, 0, {}, 0).take(20)} == {"switch"}
    assert "sampler     mine of another package; " in render(plan(run))
    more = load(SPEC, ("tasks.sampler={name: mine, options: [{name: weight, value: '2.0'}]}",))
    with pytest.raises(TaskError, match="the sampler Mine gave .* 2; it has to be a probability from 0 to 1"):
        task_source(more, 0, {}, 0).take(20)
