"""Every metric of the operator, as it is really rendered after everything happened once."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tapforge_api.run_status import TrainingRunStatus
from tapforge_operator.kube.objectmeta import ConditionBuilder
from tapforge_operator.observability.metrics import STATES, Telemetry


def everything() -> Telemetry:
    telemetry, condition = Telemetry(), ConditionBuilder((), 1, 0.0)
    telemetry.event("pods")
    telemetry.api_call("get", 200, 0.1)
    telemetry.passed_on(True)
    telemetry.passed_over("pods")
    telemetry.pool_state("a/b", dict.fromkeys(STATES, 1))
    telemetry.pool_conditions("a/b", [condition("Degraded", True, "BootFailing")])
    telemetry.claims("a/b", 1, 1)
    telemetry.watch_quotas(lambda: {"a": (2, 1)})
    telemetry.certificate(2e9, refused=False)
    telemetry.reconciled("a/b", 0.1, "ApiError")
    for method in (telemetry.booted, telemetry.replaced, telemetry.claim_granted):
        method("a/b", 0.1)
    telemetry.claim_waited("a/b", 0.1, True)
    progress = {"success": 0.5, "secondsLeft": 60.0}
    run = TrainingRunStatus.model_validate({"progress": progress}).model_copy(
        update={"conditions": (condition("Ready", True, "Running"),)}
    )
    telemetry.runs.observe("uid", "a/run", run, 1.0)
    return telemetry


def exported() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric; a counter by the name that is queried."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(everything().render().decode()):
        if family.name.startswith("tapforge_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = family.type, {label for sample in family.samples for label in sample.labels}
    return found
