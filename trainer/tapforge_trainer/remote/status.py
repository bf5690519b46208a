"""What the status of a TrainingRun says, as a small record. Pure.

A status that speaks of an earlier spec than the present one says nothing about whether the run is suspended or over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tapforge_api.progress import EXIT_COMPLETE, EXIT_CONFIGURATION, EXIT_FAILED, EXIT_STOPPED, JUDGE_BUDGET_SPENT

#: reasons of Failed that another try won't change
_CONFIGURATION: Final = ("Configuration", "ValidationFailed")


@dataclass(frozen=True, slots=True)
class RunStatus:
    name: str
    namespace: str
    uid: str
    #: the word that `kubectl get trainingruns` shows: Running, Suspended, Complete, ...
    word: str = ""
    #: the same as a sentence
    message: str = ""
    #: what the driver does: Loading, Training, Evaluating, ...
    phase: str = ""
    update: int = 0
    max_updates: int = 0
    #: over all valid attempts of the last update; from 0 to 1
    success: float | None = None
    episodes: int = 0
    episodes_per_hour: float = 0.0
    policy_version: int = 0
    #: estimate
    seconds_left: float | None = None
    phones_held: int = 0
    phones_wanted: int = 0
    #: the newest attempt, from 1; 0: there was none yet
    attempt: int = 0
    #: how often its driver was started again
    restarts: int = 0
    #: update of the newest checkpoint
    checkpoint: int | None = None
    #: spec.suspend
    suspend: bool = False
    #: as asked, or because what judges may use is spent
    suspended: bool = False
    complete: bool = False
    failed: bool = False
    #: RFC 3339
    created: str = ""
    being_deleted: bool = False

    @property
    def finished(self) -> bool:
        """It will not run again."""
        return self.complete or self.failed

    @property
    def exit_code(self) -> int | None:
        """As `tapforge run` would have ended; None: it has not. A run that is suspended has stopped, but for one that
        a queue holds."""
        if self.complete:
            return EXIT_COMPLETE
        if self.failed:
            return EXIT_CONFIGURATION if self.word in _CONFIGURATION else EXIT_FAILED
        return EXIT_STOPPED if self.suspended else None

    @property
    def judges_spent(self) -> bool:
        """What spec.stop gives to judges is spent; the message says what to raise."""
        return self.suspended and self.word == JUDGE_BUDGET_SPENT


def status_of(run: Mapping[str, Any]) -> RunStatus:
    """`run`: as the API server gives it."""
    about, spec, status = run["metadata"], run.get("spec") or {}, run.get("status") or {}
    current = status.get("observedGeneration") == about.get("generation")
    conditions = {c["type"]: c for c in status.get("conditions") or ()}

    def holds(kind: str) -> bool:
        return conditions.get(kind, {}).get("status") == "True"

    progress, leases = status.get("progress") or {}, status.get("leases") or {}
    checkpoint = status.get("checkpoint") or {}
    limits = (spec.get("stop") or {}).get("maxUpdates")
    word = conditions.get("Ready", {}).get("reason", "")
    resting = bool(spec.get("suspend", False)) or word == JUDGE_BUDGET_SPENT
    return RunStatus(
        name=about["name"],
        namespace=about.get("namespace", ""),
        uid=about.get("uid", ""),
        word=word,
        message=status.get("message", ""),
        phase=progress.get("phase", ""),
        update=progress.get("update", 0),
        max_updates=progress.get("maxUpdates") or limits or 0,
        success=progress.get("success"),
        episodes=progress.get("episodes", 0),
        episodes_per_hour=progress.get("episodesPerHour", 0.0),
        policy_version=progress.get("policyVersion", 0),
        seconds_left=progress.get("secondsLeft"),
        phones_held=leases.get("held", 0),
        phones_wanted=leases.get("wanted", 0),
        attempt=(status.get("attempt") or {}).get("number", 0),
        restarts=progress.get("restarts", 0),
        checkpoint=checkpoint.get("update"),
        suspend=bool(spec.get("suspend", False)),
        suspended=current and resting and holds("Suspended"),
        complete=holds("Complete"),
        failed=holds("Failed"),
        created=about.get("creationTimestamp", ""),
        being_deleted="deletionTimestamp" in about,
    )
