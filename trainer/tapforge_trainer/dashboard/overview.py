"""The first screen of a run: what happened, in one look. Made of `spec.yaml`, events, phones and counts. Pure, but for
files of the run's folder that are read.

Rates are shares from 0 to 1, with their 95 % intervals as the run recorded them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun

from ..run.fleet import EVERY, MISSED, FleetError, read_fleet
from ..run.folder import LOCK, SUMMARY
from ..run.plan_algorithm import algorithm_line
from .figures import RunEvents

#: updates over which times are averaged
_RECENT: Final = 20
#: parts of an update's time, in the order of the page, with what waits meanwhile
PHASES: Final = {
    "rollout_wait": "the learner waits for phones",
    "learn": "learner: batch and update",
    "sync": "engines wait for new weights",
    "checkpoint": "the learner waits for a checkpoint",
}
_TROUBLED: Final = ("quarantined", "sick", "probation")
_SHOWN_PHONES: Final = 200


def overview(folder: Path, run: TrainingRun, events: RunEvents, counts: Mapping[str, Any]) -> dict[str, Any]:
    """`counts`: what the index has of episodes."""
    summary = read_summary(folder)
    state = state_of(folder, summary, events)
    return {
        "run": run.metadata.name,
        "folder": str(folder),
        "state": state,
        "phase": events.phase if state == "running" else "",
        "update": events.update,
        "max_updates": run.spec.stop.max_updates,
        "began": events.began,
        "last": events.last,
        "facts": _facts(run, summary, events),
        "success": _success(events),
        "baselines": [_measured(event) for event in events.baselines.values()],
        "templates": _templates(events, summary),
        "time": _time(events, summary),
        "phones": _phones(folder),
        "alarms": [{"name": name} for name in _alarms(events.last_update.get("alarms"))],
        "notes": [{"at": n.get("at"), "update": n["after"], "text": str(n.get("text", ""))} for n in events.notes][
            -100:
        ],
        "episodes": dict(counts),
    }


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def state_of(folder: Path, summary: Mapping[str, Any], events: RunEvents) -> str:
    """running, finished, or stopped: by what this machine's processes or the phones' file say."""
    if is_live(folder):
        return "running"
    if summary.get("updates") is not None and summary["updates"] >= events.update:
        return "finished"
    return "stopped" if events.last is not None else "new"


def is_live(folder: Path) -> bool:
    try:
        process = (folder / LOCK).read_text().strip()
        if process.isdecimal() and b"tapforge" in Path(f"/proc/{process}/cmdline").read_bytes():
            return True
    except OSError:
        pass  # another machine's, or ended
    try:
        return time.time() - read_fleet(folder).at < MISSED * EVERY
    except FleetError:
        return False


def _facts(run: TrainingRun, summary: Mapping[str, Any], events: RunEvents) -> dict[str, str]:
    spec = run.spec
    machine, software = summary.get("machine") or {}, events.software
    source = {
        name: value for name, value in spec.model.source.model_dump(exclude_none=True).items() if value is not None
    }
    kind, options = next(iter(source.items()), ("", {}))
    place = options.get("repo") or options.get("folder") or options.get("uri") if isinstance(options, dict) else None
    environment = next(iter(spec.environment.source.model_dump(exclude_none=True)), "")
    found = {
        "model": f"{kind.replace('_', ' ')}: {place}" if place else f"the {kind} model" if kind == "tiny" else kind,
        "adapter": str(spec.model.adapter.name),
        "algorithm": algorithm_line(run),
        "seed": str(spec.seed),
        "tasks": f"{spec.tasks.suite or spec.tasks.file or ''} {spec.tasks.split or ''}".strip(),
        "environment": environment,
        "screen": f"{spec.environment.screen.width}x{spec.environment.screen.height}"
        if spec.environment.screen
        else "",
        "groups": f"{spec.rollout.groups_per_update} of {spec.rollout.group_size} episodes an update",
        "machine": f"{machine['cores']} cores, {machine['gpus']} GPUs" if machine else "",
        "software": " ".join(str(software[name]) for name in ("tapforge", "commit") if software.get(name)),
        "screens recorded": f"{spec.recording.frames}, {spec.recording.encoding}",
        "ended after": str(summary.get("ended_after") or ""),
    }
    return {name: value for name, value in found.items() if value}


def _success(events: RunEvents) -> list[dict[str, Any]]:
    """By mode: the first and the last measurement, and those between."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (name, mode, _), event in sorted(events.evaluations.items(), key=lambda item: item[1].get("at", 0)):
        found.setdefault(mode, []).append({"name": name, **_measured(event)})
    return [
        {
            "mode": mode,
            "before": points[0] if points[0]["name"] == "before" or len(points) > 1 else None,
            "after": points[-1] if len(points) > 1 or points[0]["name"] != "before" else None,
            "points": points,
        }
        for mode, points in found.items()
    ]


def _measured(event: Mapping[str, Any]) -> dict[str, Any]:
    low, high = event.get("interval") or (None, None)
    return {
        "policy": event.get("policy"),
        "update": event.get("update"),
        "success": event.get("success"),
        "low": low,
        "high": high,
        "episodes": event.get("episodes"),
        "invalid": event.get("invalid"),
        "by_template": event.get("by_template") or {},
        "reasons": event.get("reasons") or {},
    }


def _templates(events: RunEvents, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per template: success before and after in the first mode that has both, and what is practised now."""
    shown = next((one for one in _success(events) if one["before"] and one["after"]), None)
    shown = shown or next(iter(_success(events)), None) or {"before": None, "after": None}
    before = (shown["before"] or {}).get("by_template", {})
    after = (shown["after"] or {}).get("by_template", {})
    practised = events.last_update.get("templates") or {}
    names = dict.fromkeys([*before, *after, *practised])
    return [
        {"template": n, "before": before.get(n), "after": after.get(n), "practised": practised.get(n)}
        for n in sorted(names)
    ]


def _time(events: RunEvents, summary: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: events.value(f"time/{name}", _RECENT) for name in PHASES}
    whole = {
        name: summary[f"seconds_{name}"] for name in ("start", "sft", "rl", "total") if f"seconds_{name}" in summary
    }
    busy = (events.last_update.get("so_far") or {}).get("busy_share")
    return {
        "parts": [{"name": n, "words": PHASES[n], "seconds": s} for n, s in parts.items() if s is not None],
        "recent": min(_RECENT, len(events.updates)),
        "whole": whole,
        "phones_busy": busy,
        "steps_per_second": (events.last_update.get("so_far") or {}).get("env_steps_per_second"),
    }


def _phones(folder: Path) -> dict[str, Any]:
    try:
        fleet = read_fleet(folder)
    except FleetError:
        return {}
    troubled = [p for p in fleet.phones if p.state in _TROUBLED or p.dirty or p.failures]
    c = fleet.counts
    return {
        "at": fleet.at,
        "count": len(fleet.phones),
        "states": {n: getattr(c, n) for n in ("leased", "free", "sick", "probation", "quarantined")},
        "quarantines": c.quarantines,
        "troubled": [
            {"name": p.name, "state": p.state, "clean": p.clean, "dirty": p.dirty, "failures": p.failures, "why": p.why}
            for p in troubled[:_SHOWN_PHONES]
        ],
    }


def _alarms(found: Any) -> list[str]:
    return [str(one) for one in found] if isinstance(found, list | dict) else []
