"""This machine's Python environment inside a pod, without an image of it: an almost empty image and read-only mounts.

A trainer's image holds 7 GB of packages, which take longer to pack, load and unpack than a test takes. What is mounted
is exactly what runs here: the system's programs and libraries, the interpreter, the environment and the checkout.

Either a pod says it all itself (`pod_spec`), or its image's name is enough: `stand_in` makes the cluster add the mounts
to containers of that image, so that files which name it can be applied as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from . import archive

IMAGE: Final = "tapforge.test/host:e2e"
CHECKOUT: Final = Path(__file__).parents[3]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_KINDS = ("containers", "initContainers")
_PEOPLE = b"root:x:0:0:root:/tmp:/bin/sh\nnonroot:x:65532:65532:nonroot:/tmp:/bin/sh\n"


def image(path: Path, name: str = IMAGE) -> Path:
    """Writes the almost empty image."""
    return archive.write(path, name, {"/etc/passwd": _PEOPLE}, folders=["/tmp"])


def python() -> str:
    """The interpreter, by its place in such a pod."""
    return sys.executable


def mounts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of a pod, and where its containers mount them."""
    places = [place for place in _SYSTEM if Path(place).exists()]
    for place in (sys.base_prefix, sys.prefix, str(CHECKOUT)):
        # What lies below another one is there already.
        if not any(Path(place).is_relative_to(other) for other in places):
            places = [other for other in places if not Path(other).is_relative_to(place)] + [place]
    volumes = [
        {"name": f"host-{n}", "hostPath": {"path": place, "type": "Directory"}} for n, place in enumerate(places)
    ]
    targets = [{"name": f"host-{n}", "mountPath": place, "readOnly": True} for n, place in enumerate(places)]
    return volumes, targets


def environment() -> list[dict[str, str]]:
    """Variables that its containers need."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return [{"name": "PATH", "value": path}, {"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "nonroot"}]


def pod_spec(containers: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    """`containers` with this machine's environment: what they say themselves stands."""
    volumes, targets = mounts()
    filled = [
        {
            "image": IMAGE,
            "imagePullPolicy": "Never",
            **container,
            "env": [*environment(), *container.get("env", ())],
            "volumeMounts": [*targets, *container.get("volumeMounts", ())],
        }
        for container in containers
    ]
    security = {"runAsUser": 65532, "runAsGroup": 65532, "runAsNonRoot": True}
    return {"securityContext": security, **spec, "containers": filled, "volumes": [*volumes, *spec.get("volumes", ())]}


def stand_in(name: str) -> list[dict[str, Any]]:
    """Objects by which every container of the image `name`, as pods write it, has this machine's environment."""
    volumes, targets = mounts()
    pod, container = "Object.spec.volumes", "Object.spec.{}.{}"
    hosts = [f"{pod}{{name: {_cel(v['name'])}, hostPath: {pod}.hostPath{_cel(v['hostPath'])}}}" for v in volumes]
    parts = [f"volumes: [{', '.join(hosts)}]"]
    for kind in _KINDS:
        env, mount = container.format(kind, "env"), container.format(kind, "volumeMounts")
        own = f"env: [{', '.join(env + _cel(e) for e in environment())}]"
        own += f", volumeMounts: [{', '.join(mount + _cel(t) for t in targets)}]"
        mine = f"object.spec.?{kind}.orValue([]).filter(c, c.image == {_cel(name)})"
        parts.append(f"{kind}: {mine}.map(c, Object.spec.{kind}{{name: c.name, {own}}})")
    group, title = "admissionregistration.k8s.io", {"name": "this-machines-environment"}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    asks = [f"object.spec.?{kind}.orValue([]).exists(c, c.image == {_cel(name)})" for kind in _KINDS]
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": title,
            "spec": {
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "matchConstraints": {"resourceRules": [pods]},
                "matchConditions": [{"name": "asks-for-it", "expression": " || ".join(asks)}],
                "mutations": [
                    {
                        "patchType": "ApplyConfiguration",
                        "applyConfiguration": {
                            "expression": f"Object{{spec: Object.spec{{{', '.join(parts)}}}}}",
                        },
                    }
                ],
            },
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": title,
            "spec": {"policyName": title["name"]},
        },
    ]


def _cel(value: Any) -> str:
    """A value, or the fields of an object."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_cel(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
