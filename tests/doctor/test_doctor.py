"""The command on this machine, and the quick part before a run."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tapforge_api import load
from tapforge_trainer.cli.main import cli
from tapforge_trainer.doctor import machine
from tapforge_trainer.doctor.command import _is_cached, preflight
from tapforge_trainer.run.assembly import SetupError
from tapforge_trainer.telemetry.telemetry import ProgressView, Telemetry

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
REPOSITORY = 'spec.model.source={"huggingFace": {"repo": "maker/model"}}'


class _Hub(http.server.BaseHTTPRequestHandler):
    """As a hub answers about its only model, which is gated."""

    def do_HEAD(self) -> None:
        if not self.path.startswith("/api/models/maker/model/revision/"):
            self.send_error(404)
        elif self.headers.get("Authorization") != "Bearer right":
            self.send_error(401)
        else:
            self.send_response(200)
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _doctor(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(cli, ["doctor", "--output", "json", *words])
    document = json.loads(result.stdout)
    assert (result.exit_code == 1) == (document["state"] == "fail"), result.stdout
    return result.exit_code, {finding["check"]: finding for finding in document["findings"]}


def test_the_quickstart_can_run_here(tmp_path: Path) -> None:
    code, found = _doctor("-f", str(SAMPLE), "--runs", str(tmp_path))
    assert code == 0, found
    assert {"gpus", "packages", "memory", "shm", "disk", "open files", "ray"} <= set(found)
    assert "the plan asks for" in found["memory"]["text"]


def test_gpus_that_are_not_there_are_found(tmp_path: Path) -> None:
    code, found = _doctor("-f", str(SAMPLE), "--runs", str(tmp_path), "--set", "spec.device=cuda")
    assert code == 1 and found["gpus"]["state"] == "fail" and "trainer's image for GPUs" in found["run"]["text"]


@pytest.mark.parametrize(
    "token, state, words", [("", "fail", "HF_TOKEN is not set"), ("right", "ok", "can be fetched")]
)
def test_the_hub_is_asked_with_the_token(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, state: str, words: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    _, found = _doctor("-f", str(SAMPLE), "--runs", str(tmp_path), "--set", REPOSITORY)
    assert (found["model"]["state"], words in found["model"]["text"]) == (state, True), found["model"]
    assert found["clock"]["state"] == "ok"


def test_a_hub_that_does_not_answer_costs_its_deadline_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_HUB_SECONDS", 0.2)
    with http.server.HTTPServer(("127.0.0.1", 0), _Hub) as silent:  # it listens, and never accepts
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.server_port}")
        found = machine._ask_hub("maker/model", "main")
    assert found.status is None and "timed out" in found.error


def test_a_file_that_is_wrong_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "-f", str(SAMPLE), "--set", "spec.nonsense=1"])
    assert result.exit_code == 2 and "nonsense" in result.output


def _telemetry(folder: Path) -> Telemetry:
    return Telemetry(folder, ProgressView("quickstart", 1), Console(quiet=True))


def test_before_a_run_what_is_doubtful_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 1024))
    with closing(_telemetry(tmp_path / "quickstart")) as telemetry:
        preflight(load(SAMPLE), tmp_path / "quickstart", telemetry)
        assert telemetry.view.notes == ["open files: 1024 at most (ulimit -n); ulimit -n 65536"]


def test_before_a_run_what_can_not_work_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64, 64))
    refused = pytest.raises(SetupError, match="can't run quickstart .*\n.*fail.*64 at most")
    with closing(_telemetry(tmp_path / "quickstart")) as telemetry, refused:
        preflight(load(SAMPLE), tmp_path / "quickstart", telemetry)


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(machine.resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert (machine._open_files(), asked) == (4096, [(4096, 4096)])


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("head:6379", ("head", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("http://head:8265", ("head", 8265)),
        ("[::1]:6379", ("::1", 6379)),
        ("auto", None),
        ("", None),
        ("head:port", None),
    ],
)
def test_an_address_of_ray_is_read(address: str, place: tuple[str, int] | None) -> None:
    assert machine._place(address) == place


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://head:10001", "ray://head:10001 is a port of Ray's client"),
        ("nowhere", "nowhere names no host and port"),
        ("127.0.0.1:1", "127.0.0.1:1 can't be reached"),
    ],
)
def test_an_address_where_no_driver_can_be_is_told_before_the_start(address: str, words: str) -> None:
    assert machine._ray_trouble(address).startswith(words)
    assert machine._ray_trouble("auto") == ""


def test_a_machine_whose_name_has_no_address_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "nowhere.invalid")
    assert machine._ray_trouble("") == ""
    assert "nowhere.invalid has no address" in machine._name_trouble()


def test_the_token_of_a_login_is_used(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "right")
    found = machine._ask_hub("maker/model", "main")
    assert (found.status, found.token) == (200, True)


def test_a_model_is_cached_with_all_its_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    assert not _is_cached("maker/model", "main")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert _is_cached("maker/model", "main")
    shards = {"a": "model-1.safetensors", "b": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert not _is_cached("maker/model", "main")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", False),
        ("processor\t: 0\nflags\t\t: avx2 avx512f avx512dq avx512bw avx512vl", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("isa\t\t: rv64imafdc", None),
    ],
)
def test_a_cpu_says_whether_it_has_bfloat16(tmp_path: Path, lines: str, found: bool | None) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    assert machine.cpu_bf16(tmp_path / "cpuinfo") is found
    assert machine.cpu_bf16(tmp_path / "none") is None


def test_this_cpu_says_what_torch_says() -> None:
    import torch

    assert machine.cpu_bf16(Path("/proc/cpuinfo")) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
