"""docs/reference/protocol.md: the environments' wire protocol, by tapforge_envs/openapi.py."""

from __future__ import annotations

from typing import Any

from tapforge_envs.openapi import openapi

from .words import page, plain, table, wrapped


def protocol_page() -> str:
    described = openapi()
    blocks = [
        wrapped(
            "The description for generators of servers and clients is [openapi.json](openapi.json) (OpenAPI 3.1). "
            "Paths are below a slot's address: `/slot/N`, or nothing for slot 0. `tapforge env check URL` checks a "
            "server against it and more ([your own](../phones.md#your-own))."
        )
    ]
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            blocks += [f"## {method.upper()} {path}", wrapped(plain(_sentence(call["summary"]))), *_call(call)]
    blocks.append("## Records")
    for name, schema in sorted(described["components"]["schemas"].items()):
        blocks.append(f"### {name}")
        if schema.get("description"):
            blocks.append(wrapped(plain(schema["description"])))
        if fields := schema.get("properties"):
            needed = schema.get("required", ())
            rows = [
                (f"`{field}`" + ("" if field in needed else " (optional)"), plain(_type(one)), _more(one))
                for field, one in fields.items()
            ]
            blocks.append(table(("field", "type", ""), rows))
    return page("Wire protocol of environments", _INTRODUCTION, *blocks)


_INTRODUCTION = (
    "What a server of `environment.protocol: tapforge` answers, version 1. An observation is one line of JSON "
    "(`ObservationHead`), a newline, and the bytes of the frame, which `sha256` names."
)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _call(call: dict[str, Any]) -> list[str]:
    blocks = []
    parameters = [
        (f"`{one['name']}`", one["in"], plain(_type(one["schema"])), plain(one["description"]))
        for one in call.get("parameters", ())
    ]
    if parameters:
        blocks.append(table(("parameter", "in", "type", ""), parameters))
    if "requestBody" in call:
        blocks.append(f"Body: {_type(call['requestBody']['content']['application/json']['schema'])}.")
    blocks.append(
        table(("status", "answer"), [(code, plain(one["description"])) for code, one in call["responses"].items()])
    )
    return blocks


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type(one) for one in schema[several])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return ", ".join(f'"{one}"' for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _more(schema: dict[str, Any]) -> str:
    words = [plain(schema.get("description", ""))]
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "maxLength": "characters at most",
    }
    words += [f"{said} {schema[bound]}" for bound, said in bounds.items() if bound in schema]
    if schema.get("default") not in (None, "", [], {}):
        words.append(f"default `{schema['default']}`")
    return "; ".join(filter(None, words))
