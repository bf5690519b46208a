"""`tapforge explain`: every field that may be written is said, with its bounds, and what is no field is answered with
the one that was meant."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from tapforge_api import EmulatorPool, TrainingRun
from tapforge_api.explain import UnknownField, explain
from tapforge_api.shapes import all_paths
from tapforge_trainer.cli.main import cli


@pytest.mark.parametrize("model", [TrainingRun, EmulatorPool])
def test_every_field_of_a_file_is_explained(model: type) -> None:
    for path in all_paths(model):
        if path[0] != "spec":
            continue
        text = explain(".".join((model.__name__, *map(str, path))))
        assert text.startswith(f"{model.__name__}.{'.'.join(map(str, path))}  <")
        assert max(map(len, text.splitlines()[1:]), default=0) <= 100
        if "<object>" not in text.splitlines()[0]:
            assert len(text.splitlines()) > 1, f"{path} says what it is"


def test_a_struct_has_its_fields_and_rules_and_a_field_its_unit_default_and_bounds() -> None:
    rollout = explain("spec.rollout")
    assert "rule: minValid must be <= groupSize" in rollout
    assert re.search(r"groupSize  <integer>\n +episodes of the same task.*default 8 \(at least 2, at most", rollout)
    assert "one of cpu, cuda" in explain("spec.device")
    assert explain("spec.environment.source.urls.list").startswith(
        "TrainingRun.spec.environment.source.urls.list  <list of string>"
    )
    assert explain("spec.cluster.workers.replicas") == explain("trun.spec.cluster.workers[].replicas")
    assert "required" in explain("spec.cluster"), "an image has to be named"
    tree = explain("epool.spec", recursive=True)
    assert "\n  health  <object>\n    unreadyGraceSeconds  <number>" in tree


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("spec.groupSize", "did you mean spec.rollout.groupSize?"),
        ("spec.rollout.groupsize", "did you mean groupSize?"),
        ("spec.rollout.group_size", "did you mean groupSize?"),
        ("spec.rollout.groupSize.more", "is a single value (integer)"),
        ("spec.cluster.head.template.spec.nodeSelector", "passed through"),
        ("replicas", "or spec.engine.replicas"),
        ("epool.spec.rollout", "there are"),
    ],
)
def test_what_is_no_field_is_answered_with_the_one_that_was_meant(words: str, said: str) -> None:
    with pytest.raises(UnknownField, match=re.escape(said)):
        explain(words)
    done = CliRunner().invoke(cli, ["explain", words])
    assert done.exit_code == 2 and said in done.output


def test_the_command_explains_a_run_where_nothing_is_named() -> None:
    done = CliRunner().invoke(cli, ["explain"])
    assert done.exit_code == 0 and done.output.startswith("TrainingRun.spec  <object>\n")
