"""`python -m tapforge_api`: the CRDs as YAML on standard output; `--write FOLDER`: one file per kind; `--reference
FOLDER`: a page per kind."""

from __future__ import annotations

import argparse
from pathlib import Path

from .crd import crd
from .document import to_yaml
from .loading import KINDS
from .reference import page


def text_of(kind: str) -> str:
    header = "# Generated from the models by `python -m tapforge_api --write crds`; not edited by hand."
    return f"{header}\n{to_yaml(crd(kind))}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tapforge_api", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write KIND.yaml files there instead of printing")
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="write KIND.md files there: every field")
    args = parser.parse_args()
    if args.reference is not None:
        for kind in KINDS:
            (args.reference / f"{kind.lower()}.md").write_text(page(kind), encoding="utf-8")
        return
    folder: Path | None = args.write
    for kind in KINDS:
        if folder is None:
            print(f"---\n{text_of(kind)}", end="")
        else:
            (folder / f"{kind.lower()}s.yaml").write_text(text_of(kind), encoding="utf-8")


if __name__ == "__main__":
    main()
