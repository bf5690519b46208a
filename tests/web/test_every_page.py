"""The catalog of MiniWoB++'s pages: splits, names, and that each page works as a task."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tapforge_envs import protocol as p
from tapforge_envs.web import catalog
from tapforge_envs.web.environment import WebEnvironment


def test_every_page_of_the_package_is_a_task_or_left_out_with_a_reason() -> None:
    there = Path(unquote(urlparse(catalog.url("click-test")).path)).parent
    pages = {page.stem for page in there.glob("*.html")}
    assert len(pages) == 130
    assert pages == {*catalog.TEMPLATES, *(name for name in catalog.LEFT_OUT if "/" not in name)}
    assert catalog.LEFT_OUT["hover-shape"] == "its script never ends an episode"


def test_named_pages_exist() -> None:
    assert {*catalog.HELD_OUT} | catalog.MODES <= {*catalog.TEMPLATES}


def test_splits_share_no_task_and_some_pages_belong_to_one_alone() -> None:
    drawn = {
        split: [catalog.tasks(split).sample(1, index) for index in range(400)]
        for split in ("train", "validation", "test")
    }
    for one, other in pairwise(("train", "validation", "test")):
        assert not {t.key for t in drawn[one]} & {t.key for t in drawn[other]}
    for split, tasks in drawn.items():
        alone = {name for name, only in catalog.HELD_OUT.items() if only == split}
        others = {*catalog.HELD_OUT} - alone
        assert alone <= {t.template for t in tasks}
        assert not others & {t.template for t in tasks}
    modes = (
        {t.params["mode"] for t in drawn["train"] if t.params},
        {t.params["mode"] for t in drawn["test"] if t.params},
    )
    assert modes == ({"train"}, {"test"})


def test_the_order_of_tasks_is_seeded_and_every_page_comes_as_often_as_the_others() -> None:
    tasks = catalog.tasks("train", ["click-test", "click-test-2", "click-dialog"])
    assert [tasks.sample(3, n) for n in range(9)] == [tasks.sample(3, n) for n in range(9)]
    assert [tasks.sample(3, n) for n in range(9)] != [tasks.sample(4, n) for n in range(9)]
    drawn = [tasks.sample(3, n).template for n in range(9)]
    assert {name: drawn.count(name) for name in drawn} == {"click-test": 3, "click-test-2": 3, "click-dialog": 3}


@pytest.mark.parametrize(
    "split,templates,words",
    [
        ("tran", [], "unknown split: 'tran'; did you mean 'train'"),
        ("train", ["click-tset"], "did you mean 'click-test'"),
        ("train", ["hover-shape"], "is not a task here: its script never ends"),
        ("train", ["navigate-tree"], "no task in split 'train'"),
    ],
)
def test_what_does_not_exist_is_named(split: str, templates: list[str], words: str) -> None:
    with pytest.raises(catalog.UnknownTask, match=words):
        catalog.tasks(split, templates)


@pytest.mark.parametrize(
    "task",
    [
        p.Task(suite="miniwob", template="click-test", params={"mode": "test"}),
        p.Task(suite="miniwob", template="click-test-transfer", params={"mode": "other"}),
        p.Task(suite="miniwob", template="click-test", params={"colour": "red"}),
        p.Task(suite="quickstart", template="open"),
    ],
)
def test_a_task_that_is_none_of_the_suite_is_refused(task: p.Task) -> None:
    with pytest.raises(catalog.UnknownTask):
        catalog.page_of(task)


#: the same first page for every seed: what differs is hidden, or comes later
_HIDDEN = {"find-greatest", "guess-number", "hot-cold", "simon-says"}


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", catalog.TEMPLATES)
async def test_every_page_has_a_goal_and_is_the_same_for_the_same_seed(page: WebEnvironment, name: str) -> None:
    split = catalog.TEMPLATES[name].splits()[0]
    first = await page.reset(catalog.TEMPLATES[name].task(split, 7))
    assert first.goal
    moved = await page.step(p.Tap(x=0.95, y=0.3), 0)
    assert moved.done or (await page.evaluate()).value == 0, "what has not ended has no success"
    again = await page.reset(catalog.TEMPLATES[name].task(split, 7))
    assert (again.goal, again.ui_tree, again.frame.sha256) == (first.goal, first.ui_tree, first.frame.sha256)
    other = await page.reset(catalog.TEMPLATES[name].task(split, 8))
    assert (other.frame.sha256 != first.frame.sha256) == (name not in _HIDDEN)
