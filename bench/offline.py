"""What a run on a large data set takes before and while its steps are read.

    python bench/offline.py [--rows 100000] [--screens 2000]

A data set of so many one-step episodes over so many distinct screens of 1080x2400 is made, and a process of its own
goes through all of it (`load/rows.py`):

    start     seconds from the folder to the first prompt, libraries loaded before
    growth    MiB of memory from a tenth of the rows to all of them, what is kept of screens being at its bounds
    resumed   whether a run that is resumed gets the very next step

Writes bench-results/offline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

from load.canned import HEIGHT, WIDTH, Screen, draw
from load.children import child
from load.machine import machine, show, write

from tapforge_envs.protocol import Tap, Task
from tapforge_trainer.data.episodes import Episode, Provenance, Step
from tapforge_trainer.data.folder import DataWriter, Rejected
from tapforge_trainer.tiny.folder import write_model

#: screens that are drawn; the others differ from them in a row
_DRAWN = 20


def make(folder: Path, rows: int, screens: int) -> None:
    rng = random.Random(0)
    drawn = [Screen(png) for png in draw(_DRAWN)]
    with DataWriter(folder) as writer:
        names = [writer.screen(drawn[number % _DRAWN].frame(rng).data) for number in range(screens)]
        for number in range(rows):
            task = Task(suite="bench", template="tap", params={"goal": str(number)}, goal=f"Tap the thing {number}")
            step = Step(screen=names[number % screens], action=Tap(x=rng.random(), y=rng.random()))
            about = Provenance(source="bench", row=str(number))
            writer.episode(Episode(id=f"bench-{number:07d}", task=task, steps=(step,), provenance=about))
        writer.finish({}, Rejected())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--screens", type=int, default=2_000)
    parser.add_argument("--every", type=int, default=100, help="of so many steps one prompt is made")
    parser.add_argument("--out", type=Path, default=Path("bench-results/offline.json"))
    args = parser.parse_args()
    figures = {"machine": machine(), "width": WIDTH, "height": HEIGHT, "screens": args.screens, "every": args.every}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TAPFORGE_WORK")) as place:
        folder, model = Path(place, "set"), Path(place, "model")
        make(folder, args.rows, args.screens)
        write_model(model, 0)
        process = child("load.rows", str(folder), str(model), str(args.rows), str(args.every))
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"load.rows ended with {process.returncode}")
    figures |= json.loads(said.splitlines()[-1])
    row = (
        f"{figures['rows']:,}",
        f"{figures['rows_start_s']:.2f}",
        f"{figures['rows_growth_mib']:.1f}",
        f"{figures['rows_per_s']:,.0f}",
        figures["resumed_to_the_sample"],
        f"{figures['imitation_start_s']:.2f}",
    )
    columns = ("rows", "start s", "growth MiB", "rows/s", "resumed", "start of imitation s")
    show(f"{args.screens:,} screens of {WIDTH}x{HEIGHT}", columns, [row])
    write(args.out, figures)


if __name__ == "__main__":
    main()
