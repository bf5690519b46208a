"""`tapforge view`, `show` and `ls`: runs on a page, as text, and in a list."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from .failing import Problem, Wrong, as_message
from .reading import LOCAL_PATH
from .waiting import saying

#: where runs are unless one is named
_RUNS = Path("runs")
#: endings of a file that an export writes as a page
_PAGES = ("", ".html", ".htm")


@click.command()
@click.argument("folders", metavar="[RUN]...", nargs=-1, type=LOCAL_PATH)
@click.option("--serve", is_flag=True, help="serve a page with everything that the runs recorded, until Ctrl-C")
@click.option("--host", default="127.0.0.1", show_default=True, help="with --serve: address; others need a token")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="with --serve; 0: a free one"
)
@click.option(
    "--token",
    envvar="TAPFORGE_VIEW_TOKEN",
    default="",
    help="with --serve: what a browser has to bring",
    show_envvar=True,
)
@click.option("--json", "as_json", is_flag=True, help="with --serve: say the address in one line of JSON")
@click.option(
    "--export",
    "target",
    metavar="FILE",
    type=LOCAL_PATH,
    help="write episodes of RUN as one page, or one of them as an animated picture (FILE.gif, FILE.webp), and end",
)
@click.option(
    "--where",
    metavar="WORDS",
    default="",
    help="with --export: which episodes, as the page's address has it, such as 'outcome=failure&sort=-advantage'",
)
@click.option(
    "--seconds-per-step", type=click.FloatRange(0.1, 60), help="of an animated picture  [default: 2]", metavar="SECONDS"
)
@click.option(
    "--font", type=LOCAL_PATH, metavar="FILE", help="of an animated picture: a .ttf, .otf or .ttc with your characters"
)
def view(
    folders: tuple[Path, ...],
    serve: bool,
    host: str,
    port: int,
    token: str,
    as_json: bool,
    target: Path | None,
    where: str,
    seconds_per_step: float | None,
    font: Path | None,
) -> None:
    """Look at runs: RUN is the folder of one, or, with --serve, of several (default: runs).

    Without --serve, write curve.png and replay.html of each RUN again, from its recording."""
    if target is not None or where or seconds_per_step is not None or font is not None:
        _export(folders, serve, target, where, seconds_per_step, font)
        return
    if serve:
        serve_page(folders or (_RUNS,), host, port, token, as_json)
        return
    if not folders:
        raise click.UsageError("name the folder of a run, such as runs/NAME, or add --serve")
    from ..run.report import write_report

    for folder in folders:
        with as_message(), saying(f"reading the recording in {folder}"):
            for path in write_report(folder):
                click.echo(path)


def _export(
    folders: tuple[Path, ...], serve: bool, target: Path | None, where: str, seconds: float | None, font: Path | None
) -> None:
    from ..dashboard.export import export, words_of
    from ..dashboard.query import BadQuery
    from ..dashboard.stored import NotThere
    from ..viewer.animation import FORMATS, SECONDS, Style
    from ..viewer.text_writer import FontUnreadable

    if target is None or serve or len(folders) != 1:
        raise click.UsageError("an export is of one run: tapforge view RUN --export FILE [--where WORDS]")
    # Python takes `.gif` alone for a name without an ending.
    ending = target.suffix.lower() or (target.name.lower() if target.name.startswith(".") else "")
    kind = FORMATS.get(ending)
    if kind is None and ending not in _PAGES:
        raise click.UsageError(
            f"--export {target}: {ending} is not an ending of what is written; name FILE.html for a page, or "
            "FILE.gif or FILE.webp for an animated picture"
        )
    if kind is None and (seconds is not None or font is not None):
        raise click.UsageError(f"--seconds-per-step and --font are of a .gif or .webp, and {target} will be a page")
    style = kind and Style(kind, seconds or SECONDS, font)
    try:
        with as_message(), saying(f"reading the recording in {folders[0]}"):
            found = export(folders[0], words_of(where), style)
            target.write_bytes(found.data)
    except (BadQuery, FontUnreadable, NotThere) as error:
        raise Wrong(str(error)) from error
    click.echo(f"{target}: {found.episodes} of {found.total} episodes")
    if found.lacks:
        click.echo(
            f"{len(found.lacks)} characters are missing in the font, such as {found.lacks[0]!r}: "
            "name a font that has them by --font",
            err=True,
        )


def serve_page(folders: tuple[Path, ...], host: str, port: int, token: str = "", as_json: bool = False) -> None:
    """Until Ctrl-C or SIGTERM."""
    from tapforge_envs.serving.http import stop_signal
    from tapforge_envs.serving.page_site import CannotListen

    from ..dashboard.serve import serving

    async def run() -> None:
        stopping = stop_signal()
        async with serving(folders, host, port, token) as address:
            click.echo(json.dumps({"page": address}) if as_json else f"runs are at {address}  (Ctrl-C ends it)")
            sys.stdout.flush()
            await stopping.wait()

    try:
        with as_message():
            asyncio.run(run())
    except CannotListen as error:
        raise Wrong(str(error)) from error


@click.command()
@click.argument("folder", metavar="RUN", type=LOCAL_PATH)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def show(folder: Path, output: str) -> None:
    """Say what a RUN came to so far: the first screen of `tapforge view --serve`, as text."""
    from ..dashboard.opened import OpenRun
    from ..dashboard.text import shown

    with as_message():
        data = OpenRun(folder).summary()
    click.echo(json.dumps(data, indent=1) if output == "json" else shown(data))


@click.command(name="ls")
@click.argument("folder", metavar="[RUNS]", type=LOCAL_PATH, default=_RUNS)
def list_runs(folder: Path) -> None:
    """List the runs in a folder, with what they came to."""
    from ..dashboard.opened import OpenRun
    from ..dashboard.text import listed
    from ..run.assembly import ConfigurationError
    from ..run.folder import SPEC

    found = []
    for spec in sorted(folder.glob(f"*/{SPEC}")):
        try:
            found.append({"name": spec.parent.name, **OpenRun(spec.parent).brief()})
        except ConfigurationError as error:
            click.echo(f"{error}", err=True)
    if not found:
        raise Problem(f"there is no run in {folder}; name the folder that holds them")
    click.echo(listed(found))
