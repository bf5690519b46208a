"""The pages: links lead somewhere, the index has them all, the site of them is built, and sentences have a reader or a
thing for a subject."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tapforge_api import load

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "charts" / "tapforge" / "README.md"])
#: subjects and verbs of sentences that say less than they could
WORSE = re.compile(
    r"\b(somebody|anybody|nobody|whoever)\b|^Who |stands? in for|\b(is|are) told\b|\b(is|are) said to\b",
    re.IGNORECASE | re.MULTILINE,
)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).lower().strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        to = (page.parent / file).resolve() if file else page
        if "://" not in link and (not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to))):
            lost.append(link)
    assert not lost


def test_the_index_is_the_navigation_and_has_every_page_once() -> None:
    """docs/conf.py takes the first link of each row."""
    index = ROOT / "docs" / "README.md"
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)#]+\.md)\)", index.read_text(), re.MULTILINE)
    assert sorted(str((index.parent / row).resolve().relative_to(ROOT)) for row in rows) == sorted(
        str(page.relative_to(ROOT)) for page in PAGES if page != index
    )


def test_the_readme_has_the_means_of_the_quickstarts_table() -> None:
    table = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| \d \| ([\d.]+) % .*? \| ([\d.]+) % .*? \| (\d+) \|$", table, re.MULTILINE)
    assert len(rows) == 3
    before, after = (round(sum(float(row[column]) for row in rows) / 3) for column in (0, 1))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"200 held-out tasks goes from about {before} to {after} % over three seeds" in readme
    run = load(ROOT / "manifests" / "samples" / "quickstart.yaml", []).spec
    stop, page = run.stop, " ".join(table.split())
    assert f"{stop.max_updates} updates, or {stop.max_seconds:g} seconds" in page and run.evaluation.episodes == 200


@pytest.mark.long
def test_the_site_is_built_and_loads_nothing_from_elsewhere() -> None:
    """`make docs` ends with an error for a lost link, a lost anchor, and what a page would load from the network."""
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build" / "site"
    assert "url=README.html" in (site / "index.html").read_text()
    home = (site / "README.html").read_text()
    assert "docs/tutorial.html" in home and "_images/overview.png" in home
    assert "staleness" in (site / "searchindex.js").read_text().lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_subjects_are_readers_and_things(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = [match.group() for match in WORSE.finditer(re.sub(r"`[^`]*`", "", text))]
    assert not found, "write who or what does it: the reader, a component, a Pod"


def test_sources_name_who_does_it() -> None:
    """In messages, docstrings and comments."""
    vague = re.compile(r"\b(somebody|anybody|nobody|whoever)\b", re.IGNORECASE)
    files = [
        one
        for folder in ("crds", "operator", "trainer", "e2e", "bench", "release")
        for one in ROOT.glob(f"{folder}/**/*.py")
    ]
    found = [
        f"{one}:{n}" for one in files for n, line in enumerate(one.read_text().splitlines(), 1) if vague.search(line)
    ]
    assert files and not found, "name the client, the process, the holder or the person"
