"""docs/reference/rules.md: advantages and losses by name with their options, and the values of each preset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tapforge_trainer.algorithms.loss_registry import BUILT_IN
from tapforge_trainer.algorithms.presets import PRESETS
from tapforge_trainer.algorithms.registry import built_in, defaults_of

from .words import page, plain, table, wrapped


def rules_page() -> str:
    blocks = [
        "## Advantages",
        wrapped("`algorithm.advantage.plugin.name`, and options with their defaults."),
        table(("name", "options"), [(f"`{name}`", _options(defaults_of(name))) for name in built_in()]),
        "## Losses",
        wrapped("`algorithm.loss.plugin.name`, and options with their defaults."),
        table(
            ("name", "options"),
            [(f"`{name}`", _options(_keywords(made))) for name, made in sorted(BUILT_IN.items())],
        ),
        "## Presets",
        wrapped("`--preset NAME` sets these values where the file and `--set` leave the field out."),
    ]
    for name, preset in PRESETS.items():
        blocks += [f"### {name}", wrapped(plain(f"{preset.about}."))]
        if preset.left_out:
            blocks.append(wrapped(plain(f"Not in it: {'; '.join(preset.left_out)}.")))
        blocks.append(
            table(
                ("field", "value", "source"), [(f"`{v.path}`", f"`{v.value}`", plain(v.source)) for v in preset.values]
            )
        )
    return page(
        "Learning rules by name",
        "What this release has; packages add to it by the entry points `tapforge.algorithms` and `tapforge.losses`. "
        "[Algorithms](../algorithms.md) has formulas, papers, and when to use which.",
        *blocks,
    )


def _keywords(made: Callable[..., Any]) -> dict[str, Any]:
    return {
        one.name: one.default for one in inspect.signature(made).parameters.values() if one.kind is one.KEYWORD_ONLY
    }


def _options(defaults: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}: {_written(value)}`" for name, value in defaults.items()) or "none"


def _written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'
