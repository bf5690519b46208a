"""What an engine does while it starts, from its thread's stack."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tapforge_trainer.placement.start_stage import stage_of, stage_of_thread


@pytest.mark.parametrize(
    "stack, stage",
    [
        (["read", "safetensors_weights_iterator", "load_weights", "load_model", "_main"], "loading weights"),
        (["_inductor_compile", "compile_fx", "profile_run", "determine_available_memory"], "compiling"),
        (["forward", "profile_run", "determine_available_memory", "_main"], "measuring memory"),
        (["replay", "capture_model", "compile_or_warm_up_model"], "capturing CUDA graphs"),
        (["get_code", "exec_module", "_find_and_load", "build"], "importing vLLM"),
        (["something_of_a_later_version", "_main"], "starting"),
        ([], "starting"),
    ],
)
def test_the_innermost_function_that_is_known_decides(stack: list[str], stage: str) -> None:
    assert stage_of(stack) == stage


def test_a_thread_s_stack_is_read_while_it_works() -> None:
    inside, done = threading.Event(), threading.Event()

    def load_weights() -> None:
        inside.set()
        done.wait(30)

    thread = threading.Thread(target=load_weights)
    thread.start()
    inside.wait(30)
    assert stage_of_thread(thread.ident) == "loading weights"
    done.set()
    thread.join()
    assert stage_of_thread(thread.ident) == stage_of_thread(None) == "starting"


@pytest.mark.parametrize(
    "file, names",
    [
        ("worker/gpu_model_runner.py", ("load_model", "profile_run", "capture_model")),
        ("worker/gpu_worker.py", ("load_model", "determine_available_memory", "compile_or_warm_up_model")),
        ("worker/gpu_worker.py", ("initialize_from_config",)),
        ("executor/abstract.py", ("collective_rpc",)),
    ],
)
def test_vllm_has_the_functions_that_are_known(file: str, names: tuple[str, ...]) -> None:
    """A new version that renames them shows here. Its files are read, for importing it takes long."""
    place = find_spec("vllm")
    assert place is not None and place.origin is not None
    text = (Path(place.origin).parent / "v1" / file).read_text()
    assert [name for name in names if f"def {name}(" not in text] == []
