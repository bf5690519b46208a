"""`make docs`: the site of these pages, by Sphinx (requirements/docs.txt). Pages are read as they are.

- The tables of docs/README.md are the navigation: their headings are its groups, the first link of a row is a page.
- A lost link, a lost anchor, or a page that the navigation lacks ends the build.
- Nothing that the site's pages load, be it script, font, style or picture, comes from elsewhere: `_local` ends the
  build otherwise. Search runs in the browser, from an index that is a file of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT: Final = Path(__file__).parents[1]
INDEX: Final = ROOT / "docs" / "README.md"

project = "tapforge"
language = "en"
version = release = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "charts/tapforge/README.md"]
# Folders that hold no pages are not walked: .venv has a hundred thousand files.
exclude_patterns = [one.name for one in ROOT.iterdir() if one.is_dir() and one.name not in ("docs", "charts")]
myst_heading_anchors = 6
# A fence with an ellipsis in it is shown plain.
suppress_warnings = ["misc.highlighting_failure"]
smartquotes = False  # --set is two dashes

html_theme = "furo"
html_title = f"tapforge {release}"
html_copy_source = False
html_show_copyright = False
html_last_updated_fmt = None

_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\)", re.MULTILINE)


def navigation(index: str) -> dict[str, list[tuple[str, str]]]:
    """Group -> (title, page as a path from the checkout), as docs/README.md has them."""
    _, *sections = re.split(r"^## ", index, flags=re.MULTILINE)
    return {
        section.splitlines()[0]: [
            (title, str((INDEX.parent / page).resolve().relative_to(ROOT))) for title, page in _ROW.findall(section)
        ]
        for section in sections
    }


def _with_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    if name != root_doc:
        return
    groups = {"Documentation": [("All pages", "docs/README.md")], **navigation(INDEX.read_text())}
    for group, pages in groups.items():
        listed = [f"{title} <{page.removesuffix('.md')}>" for title, page in pages if page != "README.md"]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {group}", "", *listed, "```", ""])


#: what a browser loads by itself
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|prefetch|preconnect))[^>]*href=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+|@import\s+["'](?:https?:)?//[^"']+""",
    re.IGNORECASE,
)


def _local(app: Sphinx, failed: Exception | None) -> None:
    if failed is not None:
        return
    files = [one for kind in ("html", "css", "svg") for one in Path(app.outdir).rglob(f"*.{kind}")]
    if found := [f"{file}: {one.group()}" for file in files for one in _LOADED.finditer(file.read_text())]:
        raise SphinxError("the site loads from elsewhere:\n" + "\n".join(found))
    home = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={root_doc}.html">'
    Path(app.outdir, "index.html").write_text(f'{home}<a href="{root_doc}.html">tapforge</a>\n')


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _with_navigation)
    app.connect("build-finished", _local)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
