"""The operator, on a machine that sleeps when it is told to: to elections it is later then, and nothing else went on.

    python sleeping_operator.py FILE [what tapforge-operator takes]

FILE holds the seconds that were slept. So a leadership may be long, for machines that stall, and end soon in a test.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from tapforge_operator import main
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.election import Election, Timing, since_boot

#: between two looks at the Lease, seconds: who slept notices it soon
_LOOK: Final = 0.5


def begin(file: Path) -> None:
    def clock() -> float:
        return since_boot() + float(file.read_text())

    def election(client: Client, namespace: str, name: str, identity: str, timing: Timing, *, address: str) -> Election:
        return Election(client, namespace, name, identity, replace(timing, every_seconds=_LOOK), clock, address)

    main.Election = election  # type: ignore[assignment,misc]
    main.main()


if __name__ == "__main__":
    begin(Path(sys.argv.pop(1)))
