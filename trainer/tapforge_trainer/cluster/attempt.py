"""The attempt of a run that this process belongs to, by environment variables (`tapforge_api.attempt`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tapforge_api import attempt as variables
from tapforge_api.base import INT32

from ..run.assembly import ConfigurationError
from ..run.supervisor import RESTARTS, RESTARTS_LEFT, STARTED
from .storage import Holder

#: set by KubeRay
_CLUSTER: Final = "RAY_CLUSTER_NAME"


@dataclass(frozen=True, slots=True)
class RunAttempt:
    run: str
    namespace: str
    uid: str
    #: from 1; grows
    number: int
    #: the run's own folder: what has to last
    storage: Path
    #: how often the driver was started again within the attempt
    restarts: int = 0
    #: how often it will be, if it fails
    restarts_left: int = 0
    #: when it was started first, milliseconds since the epoch; the same for a driver that was started again in place
    started: int = 0
    #: the Ray cluster that it is in; "" when that is not known
    cluster: str = ""

    @property
    def holder(self) -> Holder:
        """As which it works on the storage."""
        return Holder(self.number, self.started)

    @staticmethod
    def of(environment: Mapping[str, str]) -> RunAttempt | None:
        """None outside a cluster. Raises ConfigurationError."""
        if not environment.get(variables.RUN):
            return None
        names = (variables.NAMESPACE, variables.RUN_UID, variables.ATTEMPT, variables.STORAGE)
        if lacking := [name for name in names if not environment.get(name)]:
            raise ConfigurationError(
                f"{variables.RUN} is set, so this is a run on a cluster, but {', '.join(lacking)} are not: the "
                f"operator sets all of them; to run without it, unset {variables.RUN}"
            )
        return RunAttempt(
            environment[variables.RUN],
            environment[variables.NAMESPACE],
            environment[variables.RUN_UID],
            _number(environment, variables.ATTEMPT, least=1),
            Path(environment[variables.STORAGE]),
            _number(environment, RESTARTS),
            _number(environment, RESTARTS_LEFT),
            _number(environment, STARTED, most=2**53),
            environment.get(_CLUSTER, ""),
        )


def _number(environment: Mapping[str, str], name: str, least: int = 0, most: int = INT32) -> int:
    text = environment.get(name) or str(least)
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
        raise ConfigurationError(f"{name} has to be a number from {least} on, not {text!r}: the operator sets it")
    return int(text)
