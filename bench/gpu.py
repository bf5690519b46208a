"""What only a GPU can show; needs no download, and runs with whatever of torch, vLLM and flash-attn is installed.

    python bench/gpu.py [--only learner] [--model qwen3-vl-8b] [--again]

- `learner`: tokens per second and MFU of updates of an 8B with LoRA on one GPU, packed sequences, random weights
- `attention`: packed attention (torch's flash kernel, newer ones, flash-attn) beside padded SDPA
- `engine`: answers per second of a vLLM engine on a 2B, and GB/s of a weight sync with its proof: NCCL with two GPUs,
  CUDA IPC on one

Each part runs in a process of its own; what is done is kept, and the next call goes on with the rest. What can't run is
skipped and named. Without a GPU it ends at once with exit code 2. Writes bench-results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from load.machine import machine, show, write

#: model of each part, and how long it may take, seconds
PARTS = {"attention": ("qwen3-vl-8b", 300), "learner": ("qwen3-vl-8b", 900), "engine": ("qwen3-vl-2b", 1800)}
HERE = Path(__file__).resolve().parent


def has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))


def part(name: str, model: str, seconds: float) -> dict[str, Any]:
    """Its figures, or why there are none."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, "-W", "ignore", "-m", "load.gpu_part", name, "--model", model]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {seconds:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return {"failed": said[-1] if said else f"exit code {done.returncode}"}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--model", help="a published configuration, for learner or engine")
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
    found |= machine()
    failed = False
    for name, (model, seconds) in PARTS.items():
        if args.only not in (None, name):
            continue
        if name in found and not {"failed", "skipped"} & set(found[name]):
            print(f"bench-gpu: {name}: measured before; again with --again")
            continue
        print(f"bench-gpu: {name}: at most {seconds / 60:.0f} minutes", flush=True)
        found[name] = part(name, args.model or model, seconds)
        write(args.out, found)
        for reason in ("failed", "skipped"):
            if isinstance(found[name].get(reason), str):
                print(f"bench-gpu: {name}: {reason.upper()}: {found[name][reason]}", file=sys.stderr)
        failed |= "failed" in found[name]
    rows = [[name, key, value] for name in PARTS for key, value in found.get(name, {}).items()]
    show("GPU", ("part", "figure", "value"), rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
