"""`tapforge explain`: what a field of a file means, as `kubectl explain` says it where there is a cluster."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("field", default="spec")
@click.option("--recursive", is_flag=True, help="the names of all fields below it, as a tree")
@click.option("--schema", is_flag=True, help="the JSON schema of the whole kind instead, for editors")
def explain(field: str, recursive: bool, schema: bool) -> None:
    """Say what a field means: type, unit, bounds, default and rules. FIELD is its path in a file, such as
    spec.rollout.groupSize; epool.spec.health is one of an EmulatorPool. With --schema, FIELD may also be events (a line
    of events.jsonl) or summary (summary.json)."""
    from tapforge_api.explain import UnknownField, kind_of
    from tapforge_api.explain import explain as explained
    from tapforge_api.reference import json_schema

    from ..telemetry import schema as records

    if schema:
        found = records.json_schema(field) if field in records.KINDS else json_schema(kind_of(field))
        click.echo(json.dumps(found, indent=1))
        return
    try:
        click.echo(explained(field, recursive=recursive))
    except UnknownField as error:
        raise click.UsageError(str(error)) from error
