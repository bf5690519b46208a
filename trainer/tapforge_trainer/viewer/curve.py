"""The learning curve as a PNG: success above, what the updates were made of below.

Promises: points are drawn where they were measured and gaps stay gaps (None is never drawn as 0); the smooth line is a
trailing mean, never of later points; an evaluation has its 95 % interval. Draws without a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: updates in the trailing mean
WINDOW = 5
_INK, _SOFT, _RULE = "#1c2330", "#68707f", "#dde1e8"
_TRAIN, _STEP, _EPISODE, _VALID, _ALONE = "#3a5bd9", "#c2313d", "#8d97a8", "#12805c", "#c98a00"
_MODES = {"sampled": "#3a5bd9", "greedy": "#12805c"}


@dataclass(frozen=True, slots=True)
class UpdatePoint:
    """One update's figures; None where there was nothing to measure."""

    update: int
    #: in the groups that the update learned from
    success_rate: float | None
    valid_action_ratio: float | None
    singleton_step_share: float | None
    step_advantage_spread: float | None
    episode_advantage_spread: float | None
    #: over all attempts, those in groups that the update did not learn from included; older recordings lack it
    success_rate_all: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Success on held-out tasks after `update` updates. `mode` is sampled, greedy or another name."""

    update: int
    mode: str
    rate: float
    interval: Interval | None


def percent(rate: float) -> str:
    """With one digit where it says something; only all is 100 %, and only nothing 0 %."""
    text = f"{100 * rate:.1f}"
    if rate < 1 and text == "100.0":
        text = "99.9"
    if rate > 0 and text == "0.0":
        text = "0.1"
    return f"{text.removesuffix('.0')} %"


def draw_curve(
    path: Path,
    *,
    title: str,
    updates: Sequence[UpdatePoint],
    evaluations: Sequence[EvaluationPoint] = (),
    baselines: Mapping[str, float] | None = None,
) -> None:
    """`baselines`: success rates of policies that learn nothing, by name."""
    # Not at module level: matplotlib takes most of a second. Not pyplot: it keeps figures in a global table.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(9.6, 7.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    success, shares, spread = figure.subplots(3, 1, sharex=True, height_ratios=[3.2, 1.15, 1.15])
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)

    x = [point.update for point in updates]
    every, learned = [p.success_rate_all for p in updates], [p.success_rate for p in updates]
    _series(success, x, every, "practice, all attempts", _TRAIN)
    if every != learned:
        _series(success, x, learned, "practice, groups learned from", _EPISODE)
    # Baselines that coincide share one line and one label: two texts on the same spot can't be read.
    names: dict[float, list[str]] = {}
    for name, rate in (baselines or {}).items():
        names.setdefault(round(rate, 3), []).append(name)
    for rate, together in names.items():
        success.axhline(rate, color=_SOFT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        success.annotate(
            f"{', '.join(together)} {percent(rate)}",
            (0.995, rate),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_SOFT,
        )
    for number, mode in enumerate(dict.fromkeys(point.mode for point in evaluations)):
        _evaluations(success, evaluations, mode, number)
    success.set_ylim(-0.03, 1.12)
    # Set by hand: points that are moved beside each other do not count for matplotlib's own limits.
    places = [*x, *(point.update for point in evaluations)] or [0]
    margin = 0.05 * max(max(places) - min(places), 1)
    success.set_xlim(min(places) - margin, max(places) + margin)
    success.set_ylabel("success")

    _series(shares, x, [point.valid_action_ratio for point in updates], "answers understood", _VALID)
    _series(shares, x, [point.singleton_step_share for point in updates], "steps alone in their state", _ALONE)
    shares.set_ylim(-0.05, 1.08)
    shares.set_ylabel("share of steps")

    _series(spread, x, [point.step_advantage_spread for point in updates], "step advantage", _STEP)
    _series(spread, x, [point.episode_advantage_spread for point in updates], "episode advantage", _EPISODE)
    spread.set_ylim(bottom=0)
    spread.set_ylabel("spread (std)")
    spread.set_xlabel("update", color=_SOFT)
    spread.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))

    for axes in (success, shares):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (success, shares, spread):
        axes.grid(axis="y", color=_RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_RULE)
        axes.tick_params(colors=_SOFT, length=0, labelsize=9)
        axes.yaxis.label.set_color(_SOFT)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                frameon=False,
                fontsize=9,
                labelcolor=_INK,
                loc="lower left",
                bbox_to_anchor=(0, 1.0),
                ncols=4,
                borderaxespad=0.1,
                handlelength=1.4,
                columnspacing=1.6,
            )
    figure.align_ylabels()
    figure.savefig(path, format="png", metadata={"Software": None})


def trailing_mean(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """Mean of the last `window` values up to each one, without the missing; None where that one is missing itself."""
    means: list[float | None] = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i + 1 - window) : i + 1] if v is not None]
        means.append(sum(known) / len(known) if value is not None else None)
    return means


def _series(axes: Axes, x: Sequence[int], values: Sequence[float | None], label: str, color: str) -> None:
    if all(value is None for value in values):
        return

    def drawn(series: Sequence[float | None]) -> list[float]:
        return [float("nan") if value is None else value for value in series]

    axes.plot(x, drawn(values), "o", color=color, alpha=0.32, markersize=3.2, markeredgewidth=0, zorder=2)
    axes.plot(x, drawn(trailing_mean(values)), color=color, linewidth=2, label=label, zorder=3, solid_capstyle="round")


def _evaluations(axes: Axes, evaluations: Sequence[EvaluationPoint], mode: str, number: int) -> None:
    from matplotlib.transforms import ScaledTranslation

    points = sorted((point for point in evaluations if point.mode == mode), key=lambda point: point.update)
    color = _MODES.get(mode, _SOFT)
    figure = axes.get_figure()
    assert figure is not None
    # Modes measured at the same update stand side by side, by points of the page: updates keep their places.
    beside = axes.transData + ScaledTranslation((number - 0.5) * 9 / 72, 0, figure.dpi_scale_trans)
    down = [max(0.0, point.rate - point.interval.low) if point.interval else 0.0 for point in points]
    up = [max(0.0, point.interval.high - point.rate) if point.interval else 0.0 for point in points]
    axes.errorbar(
        [point.update for point in points],
        [point.rate for point in points],
        yerr=[down, up],
        fmt="D" if number % 2 else "s",
        color=color,
        markersize=6.5,
        markeredgecolor="white",
        markeredgewidth=1.2,
        elinewidth=1.6,
        capsize=3,
        label=f"held out, {mode.replace('_', ' ')} (95 %)",
        zorder=5,
        transform=beside,
    )
    for place in sorted({0, len(points) - 1}):
        point = points[place]
        # The best of an update has its figure above the interval, the others below: they never meet.
        others = [p.rate for p in evaluations if p.update == point.update and p.mode != mode]
        above = point.rate > max(others, default=-1.0) or (number == 0 and point.rate == max(others, default=-1.0))
        axes.annotate(
            percent(point.rate),
            (point.update, point.rate + up[place] if above else point.rate - down[place]),
            xycoords=beside,
            xytext=(0, 5 if above else -5),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            fontweight="bold",
            color=color,
            zorder=6,
        )
