"""The lives of pods on fake nodes, played by kwok: no container runs, every status is as a kubelet's.

A pod is Ready at once, in one write, unless its annotations ask for another life. They can be set in a pod template or
put on a pod that is running; times are counted in whole seconds, because that is what statuses hold.

    fake.tapforge.dev/pull-seconds   between being scheduled and the container's start, or "never"
    fake.tapforge.dev/boot-seconds   between the container's start and Ready, or "never"
    fake.tapforge.dev/exit-seconds   between the container's start and its end
    fake.tapforge.dev/exit-code      which end: "0" is Succeeded, others Failed; "1" by default
    fake.tapforge.dev/unready        "true": not Ready as long as it stands there
    fake.tapforge.dev/stop-seconds   between being deleted and gone, or "never"

A container that ended is not started again, whatever restartPolicy says. A node whose label is taken away is played no
more: its Lease is not renewed, and its pods neither change nor go.
"""

from __future__ import annotations

from typing import Any, Final

PULL: Final = "fake.tapforge.dev/pull-seconds"
BOOT: Final = "fake.tapforge.dev/boot-seconds"
EXIT: Final = "fake.tapforge.dev/exit-seconds"
EXIT_CODE: Final = "fake.tapforge.dev/exit-code"
UNREADY: Final = "fake.tapforge.dev/unready"
STOP: Final = "fake.tapforge.dev/stop-seconds"


def configuration(pod_log: str) -> list[dict[str, Any]]:
    """kwok's configuration: these lives, and one file as the log of every fake container."""
    return [
        {
            "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
            "kind": "KwokConfiguration",
            # kwok fills in none of these itself once its configuration is given.
            "options": {
                "podPlayStageParallelism": 16,
                "nodePlayStageParallelism": 4,
                "nodeLeaseParallelism": 4,
                "podsOnNodeSyncParallelism": 4,
                "enableDebuggingHandlers": True,
            },
        },
        {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "ClusterLogs",
            "metadata": {"name": "every-container"},
            "spec": {"logs": [{"logsFile": pod_log}]},
        },
        _node_comes_up(),
        *_pod_lives(),
    ]


# --- pods: exactly one stage fits a pod at any time, because kwok draws lots among several ----------------------------


def _note(key: str) -> str:
    return f'.metadata.annotations["{key}"]'


_HERE = ".metadata.deletionTimestamp == null"
_PENDING = f'{_HERE} and .status.phase == "Pending" and {_note(PULL)} != "never"'
_RUNNING = f'{_HERE} and .status.phase == "Running"'
_READY = 'any(.status.conditions[]?; .type == "Ready" and .status == "True")'
_PLAIN = f"({_note(BOOT)} == null and {_note(EXIT)} == null and {_note(UNREADY)} == null)"
_SICK = f"{_note(UNREADY)} != null"
#: its end comes before it is Ready, or it is Ready already
_ENDS_NEXT = (
    f'({_note(EXIT)} != null and ({_READY} or {_SICK} or {_note(BOOT)} == "never"'
    f' or ({_note(EXIT)} | tonumber) <= ({_note(BOOT)} // "0" | tonumber)))'
)
_SCHEDULED = (
    '([.status.conditions[]? | select(.type == "PodScheduled") | .lastTransitionTime][0]'
    " // .metadata.creationTimestamp)"
)


def _after(since: str, key: str) -> str:
    """An absolute time, so that a pod that is changed meanwhile doesn't begin to wait again."""
    return f'if {_note(key)} == null then "0s" else (({since}) + ({_note(key)} | tonumber) | todateiso8601) end'


def _pod_lives() -> list[dict[str, Any]]:
    started = f"{_SCHEDULED} | fromdateiso8601"
    running = ".status.startTime | fromdateiso8601"
    deleted = "(.metadata.deletionTimestamp | fromdateiso8601) - (.metadata.deletionGracePeriodSeconds // 0)"
    return [
        _stage("Pod", "pod-ready-at-once", f"{_PENDING} and {_PLAIN}", _after(started, PULL), _started(ready=True)),
        _stage("Pod", "pod-starts", f"{_PENDING} and ({_PLAIN} | not)", _after(started, PULL), _started(ready=False)),
        _stage(
            "Pod",
            "pod-ready",
            f'{_RUNNING} and {_note(BOOT)} != "never" and (({_READY} or {_SICK} or {_ENDS_NEXT}) | not)',
            _after(running, BOOT),
            _readiness(ready=True),
        ),
        _stage("Pod", "pod-unready", f"{_RUNNING} and {_READY} and {_SICK}", '"0s"', _readiness(ready=False)),
        _stage(
            "Pod",
            "pod-ends",
            f"{_RUNNING} and {_ENDS_NEXT} and (({_READY} and {_SICK}) | not)",
            _after(running, EXIT),
            _ENDED,
        ),
        _stage(
            "Pod",
            "pod-goes",
            # Without a grace period left, it is the API server's to remove.
            f".metadata.deletionTimestamp != null and .metadata.deletionGracePeriodSeconds != 0"
            f' and {_note(STOP)} != "never"',
            _after(deleted, STOP),
            None,
        ),
    ]


def _node_comes_up() -> dict[str, Any]:
    return _stage("Node", "node-comes-up", f"({_READY} | not)", '"0s"', _NODE)


def _stage(kind: str, name: str, when: str, delay: str, status: str | None) -> dict[str, Any]:
    step: dict[str, Any] = {"delete": True}
    if status is not None:
        step = {"patch": {"subresource": "status", "root": "status", "type": "strategic", "template": status}}
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": [{"jq": {"key": when, "operator": "In", "values": ["true"]}}]},
            "delay": {"durationFrom": {"jq": {"expression": delay}}},
            "steps": [step],
        },
    }


def _conditions(*conditions: tuple[str, bool, str]) -> str:
    lines = ["conditions:"]
    for kind, value, reason in conditions:
        lines.append(f'- {{type: {kind}, status: "{value}", lastTransitionTime: {{{{ $now | Quote }}}}')
        lines[-1] += f", reason: {reason or 'null'}}}"
    return "\n".join(lines)


def _started(*, ready: bool) -> str:
    why = "" if ready else "ContainersNotReady"
    flag = str(ready).lower()
    conditions = _conditions(
        ("PodReadyToStartContainers", True, ""),
        ("Initialized", True, ""),
        ("Ready", ready, why),
        ("ContainersReady", ready, why),
    )
    return f"""
{{{{ $now := Now }}}}
phase: Running
startTime: {{{{ $now | Quote }}}}
{conditions}
containerStatuses:
{{{{ range .spec.containers }}}}
- name: {{{{ .name | Quote }}}}
  image: {{{{ .image | Quote }}}}
  imageID: {{{{ .image | Quote }}}}
  containerID: {{{{ printf "fake://%s/%s" $.metadata.uid .name | Quote }}}}
  restartCount: 0
  started: {flag}
  ready: {flag}
  state: {{running: {{startedAt: {{{{ $now | Quote }}}}}}}}
{{{{ end }}}}
{{{{ with .spec.initContainers }}}}
initContainerStatuses:
{{{{ range . }}}}
- name: {{{{ .name | Quote }}}}
  image: {{{{ .image | Quote }}}}
  imageID: {{{{ .image | Quote }}}}
  containerID: {{{{ printf "fake://%s/%s" $.metadata.uid .name | Quote }}}}
  restartCount: 0
  ready: true
  {{{{ if eq (or .restartPolicy "") "Always" }}}}
  started: true
  state: {{running: {{startedAt: {{{{ $now | Quote }}}}}}}}
  {{{{ else }}}}
  started: false
  state:
    terminated:
      exitCode: 0
      reason: Completed
      startedAt: {{{{ $now | Quote }}}}
      finishedAt: {{{{ $now | Quote }}}}
  {{{{ end }}}}
{{{{ end }}}}
{{{{ end }}}}
{{{{ with NodeIPsWith .spec.nodeName }}}}
hostIP: {{{{ index . 0 | Quote }}}}
hostIPs:
{{{{ range . }}}}
- ip: {{{{ . | Quote }}}}
{{{{ end }}}}
{{{{ end }}}}
{{{{ with PodIPsWith .spec.nodeName (or .spec.hostNetwork false) .metadata.uid .metadata.name .metadata.namespace }}}}
podIP: {{{{ index . 0 | Quote }}}}
podIPs:
{{{{ range . }}}}
- ip: {{{{ . | Quote }}}}
{{{{ end }}}}
{{{{ end }}}}
"""


#: containerStatuses is one value for a patch: what stays as it was is repeated
_SAME_CONTAINER = """- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: {{ .imageID | Quote }}
  containerID: {{ .containerID | Quote }}
  restartCount: {{ .restartCount }}"""


def _readiness(*, ready: bool) -> str:
    why = "" if ready else "ContainersNotReady"
    conditions = _conditions(("Ready", ready, why), ("ContainersReady", ready, why))
    return f"""
{{{{ $now := Now }}}}
{conditions}
containerStatuses:
{{{{ range .status.containerStatuses }}}}
{_SAME_CONTAINER}
  started: true
  ready: {str(ready).lower()}
  state: {{running: {{startedAt: {{{{ .state.running.startedAt | Quote }}}}}}}}
{{{{ end }}}}
"""


_ENDED = f"""
{{{{ $now := Now }}}}
{{{{ $code := or (index .metadata.annotations "{EXIT_CODE}") "1" }}}}
{{{{ if eq $code "0" }}}}
phase: Succeeded
{_conditions(("Ready", False, "PodCompleted"), ("ContainersReady", False, "PodCompleted"))}
{{{{ else }}}}
phase: Failed
{_conditions(("Ready", False, "PodFailed"), ("ContainersReady", False, "PodFailed"))}
{{{{ end }}}}
containerStatuses:
{{{{ range .status.containerStatuses }}}}
{_SAME_CONTAINER}
  started: false
  ready: false
  state:
    terminated:
      exitCode: {{{{ $code }}}}
      reason: {{{{ if eq $code "0" }}}}Completed{{{{ else }}}}Error{{{{ end }}}}
      startedAt: {{{{ .state.running.startedAt | Quote }}}}
      finishedAt: {{{{ $now | Quote }}}}
      containerID: {{{{ .containerID | Quote }}}}
{{{{ end }}}}
"""

_NODE = """
{{ $now := Now }}
phase: Running
conditions:
{{ range NodeConditions }}
- type: {{ .type | Quote }}
  status: {{ .status | Quote }}
  reason: {{ .reason | Quote }}
  message: {{ .message | Quote }}
  lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ $now | Quote }}
{{ end }}
addresses:
- {type: InternalIP, address: {{ NodeIP | Quote }}}
- {type: Hostname, address: {{ NodeName | Quote }}}
daemonEndpoints: {kubeletEndpoint: {Port: {{ NodePort }}}}
nodeInfo:
  architecture: amd64
  bootID: ""
  containerRuntimeVersion: fake
  kernelVersion: fake
  kubeProxyVersion: fake
  kubeletVersion: fake
  machineID: ""
  operatingSystem: linux
  osImage: fake
  systemUUID: ""
"""
