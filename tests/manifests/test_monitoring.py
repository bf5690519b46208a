"""Alerts, dashboard and runbook: Prometheus takes them, they speak of metrics that exist, and each alert fires when it
should and only then."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from e2e import packages
from e2e.cluster.processes import free_ports
from exported_metrics import everything, exported
from prometheus_client.parser import text_string_to_metric_families

from tapforge_operator.observability.metrics import CONTENT_TYPE

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "manifests" / "components" / "monitoring"
RULES = MONITORING / "rules.yml"
#: labels that Prometheus gives whatever it scrapes, with the PodMonitor's, and those of its own series
TARGET = {"instance", "job", "namespace", "pod"}
#: with spaces, as promtool's inputs are written
A, RUN = 'instance="a",', 'run="lab/run"'


@pytest.fixture(scope="module", autouse=True)
def _promtool() -> None:
    packages.ensure(packages.PROMETHEUS)


def promtool(*arguments: str, at: Path = MONITORING) -> str:
    command, path = ["promtool", *arguments], {"PATH": packages.PATH}
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=120, check=False, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> Iterator[tuple[str, str]]:
    """Title and query of each, as Grafana sends it."""
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            yield panel["title"], re.sub(r"\$(namespace|pool|run)\b", ".*", query)


def test_prometheus_takes_the_rules():
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES.name)


def test_the_prometheus_operator_gets_the_same_rules():
    wrapped = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
    assert wrapped["spec"] == yaml.safe_load(RULES.read_text()), "prometheusrule.yaml is rules.yml under `spec`"


def test_prometheus_takes_the_configuration_of_the_docs(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "monitoring.md").read_text(), re.DOTALL)
    config = yaml.safe_load(next(block for block in blocks if "scrape_configs" in block))
    # Debian's Prometheus is built without the discovery of Kubernetes' Pods.
    del config["scrape_configs"][0]["kubernetes_sd_configs"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / RULES.name).write_text(RULES.read_text())
    said = promtool("check", "config", "prometheus.yml", at=tmp_path)
    assert f"{len(alerts())} rules found" in said and "is valid prometheus config" in said


def test_every_alert_says_how_bad_it_is_and_where_its_remedy_is():
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert f"\n## {name}\n" in (ROOT / page).read_text() and anchor == name.lower()
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")


def test_the_runbook_has_a_section_for_each_alert_and_no_other():
    pages = [ROOT / "docs" / f"runbook{part}.md" for part in ("", "-pools", "-runs")]
    sections = re.findall(r"^## (Tapforge\w+)$", "".join(page.read_text() for page in pages), re.MULTILINE)
    assert sections == list(alerts())


def test_prometheus_takes_every_query_of_the_dashboard(tmp_path):
    queries = [query for _, query in panels()]
    assert len(queries) > 30 and not [query for query in queries if "$" in query]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", "panels.yml", at=tmp_path)


_SELECTOR = re.compile(r"\b((?:tapforge|process)_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")


def rendered() -> dict[str, set[str]]:
    """Labels of each series, by the name that is queried."""
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(everything().render().decode()):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


QUERIES = [(name, rule["expr"]) for name, rule in alerts().items()] + list(panels())


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_metrics_and_labels_of_a_query_are_the_operators(title, query):
    series = rendered()
    used = _SELECTOR.findall(query)
    assert used, title
    known = set(TARGET)
    for name, matchers in used:
        assert name in series, f"{name} is no metric of the operator"
        assert set(_LABEL.findall(matchers)) <= series[name], name
        known |= series[name]
    grouped = {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",") if label.strip()}
    assert grouped <= known, grouped - known


def test_what_is_shown_of_variables_exists():
    variables = json.loads((MONITORING / "dashboard.json").read_text())["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "namespace", "pool", "run"]
    for variable in variables[1:]:
        for name in re.findall(r"\btapforge_\w+", variable["query"]["query"]):
            assert name in exported() or name == "tapforge_namespace"


@pytest.mark.parametrize("kind", ["pool", "run"])
def test_all_pools_or_runs_are_those_of_the_chosen_namespace(kind):
    """As Grafana interpolates it: `allValue`, or else the values that the variable's query finds."""
    variables = json.loads((MONITORING / "dashboard.json").read_text())["templating"]["list"]
    (variable,) = [variable for variable in variables if variable["name"] == kind]
    (matcher,) = re.findall(rf'{kind}=~"(.*?)"', variable["query"]["query"])
    found = [name for name in ("lab/a", "other/b") if re.fullmatch(matcher.replace("$namespace", "lab"), name)]
    every = variable.get("allValue") or "|".join(found)
    assert re.fullmatch(every, "lab/a") and not re.fullmatch(every, "other/b")


def test_no_label_of_the_operator_is_one_that_prometheus_gives_the_target():
    clashes = {name: labels & TARGET for name, (_, labels) in exported().items() if labels & TARGET}
    assert not clashes, "it would be stored as exported_...: rename it"


def test_reasons_in_rules_are_reasons_of_the_operator():
    source = "".join(path.read_text() for path in (ROOT / "operator").rglob("*.py"))
    for name, rule in alerts().items():
        for value in re.findall(r'(?:reason|condition)(?:=~|!~|!=|=)"([^"]*)"', rule["expr"]):
            for word in value.split("|"):
                assert f'"{word}"' in source, f"{name}: {word}"


# --- as Prometheus evaluates it ---------------------------------------------------------------------------------------


class _Metrics(BaseHTTPRequestHandler):
    text = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Scrapes the target and evaluates the rules, each second. Gives what asks its API."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "operator", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    where = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["prometheus", *where, f"--web.listen-address=127.0.0.1:{port}"]

    def ask(path: str, **query: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return dict(json.load(answer)["data"])

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": packages.PATH})
        try:
            yield ask
        finally:
            process.kill()
            process.wait(60)


def test_prometheus_answers_every_query_of_the_dashboard_and_evaluates_every_rule(tmp_path):
    _Metrics.text = everything().render()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with prometheus(tmp_path, f"127.0.0.1:{server.server_port}") as ask:
            _wait_for_samples(ask, tmp_path)
            for title, query in panels():
                assert ask("query", query=query)["result"], f"{title}: {query}"
            rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
            assert [rule["name"] for rule in rules] == list(alerts())
            assert {rule["health"] for rule in rules} == {"ok"}, rules
        server.shutdown()


def _wait_for_samples(ask: Callable[..., dict[str, Any]], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):  # it does not listen yet
            found = ask("query", query="count_over_time(tapforge_leader[1m]) > 3")["result"]
            if found and all(rule["health"] != "unknown" for g in ask("rules")["groups"] for rule in g["rules"]):
                return
        time.sleep(0.2)
    pytest.fail(f"Prometheus has scraped nothing: {(folder / 'log').read_text()[-2000:]}")


# --- does it fire? ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Series minute by minute, in promtool's notation. At `minutes` the alert fires for the one, not for the other."""

    minutes: int
    firing: dict[str, str]
    quiet: dict[str, str]
    labels: str = ""


def pool(**labels: str) -> str:
    return _labels("tapforge_pool_condition", pool="lab/phones", **labels)


def slots(state: str) -> str:
    return _labels("tapforge_pool_slots", pool="lab/phones", state=state)


def run(**labels: str) -> str:
    return _labels("tapforge_run_condition", run="lab/run", **labels)


def of(metric: str, **labels: str) -> str:
    return _labels(metric, **labels)


def _labels(metric: str, **labels: str) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{metric}{{{inner}}}"


LEADER, STANDBY = of("tapforge_leader", instance="a"), of("tapforge_leader", instance="b")
STALLED = run(condition="Stalled", reason="VolumeNotFound")
FAILED, FAILED_TOO = run(condition="Failed", reason="DriverFailed"), run(condition="Stalled", reason="DriverFailed")
RUNNING = run(condition="Ready", reason="Running")
CALLS = {status: of("tapforge_api_call_seconds_count", verb="get", status=status) for status in ("2xx", "5xx")}
LAG = {le: of("tapforge_loop_lag_seconds_bucket", instance="a", le=le) for le in ("0.5", "2.5", "+Inf")}
UPDATES, LOST = of("tapforge_run_updates", run="lab/run"), of("tapforge_run_lost_clusters_total", run="lab/run")
AGE, SILENT = of("tapforge_run_progress_age_seconds", run="lab/run"), of("tapforge_claims_waiting", pool="lab/phones")
ERRORS = of("tapforge_reconcile_errors_total", pool="lab/phones", error="Conflict")
WATCH = of("tapforge_watch_event_age_seconds", instance="a", kind="pods")
EXPIRY = of("tapforge_broker_certificate_expiry_timestamp_seconds", instance="a")
REFUSED = of("tapforge_broker_certificate_refused", instance="a")
UNPROVED = of("tapforge_broker_unproved_claims", instance="a")
DAY = 86400
PASSED_ON = {flag: of("tapforge_forwarded_calls_total", answered=flag) for flag in ("true", "false")}

CASES = {
    "TapforgeOperatorAbsent": Case(10, {}, {LEADER: "0x20"}),
    "TapforgeNoLeader": Case(10, {LEADER: "0x20", STANDBY: "0x20"}, {LEADER: "0 1x20", STANDBY: "1 0x20"}),
    "TapforgeWatchSilent": Case(
        20, {LEADER: "1x30", WATCH: "0+60x30"}, {LEADER: "0x30", WATCH: "0+60x30"}, 'instance="a"'
    ),
    "TapforgeAPIErrors": Case(
        30, {CALLS["2xx"]: "0+90x40", CALLS["5xx"]: "0+10x40"}, {CALLS["2xx"]: "0+99x40", CALLS["5xx"]: "0+1x40"}
    ),
    "TapforgeEventLoopLag": Case(
        30,
        {LAG["0.5"]: "0+90x40", LAG["2.5"]: "0+100x40", LAG["+Inf"]: "0+100x40"},
        {LAG["0.5"]: "0+100x40", LAG["2.5"]: "0+100x40", LAG["+Inf"]: "0+100x40"},
        'instance="a"',
    ),
    "TapforgeForwardingFails": Case(30, {PASSED_ON["false"]: "0+1x40"}, {PASSED_ON["true"]: "0+1x40"}),
    "TapforgeClaimsUnproved": Case(10, {UNPROVED: "3x20"}, {UNPROVED: "0x20"}, 'instance="a"'),
    "TapforgeBrokerCertificateNotRenewed": Case(
        10,
        {REFUSED: "1x20", EXPIRY: f"{30 * DAY}x20"},
        {REFUSED: "0x20", EXPIRY: f"{8 * DAY}x20"},
        'instance="a"',
    ),
    "TapforgeBrokerCertificateExpired": Case(10, {EXPIRY: "300x20"}, {EXPIRY: "3600x20"}, 'instance="a"'),
    "TapforgeReconcileErrors": Case(40, {ERRORS: "0+1x50"}, {ERRORS: "0 1 1x50"}, 'pool="lab/phones",error="Conflict"'),
    "TapforgePoolStalled": Case(
        20,
        {pool(condition="Stalled", reason="PodSecurity"): "1x30"},
        {pool(condition="Stalled", reason="ReplacementBudgetSpent"): "1x30"},
        'pool="lab/phones",reason="PodSecurity"',
    ),
    "TapforgeReplacementBudgetSpent": Case(
        10,
        {pool(condition="Stalled", reason="ReplacementBudgetSpent"): "1x20"},
        {pool(condition="Stalled", reason="ReplacementBudgetSpent"): "1x3 _x20"},
        'pool="lab/phones"',
    ),
    "TapforgePoolDegraded": Case(
        80,
        {pool(condition="Degraded", reason="ImagePullSlow"): "1x90"},
        {
            pool(condition="Degraded", reason="PodSecurity"): "1x90",
            pool(condition="Stalled", reason="PodSecurity"): "1x90",
        },
        'pool="lab/phones",reason="ImagePullSlow"',
    ),
    "TapforgeBootsFailing": Case(
        20,
        {pool(condition="Degraded", reason="BootFailing"): "1x30"},
        {pool(condition="Degraded", reason="Unschedulable"): "1x30"},
        'pool="lab/phones"',
    ),
    "TapforgeSlotsUnschedulable": Case(
        40, {slots("unschedulable"): "3x50"}, {slots("unschedulable"): "3x20 0x30"}, 'pool="lab/phones"'
    ),
    "TapforgeSlotsUnhealthy": Case(
        30,
        {slots("unhealthy"): "2x40", slots("desired"): "10x40"},
        {slots("unhealthy"): "1x40", slots("desired"): "10x40"},
        'pool="lab/phones"',
    ),
    "TapforgeClaimsWaiting": Case(40, {SILENT: "5x50"}, {SILENT: "5x20 0x1 5x30"}, 'pool="lab/phones"'),
    "TapforgeSlotsIdle": Case(
        400,
        {slots("ready"): "8x420", slots("claimed"): "0x420"},
        {slots("ready"): "8x420", slots("claimed"): "1x420"},
        'pool="lab/phones"',
    ),
    "TapforgeRunStalled": Case(
        20, {STALLED: "1x30"}, {FAILED: "1x30", FAILED_TOO: "1x30"}, f'{RUN},reason="VolumeNotFound"'
    ),
    "TapforgeRunFailed": Case(20, {FAILED: "_x10 1x30"}, {FAILED: "_x10 _x10 _x30"}, f'{RUN},reason="DriverFailed"'),
    "TapforgeRunStartsSlowly": Case(
        80,
        {run(condition="Reconciling", reason="WaitingForPhones"): "1x90"},
        {run(condition="Reconciling", reason="Queued"): "1x90"},
        f'{RUN},reason="WaitingForPhones"',
    ),
    "TapforgeRunLosesClusters": Case(60, {LOST: "0x10 1x20 2x50"}, {LOST: "0x10 1x70"}, RUN),
    "TapforgeRunDriverSilent": Case(20, {AGE: "0+60x30"}, {AGE: "5x30"}, RUN),
    "TapforgeRunMakesNoUpdates": Case(
        200, {RUNNING: "1x220", UPDATES: "7x220"}, {RUNNING: "1x220", UPDATES: "7x100 8x120"}, RUN
    ),
}
#: of alerts that have more than one
OTHER_REASONS = [
    (
        "TapforgeBrokerCertificateNotRenewed",
        Case(10, {REFUSED: "0x20", EXPIRY: f"{6 * DAY}x20"}, {EXPIRY: f"{8 * DAY}x20"}, 'instance="a"'),
    ),
]


def test_every_alert_has_a_case():
    assert list(CASES) == list(alerts())


def test_an_alert_fires_when_it_should_and_not_otherwise(tmp_path):
    tests = []
    for name, case in [*CASES.items(), *OTHER_REASONS]:
        for fires, series in ((True, case.firing), (False, case.quiet)):
            severity = alerts()[name]["labels"]["severity"]
            labels = f'alertname="{name}",alertstate="firing",severity="{severity}"'
            sample = {"labels": f"ALERTS{{{','.join(filter(None, [labels, case.labels]))}}}", "value": 1}
            expected = [sample] if fires else []
            ask = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
            tests.append(
                {
                    "name": f"{name}, {'firing' if fires else 'quiet'}",
                    "interval": "1m",
                    "input_series": [{"series": key, "values": values} for key, values in series.items()],
                    "promql_expr_test": [{"expr": ask, "eval_time": f"{case.minutes}m", "exp_samples": expected}],
                }
            )
    evaluate(tmp_path, *tests)


def over_a_leader_change(series: dict[str, str], change: int) -> dict[str, str]:
    """Of gauges that stay as they are: a new leader reports them two minutes after the old one's last sample."""
    both = {}
    for key, values in series.items():
        value, _, minutes = values.partition("x")
        labels = key.removesuffix("}")
        both[f'{labels},instance="a"}}'] = f"{value}x{change} stale"
        both[f'{labels},instance="b"}}'] = f"_x{change + 2} {value}x{minutes}"
    return both


#: alerts on gauges of pools and runs that stay as they are
STEADY = [
    name
    for name, case in CASES.items()
    if re.match("(pool|run)=", case.labels) and all(re.fullmatch(r"\d+x\d+", v) for v in case.firing.values())
]


def quiet(alert: str, minutes: int, series: dict[str, str]) -> dict[str, Any]:
    ask = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [{"expr": ask, "eval_time": f"{minutes}m", "exp_samples": []}],
    }


def evaluate(folder: Path, *tests: dict[str, Any]) -> None:
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": list(tests)}
    (folder / "cases.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", "cases.yml", at=folder)


def test_a_change_of_leader_does_not_begin_an_alert_anew(tmp_path):
    assert len(STEADY) > 8
    tests = []
    for name in STEADY:
        case = CASES[name]
        series = over_a_leader_change(case.firing, case.minutes - 4)
        severity = alerts()[name]["labels"]["severity"]
        labels = f'ALERTS{{alertname="{name}",alertstate="firing",severity="{severity}",{case.labels}}}'
        # in the gap, and when the next leader reports
        for minutes in (case.minutes - 3, case.minutes):
            test = quiet(name, minutes, series)
            test["promql_expr_test"][0]["exp_samples"] = [{"labels": labels, "value": 1}]
            tests.append({"name": f"{name} at {minutes} min", **test})
    evaluate(tmp_path, *tests)


def test_an_old_failure_of_a_run_is_no_alert_any_more(tmp_path):
    evaluate(tmp_path, quiet("TapforgeRunFailed", 90, {FAILED: "_x10 1x200"}))


def test_an_old_failure_of_a_run_is_no_alert_an_hour_after_a_change_of_leader(tmp_path):
    change = 100
    series = over_a_leader_change({FAILED: "1x200"}, change)
    evaluate(tmp_path, *(quiet("TapforgeRunFailed", change + minutes, series) for minutes in (0, 3, 60, 61, 62, 63)))


def test_a_run_that_was_just_resumed_is_no_run_without_updates(tmp_path):
    evaluate(tmp_path, quiet("TapforgeRunMakesNoUpdates", 200, {RUNNING: "1x30 stale _x160 1x30", UPDATES: "7x220"}))


def test_an_update_that_a_change_of_leader_hides_is_an_update(tmp_path):
    a, b = (of("tapforge_run_updates", run="lab/run", instance=instance) for instance in "ab")
    updates = {a: "7x100 stale", b: "_x102 8x120"}
    evaluate(tmp_path, quiet("TapforgeRunMakesNoUpdates", 200, {RUNNING: "1x220", **updates}))
