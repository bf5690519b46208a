"""How a template of the standard suite is made: chores (something is done), questions, and things that can't be done.

Every template is written as data: goal, content that it needs (`setup`), a plan, and a wish or an answer. The judge
follows from these (`judge`). One task in four is interrupted by a banner or by a question of the system; accepting such
a question is a side effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

from tapforge_envs.phone.apps.world import LINES, PEOPLE, full_name
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps, judge_answer, judge_change, judge_impossible, judged
from tapforge_envs.phone.tasks import DONE, INFEASIBLE, Do, Errs, Params, Split, Template, say

Plan = Callable[[Params, Errs], Iterator[Do]]
Setup = Callable[[Apps, Params, Random], None]

_INTERRUPTED = 0.25


def combine(**values: Sequence[str]) -> tuple[Params, ...]:
    """Every combination of the values."""
    return tuple(dict(zip(values, choice, strict=True)) for choice in product(*values.values()))


def every(**values: Sequence[str]) -> tuple[Params, ...]:
    """The values side by side: the first of each, the second of each, ..."""
    return tuple(dict(zip(values, choice, strict=True)) for choice in zip(*values.values(), strict=True))


def no_setup(apps: Apps, params: Params, rng: Random) -> None:
    """The fresh content will do."""


def chore(
    name: str,
    combinations: tuple[Params, ...],
    goal: Callable[[Params], str],
    where: tuple[str, ...],
    plan: Plan,
    wish: Callable[[Params, Apps], None],
    *,
    setup: Setup = no_setup,
    steps: int = 14,
    only: Split | None = None,
) -> Template:
    """Something is to be done; `wish` changes the content as a clean solution would."""

    def whole(params: Params, errs: Errs) -> Iterator[Do]:
        yield from plan(params, errs)
        yield DONE

    return Template(
        name,
        combinations,
        goal,
        whole,
        lambda params, trial: judge_change(trial, lambda apps: wish(params, apps)),
        lambda params, state: judged(state),
        _prepared(setup, where),
        lambda params: steps,
        only=only,
    )


def question(
    name: str,
    combinations: tuple[Params, ...],
    goal: Callable[[Params], str],
    where: tuple[str, ...],
    plan: Plan,
    answer: Callable[[Params, Apps], list[str]],
    *,
    others: Callable[[Params, Apps], list[str]] = lambda params, apps: [],
    setup: Setup = no_setup,
    steps: int = 12,
    only: Split | None = None,
) -> Template:
    """Something is asked; `answer` lists the pieces that the answer must hold, `others` those that it must not."""

    def whole(params: Params, errs: Errs) -> Iterator[Do]:
        yield from plan(params, errs)
        yield Do(late=lambda state: say(", ".join(answer(params, state["apps"]))))

    return Template(
        name,
        combinations,
        goal,
        whole,
        lambda params, trial: judge_answer(
            trial, answer(params, trial.before["apps"]), others(params, trial.before["apps"])
        ),
        lambda params, state: judged(state),
        _prepared(setup, where),
        lambda params: steps,
        only=only,
    )


def impossible(
    name: str,
    combinations: tuple[Params, ...],
    goal: Callable[[Params], str],
    where: tuple[str, ...],
    plan: Plan,
    *,
    setup: Setup,
    steps: int = 10,
    only: Split | None = None,
) -> Template:
    """What is asked can't be done; the plan looks where it would be and then says so."""

    def whole(params: Params, errs: Errs) -> Iterator[Do]:
        yield from plan(params, errs)
        yield DONE if errs() else INFEASIBLE

    return Template(
        name,
        combinations,
        goal,
        whole,
        lambda params, trial: judge_impossible(trial),
        lambda params, state: judged(state),
        _prepared(setup, where),
        lambda params: steps,
        feasible=False,
        only=only,
    )


def _prepared(setup: Setup, where: tuple[str, ...]) -> Callable[[State, Params, Random], None]:
    def prepare(state: State, params: Params, rng: Random) -> None:
        setup(state["apps"], params, rng)
        if rng.random() < _INTERRUPTED:
            state["ui"]["pending"].append({"when": rng.choice(where), **_interrupt(rng)})

    return prepare


def _interrupt(rng: Random) -> State:
    kind = rng.choice(("message", "offer", "update", "feedback"))
    if kind == "message":
        return {
            "kind": "banner",
            "app": "messages",
            "title": full_name(rng.choice(list(PEOPLE))),
            "text": rng.choice(LINES),
        }
    if kind == "offer":
        return {"kind": "banner", "app": "shop", "title": "Today only", "text": f"{rng.randint(2, 7) * 10}% off books"}
    if kind == "update":
        return {"kind": "question", "title": "System update", "text": "A new version is ready. Install it tonight?",
                "yes": "Install", "no": "Later", "effect": ["settings", "update_scheduled", True]}  # fmt: skip
    return {"kind": "question", "title": "How do you like your phone?", "text": "Send a report about how you use it?",
            "yes": "Send", "no": "No, thanks", "effect": ["settings", "feedback_sent", True]}  # fmt: skip


# --- steps of plans ---------------------------------------------------------------------------------------------------


def taps(*ids: str) -> Iterator[Do]:
    for id in ids:
        yield Do(tap=id)


def fill(field: str, text: str) -> Do:
    return Do(fill=(field, text))


def unless(errs: Errs, *ids: str) -> Iterator[Do]:
    """The taps that a careless person forgets."""
    if not errs():
        yield from taps(*ids)


# --- finding and putting content --------------------------------------------------------------------------------------


def find(items: list[Any], **fields: Any) -> Any:
    """The first item with these values. Raises LookupError: set-ups see to it that there is one."""
    for item in items:
        if all(item[key] == value for key, value in fields.items()):
            return item
    raise LookupError(f"nothing with {fields} among {len(items)} items")


def has(items: list[Any], **fields: Any) -> bool:
    return any(all(item[key] == value for key, value in fields.items()) for item in items)


def drop(items: list[Any], **fields: Any) -> None:
    """Removes every item with these values."""
    items[:] = [item for item in items if not all(item[key] == value for key, value in fields.items())]
