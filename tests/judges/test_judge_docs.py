"""docs/judges.md: its judges are judges, its prompt is one, and its tables name everything that there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tapforge_api import TrainingRun, from_object
from tapforge_api.judge import JudgeModel, JudgeSpec
from tapforge_trainer.judges.conventions import CONVENTIONS, VARIABLES
from tapforge_trainer.judges.judge import judge_of

PAGE = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_judge_on_the_page_is_one() -> None:
    texts = blocks("yaml")
    specs = [text for text in texts if text.startswith("spec:")]
    judges = [
        JudgeSpec.model_validate_json(_json(text), strict=True, by_name=False) for text in texts if text not in specs
    ]
    assert len(judges) == 3 and len(specs) == 1
    about = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}
    for text in specs:
        assert from_object(TrainingRun, {**about, **yaml.safe_load(text)}).spec.models
    for judge in judges[:2]:
        judge_of(judge, "task", environ={"JUDGE_API_KEY": "k"})


def _json(text: str) -> str:
    import json

    return json.dumps(yaml.safe_load(text))


def test_the_prompt_on_the_page_works(tmp_path: Path) -> None:
    (text,) = blocks("jinja")
    (tmp_path / "mine.jinja").write_text(text)
    mine = {"models": [{"url": "http://127.0.0.1:1/v1", "model": "m"}], "promptFile": str(tmp_path / "mine.jinja")}
    judge_of(JudgeSpec.model_validate(mine), "task")


def test_the_tables_name_every_field_prompt_and_variable() -> None:
    named = set(re.findall(r"`([A-Za-z-]+)`", PAGE))
    fields = {info.alias or name for model in (JudgeSpec, JudgeModel) for name, info in model.model_fields.items()}
    assert fields <= named
    assert set(CONVENTIONS) <= named
    assert {name for variables in VARIABLES.values() for name in variables} <= named
