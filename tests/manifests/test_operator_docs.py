"""What docs/operator.md and docs/pools.md list is what the code has: flags, metrics, states, reasons, roles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_api.run_status import TrainingRunStatus
from tapforge_operator.main import main
from tapforge_operator.pool.history import RefusalReason
from tapforge_operator.pool.records import Reason
from tapforge_operator.run_telemetry import PHASES
from tapforge_operator.telemetry import STATES, Telemetry

ROOT = Path(__file__).parents[2]
OPERATOR = (ROOT / "docs" / "operator.md").read_text()
POOLS = (ROOT / "docs" / "pools.md").read_text()


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """Tables of a section by their first column, without the code marks."""
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip().replace("`", ""): [cell.strip() for cell in row[1:]] for row in cells}


def test_every_flag_with_its_default():
    listed = {name for key in rows(OPERATOR, "Flags") for name in key.split(" / ")}
    options = [param for param in main.params if isinstance(param, click.Option)]
    assert listed == {name for option in options for name in (*option.opts, *option.secondary_opts)}
    numbers = {o.opts[0]: o.default for o in options if not o.is_flag and isinstance(o.default, int | float)}
    assert {"--broker-port", "--lease-seconds"} <= set(numbers)
    for flag, default in numbers.items():
        assert float(rows(OPERATOR, "Flags")[flag][0]) == default


def test_every_metric_with_its_labels():
    telemetry = Telemetry()
    telemetry.event("pods")
    telemetry.api_call("get", 200, 0.1)
    telemetry.passed_on(True)
    telemetry.pool_state("a/b", dict.fromkeys(STATES, 1))
    telemetry.claims("a/b", 1, 1)
    telemetry.reconciled("a/b", 0.1, "ApiError")
    for method in (telemetry.booted, telemetry.replaced, telemetry.claim_granted):
        method("a/b", 0.1)
    telemetry.claim_waited("a/b", 0.1, True)
    running = {"type": "Ready", "status": "True", "reason": "Running", "message": "", "lastTransitionTime": "now"}
    run = {"conditions": [running], "progress": {"success": 0.5, "secondsLeft": 60.0}}
    telemetry.runs.saw("uid", "a/run", TrainingRunStatus.model_validate(run), 1.0)
    measured = {}
    for family in text_string_to_metric_families(telemetry.render().decode()):
        if family.name.startswith("tapforge_"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            measured[name] = (family.type, labels)
    table = rows(OPERATOR, "Metrics")
    assert {name: (kind, set(filter(None, said.split(", ")))) for name, (kind, said, *_) in table.items()} == measured
    states = table["tapforge_pool_slots"][2]
    assert ", ".join(STATES) in states
    assert ", ".join(PHASES) in table["tapforge_runs"][2]


def test_every_role():
    roles = {
        thing["metadata"]["name"]
        for path in (ROOT / "manifests").rglob("*.yaml")
        for thing in yaml.safe_load_all(path.read_text())
        if thing.get("kind") in ("Role", "ClusterRole")
    }
    assert {name for key in rows(OPERATOR, "Rights") for name in key.split(", ")} == roles


def test_every_field_of_the_status():
    listed = {name for key in rows(POOLS, "What the status says") for name in key.split(", ")}
    fields = {field.alias for field in EmulatorPoolStatus.model_fields.values()} - {"conditions", "selector"}
    assert fields | {"Ready", "Reconciling", "Stalled", "Degraded"} == listed


def test_every_reason_that_needs_a_person():
    listed = {name for key in rows(POOLS, "Troubleshooting") for name in key.split(", ")}
    concerns = (ROOT / "operator" / "tapforge_operator" / "pool" / "concerns.py").read_text()
    told = set(re.findall(r'Concern\(\s*"(\w+)"', concerns)) | set(get_args(RefusalReason))
    assert len(told) > 10
    sick = {Reason.BOOT_DEADLINE.value, Reason.UNREADY.value}
    assert told | sick | {"SlotsMissing", "InvalidSpec"} == listed - {"OOMKilled", "Error", "..."}


@pytest.mark.parametrize(
    "page", ["docs/pools.md", "docs/operator.md", "docs/gitops.md", "docs/autoscaling.md", "README.md"]
)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w/])(?:manifests|crds|docs)/[\w./-]*\w", text))
    named |= {f"manifests/samples/{name}" for name in re.findall(r"`(pool-\w+\.yaml)`", text)}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
