"""docs/reference/events.md and summary.md: what programs may read of a run's folder, by telemetry/schema.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tapforge_trainer.telemetry import schema

from .words import page, plain, table, wrapped

_VERSION = (
    f"This is version {schema.VERSION} (`schema`). It grows when a field changes its meaning or goes; fields that are "
    "added don't change it, so a reader leaves alone what it doesn't know. Rates and shares are from 0 to 1, times are "
    "seconds, and a rate over nothing is null."
)


def events_page() -> str:
    blocks = [
        wrapped(_VERSION),
        wrapped(
            "The JSON schema of a line is [events.schema.json](events.schema.json), and the output of "
            "`tapforge explain --schema events`."
        ),
    ]
    for name, model in schema.EVENTS.items():
        blocks += [f"## {name}", *_record(model, leave_out={"at", "event"})]
    return page(
        "events.jsonl",
        "What happened in a run, a line of JSON for each event: `at` (seconds since 1970) and `event` in all of them, "
        "and the fields below. Lines are only appended; after a crash an update may occur twice, and the later line "
        "counts.",
        *blocks,
        *_parts(tuple(schema.EVENTS.values())),
    )


def summary_page() -> str:
    return page(
        "summary.json",
        "What a finished run came to. `tapforge show RUN` prints the most important of it.",
        wrapped(_VERSION),
        wrapped(
            "The JSON schema is [summary.schema.json](summary.schema.json), and the output of "
            "`tapforge explain --schema summary`."
        ),
        *_record(schema.Summary)[1:],
        *_parts((schema.Summary,)),
    )


def _record(model: type[BaseModel], leave_out: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    fields = model.model_json_schema(by_alias=True)["properties"]
    needed = model.model_json_schema(by_alias=True).get("required", ())
    rows = [
        (
            f"`{name}`" + ("" if name in needed else " (optional)"),
            plain(_type(field)),
            _said(field.get("description", "")),
        )
        for name, field in fields.items()
        if name not in leave_out
    ]
    said = " ".join((model.__doc__ or "").split())
    return [wrapped(said), table(("field", "type", ""), rows)] if rows else [wrapped(said)]


def _said(text: str) -> str:
    return plain(text)


def _parts(models: tuple[type[BaseModel], ...]) -> Iterator[str]:
    """Records inside of records, each once."""
    shown: dict[str, type[BaseModel]] = {}
    for model in models:
        for inner in _inside(model):
            shown.setdefault(inner.__name__, inner)
    for name, model in sorted(shown.items()):
        yield f"## {name}"
        yield from _record(model)


def _inside(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in model.model_fields.values():
        for part in _types(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield part
                yield from _inside(part)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _types(inner)


def _type(field: dict[str, Any]) -> str:
    """In words, from a JSON schema."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    match field.get("type"):
        case "array":
            return "list" if "items" not in field else f"list of {_type(field['items'])}"
        case "object":
            values = field.get("additionalProperties")
            return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
        case "number":
            return "share" if field.get("maximum") == 1 else "number"
        case str(name):
            return name
        case _:
            return "any"
