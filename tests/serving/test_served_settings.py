"""`spec.models` before anything is started: what servers are told, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tapforge_api import load
from tapforge_api.gpus import gpus_needed
from tapforge_trainer.model_source.tiny_base import base_folder
from tapforge_trainer.run.assembly import ConfigurationError, SetupError, inspect
from tapforge_trainer.run.plan_rewards import models_line
from tapforge_trainer.run.served_model_errors import images_sent, notes_on_models
from tapforge_trainer.run.served_models import asks_models, counted, server_settings, without_own_models
from tapforge_trainer.run.shutdown import StopSignal
from tapforge_trainer.serving.gate import TokenGate
from tapforge_trainer.serving.settings import arguments, environment
from tapforge_trainer.session import eval_session

QUICKSTART = Path("manifests/samples/quickstart.yaml")
REWARDS = {"streams": [{"name": "judge", "judge": {"models": [{"model": "own"}]}}]}


@pytest.fixture
def blind(tmp_path: Path) -> Path:
    """A language model without a vision tower."""
    folder = tmp_path / "blind"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 32768}')
    return folder


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    shutil.copytree(base_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    return folder


def run_with(judge: dict[str, Any] | None = None, **model: Any):
    served = {"name": "own", "source": {"tiny": {}}, "contextTokens": 2048, **model}
    streams = [
        {"name": "judge", "judge": {"models": [{"model": "own"}], "screens": 5, **(judge or {})}},
        {"name": "steps", "judge": {"models": [{"model": "own"}]}},
    ]
    sets = [f"spec.models={json.dumps([served])}", f"spec.rewards={json.dumps({'streams': streams})}"]
    return load(QUICKSTART, sets)


def test_a_server_takes_as_many_images_as_its_judges_send_and_keeps_its_token_to_itself(tmp_path: Path) -> None:
    run = run_with()
    assert images_sent([run.spec.rewards]) == {"own": 5}
    assert images_sent([run_with({"prompt": "clawgui-task"}).spec.rewards]) == {"own": 2}
    (settings,) = server_settings(run, tmp_path, "cpu", {"own": 5}, keep=False, log=None)
    words = arguments(settings, base_folder(), "127.0.0.1", 8000)
    assert words[words.index("--limit-mm-per-prompt") + 1] == '{"image": 5, "video": 0}'
    assert words[words.index("--served-model-name") + 1] == "own" and "--gpu-memory-utilization" not in words
    assert settings.token not in " ".join(words) and settings.token not in repr(settings)
    assert environment(settings, {})["VLLM_API_KEY"] == settings.token
    (other,) = server_settings(run, tmp_path, "cpu", {"own": 5}, keep=False, log=None)
    assert other.token != settings.token


@pytest.mark.parametrize(
    ("model", "judge", "words"),
    [
        ({"source": {"path": {"folder": "BLIND"}}}, {}, r"takes no images by its config.json, .* up to 5 screens"),
        ({"source": {"path": {"folder": "nowhere"}}}, {}, r"spec.models\[own\].source.path.folder: .*no config.json"),
        ({"contextTokens": 65536}, {}, r"spec.models\[own\].contextTokens: 65,536 is more than the model's 4,096"),
        ({"source": {"path": {"folder": "PACKED"}}}, {}, r"quantized weights, which are served on GPUs alone"),
    ],
)
def test_what_a_model_can_t_do_is_refused_before_anything_starts(
    model: dict[str, Any], judge: dict[str, Any], words: str, blind: Path, packed: Path, tmp_path: Path
) -> None:
    text = json.dumps(model).replace("BLIND", str(blind)).replace("PACKED", str(packed))
    run = run_with(judge, **json.loads(text))
    on_cpus = run.model_copy(update={"spec": run.spec.model_copy(update={"device": "cpu"})})
    with pytest.raises(ConfigurationError, match=words):
        inspect(on_cpus, tmp_path)
    # Where no judge asks it, a run doesn't start it: `tapforge collect` may, on another machine.
    alone = on_cpus.spec.model_copy(update={"rewards": load(QUICKSTART).spec.rewards})
    inspect(on_cpus.model_copy(update={"spec": alone}), tmp_path)


def test_a_judge_that_sends_no_screen_may_ask_a_model_that_sees_none(blind: Path, tmp_path: Path) -> None:
    source = {"source": {"path": {"folder": str(blind)}}}
    run = run_with({"prompt": "simulated-phone"}, **source)
    only = run.spec.rewards.model_copy(update={"streams": run.spec.rewards.streams[:1]})
    inspect(run.model_copy(update={"spec": run.spec.model_copy(update={"rewards": only})}), tmp_path)
    with pytest.raises(ConfigurationError, match="vllm serve MODEL --served-model-name own"):
        without_own_models([only], "rescore")


def test_a_session_that_learns_nothing_starts_models_only_where_judges_say_how_its_episodes_end() -> None:
    run = run_with()
    judged = run.spec.evaluation.model_copy(update={"judged": True})
    measured = run.model_copy(update={"spec": run.spec.model_copy(update={"evaluation": judged})})
    assert asks_models(run, learner=True) and asks_models(measured, learner=False)
    assert not asks_models(run, learner=False) and not asks_models(load(QUICKSTART), learner=True)
    # and it needs no GPUs for those that it doesn't start
    for learner, engines, one, gpus in ((True, True, run, 3), (False, True, measured, 3), (False, True, run, 2)):
        assert gpus_needed(counted(one, learner=learner, engines=engines).spec) == gpus
    assert gpus_needed(counted(measured, learner=True, engines=False).spec) == 2


async def test_a_measurement_s_judge_is_the_model_that_the_run_was_pinned_to(tmp_path: Path) -> None:
    run = run_with(source={"objectStorage": {"uri": "s3://nowhere/judge"}})
    judged = run.spec.evaluation.model_copy(update={"judged": True})
    measured = run.model_copy(update={"spec": run.spec.model_copy(update={"evaluation": judged})})
    pin = tmp_path / measured.metadata.name / "model-own.json"
    pin.parent.mkdir()
    pin.write_text("{")
    with pytest.raises(SetupError, match=f"{pin}, what the model was pinned to, can't be read"):
        await eval_session(measured, tmp_path, base_folder(), StopSignal())


def test_a_plan_says_where_a_question_s_screens_are_more_than_a_model_s_context_holds(tmp_path: Path) -> None:
    """By default a model reads 32,768 tokens, and a judge shows 16 screens, which phones may draw large."""
    phones = [f"spec.environment.source={json.dumps({'processes': {'count': 1}})}"]
    large = {"width": 1080, "height": 2400}
    phones += [f"spec.environment.screen={json.dumps(large)}", f"spec.rewards={json.dumps(REWARDS)}"]
    own = [f"spec.models={json.dumps([{'name': 'own', 'source': {'tiny': {}}}])}"]

    def notes(*sets: str) -> list[str]:
        run = load(QUICKSTART, [*phones, *own, *sets])
        return notes_on_models(run, [run.spec.rewards])

    assert notes() == [] == notes("spec.recording.screens=device", "spec.rewards.streams[0].judge.screens=8")
    (note,) = notes("spec.recording.screens=device")
    assert "contextTokens (32,768)" in note and "16 screens" in note and "recording.screens to model" in note


def test_a_plan_says_which_models_a_run_doesn_t_start() -> None:
    run = load(QUICKSTART, [f"spec.models={json.dumps([{'name': 'large', 'source': {'tiny': {}}}])}"])
    assert not asks_models(run, learner=True)
    (note,) = notes_on_models(run, [run.spec.rewards])
    assert "asked by no judge: a run doesn't start it" in note and "tapforge collect --teacher large" in note
    assert models_line(run.spec).endswith("as a teacher alone") and gpus_needed(run.spec) == 2
    assert not models_line(run_with().spec).endswith("as a teacher alone")


@pytest.mark.parametrize(
    ("kind", "path", "headers", "answered"),
    [
        ("http", "/health", [], True),
        ("lifespan", "", [], True),
        ("http", "/v1/chat/completions", [(b"authorization", b"Bearer right")], True),
        ("http", "/v1/chat/completions", [(b"authorization", b"Bearer wrong")], False),
        ("http", "/invocations", [], False),  # vLLM's own check leaves it open
        ("websocket", "/v1/realtime", [], False),
    ],
)
async def test_without_its_token_a_server_says_only_how_it_is(
    kind: str, path: str, headers: Any, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    seen, sent = [], []

    async def app(*given: Any) -> None:
        seen.append(given)

    async def send(message: Any) -> None:
        sent.append(message)

    await TokenGate(app)({"type": kind, "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    assert bool(seen) == answered
    assert [one.get("status", one.get("code")) for one in sent[:1]] == (
        [] if answered else [401 if kind == "http" else 1008]
    )


@pytest.mark.parametrize("how", ["input ends", "module ends", "guard is killed"])
def test_a_guarded_module_leaves_no_process_behind(how: str, tmp_path: Path) -> None:
    """Neither itself nor what it has started."""
    wait = "time.sleep(0.5)" if how == "module ends" else "time.sleep(600)"
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    said = "open('child', 'w').write(f'{child.pid}')"
    code = f"import os, subprocess, sys, time\nchild = {child}\n{said}\nos.rename('child', 'pid')\n{wait}\n"
    (tmp_path / "module.py").write_text(code)
    guard = subprocess.Popen(
        [sys.executable, "-m", "tapforge_trainer.serving.guard", "module"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    while not (tmp_path / "pid").exists():
        assert guard.poll() is None
    own = psutil.Process(int((tmp_path / "pid").read_text()))
    if how == "input ends":
        assert guard.stdin is not None
        guard.stdin.close()
    if how == "guard is killed":
        guard.kill()
    guard.wait(60)
    psutil.wait_procs([own], timeout=60)
    assert not own.is_running() or own.status() == psutil.STATUS_ZOMBIE
