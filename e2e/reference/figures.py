"""docs/reference/figures.md: figures of a run, as loggers get them, and metrics of the operator, as Prometheus does."""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tapforge_trainer.loggers.figures import FIGURES

from .words import page, plain, table, wrapped

sys.path.append(str(Path(__file__).parents[2] / "tests" / "manifests"))

from exported_metrics import everything


def figures_page() -> str:
    return page(
        "Figures and metrics",
        "What a run measures of itself, and what the operator does.",
        "## Figures of a run",
        wrapped(
            "Each update writes them to [events.jsonl](events.md); [loggers](../loggers.md) and the "
            "[page of runs](../reading-a-run.md) have them under these names. The step is the number of updates so "
            "far. Times are in seconds, shares go from 0 to 1; `*` stands for names from the run."
        ),
        table(("figure", "meaning"), [(f"`{name}`", plain(said)) for name, said in FIGURES.items()]),
        "## Metrics of the operator",
        wrapped(
            "Prometheus' text format, on port 8080 at `/metrics`. [Its reference](../operator-reference.md#metrics) "
            "lists states and phases, [monitoring](../monitoring.md) has the alerts."
        ),
        table(("metric", "kind", "labels", "meaning"), _metrics()),
    )


def _metrics() -> list[tuple[str, str, str, str]]:
    """As they are rendered after everything happened once, which the operator's own tests do."""
    rows = []
    for family in text_string_to_metric_families(everything().render().decode()):
        if family.name.startswith("tapforge_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            rows.append((f"`{name}`", family.type, ", ".join(sorted(labels)), plain(family.documentation)))
    return sorted(rows)
