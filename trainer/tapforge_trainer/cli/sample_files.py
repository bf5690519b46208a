"""`tapforge samples`: the sample files and CRDs of this release, also where there is no checkout."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
def samples(name: str | None) -> None:
    """Print the sample NAME, or list all: runs, pools, and the CRDs of a cluster."""
    from tapforge_api import shipped

    kinds = {"samples": shipped.files("samples"), "crds": shipped.files("crds")}
    known = {file: path for found in kinds.values() for file, path in found.items()}
    if name is None:
        for kind, found in kinds.items():
            click.echo(f"{kind}:")
            for file in found:
                click.echo(f"  {file}")
        click.echo("next: tapforge samples quickstart.yaml > run.yaml")
        return
    if (path := known.get(name) or known.get(f"{name}.yaml")) is None:
        raise click.UsageError(f"there is no sample {name}: `tapforge samples` lists them")
    click.echo(path.read_text(encoding="utf-8"), nl=False)
