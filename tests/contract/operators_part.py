"""What the operator writes for a run, by its own functions: for the trainer's readers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs_made import UID

from tapforge_api import TrainingRun, dump_set, load, load_bundle
from tapforge_api.document import parse
from tapforge_api.loading import from_object
from tapforge_api.reading import read_run
from tapforge_operator.trainingrun import rayjob
from tapforge_operator.trainingrun.state import Run

Json = dict[str, Any]

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
BROKER = rayjob.Broker("https://tapforge-broker.tapforge-system.svc:8443", "CERTIFICATES")


def _runs_of_samples() -> Iterator[Path]:
    for path in sorted(SAMPLES.glob("*.yaml")):
        if any(document.data.get("kind") == "TrainingRun" for document in parse(path.read_text(), str(path))):
            yield path


#: every file that has a run in it
RUN_FILES = tuple(_runs_of_samples())


def written(path: Path) -> TrainingRun:
    """The run of a file, as its user wrote it."""
    return load_bundle(path)[0]


def made(spec: Mapping[str, Any], name: str = "run") -> TrainingRun:
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": name}}
    return from_object(TrainingRun, {**about, "spec": spec})


def body_of(run: TrainingRun, namespace: str = "team") -> Json:
    """As the API server has it."""
    body = dump_set(run)
    body["metadata"] |= {"namespace": namespace, "uid": UID, "generation": 1}
    return body


def seen(run: TrainingRun, namespace: str = "team") -> Run:
    """The run as the operator has it from the API server."""
    body = body_of(run, namespace)
    reading = read_run(body)
    assert reading.spec is not None, reading.message
    return Run.of(body, reading.spec)


@dataclass(frozen=True)
class Started:
    """A run as its user wrote it, and what the operator has made of it by its start."""

    run: TrainingRun
    seen: Run
    #: of its ConfigMap, by key
    config: dict[str, str]
    #: run.yaml as the driver reads it
    read: TrainingRun

    @staticmethod
    def of(run: TrainingRun) -> Started:
        made = seen(run)
        status = made.status.model_copy(update={"resolved": rayjob.resolve(made)})
        config = rayjob.config_map(replace(made, status=status))["data"]
        return Started(run, made, config, load(config[rayjob.RUN_KEY]))

    @property
    def text(self) -> str:
        """run.yaml"""
        return self.config[rayjob.RUN_KEY]


def ray_job(run: Run, attempt: int = 1, broker: rayjob.Broker = BROKER) -> Json:
    """As the API server and KubeRay get it: JSON and nothing else."""
    return dict(json.loads(json.dumps(rayjob.ray_job(run, attempt, broker))))


def pods_of(job: Json) -> dict[str, Json]:
    """Pod templates by group, and the submitter's."""
    cluster = job["spec"]["rayClusterSpec"]
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], "submitter": job["spec"]["submitterPodTemplate"], **workers}


def environment(pod: Json) -> dict[str, str]:
    """Of its main container, as far as the values stand there."""
    return {e["name"]: e["value"] for e in pod["spec"]["containers"][0].get("env", ()) if "value" in e}


def place_of(pod: Json, path: str) -> tuple[Json, str]:
    """What a file of the main container is: the volume's source and the path in it."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    for mount in pod["spec"]["containers"][0].get("volumeMounts", ()):
        if path.startswith(f"{mount['mountPath']}/"):
            return volumes[mount["name"]], path.removeprefix(f"{mount['mountPath']}/")
    raise AssertionError(f"{path} is on no volume of the Pod")
