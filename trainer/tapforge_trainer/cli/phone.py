"""`tapforge phone`: simulated phones that people and other programs use."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from .failing import as_message
from .reading import LOCAL_PATH


class Port(click.ParamType):
    """A port number, 0 for a free one, or `off`."""

    name = "port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        text = str(value)
        if text == "off":
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
            self.fail(f"{text!r} is not a port: 1 to 65535, 0 for a free one, or off", param, ctx)
        return int(text)


_PORT = Port()
#: where episodes go that are kept
RECORD = click.option(
    "--record",
    type=LOCAL_PATH,
    default=Path("people"),
    show_default=True,
    help="folder of the episodes that are kept on the page; made with the first",
)


@click.group()
def phone() -> None:
    """Simulated phones."""


@phone.command()
@click.option("--phones", type=click.IntRange(1, 64), default=1, show_default=True, help="phones, each of its own")
@click.option("--suite", default="standard", show_default=True, help="what a phone without a task shows")
@click.option("--width", type=click.IntRange(32, 4096), default=1080, show_default=True, help="pixels")
@click.option("--height", type=click.IntRange(32, 4096), default=2400, show_default=True, help="pixels")
@click.option("--host", default="127.0.0.1", show_default=True, help="address that everything listens on")
@click.option("--token", envvar="TAPFORGE_TOKEN", default="", help="that the page needs elsewhere", show_envvar=True)
@RECORD
@click.option(
    "--page", type=_PORT, default="8080", show_default=True, help="page in the browser; 0 a free port, or off"
)
@click.option("--tapforge", type=_PORT, default="8000", show_default=True, help="tapforge's protocol, under /slot/N")
@click.option("--mobileworld", type=_PORT, default="6800", show_default=True, help="MobileWorld's API, under /slot/N")
@click.option("--adb", type=_PORT, default="5600", show_default=True, help="adb; one port for each phone from here on")
@click.option("--adb-keys", type=LOCAL_PATH, help="file of accepted adb keys; without: any host")
@click.option("--json", "as_json", is_flag=True, help="say the addresses in one line of JSON")
def serve(
    phones: int,
    suite: str,
    width: int,
    height: int,
    host: str,
    token: str,
    record: Path,
    page: int | None,
    tapforge: int | None,
    mobileworld: int | None,
    adb: int | None,
    adb_keys: Path | None,
    as_json: bool,
) -> None:
    """Serve phones for browsers, for adb, and for clients of tapforge's protocol and MobileWorld's, until Ctrl-C."""
    from tapforge_envs.phone import catalog
    from tapforge_envs.phone.serve import CannotServe, Ports, serving
    from tapforge_envs.serving.http import stop_signal

    from ..run.people import PeopleFolder

    if suite not in catalog.SUITES:
        raise click.BadParameter(catalog.unknown("suite", suite, list(catalog.SUITES)), param_hint="--suite")
    suites = (suite, *(name for name in catalog.SUITES if name != suite))

    with as_message():
        address = f"http://{host}:{tapforge or 8000}/slot/0"
        writer = None if page is None else PeopleFolder(record, "tapforge", [address])

    async def run() -> None:
        stopping = stop_signal()
        ports = Ports(page, tapforge, mobileworld, adb)
        async with serving(phones, width, height, suites, ports, host, adb_keys, writer, token) as served:
            if as_json:
                click.echo(json.dumps({"page": served.page, "phones": served.phones}))
            else:
                _say(served.page, served.phones)
            sys.stdout.flush()
            await stopping.wait()

    try:
        asyncio.run(run())
    except CannotServe as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    finally:
        if writer is not None:
            writer.close()


def _say(page: str, phones: tuple[dict[str, str], ...]) -> None:
    if page:
        click.echo(f"{'page':12} {page}")
    for number, addresses in enumerate(phones):
        if len(phones) > 1:
            click.echo(f"phone {number}")
        for protocol, address in addresses.items():
            click.echo(f"{protocol:12} {address}")
