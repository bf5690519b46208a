"""`make pictures`: the pictures of README and docs, made anew from a run: the page of runs, the phone page, the replay.

    python -m e2e.pictures [RUN]

RUN is a finished run of the quickstart; `make demo` makes one in four minutes. Writes docs/pictures/*.png, each under
300 KB.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from PIL import Image

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.serve import Ports
from tapforge_envs.phone.serve import serving as serving_phones
from tapforge_envs.protocol import Terminate
from tapforge_trainer.dashboard.serve import serving
from tapforge_trainer.run.people import PeopleFolder
from tapforge_trainer.run.report import write_report

_ROOT: Final = Path(__file__).parents[1]
sys.path.append(str(_ROOT / "tests" / "phone"))

from chromium import Tab, tab  # noqa: E402

_TARGET: Final = _ROOT / "docs" / "pictures"
#: bytes of a picture at most
_MOST: Final = 300_000
_WIDTH, _HEIGHT = 1280, 900
_QUIET: Final = (
    "!document.querySelector('#main[aria-busy], progress') && document.querySelector('#main').children.length > 0"
    " && [...document.images].every((one) => one.complete || one.getBoundingClientRect().top > innerHeight"
    " || one.getBoundingClientRect().left > innerWidth)"
)


async def keep(page: Tab, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.png"
        await page.screenshot(raw)
        image = Image.open(raw).convert("RGB")
    data = _png(image)
    if len(data) > _MOST:
        data = _png(image.quantize(256))
    if len(data) > _MOST:
        raise SystemExit(f"{name}.png has {len(data)} bytes; pictures of docs have {_MOST} at most: show less on it")
    (_TARGET / f"{name}.png").write_bytes(data)
    print(f"docs/pictures/{name}.png  {len(data):,} bytes", flush=True)


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


async def open_at(page: Tab, address: str, ready: str = _QUIET) -> None:
    await page.value(f"location.hash = {address!r}")
    await page.until(ready)
    await asyncio.sleep(0.5)  # curves are drawn when their boxes have a size
    await page.until(_QUIET)


async def page_of_runs(folder: Path, profile: Path) -> None:
    run = f"#/run/{folder.name}"
    async with serving([folder], "127.0.0.1", 0) as url, tab(url, profile, _WIDTH, _HEIGHT) as page:
        await open_at(page, run, "document.querySelector('.kinds') && !document.querySelector('progress')")
        await asyncio.sleep(15)  # advantages
        await keep(page, "overview")
        await open_at(page, f"{run}/figures")
        await keep(page, "figures")
        await open_at(page, f"{run}/episodes?template=two_panels&recording=rollout&sort=-advantage")
        await keep(page, "episodes")
        first = await page.value("document.querySelector('a.row').getAttribute('href')")
        await open_at(page, first.replace("/episode/", "/step/") + "/4", "document.querySelector('.token')")
        await keep(page, "step")
        await open_at(page, first, "document.querySelector('.members a')")
        group = await page.value("document.querySelector('.members a').getAttribute('href')")
        await open_at(page, group, "document.querySelector('.lane')")
        await keep(page, "group")
        await open_at(page, f"{run}/compare?kind=gained", "document.querySelector('.choices')")
        await keep(page, "compare")


async def phone_page(_: Path, profile: Path) -> None:
    ports = Ports(page=0, tapforge=None, mobileworld=None, adb=None)
    async with (
        serving_phones(1, 1080, 2400, ("standard", "quickstart"), ports) as served,
        tab(served.page, profile, _WIDTH, _HEIGHT) as page,
    ):
        await page.until("document.querySelector('#screen').naturalWidth === 1080")
        await page.click("#start")
        await page.until("state && state.task !== null")
        await keep(page, "phone")


async def record_page(_: Path, profile: Path) -> None:
    """A task that was played, before the person keeps it."""
    ports = Ports(page=0, tapforge=None, mobileworld=None, adb=None)
    writer = PeopleFolder(Path("people"), "tapforge", ["http://127.0.0.1:8000/slot/0"])
    task = catalog.tasks("standard", "train", ["turn_switch"]).sample(0, 0)
    phone = catalog.phone_for(task.suite, 1080, 2400)
    phone.begin(task.seed, catalog.rules_of(task))
    async with (
        serving_phones(1, 1080, 2400, ("standard", "quickstart"), ports, writer=writer) as served,
        tab(served.page, profile, _WIDTH, _HEIGHT) as page,
    ):
        await page.until("state && document.querySelector('#template').options.length")
        await page.value("document.querySelector('#template').value = 'turn_switch'")
        await page.click("#start")
        await page.until("state.task !== null")
        for action in demonstration(phone, catalog.template_of(task), task.params):
            phone.act(action)
            if isinstance(action, Terminate):
                await page.click("#done")
            else:
                await page.value(f"act({action.model_dump_json()}).then(() => 0)")
        await page.until("state.verdict && document.querySelector('#screen').complete")
        await keep(page, "record")
    writer.close()


async def replay(folder: Path, profile: Path) -> None:
    write_report(folder)
    async with tab((folder / "replay.html").as_uri(), profile, _WIDTH, _HEIGHT) as page:
        await asyncio.sleep(1)
        await keep(page, "replay")


async def made(run: Path) -> None:
    steps: tuple[Callable[[Path, Path], Awaitable[None]], ...] = (
        page_of_runs,
        phone_page,
        record_page,
        replay,
    )
    with tempfile.TemporaryDirectory(prefix="tapforge-pictures-") as place:
        os.environ["TAPFORGE_CACHE"] = f"{place}/cache"
        folder = Path("runs") / run.name
        shutil.copytree(run, Path(place) / folder, ignore=shutil.ignore_patterns("checkpoints"))
        os.chdir(place)  # a picture shows a folder that readers know
        for number, step in enumerate(steps):
            await step(Path(place) / folder if step is replay else folder, Path(place) / f"profile-{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/quickstart"))
    run = parser.parse_args().run.absolute()
    if not (run / "summary.json").is_file():
        raise SystemExit(f"{run} is not a finished run: `make demo` makes one, or name one with ARGS=RUN")
    _TARGET.mkdir(exist_ok=True)
    asyncio.run(made(run))


if __name__ == "__main__":
    main()
