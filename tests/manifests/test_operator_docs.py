"""What the pages about the operator and pools list is what the code has: flags, metrics, states, reasons, roles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from exported_metrics import exported

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_operator.emulatorpool.state import Reason, RefusalReason
from tapforge_operator.emulatorpool.status import _WORDS
from tapforge_operator.kube.objectmeta import UNREADABLE_STATUS
from tapforge_operator.main import main
from tapforge_operator.observability.metrics import PHASES, STATES

ROOT = Path(__file__).parents[2]
OPERATOR = (ROOT / "docs" / "operator-reference.md").read_text()
RIGHTS = (ROOT / "docs" / "rights.md").read_text()
POOLS = (ROOT / "docs" / "pool-status.md").read_text()


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
    measured = {name: (kind, labels - {"le"}) for name, (kind, labels) in exported().items()}
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
    assert {name for key in rows(RIGHTS, "Rights") for name in key.split(", ")} == roles


def test_every_field_of_the_status():
    listed = {name for key in rows(POOLS, "What the status says") for name in key.split(", ")}
    fields = {field.alias for field in EmulatorPoolStatus.model_fields.values()} - {"conditions", "selector"}
    assert fields | {"Ready", "Reconciling", "Stalled", "Degraded"} == listed


def test_every_event() -> None:
    listed = {name for key in rows(POOLS, "What happened to it") for name in key.split(", ")}
    text = (ROOT / "operator" / "tapforge_operator" / "emulatorpool" / "status.py").read_text()
    written = set(re.findall(r'Event\("(?:Normal|Warning)", "(\w+)"', text)) | set(_WORDS)
    assert len(written) > len(_WORDS)
    assert written | {"InvalidSpec", UNREADABLE_STATUS} == listed


def test_every_reason_that_needs_a_person():
    listed = {name for key in rows(POOLS, "Troubleshooting") for name in key.split(", ")}
    concerns = (ROOT / "operator" / "tapforge_operator" / "emulatorpool" / "status.py").read_text()
    told = set(re.findall(r'Concern\(\s*"(\w+)"', concerns)) | set(get_args(RefusalReason))
    assert len(told) > 10
    sick = {Reason.BOOT_DEADLINE.value, Reason.UNREADY.value}
    assert told | sick | {"SlotsMissing", "InvalidSpec", UNREADABLE_STATUS} == listed - {"OOMKilled", "Error", "..."}


@pytest.mark.parametrize(
    "page",
    ["docs/pools.md", "docs/operator.md", "docs/rights.md", "docs/gitops.md", "docs/autoscaling.md", "docs/install.md"],
)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w/])(?:manifests|crds|docs)/[\w./-]*\w", text))
    named |= {f"manifests/samples/{name}" for name in re.findall(r"`(pool-\w+\.yaml)`", text)}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


#: literals of a run's modules that look like reasons: words of Kubernetes, KubeRay and Kueue, and what no status shows
_NO_REASONS = {
    "Active", "Background", "ClusterIP", "ConfigMap", "Degraded", "EmulatorPool", "Evicted", "Exists", "Finished",
    "Ingress", "Initializing", "Intended", "K8sJobMode", "NetworkPolicy", "Never", "Normal", "NotPublished",
    "OnRootMismatch", "Over", "Pending", "QuotaReserved", "RayJob", "ReadWriteMany", "ReadWriteOnce",
    "ReadWriteOncePod", "Retry", "Retrying", "Suspending", "TrainingRun", "True", "TryLater", "Undecided",
    "Waiting", "Warning",
}  # fmt: skip


def test_every_condition_and_reason_of_a_run() -> None:
    page = (ROOT / "docs" / "reference" / "conditions.md").read_text()
    listed = set(re.findall(r"`([A-Z][A-Za-z]+)`", page))
    modules = (ROOT / "operator" / "tapforge_operator" / "trainingrun").glob("*.py")
    written = {word for file in modules for word in re.findall(r'"([A-Z]\w*[a-z]\w*)"', file.read_text())}
    missing = written - _NO_REASONS - listed
    assert not missing, "list them in docs/reference/conditions.md, or here where no status shows them"
    assert not _NO_REASONS - written
