"""Studies of whole runs: every file of theirs is one that `tapforge plan` takes, and what was run is not run again."""

import json
from pathlib import Path

import pytest
import stack
import yaml
from load import whole_runs

from tapforge_api import load


@pytest.mark.parametrize("name", list(stack.STUDIES))
def test_files_of_a_study_are_taken_and_differ_in_what_the_arms_say(name: str, tmp_path: Path) -> None:
    study = stack.STUDIES[name]
    assert study.baseline in study.arms
    named = {"metadata": {"name": "made"}}
    starts = [whole_runs.merged(study.start, named)]
    arms = [whole_runs.merged(whole_runs.of(study, tmp_path, arm, 1), named) for arm in study.arms]
    assert all(one != other for place, one in enumerate(arms) for other in arms[:place])
    for document in (*starts, *arms):
        load(yaml.safe_dump(document))


def test_what_is_in_the_file_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ran(place: Path, name: str, document: whole_runs.Spec, urls: dict[str, str] | None = None) -> Path:
        asked.append(name)
        (place / name / "export").mkdir(parents=True)
        return place / name

    monkeypatch.setattr(whole_runs, "tapforge", ran)
    study, file = stack.STUDIES["rules"], tmp_path / "stack.json"
    after = iter((0.5, 0.75, 0.25, 0.5))
    for arms, seeds in ((("grpo", "gigpo"), (1,)), (("grpo", "gigpo"), (1, 2))):
        whole_runs.run(study, file, tmp_path, arms, seeds, lambda folder: {"after": next(after)})
    assert asked == ["made", "grpo-1", "gigpo-1", "grpo-2", "gigpo-2"]
    found = json.loads(file.read_text())[study.name]["arms"]
    assert found["gigpo"]["vs_grpo"]["mean"] == pytest.approx(0.25)
