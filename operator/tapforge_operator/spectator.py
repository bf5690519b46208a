"""Has kopf only look on: it remembers nothing on objects and compares nothing.

kopf computes for every event what changed since it last handled the object: several deep copies of a Pod, which cost
more than everything else that an event does. Only change-detecting handlers read the result, and the operator has none.
What kopf would write by itself (its last state, its progress, another operator's kopf finalizer that it takes for its
own) it doesn't either: who gets to a write here has found a mistake.
"""

from __future__ import annotations

from typing import Any, NoReturn

import kopf


def look_on(settings: kopf.OperatorSettings) -> None:
    """For operators whose handlers are all `on.event`."""
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoStates()
    settings.persistence.progress_storage = _NoProgress()
    # kopf removes the finalizer of this name from whatever has it; its default is that of every other kopf operator.
    settings.persistence.finalizer = "tapforge.dev/never-set"
    # Each object that was seen has a task, which keeps it whole in memory until it has been quiet for so long.
    settings.queueing.idle_timeout = 0.5


def _never(**_: Any) -> NoReturn:
    raise RuntimeError("kopf would write on an object: the operator may have `on.event` handlers only")


class _NoStates(kopf.DiffBaseStorage):
    def build(self, **_: Any) -> Any:
        """Everything is equal."""
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    store = _never


class _NoProgress(kopf.ProgressStorage):
    def fetch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence

    def touch(self, **_: Any) -> None:
        """Asked with every patch, to take kopf's own mark off; there is none."""

    store = _never
    purge = _never
