"""`make axe`: axe-core over every view of the page of runs and the page of phones, dark and light, in Chromium.

    python -m e2e.axe [AXE_MIN_JS]

Without a file, `npm pack` fetches axe-core of `VERSION` into a temporary folder; it is not part of the checkout, and
pages never load it. Prints each violation with its elements; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from tapforge_envs.phone.serve import Ports
from tapforge_envs.phone.serve import serving as serving_phones
from tapforge_trainer.dashboard.serve import serving

_ROOT: Final = Path(__file__).parents[1]
sys.path += [str(_ROOT / "tests" / "phone"), str(_ROOT / "bench")]

from chromium import Tab, tab  # noqa: E402
from load.made_run import Shape, make_run  # noqa: E402

VERSION: Final = "4.14.1"
_NPM_SECONDS: Final = 120
_READY: Final = (
    "!document.querySelector('#main[aria-busy], progress') && document.querySelector('#main').children.length"
)
#: by name: the address of a view of a run `made`, and what is there once it is drawn; "": where the last one leads
_VIEWS: Final = {
    "runs": ("#/", "tbody tr"),
    "overview": ("#/run/made", ".cards"),
    "figures": ("#/run/made/figures", "#main"),
    "episodes": ("#/run/made/episodes", "a.row"),
    "episode": ("", ".episode"),
    "group": ("", ".lane"),
    "step": ("", ".token"),
    "compare": ("#/run/made/compare?b=second", ".choices"),
}
_LEADS: Final = {
    "episode": "document.querySelector('a.row').getAttribute('href')",
    "group": "document.querySelector('.members a').getAttribute('href')",
    "step": "(window.an_episode || '').replace('/episode/', '/step/') + '/0'",
}
_RUN: Final = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((one) => ({
    id: one.id, impact: one.impact, help: one.help,
    nodes: one.nodes.map((node) => node.target.join(' ') + ': ' + (node.any[0] || node.all[0] || {}).message)})))"""


def script_of(place: Path) -> Path:
    subprocess.run(
        ["npm", "pack", "--silent", f"axe-core@{VERSION}"],
        cwd=place,
        check=True,
        timeout=_NPM_SECONDS,
        stdout=sys.stderr,
    )
    with tarfile.open(place / f"axe-core-{VERSION}.tgz") as packed:
        packed.extract("package/axe.min.js", place, filter="data")
    return place / "package" / "axe.min.js"


async def violations(page: Tab, script: str) -> list[dict[str, Any]]:
    await page.value(script + "; true")
    found: list[dict[str, Any]] = await page.value(_RUN)
    return found


def told(where: str, found: list[dict[str, Any]]) -> int:
    for one in found:
        print(f"{where}: {one['id']} ({one['impact']}): {one['help']}")
        for node in one["nodes"][:5]:
            print(f"    {node}")
    if not found:
        print(f"{where}: no violation")
    return len(found)


async def page_of_runs(place: Path, script: str, scheme: str) -> int:
    runs = place / f"runs-{scheme}"
    for seed, name in enumerate(("made", "second")):
        make_run(runs / name, Shape(64, steps=3, screens=8, groups=2, prompt=8, answer=6, measured=24), seed=seed)
    count = 0
    async with serving([runs], "127.0.0.1", 0) as url, tab(url, place / f"profile-{scheme}") as page:
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for name, (address, there) in _VIEWS.items():
            target = address or await page.value(_LEADS[name])
            if name == "episode":
                await page.value(f"window.an_episode = {target!r}")
            await page.value(f"location.hash = {target!r}")
            await page.until(f"{_READY} && document.querySelector({there!r})")
            await asyncio.sleep(0.5)  # curves are drawn when their boxes have a size
            count += told(f"{scheme} {name}", await violations(page, script))
    return count


async def page_of_phones(place: Path, script: str) -> int:
    ports = Ports(page=0, tapforge=None, mobileworld=None, adb=None)
    async with (
        serving_phones(1, 360, 800, ("standard", "quickstart"), ports) as served,
        tab(served.page, place / "profile-phones") as page,
    ):
        await page.until("document.querySelector('#screen').naturalWidth === 360")
        return told("phones", await violations(page, script))


async def checked(file: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="tapforge-axe-") as folder:
        place = Path(folder)
        os.environ["TAPFORGE_CACHE"] = f"{place}/cache"
        script = (file or script_of(place)).read_text()
        count = sum([await page_of_runs(place, script, scheme) for scheme in ("light", "dark")])
        return count + await page_of_phones(place, script)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path, nargs="?", metavar="AXE_MIN_JS", help="axe.min.js that is there already")
    count = asyncio.run(checked(parser.parse_args().script))
    print(f"axe: {count} violations" if count else "axe: no violation")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
