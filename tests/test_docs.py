"""The pages: links lead somewhere, the index has them all, and sentences have a reader or a thing for a subject."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md") if page.name != "README.md"]
    assert not [str(page) for page in pages if f"({page})" not in index and f"({page}#" not in index]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_subjects_are_readers_and_things(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = [match.group() for match in WORSE.finditer(re.sub(r"`[^`]*`", "", text))]
    assert not found, "write who or what does it: the reader, a component, a Pod"
