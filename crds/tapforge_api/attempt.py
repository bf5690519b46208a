"""What a run's driver finds in its Pod on a cluster: environment variables and places. The operator writes them, the
trainer reads them; on a laptop none of them is there.

An attempt is one Ray cluster's worth of a run. The run goes on over attempts: it keeps its UID and its storage, and a
later attempt goes on from the newest checkpoint of an earlier one.

What lies in the storage of a run is under $TAPFORGE_STORAGE and nowhere else: a run that is deleted and made again
under its name has another UID, and begins anew.
"""

from __future__ import annotations

from typing import Final

#: name, namespace and metadata.uid of the TrainingRun
RUN: Final = "TAPFORGE_RUN"
NAMESPACE: Final = "TAPFORGE_NAMESPACE"
RUN_UID: Final = "TAPFORGE_RUN_UID"
#: number of the attempt, from 1; grows. What is written into the storage is fenced by it
ATTEMPT: Final = "TAPFORGE_ATTEMPT"
#: folder of this run's own, <root>/<namespace>/<run uid>: everything that it keeps
STORAGE: Final = "TAPFORGE_STORAGE"
#: "false" where the storage is lost with the Ray cluster; "true" otherwise
STORAGE_LASTS: Final = "TAPFORGE_STORAGE_LASTS"
#: folder that can be written to and is lost with the Pod: caches
WORK: Final = "TAPFORGE_WORK"

#: how long the driver may take to stop when its Pod is ended, seconds
GRACE: Final = "TAPFORGE_GRACE_SECONDS"

#: address of the operator, its certificates (file), and a token for it (file)
BROKER_URL: Final = "TAPFORGE_BROKER_URL"
BROKER_CA: Final = "TAPFORGE_BROKER_CA"
BROKER_TOKEN_FILE: Final = "TAPFORGE_BROKER_TOKEN_FILE"

#: the TrainingRun as it was when the run began, with everything resolved
RUN_FILE: Final = "/etc/tapforge/run/run.yaml"
#: where a volume for the storage is mounted
STORAGE_MOUNT: Final = "/var/lib/tapforge/storage"
WORK_MOUNT: Final = "/var/lib/tapforge/work"
#: where libraries keep models and compiled kernels
CACHES: Final = {"XDG_CACHE_HOME": f"{WORK_MOUNT}/cache", "HF_HOME": f"{WORK_MOUNT}/cache/huggingface"}
#: user and group that the trainer's image runs as
USER: Final = 65532
BROKER_MOUNT: Final = "/var/run/tapforge/broker"
CA_FILE: Final = f"{BROKER_MOUNT}/ca.crt"
TOKEN_FILE: Final = f"{BROKER_MOUNT}/token"


def entrypoint(restarts: int) -> str:
    """The command that a Ray cluster runs: the driver, started again in place at most so often after a crash."""
    return f"tapforge run -f {RUN_FILE} --restarts {restarts}"


def prestop(seconds: int) -> list[str]:
    """The preStop hook of a Ray Pod."""
    return ["tapforge", "prestop", "--seconds", str(seconds)]
