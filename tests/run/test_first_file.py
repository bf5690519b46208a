"""`tapforge init`: whatever is answered, `plan` takes the file as it is written, or the refusal says what to answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tapforge_trainer.cli.main import cli
from tapforge_trainer.run.first_file import ENVIRONMENTS


def typed(*words: str, stdin: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words), input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODELS = ("Qwen/Qwen3-VL-8B-Instruct", "ByteDance-Seed/UI-TARS-1.5-7B", "Qwen/Qwen2.5-VL-7B-Instruct")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize(("model", "gpus"), [*((model, 4) for model in MODELS), (MODELS[0], 1), (MODELS[0], 8)])
@pytest.mark.parametrize("cluster", [False, True])
def test_plan_takes_what_is_written(environment: str, model: str, gpus: int, cluster: bool) -> None:
    if environment == "pool" and not cluster:
        return
    words = ["--environment", environment, "--model", model, "--gpus", str(gpus), *(["--cluster"] if cluster else [])]
    code, said = typed("init", "my_run.yaml", *words)
    assert code == 0 and "\nnext: tapforge plan -f my_run.yaml, tapforge plan --memory" in said
    code, said = typed("plan", "-f", "my_run.yaml")
    assert code == 0, said
    assert said.startswith("run         my-run, seed 1")


def test_questions_are_asked_and_answered_by_their_defaults_with_the_tiny_model(here: Path) -> None:
    code, said = typed("init", stdin="\n\n\n")
    assert code == 0 and "Environment (simulated" in said and "Model (tiny" in said and "GPUs [0]" in said
    assert typed("plan", "-f", "run.yaml")[0] == 0 and "built-in tiny" in typed("plan", "-f", "run.yaml")[1]
    assert "#" in (here / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--environment", "adb", "--model", "tiny", "--gpus", "0"), "name a model"),
        (("--environment", "simulated", "--model", MODELS[0], "--gpus", "0"), "needs GPUs"),
        (("--environment", "pool", "--model", MODELS[0], "--gpus", "8"), "ask for a cluster"),
        (("--environment", "osworld", "--model", "Tongyi-MAI/MAI-UI-8B", "--gpus", "8"), "acts on phones only"),
    ],
)
def test_what_can_not_be_a_run_is_refused_with_what_can(here: Path, words: tuple[str, ...], refused: str) -> None:
    code, said = typed("init", *words)
    assert code == 2 and refused in said and not list(here.iterdir())


def test_a_file_that_is_there_is_kept(here: Path) -> None:
    (here / "tasks.jsonl").write_text("mine")
    words = ("--environment", "adb", "--model", MODELS[0], "--gpus", "8")
    code, said = typed("init", *words)
    assert code == 2 and "tasks.jsonl is there already" in said and not (here / "run.yaml").exists()
    assert typed("init", *words, "--force")[0] == 0 and (here / "tasks.jsonl").read_text() != "mine"
