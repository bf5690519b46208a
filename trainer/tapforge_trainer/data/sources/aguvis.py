"""AITW as Aguvis has it (huggingface.co/datasets/xlangai/aguvis-stage2, aitw-l1.json): what R1-V-GUI-Agent learns from.

A JSON list of {image: file name, conversations: [{from, value}, ...]}, a step each. The person's turn holds the
instruction and, in words, what was done before; a turn of the model that is code, such as
`mobile.swipe(from_coord=[0.5, 0.8], to_coord=[0.5, 0.2])`, is the action. Coordinates are fractions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ...agents.aguvis import parse
from ...agents.parsing import ParseFailure
from ..convert import Bad, Row, RowStep
from ..episodes import DataError
from ..images import image_at, plane_of
from ..rows import convention, json_rows

_INSTRUCTION: Final = re.compile(r"Instruction:\s*(.+?)(?:\n\s*\n|\n\s*Previous actions:|$)", re.DOTALL)
_BEFORE: Final = re.compile(r"Previous actions:\s*\n(.*?)(?:\n\s*\n|$)", re.DOTALL)
_STEP: Final = re.compile(r"^\s*Step\s+\d+:\s*", re.IGNORECASE)
_NOTHING: Final = {"", "none"}


def aguvis(path: Path, /, *, images: str = "", coordinates: str = "fraction") -> Iterator[Row | Bad]:
    """`path`: the JSON file. `images`: the folder of its images; default: the file's own."""
    folder, how = Path(images) if images else path.parent, convention(coordinates)
    for name, value in json_rows(path):
        if isinstance(value, DataError):
            yield Bad(name, "row", str(value)[:200])
            continue
        try:
            yield _row(name, value, folder, how)
        except DataError as error:
            yield Bad(name, "image", str(error))


def _row(name: str, value: Any, folder: Path, how: Any) -> Row | Bad:
    turns = value.get("conversations") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return Bad(name, "row", "no list of conversations")
    file = value.get("image")
    if not isinstance(file, str) or not file:
        return Bad(name, "image", "the row names no image")
    asked = next((str(turn.get("value", "")) for turn in turns if turn.get("from") == "human"), "")
    goal = _INSTRUCTION.search(asked)
    if goal is None:
        return Bad(name, "row", f"no instruction in {asked[:80]!r}")
    said = [str(turn.get("value", "")) for turn in turns if turn.get("from") == "gpt"]
    if not said:
        return Bad(name, "row", "the model says nothing")
    image = image_at(folder, file)
    action = parse(said[-1].strip(), plane_of(image, how))
    if isinstance(action, ParseFailure):
        outside = _numbers(said[-1]) if action.kind == "action" else ()
        return Bad(name, "action", f"{said[-1][:80]!r}: {action}", outside)
    before = _BEFORE.search(asked)
    words = [_STEP.sub("", line).strip() for line in (before[1].splitlines() if before else [])]
    step = RowStep(image, action, answer="\n".join(said) if len(said) > 1 else None)
    return Row(name, goal[1].strip(), [step], before=[word for word in words if word.lower() not in _NOTHING])


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)][:4]
