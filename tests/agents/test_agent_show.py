"""`tapforge agent show`: what a user compares with a model card."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from drawn import draw_png

from tapforge_trainer.cli.main import cli


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    return tmp_path / "model"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["agent", "show", *map(str, arguments)])
    return result.exit_code, result.output


def test_one_step_of_the_simulated_phone(folder: Path) -> None:
    code, said = run(folder, "--task", "Open Wi-Fi", "--width", 540, "--height", 1200)
    assert code == 0, said
    for part in (
        "adapter          qwen2.5-vl\n",
        "coordinates      x from 0 to 319 (left to right), y from 0 to 735 (top to bottom)\n",
        "screen           540x1200, seen as 320x736\n",
        "image limits     4 to 256 visual tokens of 32x32 pixels (4,096 to 262,144 pixels)\n",
        "Task: Open Wi-Fi\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n",
        "images           230 (230)\n",
        '{"action": "click", "coordinate": [160, 368]}',
        "terminate infeasible:\n",
    ):
        assert part in said


def test_a_history_a_picture_and_the_ids(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "screen.png").write_bytes(draw_png(96, 160))
    image = tmp_path / "screen.png"
    code, said = run(folder, "--adapter", "ui-tars", "--image", image, "--step", 3, "--history-images", 2, "--ids")
    assert code == 0, said
    assert "history          2 earlier steps, 2 images of at most 2\n" in said
    assert said.count("Action: click(start_box='(48,80)')") >= 2 or "<|box_start|>(48,80)<|box_end|>" in said
    ids = said.rpartition("visual token ---\n")[2].split()
    prompt = next(line.split()[1] for line in said.splitlines() if line.startswith("prompt "))
    assert len(ids) == int(prompt.replace(",", ""))


@pytest.mark.parametrize(
    ("history", "step", "said"),
    [
        ("blocks: {keep: 2, upTo: 4}", 4, "the last step, with its answer"),
        ("blocks: {keep: 2, upTo: 4}", 5, "the last step in its first "),
        ("sliding: {}", 2, "the last step in its first "),
    ],
)
def test_whether_a_prompt_extends_the_one_before(
    folder: Path, tmp_path: Path, history: str, step: int, said: str
) -> None:
    (tmp_path / "run.yaml").write_text(
        "{apiVersion: tapforge.dev/v1alpha1, kind: TrainingRun, metadata: {name: r}, spec: {model: {source: {path: "
        f"{{folder: {json.dumps(str(folder))}}}}}, adapter: {{name: qwen2.5-vl, history: {{{history}}}}}}}}}}}"
    )
    (tmp_path / "model" / "weights.safetensors").write_bytes(b"")
    code, shown = run("-f", tmp_path / "run.yaml", "--step", step)
    assert code == 0, shown
    assert f"extends          {said}" in shown


def test_a_files_model_and_adapter(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    spec = {"model": {"source": {"path": {"folder": str(folder)}}, "adapter": {"name": "qwen2.5-vl-computer"}}}
    file = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}, "spec": spec}
    (tmp_path / "run.yaml").write_text(json.dumps(file))
    code, said = run(folder, "-f", tmp_path / "run.yaml", "--set", "spec.model.maxPixels=50000")
    assert code == 0, said
    assert "adapter          qwen2.5-vl-computer\n" in said and "4 to 48 visual tokens" in said
    assert '"action": "left_click"' in said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "name a model folder, or a TrainingRun with -f"),
        (("/nowhere",), "the model folder /nowhere does not exist"),
        (("{}", "--adapter", "qwen"), "unknown agent 'qwen'; did you mean"),
        (("{}", "--max-pixels", 800), "maxPixels 800 is less than the 4,096 pixels"),
        (("{}", "--min-pixels", 10**8), "give less"),
        (("{}", "--prompt-file", "/nowhere.jinja"), "the prompt file /nowhere.jinja can't be read"),
        (("{}", "--context", "memory"), "unknown context 'memory'"),
        (("{}", "--image", "/nowhere.png"), "nowhere.png"),
        (("{}", "--task", "word " * 9000), "exceed the context of 8192; raise contextTokens"),
    ],
)
def test_what_can_not_be_shown_is_said_in_words(folder: Path, arguments: tuple, part: str) -> None:
    code, said = run(*(str(one).format(folder) for one in arguments))
    assert code == 2
    assert part in said and "Traceback" not in said


def test_another_family_needs_its_adapter_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    code, said = run(folder)
    assert code == 2 and "--adapter is needed" in said and "'qwen2_vl'" in said and "aguvis" in said
