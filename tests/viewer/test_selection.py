"""Which episodes are shown: regressions beside gains, all templates, the whole run."""

from __future__ import annotations

import pytest

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord, GroupRecord
from tapforge_trainer.viewer.selection import in_turn, kinds, pairs_of, pick_groups, pick_pairs

WON, LOST = Outcome.SUCCESS, Outcome.FAILURE


def episode(outcome: Outcome | None, template: str = "t", seed: int = 0, name: str = "") -> EpisodeRecord:
    task = Task(suite="s", template=template, seed=seed)
    return EpisodeRecord(name or f"{template}{seed}", "g", task, 0, "", 0, Reason.DONE, outcome, None, "", (), 0.0, 0.0)


def pairs(*outcomes: tuple[Outcome | None, Outcome | None], template: str = "t"):
    both = [(episode(b, template, i), episode(a, template, i)) for i, (b, a) in enumerate(outcomes)]
    return pairs_of([b for b, _ in both], [a for _, a in both])


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (LOST, WON, "learned"),
        (WON, WON, "kept"),
        (LOST, LOST, "never"),
        (WON, LOST, "lost"),
        (WON, Outcome.INVALID, "unclear"),
        (None, LOST, "unclear"),
    ],
)
def test_kinds(before, after, kind):
    assert kinds(pairs((before, after))) == {kind: 1}


def test_a_regression_is_shown_beside_many_gains():
    many = pairs(*[(LOST, WON)] * 50, (WON, LOST), (LOST, LOST))
    assert [pair.kind for pair in pick_pairs(many, 6)] == ["learned", "learned", "learned", "learned", "never", "lost"]
    assert len(pick_pairs(many, 500)) == 52


def test_templates_take_turns():
    several = [pair for template in "abc" for pair in pairs(*[(LOST, WON)] * 9, template=template)]
    assert {pair.after.task.template for pair in pick_pairs(several, 3)} == set("abc")


def test_attempts_at_the_same_task_are_paired_one_by_one():
    before = [episode(LOST, name="b1"), episode(LOST, name="b2"), episode(LOST, "other", name="b3")]
    after = [episode(WON, name="a1"), episode(WON, name="a2"), episode(WON, name="a3")]
    assert [(p.before.id, p.after.id) for p in pairs_of(before, after)] == [("b1", "a1"), ("b2", "a2")]


def group(order: int, outcomes: list[Outcome], template: str = "t") -> GroupRecord:
    task = Task(suite="s", template=template)
    return GroupRecord(
        f"g{order}", order, task, 0, tuple(episode(o, template, name=f"{order}.{i}") for i, o in enumerate(outcomes))
    )


def test_groups_with_contrast_come_first_and_cover_the_run():
    groups = [group(i, [WON, LOST] if i % 2 else [WON, WON], template="ab"[i // 2 % 2]) for i in range(40)]
    chosen = pick_groups(groups[::-1], 4)
    assert [g.order for g in chosen] == sorted(g.order for g in chosen)
    assert all(g.order % 2 for g in chosen)
    assert [g.order // 10 for g in chosen] == [0, 1, 2, 3]
    assert {g.task.template for g in chosen} == {"a", "b"}
    assert len(pick_groups(groups[:6:2] + groups[1:2], 3)) == 3  # filled up with zero-variance groups
    assert pick_groups([], 3) == []


def test_in_turn():
    assert in_turn(["a1", "a2", "b1", "a3", "b2"], lambda item: item[0]) == ["a1", "b1", "a2", "b2", "a3"]
