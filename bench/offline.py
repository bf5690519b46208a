"""What a run on a data set takes: its updates beside TRL's GRPOTrainer, and rows without end.

    python bench/offline.py [--only rows|trl] [--rows 100000] [--screens 2000] [--updates 3]

The same tiny model, recorded steps with screens of 1080x2400 (253 visual tokens), rewards and number of answers, in one
run: an update of ours, one of TRL's (its multimodal path, its default loss), and so on (`load/offline_step.py`). The
first two updates of each kind aren't counted. TRL has its default micro-batch, for each of which it loads the update's
rows anew (`trl`), and all rows at once, which is the least that it can do (`trl_at_once`).

    ratio                    samples per CPU second, ours over TRL's: loader, image processing, rewards and update, on
                             the same recorded answers, which replace TRL's generation; `ratio_wall` the same by time
    ratio_with_generation    the same with generation, TRL's by transformers and ours by vLLM's CPU build
    at_once                  the same ratios to `trl_at_once`

A data set of so many one-step episodes over so many distinct screens of 1080x2400 is made, and a process of its own
goes through all of it (`load/rows.py`):

    start     seconds from the folder to the first prompt, libraries loaded before
    growth    MiB of memory from a tenth of the rows to all of them, what is kept of screens being at its bounds
    resumed   whether a run that is resumed gets the very next step

Writes bench-results/offline.json; a part that isn't measured keeps its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from load.canned import HEIGHT, WIDTH, Screen, draw
from load.children import child
from load.machine import machine, show, write

from tapforge_envs.protocol import Tap, Task
from tapforge_trainer.data.episodes import Episode, Provenance, Step
from tapforge_trainer.data.folder import DataWriter, Rejected
from tapforge_trainer.data.sets import export
from tapforge_trainer.tiny.folder import write_model

#: screens that are drawn; the others differ from them in a row
_DRAWN = 20
#: of a screen as the model sees it, at most
PIXELS = 256 * 1024
#: updates of a kind that warm up
WARM = 2
#: what `load/offline_step.py` is asked for, and rows of a micro-batch where it has rows
CONTENDERS = {"ours": ("ours", 0), "trl": ("trl", 8), "trl_at_once": ("trl", 32)}


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


def beside_trl(updates: int) -> dict[str, Any]:
    """Contenders wait for their turns. Raises SystemExit where they did different work."""
    kinds = ("recorded", "generated")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TAPFORGE_WORK")) as place:
        folder = Path(place)
        rows = 4 * 2 * (updates + WARM)  # no screen is seen twice
        make(folder / "set", rows, rows)
        write_model(folder / "model", 0)
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            file = folder / "model" / name
            settings = json.loads(file.read_text())
            settings["size"]["longest_edge"] = PIXELS
            file.write_text(json.dumps(settings))
        export(folder / "set", folder / "rows.parquet")
        contenders: dict[str, subprocess.Popen[str]] = {}

        def next_line(name: str) -> dict[str, float]:
            line = contenders[name].stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"load.offline_step {name} ended with {contenders[name].wait(60)}")
            return dict(json.loads(line))

        try:
            for name, (contender, rows_at_once) in CONTENDERS.items():
                contenders[name] = child("load.offline_step", contender, str(folder), str(rows_at_once))
                next_line(name)
            for kind in kinds:
                for number in range(updates + WARM):
                    for name, process in contenders.items():
                        process.stdin.write(f"{kind}\n")  # type: ignore[union-attr]
                        process.stdin.flush()  # type: ignore[union-attr]
                        figures = next_line(name)
                        print(f"{kind} {number} {name}: {figures}", flush=True)
                        if number >= WARM:
                            found.setdefault(kind, {}).setdefault(name, []).append(figures)
            for process in contenders.values():
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                process.wait(120)
        finally:
            for process in contenders.values():
                process.kill()
    for together in zip(*found["recorded"].values(), strict=True):
        if len({(one["samples"], one["tokens"], one["reward"]) for one in together}) > 1:
            raise SystemExit(f"the contenders did different work: {together}")
    medians = {
        kind: {
            name: {
                figure: statistics.median(one[figure] for one in updates)
                for figure in ("seconds", "cpu_seconds", "samples", "tokens")
            }
            for name, updates in of.items()
        }
        for kind, of in found.items()
    }

    def ratios(other: str) -> dict[str, float]:
        return {
            f"ratio{of}{by}": round(medians[kind][other][figure] / medians[kind]["ours"][figure], 2)
            for kind, of in (("recorded", ""), ("generated", "_with_generation"))
            for figure, by in (("cpu_seconds", ""), ("seconds", "_wall"))
        }

    return {
        **ratios("trl"),
        "at_once": ratios("trl_at_once"),
        "trl_version": version("trl"),
        "updates": medians,
    }


def many_rows(rows: int, screens: int, every: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TAPFORGE_WORK")) as place:
        folder, model = Path(place, "set"), Path(place, "model")
        make(folder, rows, screens)
        write_model(model, 0)
        process = child("load.rows", str(folder), str(model), str(rows), str(every))
        said, _ = process.communicate(timeout=3600)
        if process.returncode:
            raise SystemExit(f"load.rows ended with {process.returncode}")
    return {"screens": screens, "every": every} | json.loads(said.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["rows", "trl"])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--screens", type=int, default=2_000)
    parser.add_argument("--every", type=int, default=100, help="of so many steps one prompt is made")
    parser.add_argument("--updates", type=int, default=3, help="of each kind and contender, without those that warm up")
    parser.add_argument("--out", type=Path, default=Path("bench-results/offline.json"))
    args = parser.parse_args()
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    figures |= {"machine": machine(), "width": WIDTH, "height": HEIGHT}
    if args.only != "rows":
        figures |= beside_trl(args.updates)
        write(args.out, figures)
        rows = [
            (kind, name, *(f"{one[figure]:,.2f}" for figure in ("seconds", "cpu_seconds", "samples", "tokens")))
            for kind, of in figures["updates"].items()
            for name, one in of.items()
        ]
        title = f"Ours over TRL {figures['trl_version']}: {figures['ratio']}, with generation "
        title += f"{figures['ratio_with_generation']}; to TRL with all rows at once {figures['at_once']['ratio']}, "
        title += f"{figures['at_once']['ratio_with_generation']} (CPU seconds of an update)"
        show(title, ("answers", "contender", "s", "CPU s", "samples", "tokens"), rows)
    if args.only != "trl":
        figures |= many_rows(args.rows, args.screens, args.every)
        write(args.out, figures)
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


if __name__ == "__main__":
    main()
