"""The page in a real browser: a run watched while it goes on, an episode found and opened, two runs compared, a screen
of a phone read as it is."""

import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest_asyncio
from chromium import Tab, tab
from load.made_run import Shape, make_run, update_event

from tapforge_trainer.dashboard.serve import serving

SMALL = Shape(64, steps=3, screens=8, groups=2, prompt=8, answer=6, measured=24)
MAIN = "document.querySelector('#main')"


@pytest_asyncio.fixture
async def page(made: Path, tmp_path: Path) -> AsyncIterator[Tab]:
    """Of three runs: a big one, a small one, and one that has begun."""
    runs = tmp_path / "runs"
    make_run(runs / "small", SMALL, seed=3)
    make_run(runs / "phone", Shape(16, steps=2, screens=2, groups=2, width=1080, height=2400, measured=0))
    begun = make_run(runs / "begun", replace(SMALL, measured=0))
    events = (begun / "events.jsonl").read_text().splitlines(keepends=True)
    (begun / "events.jsonl").write_text("".join(events[:3]))
    shutil.copytree(made, runs / "made")
    async with serving([runs], "127.0.0.1", 0) as address, tab(address, tmp_path / "profile") as page:
        yield page


#: by what the tokens of an answer are coloured
COLOURS = "[...document.querySelectorAll('select')].find((one) => one.options[0].value === 'logprob')"
MODES = "logprob learner entropy gap version"


async def go(page: Tab, address: str, ready: str) -> None:
    await page.value(f"location.hash = {address!r}")
    await page.until(f"!{MAIN}.hasAttribute('aria-busy') && ({ready})")


async def shot(page: Tab, tmp_path: Path, name: str) -> None:
    await page.screenshot(Path(os.environ.get("TAPFORGE_SHOTS", tmp_path)) / f"{name}.png")


async def coloured(page: Tab, mode: str) -> str:
    """The colours of an answer's tokens."""
    await page.value(f"(() => {{ const s = {COLOURS}; s.value = '{mode}'; s.dispatchEvent(new Event('change')); }})()")
    each = "getComputedStyle(one).backgroundColor"
    return await page.value(f"[...document.querySelectorAll('.token')].map((one) => {each}).join()")


def text(selector: str) -> str:
    return f"(document.querySelector({json.dumps(selector)}) || {{}}).textContent"


async def test_the_page(page: Tab, tmp_path: Path):
    await page.until("document.querySelectorAll('tbody tr').length === 4")

    # A run is watched while it goes on.
    await go(page, "#/run/begun", f"{text('h1')} === 'begun'")
    assert "1 updates" in await page.value(text(".pill"))
    live = tmp_path / "runs" / "begun" / "events.jsonl"
    with live.open("a") as file:
        file.write(json.dumps(update_event(2, 0.625)) + "\n" + json.dumps(update_event(3, 0.75)) + "\n")
    await page.until(f"{text('.pill')}.includes('3 updates')")
    await page.until(f"{text('.cards')}.includes('mean of the last 3')")

    # An episode is found by filters and a search, and opened by its address.
    await go(page, "#/run/made", f"{text('.success')} && {text('.success')}.includes('80 %')")
    await page.until(f"!document.querySelector('progress') && {text('.cards')}.includes('before-sampled')")
    await shot(page, tmp_path, "overview")
    await go(page, "#/run/made/episodes", f"{text('.count')} === '5,080 episodes'")
    assert await page.value("document.querySelectorAll('a.row').length") < 100
    await page.value("document.querySelector('.body').scrollTop = 4000 * 34")
    await page.until(
        "[...document.querySelectorAll('a.row')].some((row) => row.closest('[role=row]').ariaRowIndex === '4001')"
    )
    await page.value(
        "(() => { const s = [...document.querySelectorAll('select')].find((one) =>"
        " one.options[1].value === 'success' || one.options[2].value === 'success'); s.value = 'failure';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    await page.until("location.hash.includes('outcome=failure')")
    await page.until(f"{text('.count')} && {text('.count')} !== '5,080 episodes'")
    failures = await page.value(text(".count"))
    await page.key("/")
    await page.until("document.activeElement.type === 'search'")
    await page.call("Input.insertText", text="dentist")
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
    # Keys are for the list that is shown: the one of the search, not the one before it.
    await page.until(f"location.hash.includes('q=dentist') && {text('.count')} !== {failures!r}")
    assert "outcome=failure" in await page.value("location.hash")
    await shot(page, tmp_path, "episodes")
    export = await page.value("document.querySelector('.filters a[download]').href")
    assert "/api/runs/made/export?" in export and "outcome=failure" in export and "q=dentist" in export
    row = await page.value("document.querySelector('a.row').getAttribute('href')")
    await page.key("j")
    await page.key("k")
    await page.key("Enter")
    await page.until("document.querySelector('.episode')")
    assert await page.value("location.hash") == row
    await page.until("[...document.images].every((one) => one.complete && one.naturalWidth)")
    await shot(page, tmp_path, "episode")
    await page.key("g")
    await page.until("document.querySelectorAll('.lane').length === 8")
    await shot(page, tmp_path, "group")
    await go(page, row, "document.querySelector('.steps a')")
    await page.click(".steps a")
    await page.until("document.querySelectorAll('.token').length === 8")
    assert "Step 0" in await page.value(text("h1"))
    await page.key("ArrowRight")
    await page.until(f"{text('h1')}.includes('Step 1')")
    assert "log-probability was" in await page.value(text(".learned"))
    assert await page.value(f"[...{COLOURS}.options].map((one) => one.value).join(' ').startsWith('{MODES}')")
    shown = {mode: await coloured(page, mode) for mode in MODES.split()}
    assert len(set(shown.values())) == 5, shown
    said = await page.value("document.querySelector('.token').title")
    for words in ("learner's log-probability", "engine \N{MINUS SIGN} learner", "entropy"):
        assert words in said
    await coloured(page, "entropy")
    await shot(page, tmp_path, "step")
    # The address alone leads there, in a browser that was nowhere before.
    address = await page.value("location.href")
    await page.call("Page.navigate", url="about:blank")
    await page.call("Page.navigate", url=address)
    await page.until(f"{text('h1')} && {text('h1')}.includes('Step 1')")

    await go(page, "#/run/made/step/evaluation%2Fbefore-sampled/before-sampled-000000.0.0/0", text(".learned"))
    assert "no update trains on a measurement" in await page.value(text(".learned"))
    assert await page.value(f"{COLOURS}.value") == "logprob", "there is no entropy here"

    # A screen of 1080x2400 is shown whole, and as large as it is.
    await go(page, "#/run/phone", "!document.querySelector('progress') && document.querySelector('.kinds')")
    await go(page, "#/run/phone/step/rollout/g1-000000.0.0/0", "document.querySelector('.large img')")
    await page.until("document.querySelector('.large img').naturalHeight === 2400")
    box = await page.value("document.querySelector('.large img').getBoundingClientRect().bottom")
    assert box <= 1000
    await page.value("(() => { const s = document.querySelector('.tools select'); s.value = '1';"
                     " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert await page.value("document.querySelector('.large img').getBoundingClientRect().height") == 2400
    await shot(page, tmp_path, "phone")

    # Two runs are compared.
    await go(page, "#/run/made/compare?b=small", f"{text('.choices')} !== undefined")
    kinds = await page.value(text(".choices"))
    assert "gained" in kinds and "lost" in kinds and "common tasks" in await page.value(text(".cards"))
    await page.until("document.querySelectorAll('.curve').length === 2")
    await shot(page, tmp_path, "compare")
    await go(
        page, "#/run/made/figures?with=small&f=learner%2Fentropy", "document.querySelectorAll('.curve').length === 2"
    )
    await shot(page, tmp_path, "figures")

    # Narrow, and dark.
    await page.call("Emulation.setDeviceMetricsOverride", width=900, height=800, deviceScaleFactor=1, mobile=False)
    await page.click("#theme")
    for address, name in (("#/run/made", "narrow"), (row, "narrow-episode"), (f"{row}/x", "narrow-other")):
        await go(page, address, f"{MAIN}.children.length")
        assert await page.value("document.documentElement.scrollWidth") <= 900, address
        await shot(page, tmp_path, name)
    assert await labels(page) == []
    assert await contrast(page) == []
    assert page.complaints == []


async def labels(page: Tab) -> list[str]:
    """Fields, buttons and pictures without a name."""
    await go(page, "#/run/made/episodes", "document.querySelector('a.row')")
    return await page.value(
        "[...document.querySelectorAll('input, select, button, img, a')].filter((one) =>"
        " !(one.getAttribute('aria-label') || one.title || one.alt !== undefined && one.hasAttribute('alt') ||"
        " one.closest('label') ||"
        " one.textContent.trim())).map((one) => one.outerHTML.slice(0, 200))"
    )


async def contrast(page: Tab) -> list[str]:
    """Colours of text whose contrast with card and ground is under 4.5:1, in both themes."""
    return await page.value("""(() => {
      const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = (rgb) => rgb.map((v) => linear(v / 255))
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
      const probe = document.body.appendChild(document.createElement('i')), wrong = [];
      const rgb = (name) => { probe.style.setProperty('color', `var(--${name})`);
        return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number); };
      for (const theme of ['light', 'dark']) {
        document.documentElement.dataset.theme = theme;
        const inks = ['ink', 'soft', 'accent', 'good', 'bad', 'warn'];
        for (const back of ['paper', 'ground', 'hover']) for (const ink of inks) {
          const [a, b] = [light(rgb(ink)), light(rgb(back))];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          if (ratio < 4.5) wrong.push(`${theme}: ${ink} on ${back} ${ratio.toFixed(2)}`);
        }
      }
      probe.remove();
      return wrong;
    })()""")
