"""What an engine is doing while it starts, read from the stack of the thread that starts it: no hook in vLLM, no log.

The innermost function that is known decides. A version of vLLM that calls them otherwise is only "starting".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

#: functions of vLLM, torch and Python, and what they are about
_STAGES: Final = {
    "on_this_node": "fetching the model",
    "_find_and_load": "importing vLLM",
    "create_engine_config": "reading the model's configuration",
    "load_model": "loading weights",
    "load_weights": "loading weights",
    "get_all_weights": "loading weights",
    "profile_run": "measuring memory",
    "determine_available_memory": "measuring memory",
    "initialize_kv_caches": "making the key-value cache",
    "initialize_from_config": "making the key-value cache",
    "compile": "compiling",
    "compile_fx": "compiling",
    "_compile": "compiling",
    "_inductor_compile": "compiling",
    "compile_or_warm_up_model": "warming up",
    "warming_up_model": "warming up",
    "capture_model": "capturing CUDA graphs",
    "_capture_cudagraphs": "capturing CUDA graphs",
    "wait_for_ready": "waiting for its worker processes",
    "collective_rpc": "waiting for its worker processes",
}
_STARTING: Final = "starting"


def stage_of(functions: Iterable[str]) -> str:
    """`functions`: names of the stack, the innermost first."""
    return next((_STAGES[name] for name in functions if name in _STAGES), _STARTING)


def stage_of_thread(ident: int | None) -> str:
    frame = sys._current_frames().get(ident) if ident is not None else None
    names = []
    while frame is not None:
        # Python's own machinery of imports is one function, whatever is imported inside.
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return stage_of(names)
