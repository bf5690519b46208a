"""What the user says about a pool's Pods, as one hash: slots with another one are of an old template.

Hashed are the template as it was written, and those fields beside it that end up in the Pod and may change (kvm,
readinessPath) where they differ from their defaults. Nothing that the operator adds is hashed, so another release of
the operator rolls nobody's fleet.
"""

from __future__ import annotations

import json

from tapforge_api.pool import EmulatorPoolSpec

from ..names import digest


def template_hash(spec: EmulatorPoolSpec) -> str:
    """ "" for a pool without Pods."""
    if spec.template is None:
        return ""
    fields = EmulatorPoolSpec.model_fields
    said = {
        name: value.model_dump(by_alias=True, mode="json", exclude_defaults=True) if name == "kvm" else value
        for name in ("kvm", "readiness_path")
        if (value := getattr(spec, name)) != fields[name].default
    }
    written = spec.template.written()
    return digest(json.dumps([written, said] if said else [written], sort_keys=True, separators=(",", ":")))
