"""What only a GPU can show; needs no download, and runs with whatever of torch, vLLM and flash-attn is installed.

    python bench/gpu.py [--only learner] [--model qwen3-vl-8b] [--folder MODEL] [--again]

In the order of what has to be known first, in one hour at most:

- `doctor`: what `tapforge doctor` finds on the machine
- `proof`: gaps between a 2B's learner and engine with heads in fp32 and in bf16, and the slope of the engine's change
- `transfer`: weight syncs with their proofs: CUDA IPC on one GPU, NCCL with two
- `lora`: what merged adapters keep of the learner's change
- `tensor_parallel`: an engine on two GPUs
- `learner`: tokens per second and MFU of updates of an 8B with LoRA on one GPU, packed sequences, random weights
- `attention`: packed attention (torch's flash kernel, newer ones, flash-attn) beside padded SDPA
- `engine`: answers per second of a vLLM engine on a 2B, and GB/s of a weight sync with its proof

Each part runs in a process of its own and has its time; one that is cut off keeps the figures that it has said. What is
done is kept, and the next call goes on with the rest. What can't run is skipped and named. Without a GPU it ends at
once with exit code 2. Writes bench-results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from load.machine import machine, show, write

#: model of each part, and how long it may take, seconds: an hour together
PARTS = {
    "doctor": ("", 60),
    "proof": ("qwen3-vl-2b", 900),
    "transfer": ("qwen3-vl-2b", 600),
    "lora": ("qwen3-vl-2b", 420),
    "tensor_parallel": ("qwen3-vl-2b", 300),
    "learner": ("qwen3-vl-8b", 600),
    "attention": ("qwen3-vl-8b", 180),
    "engine": ("qwen3-vl-2b", 540),
}
#: after its time a part has so long to end, seconds
_GRACE = 5.0
HERE = Path(__file__).resolve().parent


def has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))


def part(name: str, model: str, folder: Path | None, seconds: float) -> dict[str, Any]:
    """Its figures, or why there are none."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, "-W", "ignore", "-m", "load.gpu_part", name]
    command += [*(["--model", model] if model else []), *(["--folder", str(folder)] if folder else [])]
    return bounded(command, environment, seconds)


def bounded(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """The last line of JSON that the command has written: its figures so far, with `cut_off` where its time was over.
    All that it has started in its own session is ended."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        late = ""
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"after {seconds:g} s"
        finally:
            _end(child)
        lines, said = (_lines(stream) for stream in (out, err))
    found: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError):  # a line that was cut off in its middle, or that a library has written
            found = read if isinstance(read := json.loads(line), dict) else found
    if late:
        return found | {"cut_off": late}
    if child.returncode or not found:
        return found | {"failed": said[-1] if said else f"exit code {child.returncode}"}
    return found


def _end(child: subprocess.Popen[Any]) -> None:
    for number, grace in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace)


def _lines(stream: IO[str]) -> list[str]:
    stream.seek(0)
    return stream.read().strip().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--model", help="a published configuration, in place of each part's own")
    parser.add_argument("--folder", type=Path, help="a model with its weights, for the parts about syncs")
    parser.add_argument("--again", action="store_true", help="measure what is done, too")
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu.json"))
    args = parser.parse_args()
    if not has_gpu():
        print(
            "bench-gpu: this machine has no NVIDIA GPU (no /dev/nvidia*), or CUDA_VISIBLE_DEVICES hides it: there is "
            "nothing to measure",
            file=sys.stderr,
        )
        sys.exit(2)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() and not args.again else {}
    found |= machine() | {"date": time.strftime("%Y-%m-%d")}
    failed = False
    for name, (model, seconds) in PARTS.items():
        if args.only not in (None, name):
            continue
        if name in found and not {"failed", "skipped", "cut_off"} & set(found[name]):
            print(f"bench-gpu: {name}: measured before; again with --again")
            continue
        print(f"bench-gpu: {name}: at most {seconds / 60:.0f} minutes", flush=True)
        found[name] = part(name, (args.model or model) if model else "", args.folder, seconds)
        write(args.out, found)
        for reason in ("failed", "skipped", "cut_off"):
            if isinstance(found[name].get(reason), str):
                print(f"bench-gpu: {name}: {reason.upper().replace('_', ' ')}: {found[name][reason]}", file=sys.stderr)
        failed |= bool({"failed", "cut_off"} & set(found[name]))
    rows = [[name, key, value] for name in PARTS for key, value in found.get(name, {}).items()]
    show("GPU", ("part", "figure", "value"), rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
