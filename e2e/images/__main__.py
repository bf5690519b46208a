"""`python -m e2e.images [TARGET...] [NAME=value...]`: builds and says where the images are."""

from __future__ import annotations

import sys

from ..cluster.node.prerequisites import CannotRun
from .build import IMAGES, ensure


def main(words: list[str]) -> int:
    arguments = [word for word in words if "=" in word]
    targets = [word for word in words if "=" not in word]
    if wrong := sorted(set(targets) - set(IMAGES)):
        print(f"images: no target is called {' or '.join(wrong)}; there are {', '.join(IMAGES)}", file=sys.stderr)
        return 2
    try:
        print(ensure(*targets, arguments=arguments))
    except CannotRun as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
