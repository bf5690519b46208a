"""The Pod templates that a run was started with: what they are, where they are kept, and whether spec still has them.

The rules of the TrainingRun's CRD keep every field of a started run, except those that its schema doesn't know: CEL
compares maps of unknown fields by their size and their known keys, so one such field can be exchanged for another. All
of those are in Pod templates (head, workers, submitter, the own pool's). Therefore:

1. The templates of the start are kept as a second key of the run's immutable ConfigMap, and their digest as an
   annotation of the resolved run, which the status has. Both are written before the first RayJob.
2. Every attempt, and an own pool that has to be made again, is built from them. Where spec differs, that is reported
   and ignored (`StartedRun.edited`).
3. A ConfigMap that is gone is made again from spec, as long as spec has the templates of that digest; otherwise no
   further attempt begins (`lost`).
4. A run that an earlier release started has no digest: its attempts are built from spec until its end.

The text is the same for the same templates in every release that knows more fields, as defaults are left out. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapforge_api.training_run import TrainingRunSpec
from tapforge_operator import labels

Json = dict[str, Any]

#: what is kept beside the groups of workers: the struct of spec that has it, and where in that
_SITES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "head": (("cluster",), ("head", "template")),
    "submitter": (("cluster",), ("submitter", "template")),
    "ownPool": (("environment", "source", "ownPool"), ("spec", "template")),
}
_WORKERS: Final = ("cluster", "workers")
_DIGEST_LENGTH: Final = 32
#: `to_yaml` quotes a digest that looks like a number
_ANNOTATION: Final = re.compile(
    rf"^    {re.escape(labels.POD_TEMPLATES)}: '?([0-9a-v]{{{_DIGEST_LENGTH}}})'?$", re.MULTILINE
)
#: fields that a message names
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """What the run's ConfigMap holds; nothing where there is none."""

    #: the run as all its attempts see it
    run: str = ""
    #: as `written` gave them
    templates: str = ""


@dataclass(frozen=True, slots=True)
class StartedRun:
    """An object of the API server with the templates that it was started with."""

    body: Mapping[str, Any]
    #: those templates, as they are kept; "" when they are not there
    templates: str = ""
    #: fields of spec that differ from them
    edited: tuple[str, ...] = ()


def written(spec: TrainingRunSpec) -> str:
    """The templates of a spec, as they are kept."""
    kept: Json = {}
    if (cluster := spec.cluster) is not None:
        kept["head"] = cluster.head.template.written()
        kept["submitter"] = cluster.submitter.template.written()
        kept["workers"] = {group.name: group.template.written() for group in cluster.workers}
    own = spec.environment.source.own_pool
    if own is not None and own.spec.template is not None:
        kept["ownPool"] = own.spec.template.written()
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def digest(templates: str) -> str:
    return labels.digest(templates, length=_DIGEST_LENGTH)


def digest_of(resolved: str) -> str:
    """Of the templates that a resolved run was started with; "" when an earlier release started it."""
    found = _ANNOTATION.search(resolved.partition("\nspec:")[0])
    return found[1] if found else ""


def fits(config: StoredConfig, resolved: str) -> bool:
    """Whether the ConfigMap has the templates that a resolved run was started with."""
    return bool(config.templates) and digest(config.templates) == digest_of(resolved)


def lost(spec: TrainingRunSpec, resolved: str, templates: str) -> bool:
    """Whether it is unknown which templates the run was started with: neither its ConfigMap nor spec has them."""
    if templates or not (start := digest_of(resolved)):
        return False
    return digest(written(spec)) != start


def as_started(body: Mapping[str, Any], config: StoredConfig | None) -> StartedRun:
    """The object with the templates of its start in place of those that it has now."""
    resolved = (body.get("status") or {}).get("resolved") or ""
    if config is None or not fits(config, resolved):
        return StartedRun(body)
    kept = json.loads(config.templates)
    spec: Mapping[str, Any] = body.get("spec") or {}
    edited: list[str] = []
    for name, (struct, rest) in _SITES.items():
        path = (*struct, *rest)
        if name in kept and _at(spec, struct) is not None:
            edited += _differing(kept[name], _at(spec, path) or {}, ".".join(("spec", *path)))
            spec = _with(spec, path, kept[name])
    groups = []
    for group in (_at(spec, _WORKERS[:-1]) or {}).get(_WORKERS[-1]) or ():
        template = kept.get("workers", {}).get(group["name"])
        if template is not None:
            where = f"spec.cluster.workers[{group['name']}].template"
            edited += _differing(template, group.get("template", {}), where)
            group = {**group, "template": template}
        groups.append(group)
    if groups:
        spec = _with(spec, _WORKERS, groups)
    return StartedRun({**body, "spec": spec}, config.templates, tuple(edited))


def edited_message(edited: Sequence[str], config_map: str) -> str:
    """For people: what was edited, and what becomes of that."""
    more = f" and {len(edited) - _NAMED} more" if len(edited) > _NAMED else ""
    fields = ", ".join(edited[:_NAMED])
    return (
        f"edited after the start, and ignored: {fields}{more}; attempts are built from the Pod templates in ConfigMap "
        f"{config_map}: undo the edit, or make another run"
    )


def lost_message(config_map: str) -> str:
    return (
        f"ConfigMap {config_map} no longer has the Pod templates that the run was started with, and spec was edited "
        "since: undo the edit of spec.cluster or of the own pool's template, or make another run"
    )


def _differing(kept: Any, now: Any, where: str) -> Iterator[str]:
    """Fields that are kept and differ now. One that was added shows as the one that went for it."""
    if isinstance(kept, Mapping) and isinstance(now, Mapping):
        for name, value in kept.items():
            if name in now:
                yield from _differing(value, now[name], f"{where}.{name}")
            else:
                yield f"{where}.{name}"
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for number, (before, after) in enumerate(zip(kept, now, strict=True)):
            yield from _differing(before, after, f"{where}[{number}]")
    elif kept != now:
        yield where


def _at(data: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any] | None:
    for name in path:
        found = data.get(name)
        if not isinstance(found, Mapping):
            return None
        data = found
    return data


def _with(data: Mapping[str, Any], path: Sequence[str], value: Any) -> Json:
    """A copy in which one place has another value."""
    name, *rest = path
    return {**data, name: _with(data.get(name) or {}, rest, value) if rest else value}
