"""CustomResourceDefinitions out of the models: structural schemas that an API server takes.

1. What a structural schema may not have is translated: `$ref` is written out, exclusive bounds become flags, defaults
   lose their nulls. "T or null" is just T: the API server takes a null as "not written", as the models do.
2. Rules between fields, and what an update may not do, become CEL; no webhook is needed.
3. A description says the unit, from the model, and the default, because `kubectl explain` doesn't show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .base import GROUP, VERSION, Change, Rule, Spec
from .pool import EmulatorPool
from .shapes import model_of
from .training_run import TrainingRun

Schema = dict[str, Any]


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}


_AGE = _column("Age", ".metadata.creationTimestamp", "date")
# The reason of Ready says in one word how things are, whether Ready is True or not; the message says it in a sentence.
_STATUS = _column("Status", '.status.conditions[?(@.type=="Ready")].reason')
_MESSAGE = _column("Message", '.status.conditions[?(@.type=="Ready")].message', wide=True)

_KINDS: Mapping[str, dict[str, Any]] = {
    "TrainingRun": {
        "model": TrainingRun,
        "names": {"plural": "trainingruns", "singular": "trainingrun", "shortNames": ["tr", "trun"]},
        "subresources": {"status": {}},
        "columns": [
            _STATUS,
            _column("Update", ".status.progress.update", "integer"),
            _column("Success", ".status.progress.success", "number"),
            _column("Phones", ".status.leases.held", "integer"),
            _column("Pool", ".status.pool", wide=True),
            _column("Of", ".spec.stop.maxUpdates", "integer", wide=True),
            _column("Attempts", ".status.attempts", "integer", wide=True),
            _column("RayJob", ".status.rayJob", wide=True),
            _column("Started", ".status.startTime", "date", wide=True),
            _MESSAGE,
            _AGE,
        ],
    },
    "EmulatorPool": {
        "model": EmulatorPool,
        # not `ep`: that is what kubectl calls Endpoints, and it would warn all users that ask for those
        "names": {"plural": "emulatorpools", "singular": "emulatorpool", "shortNames": ["epool"]},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.pods",
                "labelSelectorPath": ".status.selector",
            },
        },
        "columns": [
            _column("Desired", ".status.desiredReplicas", "integer"),
            _column("Ready", ".status.ready", "integer"),
            _column("Claimed", ".status.claimed", "integer"),
            _column("Booting", ".status.booting", "integer", wide=True),
            _column("Unhealthy", ".status.unhealthy", "integer", wide=True),
            _column("Unschedulable", ".status.unschedulable", "integer", wide=True),
            _column("Updated", ".status.updated", "integer", wide=True),
            _column("Replaced", ".status.replacedTotal", "integer", wide=True),
            _STATUS,
            _column("Protocol", ".spec.protocol", wide=True),
            _MESSAGE,
            _AGE,
        ],
    },
}


#: the kinds, with the other names that kubectl has for each
KINDS: Mapping[str, tuple[str, ...]] = {
    kind: (about["names"]["plural"], *about["names"]["shortNames"]) for kind, about in _KINDS.items()
}


def crd(kind: str) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind, as plain data."""
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(_KINDS)}")
    about = _KINDS[kind]
    names = {**about["names"], "kind": kind, "listKind": f"{kind}List", "categories": ["tapforge"]}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": structural(about["model"])},
        "subresources": about["subresources"],
        "additionalPrinterColumns": about["columns"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{about['names']['plural']}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of an object kind."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _node(raw, raw.get("$defs", {}), model)
    properties = schema["properties"]
    # the API server brings its own schema for these three; of metadata only the name may be narrowed
    name = properties["metadata"]["properties"]["name"]
    properties["apiVersion"] = {
        "type": "string",
        "maxLength": 64,
        "description": properties["apiVersion"]["description"],
    }
    properties["kind"] = {"type": "string", "maxLength": 64, "description": properties["kind"]["description"]}
    properties["metadata"] = {"type": "object", "properties": {"name": name}}
    _say_defaults(properties["spec"])
    # Of a new object, too, it can be read that no generation was observed yet: tools that wait would take a status
    # without conditions for a sign that all is well.
    properties["status"]["default"] = {"observedGeneration": 0}
    schema["required"] = ["metadata", *(["spec"] if "default" not in properties["spec"] else [])]
    return schema


_KEPT = (
    *("description", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "enum", "format", "x-kubernetes-int-or-string"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)


def _say_defaults(node: Schema) -> None:
    """Adds the defaults of single values to the descriptions, in place."""
    for child in node.get("properties", {}).values():
        default = child.get("default")
        if isinstance(default, str | int | float) and default != "":
            child["description"] += f"; default {json.dumps(default).strip(chr(34)).removesuffix('.0')}"
        _say_defaults(child)


def _node(raw: Schema, definitions: Mapping[str, Schema], annotation: Any) -> Schema:
    """One node of the structural schema. `annotation` is the Python type it stands for: rules live on the classes."""
    raw = (
        {**definitions[raw["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in raw.items() if k != "$ref"}}
        if "$ref" in raw
        else raw
    )
    if "anyOf" in raw:
        members = [m for m in raw["anyOf"] if m.get("type") != "null"]
        if len(members) != 1:
            raise TypeError(f"a union has no structural schema, make it an exactly-one-of struct: {raw}")
        around = {k: v for k, v in raw.items() if k != "anyOf"}
        return _node({**members[0], **around}, definitions, annotation)
    node: Schema = {key: raw[key] for key in _KEPT if key in raw}
    if "const" in raw:
        node |= {"enum": [raw["const"]]}
    if "type" in raw:
        node = {"type": raw["type"], **node}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if flag in raw:
            node |= {bound: raw[flag], flag: True}
    if raw.get("type") == "array":
        node["items"] = _node(raw["items"], definitions, annotation)
    elif raw.get("type") == "object":
        _fill_object(node, raw, definitions, model_of(annotation))
    if raw.get("default") is not None:
        node["default"] = _without_nulls(raw["default"])
    return node


def _fill_object(node: Schema, raw: Schema, definitions: Mapping[str, Schema], model: type[BaseModel] | None) -> None:
    if "properties" not in raw and model is None:
        node["additionalProperties"] = _node(raw["additionalProperties"], definitions, str)
        return
    fields = {} if model is None else {f.alias or n: f.annotation for n, f in model.model_fields.items()}
    node["properties"] = {k: _node(v, definitions, fields.get(k)) for k, v in raw.get("properties", {}).items()}
    if raw.get("required"):
        node["required"] = list(raw["required"])
    if raw.get("additionalProperties") is True:
        node["x-kubernetes-preserve-unknown-fields"] = True
    if model is not None and issubclass(model, Spec) and (model.rules or model.changes):
        node["x-kubernetes-validations"] = [*map(_rule, model.rules), *map(_change, model.changes)]


def _rule(rule: Rule) -> Schema:
    return {"rule": rule.cel, "message": rule.message}


def _change(change: Change) -> Schema:
    at = {"fieldPath": f".{change.at}"} if change.at else {}
    return {"rule": change.cel, "message": change.message, "reason": "FieldValueForbidden", **at}


def _without_nulls(default: Any) -> Any:
    """Whole, because the API server checks a default against the rules before it fills in the defaults inside it."""
    if isinstance(default, dict):
        return {k: _without_nulls(v) for k, v in default.items() if v is not None}
    return default
