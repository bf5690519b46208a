"""`python -m charts`: writes the templates and the table of values of the Helm chart `charts/tapforge`.

- `manifests` and `crds` are the only definition of what is installed. A template is the text of one of their files
  with its comments, in which single places are exchanged for values.
- A name that is put in is quoted: a namespace may be called `2024` or `on`, which YAML reads as something else.
- A place that is exchanged occurs in its file exactly once. Where it doesn't, nothing is written and the error says
  which place that is.
- Written by hand: Chart.yaml, values.yaml, its schema, NOTES.txt, `_helpers.tpl`, and `certificate.yaml`, which is an
  object of cert-manager's and not among the manifests.
- A comment over a value in values.yaml is its description in the chart's README.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "charts" / "tapforge"
#: namespace that the manifests are written for
_NAMESPACE: Final = "tapforge-system"
#: what manifests/base/kustomization.yaml adds
_LABEL: Final = "    app.kubernetes.io/part-of: tapforge\n"


@dataclass(frozen=True)
class Template:
    #: below the chart's templates
    name: str
    #: below the checkout
    source: str
    #: which of the source's objects; none: all
    kinds: Sequence[str] = ()
    #: of the chart's values, as Helm's `if` takes it; "": always
    when: str = ""
    #: once for each of this list's namespaces
    each: str = ""
    #: text of the source -> text of the template
    exchange: Mapping[str, str] = field(default_factory=dict)


def _optional(value: str, field: str, indent: int) -> str:
    """A field of a Pod's spec that is left out where the value is empty."""
    blanks = " " * indent
    return (
        f"{blanks}{{{{- with .Values.{value} }}}}\n{blanks}{field}:\n"
        f"{blanks}  {{{{- toYaml . | nindent {indent + 2} }}}}\n{blanks}{{{{- end }}}}\n"
    )


_AFFINITY: Final = """\
      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels:
                    app.kubernetes.io/name: tapforge-operator
"""
_DEPLOYMENT: Final = {
    "  replicas: 2\n": "  replicas: {{ .Values.replicas }}\n",
    "        app.kubernetes.io/name: tapforge-operator\n    spec:\n": (
        "        app.kubernetes.io/name: tapforge-operator\n"
        "        {{- with .Values.podLabels }}\n        {{- toYaml . | nindent 8 }}\n        {{- end }}\n"
        + _optional("podAnnotations", "annotations", 6)
        + "    spec:\n"
    ),
    "      nodeSelector:\n        kubernetes.io/os: linux\n": (
        _optional("image.pullSecrets", "imagePullSecrets", 6)
        + _optional("nodeSelector", "nodeSelector", 6)
        + _optional("tolerations", "tolerations", 6)
        + _optional("topologySpreadConstraints", "topologySpreadConstraints", 6)
        + "      {{- with .Values.priorityClassName }}\n      priorityClassName: {{ . | quote }}\n      {{- end }}\n"
    ),
    _AFFINITY: (
        "      {{- with .Values.affinity }}\n      affinity:\n        {{- toYaml . | nindent 8 }}\n"
        f"      {{{{- else }}}}\n{_AFFINITY}      {{{{- end }}}}\n"
    ),
    "          image: tapforge/operator:dev\n": (
        '          image: {{ include "tapforge.image" . | quote }}\n'
        "          {{- with .Values.image.pullPolicy }}\n          imagePullPolicy: {{ . }}\n          {{- end }}\n"
    ),
    "            - --advertise-address=$(POD_IP)\n": (
        "            - --advertise-address=$(POD_IP)\n"
        "            {{- range .Values.namespaces }}\n            - --namespace={{ . }}\n            {{- end }}\n"
        '            {{- if not (include "tapforge.nodes" .) }}\n            - --no-nodes\n            {{- end }}\n'
        "            {{- if not .Values.networkPolicies.runs }}\n"
        "            - --no-run-network\n            {{- end }}\n"
        "            {{- with .Values.networkPolicies.kuberayFrom }}\n"
        '            - {{ printf "--kuberay-namespace=%s" (include "tapforge.labels" .) | quote }}\n'
        "            {{- end }}\n"
        "            {{- with .Values.networkPolicies.metricsFrom | default (list dict) }}\n"
        '            {{- if ne (toJson .) (list (dict "kubernetes.io/metadata.name" "monitoring") | toJson) }}\n'
        "            {{- range . }}\n"
        '            - {{ printf "--metrics-namespace=%s" (include "tapforge.labels" .) | quote }}\n'
        "            {{- end }}\n            {{- end }}\n            {{- end }}\n"
        "            {{- if .Values.devices }}\n            - --devices\n            {{- end }}\n"
        '            {{- if ne .Values.logLevel "INFO" }}\n            - --log-level={{ .Values.logLevel }}\n'
        "            {{- end }}\n"
        '            {{- if include "tapforge.tlsSecret" . }}\n            - --tls-dir=/etc/tapforge/tls\n'
        "            {{- end }}\n"
        "            {{- if .Values.monitoring.token }}\n            - --metrics-token\n            {{- end }}\n"
        "            {{- range $namespace, $slots := .Values.claimQuotas }}\n"
        '            - {{ printf "--claim-quota=%s=%d" $namespace (int64 $slots) | quote }}\n            {{- end }}\n'
        "            {{- range $namespace, $hosts := .Values.externalDevices }}{{ range $hosts }}\n"
        '            - {{ printf "--external-device=%s=%s" $namespace . | quote }}\n            {{- end }}{{ end }}\n'
        "            {{- range .Values.extraArgs }}\n            - {{ . | quote }}\n            {{- end }}\n"
    ),
    "            requests: {cpu: 100m, memory: 192Mi}\n            limits: {memory: 512Mi}\n": (
        "            {{- toYaml .Values.resources | nindent 12 }}\n"
    ),
    "              mountPath: /tmp\n": (
        "              mountPath: /tmp\n"
        '            {{- if include "tapforge.tlsSecret" . }}\n'
        "            - name: tls\n              mountPath: /etc/tapforge/tls\n              readOnly: true\n"
        "            {{- end }}\n"
    ),
    "            sizeLimit: 8Mi\n": (
        "            sizeLimit: 8Mi\n"
        '        {{- with include "tapforge.tlsSecret" . }}\n'
        "        - name: tls\n          secret:\n            secretName: {{ . | quote }}\n        {{- end }}\n"
    ),
}
#: by its Prometheus' selector a monitor is found
_MONITOR: Final = {
    "spec:\n  selector:\n    matchLabels:\n": (
        _optional("monitoring.labels", "labels", 2) + "spec:\n  selector:\n    matchLabels:\n"
    ),
    "      interval: 15s\n": (
        "      interval: {{ .Values.monitoring.interval }}\n"
        "      {{- with .Values.monitoring.tokenSecret }}\n      authorization:\n        credentials:\n"
        "          {{- toYaml . | nindent 10 }}\n      {{- end }}\n"
    ),
}
_KEPT: Final = """\
metadata:
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
    argocd.argoproj.io/sync-options: Prune=false
    kustomize.toolkit.fluxcd.io/prune: disabled
  {{- end }}
"""
_OPERATOR: Final = "manifests/base/operator.yaml"
_COMPONENTS: Final = "manifests/components"
_DASHBOARD: Final = f"{_COMPONENTS}/monitoring/dashboard.json"
#: as that component's kustomization says
_DASHBOARDS_OBJECT: Final = f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: tapforge-dashboard
  namespace: {_NAMESPACE}
  labels:
    grafana_dashboard: "1"
data:
  tapforge.json: |
"""
TEMPLATES: Final = (
    *(
        Template(f"crds/{name}", f"crds/{name}", when=".Values.crds.install", exchange={"\nmetadata:\n": f"\n{_KEPT}"})
        for name in ("emulatorpools.yaml", "trainingruns.yaml")
    ),
    Template("serviceaccount.yaml", _OPERATOR, kinds=("ServiceAccount",)),
    Template("deployment.yaml", _OPERATOR, kinds=("Deployment",), exchange=_DEPLOYMENT),
    Template("poddisruptionbudget.yaml", _OPERATOR, kinds=("PodDisruptionBudget",)),
    Template("service.yaml", _OPERATOR, kinds=("Service",)),
    Template("rbac.yaml", "manifests/base/rbac.yaml"),
    Template("user-roles.yaml", "manifests/base/user-roles.yaml"),
    Template("protection.yaml", "manifests/base/protection.yaml", when=".Values.protection"),
    Template("rbac-cluster.yaml", "manifests/overlays/cluster/binding.yaml", when="not .Values.namespaces"),
    Template(
        "rbac-namespaces.yaml",
        "manifests/overlays/namespaced/binding.yaml",
        each=".Values.namespaces",
        exchange={"  namespace: default\n": "  namespace: {{ . | quote }}\n"},
    ),
    Template(
        "logs.yaml",
        f"{_COMPONENTS}/logs/binding.yaml",
        each="(concat .Values.namespaces .Values.logNamespaces | uniq)",
        exchange={"-logs\nroleRef": "-logs\n  namespace: {{ . | quote }}\nroleRef"},
    ),
    Template(
        "devices-cluster.yaml",
        f"{_COMPONENTS}/devices/binding.yaml",
        when="and .Values.devices (not .Values.namespaces)",
    ),
    Template(
        "devices-namespaces.yaml",
        f"{_COMPONENTS}/devices/namespaced/binding.yaml",
        when=".Values.devices",
        each=".Values.namespaces",
        exchange={"  namespace: default\n": "  namespace: {{ . | quote }}\n"},
    ),
    Template("nodes.yaml", f"{_COMPONENTS}/nodes/nodes.yaml", when='include "tapforge.nodes" .'),
    Template("confinement.yaml", f"{_COMPONENTS}/confinement/policy.yaml", when=".Values.confinement"),
    Template("flowcontrol.yaml", f"{_COMPONENTS}/flowcontrol/flowcontrol.yaml", when=".Values.flowControl"),
    Template("kueue.yaml", f"{_COMPONENTS}/kueue/rbac.yaml", when=".Values.kueue"),
    Template(
        "networkpolicy.yaml",
        f"{_COMPONENTS}/network/operator.yaml",
        when=".Values.networkPolicies.operator",
        exchange={
            "        - namespaceSelector:\n            matchLabels:\n"
            "              kubernetes.io/metadata.name: monitoring\n": (
                "        {{- range .Values.networkPolicies.metricsFrom }}\n"
                "        - namespaceSelector:\n            matchLabels:\n"
                "              {{- toYaml . | nindent 14 }}\n        {{- end }}\n"
            )
        },
    ),
    Template(
        "networkpolicy-phones.yaml",
        f"{_COMPONENTS}/network/phones/phones.yaml",
        each=".Values.networkPolicies.phones",
        exchange={
            "  name: tapforge-phones\n": "  name: tapforge-phones\n  namespace: {{ . | quote }}\n",
            "  name: tapforge-phones-internet\n": "  name: tapforge-phones-internet\n  namespace: {{ . | quote }}\n",
        },
    ),
    Template(
        "podmonitor.yaml",
        f"{_COMPONENTS}/prometheus/podmonitor.yaml",
        when='eq .Values.monitoring.scrape "PodMonitor"',
        exchange=_MONITOR,
    ),
    Template(
        "servicemonitor.yaml",
        f"{_COMPONENTS}/servicemonitor/servicemonitor.yaml",
        when='eq .Values.monitoring.scrape "ServiceMonitor"',
        exchange=_MONITOR,
    ),
    Template(
        "prometheusrule.yaml",
        f"{_COMPONENTS}/monitoring/prometheusrule.yaml",
        when=".Values.monitoring.rules",
        exchange={"spec:\n  groups:\n": _optional("monitoring.labels", "labels", 2) + "spec:\n  groups:\n"},
    ),
    Template("dashboard.yaml", _DASHBOARD, when=".Values.monitoring.dashboard"),
)


def text_of(template: Template) -> str:
    source = (ROOT / template.source).read_text()
    if template.source == _DASHBOARD:
        source = _DASHBOARDS_OBJECT + textwrap.indent(source, "    ")
    chosen = [part for part in source.split("\n---\n") if not template.kinds or _kind(part) in template.kinds]
    text = "---\n".join(f"{part.rstrip()}\n" for part in chosen)
    # Braces of others' templates, as in a rule of Prometheus, are text to Helm.
    text = re.sub(r"\{\{|\}\}", lambda found: f'{{{{ "{found[0]}" }}}}', text)
    for old, new in template.exchange.items():
        if text.count(old) != 1:
            raise ValueError(
                f"{template.source} has {text.count(old)} times, not once, what {template.name} exchanges:\n{old}"
                "Change charts/__main__.py with it"
            )
        text = text.replace(old, new)
    if template.source.startswith(("manifests/base/", "crds/")):
        text = "---\n".join(_labelled(part) for part in text.split("---\n"))
    text = text.replace(_NAMESPACE, f"{{{{ {'$' if template.each else ''}.Release.Namespace | quote }}}}")
    if template.each:
        text = f"{{{{- range {template.each} }}}}\n---\n{text}{{{{- end }}}}\n"
    if template.when:
        text = f"{{{{- if {template.when} }}}}\n{text}{{{{- end }}}}\n"
    return f"{{{{- /* From {template.source}, by `python -m charts`; not edited by hand. */ -}}}}\n{text}"


def _kind(part: str) -> str:
    return str(yaml.safe_load(part)["kind"])


def _labelled(part: str) -> str:
    """The object with the label that kustomize gives to all of the base."""
    head, spec, rest = re.split(
        r"^(?=(spec|rules|roleRef|automountServiceAccountToken):)", part, maxsplit=1, flags=re.MULTILINE
    )
    assert spec
    if "  labels:\n" in head:
        return head.replace("  labels:\n", f"  labels:\n{_LABEL}", 1) + rest
    return f"{head}  labels:\n{_LABEL}{rest}"


# --- the table of values ----------------------------------------------------------------------------------------------


def rows(text: str) -> Iterator[tuple[str, Any, str]]:
    """(name, default, description) of values.yaml. What has a comment is a value, also when it is a map."""
    values = yaml.safe_load(text)
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if comment := re.fullmatch(r" *# ?(.*)", line):
            above.append(comment[1])
        elif key := re.match(r"( *)([\w.-]+):", line):
            path = [*(one for one in path if one[0] < len(key[1])), (len(key[1]), key[2])]
            names = [name for _, name in path]
            found = values
            for name in names:
                found = found[name]
            if above:
                yield ".".join(names), found, " ".join(above)
            above = []
        else:
            above = []


def readme() -> str:
    page = (CHART / "README.md").read_text()
    before = page.split("\n| value | default | |\n")[0]
    table = [
        f"| `{name}` | `{_default(default)}` | {description} |"
        for name, default, description in rows((CHART / "values.yaml").read_text())
    ]
    return "\n".join([before, "| value | default | |", "|---|---|---|", *table, ""])


def _default(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def written() -> dict[Path, str]:
    """All files that are generated, with what they are to hold."""
    files = {CHART / "templates" / template.name: text_of(template) for template in TEMPLATES}
    return files | {CHART / "README.md": readme()}


if __name__ == "__main__":
    for path, text in written().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
