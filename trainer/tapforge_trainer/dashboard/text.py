"""The first screen of a run, and the list of runs, as text for a terminal, a log or a chat. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..viewer.curve import percent


def shown(data: Mapping[str, Any]) -> str:
    """`data`: as `overview.overview` makes it."""
    lines = [f"{data['run']}: {_state(data)}", ""]
    lines += [f"held-out success, {_plain(mode['mode'])}: {_change(mode)}" for mode in data["success"]]
    lines += [f"baseline, {_plain(one['policy'])}: {_rate(one)}" for one in data["baselines"]]
    if data["templates"]:
        rows = [("template", "before", "after", "practice")]
        rows += [(one["template"], *(_share(value) for value in _of_template(one))) for one in data["templates"]]
        lines += ["", *_table(rows)]
    if parts := data["time"]["parts"]:
        lines += ["", f"time of an update, mean of the last {data['time']['recent']}:"]
        lines += [f"  {one['words']}: {one['seconds']:.2f} s" for one in parts]
    if (busy := data["time"]["phones_busy"]) is not None:
        lines.append(f"  phones are busy {percent(busy)} of the time")
    if phones := data["phones"]:
        states = ", ".join(f"{count} {state}" for state, count in phones["states"].items() if count)
        lines += ["", f"{phones['count']} phones: {states}; {len(phones['troubled'])} had failures or dirty ends"]
    lines += [f"alarm: {alarm['name']}" for alarm in data["alarms"]]
    lines += [f"note after update {note['update']}: {note['text']}" for note in data["notes"][-5:]]
    lines += ["", *_table([(f"{name}:", value) for name, value in data["facts"].items()])]
    return "\n".join(lines)


def listed(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run, as `OpenRun.brief` makes it."""
    rows = [("RUN", "STATE", "UPDATE", "BEFORE", "AFTER", "PRACTICE", "SEED", "LAST EVENT")]
    for run in runs:
        mode: Mapping[str, Any] = next((one for one in run["success"] if one["after"]), next(iter(run["success"]), {}))
        at = f"{run['update']}/{run['max_updates']}" if run["max_updates"] else str(run["update"])
        rates = (_success(mode.get("before")), _success(mode.get("after")), _share(run["recent"]))
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["last"])) if run["last"] else "-"
        rows.append((run["name"], run["state"], at, *rates, run["facts"].get("seed", "-"), last))
    return "\n".join(_table(rows))


def _state(data: Mapping[str, Any]) -> str:
    at = f" of {data['max_updates']}" if data["state"] == "running" and data["max_updates"] else ""
    phase = f", {data['phase']}" if data["phase"] else ""
    return f"{data['state']}, {data['update']}{at} updates{phase}"


def _change(mode: Mapping[str, Any]) -> str:
    before, after = mode["before"], mode["after"]
    return " -> ".join(_rate(one) for one in (before, after) if one is not None)


def _rate(one: Mapping[str, Any]) -> str:
    if one["low"] is None:
        return _success(one)
    return f"{_success(one)} ({percent(one['low'])} to {percent(one['high'])})"


def _success(one: Mapping[str, Any] | None) -> str:
    return _share(None if one is None else one["success"])


def _share(rate: float | None) -> str:
    return "-" if rate is None else percent(rate)


def _of_template(one: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    return one["before"], one["after"], (one["practised"] or {}).get("success")


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
