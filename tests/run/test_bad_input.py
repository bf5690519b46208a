"""What bad input gets, through the command: words that name the thing, an exit code, nothing started, nothing lost."""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from whole import SPEC

from tapforge_envs.phone import catalog
from tapforge_trainer.cli import main as cli
from tapforge_trainer.rollout.scheduler import RolloutError
from tapforge_trainer.tiny.folder import write_model


class Said(NamedTuple):
    code: int
    words: str


class House:
    """A folder to type commands in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / "tiny.yaml"
        self.runs = folder / "runs"
        self.run = self.runs / "tiny"
        self.file.write_text(SPEC)

    def type(self, *words: str | Path) -> Said:
        result = CliRunner().invoke(cli.cli, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.output)

    def type_run(self, *settings: str, command: str = "run", runs: Path | None = None) -> Said:
        options = [word for setting in settings for word in ("--set", setting)]
        return self.type(command, "-f", self.file, "--runs", runs or self.runs, *options)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.chdir(tmp_path)
    return House(tmp_path)


# --- files that are wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "run", "sft", "eval"])
@pytest.mark.parametrize(
    "text, words",
    [
        pytest.param(None, ["tiny.yaml", "No such file"], id="missing"),
        pytest.param("spec: [", ["tiny.yaml", "line 1", "not valid YAML"], id="not YAML"),
        pytest.param(SPEC.replace("TrainingRun", "Pod"), ["kind", '"Pod"', "TrainingRun"], id="another kind"),
        pytest.param(SPEC.replace("seed: 3", "sede: 3"), ["line 6", "spec.sede", "mean seed"], id="unknown field"),
        pytest.param(SPEC.replace("seed: 3", "seed: three"), ["line 6", "spec.seed", "three"], id="not a number"),
        pytest.param(SPEC.replace("steps: 30", "steps: 0"), ["spec.warmStart.steps", "0"], id="out of range"),
    ],
)
def test_a_wrong_file(house: House, command: str, text: str | None, words: list[str]) -> None:
    house.file.unlink()
    if text is not None:
        house.file.write_text(text)
    said = house.type_run(command=command)
    assert said.code == 2
    assert all(word in said.words for word in words), said.words
    assert not house.runs.exists()


def _task(**other: object) -> str:
    return json.dumps(catalog.tasks("quickstart", "train").sample(0, 0).model_dump() | other)


NO_WARM_START = "spec.warmStart=null"


@pytest.mark.parametrize(
    "lines, words",
    [
        pytest.param([_task(), '{"suite": '], ["tasks.jsonl:2", "JSON"], id="half a line"),
        pytest.param([_task(), "", _task(seed="x")], ["tasks.jsonl:3", "seed"], id="a wrong value"),
        pytest.param([_task(), _task()], ["tasks.jsonl:2", "line 1"], id="the same twice"),
        pytest.param(["# nothing"], ["tasks.jsonl", "no task"], id="empty"),
        pytest.param([_task(suite="quickstrat")], ["tasks.jsonl", "quickstrat", "'quickstart'"], id="unknown suite"),
        pytest.param([_task(template="opne")], ["tasks.jsonl", "opne", "'open'"], id="unknown template"),
        pytest.param([_task(params={"app": "?"})], ["tasks.jsonl", "parameters", "?"], id="unknown parameters"),
    ],
)
def test_a_task_file_is_read_before_anything_starts(house: House, lines: list[str], words: list[str]) -> None:
    (house.folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    for command in ("plan", "run"):
        said = house.type_run("spec.tasks.file=tasks.jsonl", NO_WARM_START, command=command)
        assert said.code == 2
        assert all(word in said.words for word in ["spec.tasks.file", *words]), said.words
    assert not house.runs.exists()


@pytest.mark.parametrize(
    "settings, words",
    [
        pytest.param(["spec.tasks.suite=quickstrat"], ["spec.tasks", "quickstrat", "'quickstart'"], id="suite"),
        pytest.param(["spec.tasks.templates=[opne]"], ["spec.tasks", "opne", "'open'"], id="template"),
        pytest.param(["spec.tasks.file=nowhere.jsonl", NO_WARM_START], ["spec.tasks.file", "nowhere.jsonl"], id="file"),
        pytest.param(["spec.tasks.file=tasks.jsonl"], ["spec.warmStart", "no demonstrations"], id="nobody to imitate"),
        pytest.param(
            ['spec.model.source={"path": {"folder": "nowhere"}}'],
            ["spec.model.source.path.folder", "nowhere", "doesn't exist"],
            id="no model folder",
        ),
        pytest.param(
            ['spec.model.source={"path": {"folder": "."}}'],
            ["spec.model.source.path.folder", "config.json", "tokenizer", "safetensors"],
            id="a folder without a model",
        ),
        pytest.param(
            ['spec.environment.source={"urls": {"list": ["http://a:1", "http://a:1"]}}'],
            ["spec.environment.source.urls.list", "http://a:1"],
            id="a phone twice",
        ),
        pytest.param(
            ['spec.environment.source={"urls": {"file": "phones.txt"}}'],
            ["phones.txt:1", "phones.txt:3", "http://a:1"],
            id="a phone twice in a file",
        ),
        pytest.param(
            ["spec.checkpoints.resumeFrom=nowhere"], ["spec.checkpoints.resumeFrom", "nowhere"], id="no checkpoint"
        ),
    ],
)
def test_what_a_file_names_is_looked_at_before_anything_starts(
    house: House, settings: list[str], words: list[str]
) -> None:
    (house.folder / "tasks.jsonl").write_text(_task() + "\n")
    (house.folder / "phones.txt").write_text("a:1\n# another\nhttp://a:1/\n")
    for command in ("plan", "run"):
        said = house.type_run(*settings, command=command)
        assert said.code == 2
        assert all(word in said.words for word in words), said.words
    assert not house.runs.exists()


def test_a_plan_names_the_folder_that_the_run_would_have(house: House) -> None:
    said = house.type_run(command="plan")
    assert said.code == 0
    assert str(house.run) in said.words


# --- model folders that look right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json"])
def test_a_model_folder_that_the_adapter_can_not_read(house: House, name: str) -> None:
    from tapforge_trainer.model_source.tiny_base import base_folder

    model = house.folder / "model"
    model.mkdir()
    for path in base_folder().iterdir():
        (model / path.name).write_bytes(b"{}" if path.name == name else path.read_bytes())
    said = house.type_run('spec.model.source={"path": {"folder": "model"}}')
    assert said.code == 2
    assert "spec.model" in said.words and name in said.words


def test_an_adapter_that_nobody_knows(house: House) -> None:
    said = house.type_run("spec.model.adapter.name=qwen3vl")
    assert said.code == 2
    assert "'qwen3vl'" in said.words and "'qwen3-vl'" in said.words


# --- phones -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_when_every_phone_is_dead_nothing_heavy_starts(house: House, nobody: str) -> None:
    import ray

    source = json.dumps({"urls": {"list": [f"{nobody}/slot/{k}" for k in range(2)]}})
    before = ray.is_initialized()  # another room's tests may have one in this process
    said = house.type_run(f"spec.environment.source={source}")
    assert said.code == 1
    assert "none of the 2 phones answers" in said.words
    assert f"{nobody}/slot/0" in said.words and f"{nobody}/slot/1" in said.words
    assert "starting" in said.words and ray.is_initialized() == before


def test_a_failed_start_binds_nobody(house: House, nobody: str) -> None:
    """The corrected file is taken, whatever it says."""
    source = json.dumps({"urls": {"list": [nobody]}})
    for seed in (1, 2):
        said = house.type_run(f"spec.environment.source={source}", f"spec.seed={seed}")
        assert "none of the 1 phones answers" in said.words


def test_a_context_in_which_no_frame_has_room(house: House) -> None:
    folder = house.folder / "model"
    write_model(folder, 0)
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    pixels |= {"min_pixels": 65536, "max_pixels": 16777216}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    source = f"spec.model.source={json.dumps({'path': {'folder': str(folder)}})}"
    for command in ("plan", "run"):
        said = house.type_run(source, "spec.model.contextTokens=89", "spec.rollout.responseTokens=8", command=command)
        assert said.code == 2
        assert "spec.model.contextTokens: 89 is too little" in said.words and "take 90 tokens" in said.words
    first = house.type_run(source, "spec.model.contextTokens=90", "spec.rollout.responseTokens=8", command="plan")
    # The longest goal has no room, and shorter ones do.
    assert first.code == 0 and "it takes up to 84 tokens" in first.words and "92 will do" in first.words
    longer = house.type_run(source, "spec.model.contextTokens=92", "spec.rollout.responseTokens=8", command="plan")
    assert longer.code == 0


def test_a_lora_target_that_the_model_does_not_have(house: House) -> None:
    folder = house.folder / "model"
    write_model(folder, 0)
    source = f"spec.model.source={json.dumps({'path': {'folder': str(folder)}})}"
    for command in ("plan", "run"):
        said = house.type_run(source, "spec.model.lora={targets: [q_proj, up_prj]}", command=command)
        assert said.code == 2
        assert "spec.model.lora.targets: up_prj is not a linear layer" in said.words and "mean up_proj?" in said.words
    assert not house.run.exists()


def test_a_pool_needs_a_cluster(house: House) -> None:
    said = house.type_run('spec.environment.source={"pool": {"name": "phones"}}')
    assert said.code == 1
    assert "spec.environment.source.pool needs" in said.words and "TAPFORGE_BROKER_URL" in said.words
    # What `tapforge plan` notes is said before a run begins, too.
    assert "note: the phones come from a pool: the run needs a cluster" in said.words


def test_checking_a_phone_that_is_not_there(house: House, nobody: str) -> None:
    said = house.type("env", "check", nobody)
    assert said.code == 1
    assert f"{nobody}: nothing was checked, because nothing answers there: " in said.words
    assert "violation" not in said.words and "tapforge phone serve" in said.words


# --- folders ----------------------------------------------------------------------------------------------------------


def test_the_folder_of_runs_is_a_file(house: House) -> None:
    house.runs.write_text("")
    for command in ("plan", "run"):
        said = house.type_run(command=command)
        assert said.code == 2
        assert str(house.runs) in said.words and "is a file" in said.words


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_the_folder_of_runs_can_not_be_written(house: House) -> None:
    said = house.type_run(runs=Path("/proc/self/runs"))
    assert said.code in (1, 2)
    assert "/proc/self" in said.words and "can't be written" in said.words


def test_a_run_belongs_to_one_process(house: House) -> None:
    house.run.mkdir(parents=True)
    with (house.run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        for command in ("run", "sft"):
            said = house.type_run(command=command)
            assert said.code == 1
            assert f"{house.run} is in use by process 4711" in said.words


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_at_the_start(house: House) -> None:
    house.run.mkdir(parents=True)
    (house.run / "events.jsonl").symlink_to("/dev/full")
    said = house.type_run()
    assert said.code == 1
    assert "events.jsonl" in said.words and "No space left" in said.words


@pytest.mark.parametrize(
    "words, code, expected",
    [
        (["view", "nowhere"], 2, "nowhere is not a run's folder: it doesn't exist (looked for in {here})"),
        (["view", "{here}/nowhere"], 2, "nowhere is not a run's folder: it doesn't exist; name"),
        (["view", "empty"], 2, "empty is not a run's folder: it has no spec.yaml; name the folder of a run"),
        (["view", "tiny.yaml"], 2, "tiny.yaml is not a run's folder: it is a file"),
        (["view", "."], 2, ". is not a run's folder: it holds the runs begun: name one of them, such as begun"),
        (["view", "begun"], 1, "neither an update nor a measurement"),
        (["top", "nowhere"], 2, "nowhere is not a run's folder: it doesn't exist"),
        (["top", "begun"], 1, "phones.json can't be read (No such file or directory): name the folder of a run whose"),
        (["export", "nowhere", "model"], 2, "nowhere is not a run's folder: it doesn't exist"),
        (["export", "empty", "model"], 2, "empty is not a run's folder"),
        (["export", "begun", "begun"], 2, "begun is not empty"),
        (["export", "begun", "tiny.yaml"], 2, "tiny.yaml is a file"),
        (["eval", "-f", "tiny.yaml"], 2, "runs/tiny/export holds no model"),
        (["eval", "-f", "tiny.yaml", "--model", "empty"], 2, "empty holds no model"),
        (["sft", "-f", "tiny.yaml", "--set", NO_WARM_START], 2, "spec.warmStart is not set"),
        (["tiny", "build", "--output", "tiny.yaml"], 2, "tiny.yaml is a file"),
        (["agent", "show", "empty"], 2, "config.json of empty"),
        (["agent", "show", "nowhere"], 2, "the model folder nowhere does not exist"),
        (["agent", "show", "-f", "tiny.yaml", "--image", "nowhere.png"], 2, "--image: nowhere.png: No such file"),
        (
            ["agent", "show", "-f", "tiny.yaml", "--image", "tiny.yaml"],
            2,
            "--image: tiny.yaml: is not a PNG, JPEG or WebP",
        ),
        (["env", "bench", "http://127.0.0.1:1", "--output", "no/x.json"], 2, "the folder no doesn't exist"),
        (["plan", "-f", "tiny.yaml", "--memory", "--measured", "nowhere"], 2, "--measured nowhere: "),
    ],
)
def test_folders_that_are_something_else(house: House, words: list[str], code: int, expected: str) -> None:
    """2 is the caller's turn; 1 is that of what was named rightly: the run, the machine, a server."""
    (house.folder / "empty").mkdir()
    (house.folder / "begun").mkdir()
    (house.folder / "begun" / "spec.yaml").write_text(SPEC)
    said = house.type(*(word.replace("{here}", str(house.folder)) for word in words))
    assert expected.replace("{here}", str(house.folder)) in said.words
    assert said.code == code


# --- which failures are words -----------------------------------------------------------------------------------------


def test_a_failure_is_words_with_its_notes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> int:
        error = RolloutError("no phone is left")
        error.add_note("update 3 is saved")
        raise error

    monkeypatch.setattr("tapforge_trainer.session.run_session", fails)
    said = house.type_run()
    assert said.code == 1 and said.words.endswith("\nError: no phone is left\nupdate 3 is saved\n")


def test_a_programming_error_keeps_its_traceback(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> int:
        return {}["missing"]

    monkeypatch.setattr("tapforge_trainer.session.run_session", fails)
    with pytest.raises(KeyError, match="missing"):
        house.type_run()
