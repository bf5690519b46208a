"""Tables of studies as pictures (SVG): of each arm the difference to the baseline with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from xml.sax.saxutils import escape

ROW, LEFT, PLOT, TOP, RIGHT = 20, 170, 360, 46, 110
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#333}.t{font-weight:bold}.d{fill:#666}"
    "line{stroke:#bbb}.z{stroke:#333}.b{stroke:#1f77b4;stroke-width:2}.n{stroke:#999;stroke-width:2}"
    "circle{fill:#1f77b4}.n,circle.n{fill:#999}"
)


def picture(title: str, arms: Mapping[str, Any], baseline: str, *, scale: float = 100.0, unit: str = "points") -> str:
    """Grey where the interval holds 0. `arms`: as `paired.table` makes them."""
    rows = {name: of[f"vs_{baseline}"] for name, of in arms.items() if f"vs_{baseline}" in of}
    rows = {name: of for name, of in rows.items() if of["ci95"] is not None}
    ordered = sorted(rows, key=lambda name: -rows[name]["mean"])
    ends = [0.0, *(of["mean"] + sign * of["ci95"] for of in rows.values() for sign in (-1, 1))]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return round(LEFT + PLOT * (value - low) / span, 1)

    height, width = TOP + ROW * len(ordered) + 24, LEFT + PLOT + RIGHT
    bottom = height - 24
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>',
        f'<text class="t" x="8" y="18">{escape(title)}</text>',
        f'<line class="z" x1="{x(0)}" x2="{x(0)}" y1="{TOP - 12}" y2="{bottom}"/>',
        f'<text class="d" x="{x(0)}" y="{bottom + 16}" text-anchor="middle">{escape(baseline)}</text>',
    ]
    for place, name in enumerate(ordered):
        of, y = rows[name], TOP + ROW * place
        begin, end = of["mean"] - of["ci95"], of["mean"] + of["ci95"]
        kind = "n" if begin <= 0 <= end else "b"
        mean = f"{scale * of['mean']:+.1f} ± {scale * of['ci95']:.1f}"
        made += [
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>',
            f'<line class="{kind}" x1="{x(begin)}" x2="{x(end)}" y1="{y}" y2="{y}"/>',
            f'<circle class="{kind}" cx="{x(of["mean"])}" cy="{y}" r="4"/>',
            f'<text class="d" x="{LEFT + PLOT + 10}" y="{y + 4}">{mean}</text>',
        ]
    made.append(f'<text class="d" x="{LEFT + PLOT + 10}" y="{TOP - 20}">{escape(unit)}</text></svg>')
    return "\n".join(made) + "\n"
