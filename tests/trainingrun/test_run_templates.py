"""A started run is built from the Pod templates of its start, whatever its spec says by now."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from runs_made import SAFE, Story, body, job, lose, made

from tapforge_api.reading import read_run
from tapforge_api.training_run import TrainingRunSpec
from tapforge_operator.trainingrun import rayjob, templates
from tapforge_operator.trainingrun.rayjob import RUN_KEY, TEMPLATES_KEY, Broker
from tapforge_operator.trainingrun.state import Run
from tapforge_operator.trainingrun.templates import StoredConfig, as_started

BROKER = Broker("https://b:8443", "ca")
PHONE = {"name": "emulator", "image": "p:1", "imagePullPolicy": "Always"}
SPEC: dict[str, Any] = {
    "environment": {
        "source": {"ownPool": {"slots": 1, "spec": {"replicas": 1, "template": {"spec": {"containers": [PHONE]}}}}}
    },
    "checkpoints": SAFE,
    "cluster": {
        "image": "trainer:1",
        "head": {"template": {"spec": {"nodeSelector": {"pool": "a"}, "serviceAccountName": "one"}}},
        "workers": [{"name": "gpu", "template": {"metadata": {"labels": {"team": "a"}}, "spec": {"hostUsers": False}}}],
        "submitter": {"template": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}},
    },
}


def start(**spec: Any) -> tuple[dict[str, Any], StoredConfig]:
    """A started run as the API server has it, and its ConfigMap."""
    story = Story(made(**deepcopy(spec or SPEC)))
    story.plan(pool=None)
    run = replace(story.run, status=story.run.status.model_copy(update={"resolved": rayjob.resolve(story.run)}))
    data = rayjob.config_map(run)["data"]
    status = {"resolved": data[RUN_KEY], "startTime": "2026-11-20T12:00:00Z", "attempts": 1}
    return {**body(**deepcopy(spec or SPEC)), "status": status}, StoredConfig(data[RUN_KEY], data[TEMPLATES_KEY])


def read(stored: dict[str, Any], config: StoredConfig | None) -> Run:
    started = as_started(stored, config)
    reading = read_run(started.body)
    assert reading.spec is not None, reading.message
    return Run.of(started.body, reading.spec, started.templates, started.edited)


def at(data: Any, *path: str | int) -> Any:
    for step in path:
        data = data[step]
    return data


HEAD = ("cluster", "head", "template", "spec")
WORKER = ("cluster", "workers", 0, "template", "spec")
SUBMITTER = ("cluster", "submitter", "template", "spec")
OWN = ("environment", "source", "ownPool", "spec", "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "gone", "come", "named"),
    [
        (HEAD, "nodeSelector", {"hostNetwork": True}, "spec.cluster.head.template.spec.nodeSelector"),
        (WORKER, "hostUsers", {"hostPID": True}, "spec.cluster.workers[gpu].template.spec.hostUsers"),
        (SUBMITTER, "tolerations", {"hostIPC": True}, "spec.cluster.submitter.template.spec.tolerations"),
        (
            OWN,
            "imagePullPolicy",
            {"command": ["sh"]},
            "spec.environment.source.ownPool.spec.template.spec.containers[0].imagePullPolicy",
        ),
    ],
    ids=["head", "worker", "submitter", "own-pool"],
)
def test_an_exchanged_field_reaches_no_pod_and_is_named(
    path: tuple[str | int, ...], gone: str, come: dict[str, Any], named: str
) -> None:
    stored, config = start()
    before = read(stored, config)
    assert before.edited == ()
    place = at(stored["spec"], *path)
    del place[gone]
    place.update(come)
    assert read(stored, None) != before, "the spec that is there now"
    run = read(stored, config)
    assert run.edited == (named,) and run.spec == before.spec
    assert rayjob.ray_job(run, 2, BROKER) == rayjob.ray_job(before, 2, BROKER)
    assert rayjob.own_pool(run) == rayjob.own_pool(before)
    assert rayjob.config_map(run) == rayjob.config_map(before)


def test_everything_that_the_schema_passes_through_is_kept() -> None:
    """The CRD's rules compare the rest exactly."""
    kept = {"cluster.head.template", "cluster.workers.template", "cluster.submitter.template"}
    kept |= {"environment.source.ownPool.spec.template"}
    assert set(_passed(TrainingRunSpec, ())) == kept


def _passed(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """Templates that have fields which aren't known, and all other such structs."""
    if model.model_config.get("extra") == "allow":
        end = path.index("template") + 1 if "template" in path else len(path)
        return [".".join(path[:end])]
    found = []
    for name, field in model.model_fields.items():
        for part in _models(field.annotation):
            found += _passed(part, (*path, field.alias or name))
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def test_defaults_that_a_later_release_adds_are_no_edit() -> None:
    stored, config = start()
    for path in (HEAD, WORKER, SUBMITTER):
        template = at(stored["spec"], *path[:-1])
        template.setdefault("metadata", {}).setdefault("annotations", {})
    assert read(stored, config).edited == () and read(stored, None).templates == ""
    assert not templates.lost(read(stored, None).spec, stored["status"]["resolved"], "")


def test_a_config_map_that_is_not_of_the_start_is_not_used() -> None:
    stored, config = start()
    forged = json.loads(config.templates)
    forged["head"]["spec"]["hostNetwork"] = True
    run = read(stored, replace(config, templates=json.dumps(forged)))
    assert run.templates == "" and run == read(stored, StoredConfig())


def test_a_lost_config_map_is_made_again_from_a_spec_that_was_not_edited() -> None:
    stored, config = start()
    data = rayjob.config_map(read(stored, StoredConfig()))["data"]
    assert data == {RUN_KEY: config.run, TEMPLATES_KEY: config.templates}


def test_with_its_templates_lost_and_its_spec_edited_no_further_attempt_begins() -> None:
    story = Story(made(checkpoints=SAFE, cluster={"image": "i", "head": SPEC["cluster"]["head"]})).started()
    unedited = story.run.spec
    lose(story)
    swapped = made(cluster={"image": "i", "head": {"template": {"spec": {"hostNetwork": True}}}})
    story.edit(cluster=swapped.spec.cluster)
    story.plan(400.0)
    assert story.ready == ("False", "TemplatesLost") and story.condition("Stalled")[0] == "True"
    assert story.run.status.attempts == 1
    story.edit(cluster=unedited.cluster)
    story.plan(400.0)
    assert story.plan().create_job == 2


def test_an_own_pool_is_not_made_again_from_an_edited_spec() -> None:
    story = Story(made(**deepcopy(SPEC)))
    assert story.plan(pool=None).create_pool
    start, began = story.run.spec, {"start_time": "2026-11-20T12:00:00Z", "resolved": rayjob.resolve(story.run)}
    story.run = replace(story.run, status=story.run.status.model_copy(update=began))
    edited = deepcopy(SPEC)
    at(edited, *OWN).update(imagePullPolicy="Never")
    story.edit(environment=made(**edited).spec.environment)
    assert not story.plan().create_pool and story.ready == ("False", "TemplatesLost")
    story.edit(environment=start.environment)
    assert story.plan().create_pool


def test_the_condition_says_what_is_ignored_and_goes_with_the_edit() -> None:
    story = Story(made(cluster={"image": "i"})).started()
    told = [c.type for c in story.run.status.conditions]
    assert "SpecChanged" not in told
    story.run = replace(story.run, edited=("spec.cluster.head.template.spec.nodeSelector",), generation=2)
    plan = story.plan()
    assert story.condition("SpecChanged") == ("True", "Ignored") and story.ready == ("True", "Running")
    message = next(c.message for c in plan.status.conditions if c.type == "SpecChanged")
    assert "head.template.spec.nodeSelector" in message and "another run" in message
    story.run = replace(story.run, edited=())
    assert [c.type for c in story.plan().status.conditions] == told


def test_a_run_that_an_earlier_release_started_goes_on_from_its_spec() -> None:
    stored, config = start()
    resolved = "\n".join(line for line in config.run.splitlines() if "pod-templates" not in line) + "\n"
    assert templates.digest_of(config.run) and not templates.digest_of(resolved)
    stored["status"]["resolved"] = resolved
    run = read(stored, StoredConfig(resolved))
    assert run.edited == () and rayjob.config_map(run)["data"] == {RUN_KEY: resolved}
    at(stored["spec"], *HEAD).update(priorityClassName="high")
    now = read(stored, StoredConfig(resolved))
    assert rayjob.ray_job(now, 2, BROKER) != rayjob.ray_job(run, 2, BROKER)
    assert not templates.lost(now.spec, resolved, "")


def test_templates_that_no_config_map_takes_are_refused_before_the_start() -> None:
    script = {"name": "ray", "env": [{"name": "SCRIPT", "value": "x" * 1_100_000}]}
    story = Story(made(cluster={"image": "i", "head": {"template": {"spec": {"containers": [script]}}}}))
    plan = story.plan()
    assert story.ready == ("False", "SpecTooLarge") and not plan.status.attempts
    assert "1,048,576" in plan.status.message


def test_nothing_but_the_resolved_run_is_mounted() -> None:
    head = rayjob.ray_job(made(), 1, BROKER)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = [v for v in head["volumes"] if v["name"] == "tapforge-run"]
    assert volume["configMap"]["items"] == [{"key": RUN_KEY, "path": RUN_KEY}]


def test_a_job_of_the_second_attempt_is_planned_as_the_first_one() -> None:
    """By the planner, with an edit between the two."""
    story = Story(made(checkpoints=SAFE, cluster=deepcopy(SPEC["cluster"]))).started()
    config = StoredConfig(story.run.status.resolved, templates.written(story.run.spec))
    lose(story)
    edited = deepcopy(SPEC["cluster"])
    del edited["head"]["template"]["spec"]["nodeSelector"]
    edited["head"]["template"]["spec"]["hostNetwork"] = True
    stored = {**body(checkpoints=SAFE, cluster=edited), "status": story.run.status.model_dump(by_alias=True)}
    story.run = read(stored, config)
    story.plan(400.0, config=config)
    assert story.plan().create_job == 2
    spec = rayjob.ray_job(story.run, 2, BROKER)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"pool": "a"} and "hostNetwork" not in spec
    story.plan(jobs=(job(2, "RUNNING/Running"),))
    assert story.condition("SpecChanged") == ("True", "Ignored")
