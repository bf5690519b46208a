"""Placements on two nodes of four GPUs each, which raylets make up: real groups, real actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("raylets.py")), str(tmp_path_factory.mktemp("nodes"))]
    online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment = online | {"PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the raylets' program has not ended; it said: {str(error.stderr)[-4000:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def gpus(processes: list[Seen]) -> list[tuple[str, str]]:
    return [(one["node"], device) for one in processes for device in one["devices"]]


@pytest.mark.parametrize(("name", "ranks", "engines", "parallel"), [("apart", 4, 2, 2), ("spread", 6, 1, 2)])
def test_apart_nobody_shares_a_gpu_and_neighbours_are_of_one_node(
    found: dict[str, Any], name: str, ranks: int, engines: int, parallel: int
) -> None:
    seen = found[name]
    assert [len(one["devices"]) for one in seen["engines"]] == [parallel] * engines
    assert [len(one["devices"]) for one in seen["ranks"]] == [1] * ranks
    everybody = gpus(seen["engines"]) + gpus(seen["ranks"])
    assert len(set(everybody)) == ranks + engines * parallel
    assert gpus(seen["ranks"]) == sorted(gpus(seen["ranks"]))


@pytest.mark.parametrize(("name", "parallel"), [("colocated", 1), ("colocated in twos", 2)])
def test_colocated_rank_k_has_gpu_k_of_the_engines(found: dict[str, Any], name: str, parallel: int) -> None:
    seen = found[name]
    assert gpus(seen["engines"]) == gpus(seen["ranks"]) == sorted(gpus(seen["ranks"]))
    assert len(set(gpus(seen["ranks"]))) == len(seen["ranks"]) == len(seen["engines"]) * parallel
    assert {len(one["devices"]) for one in seen["engines"]} == {parallel}


def test_an_engine_that_is_started_again_has_its_own_gpus(found: dict[str, Any]) -> None:
    for name in ("apart", "spread", "colocated", "colocated in twos"):
        assert found[name]["again"] == found[name]["engines"][0]


def test_a_learner_alone_has_gpus_of_its_own(found: dict[str, Any]) -> None:
    assert len(set(gpus(found["learner alone"]["ranks"]))) == 3 and not found["learner alone"]["engines"]


def test_gpus_that_are_not_there_end_the_wait_with_words(found: dict[str, Any]) -> None:
    words = found["too few"]
    assert words["in all"].startswith("waiting for GPUs: 8 of 9 are in the Ray cluster, after 0 s")
    assert words["by node"].startswith("waiting for a node with 5 GPUs and 1 CPUs, which an engine needs")
    assert words["held"].startswith("waiting for 4 GPUs and 3 CPUs by nodes as engines and ranks need them: 3 GPUs and")
    ends = [words[name] for name in ("in all", "by node", "held")]
    assert [end.startswith(told) for end, told in zip(ends, words["told"], strict=True)] == [True] * 3


def test_nothing_is_left_behind(found: dict[str, Any]) -> None:
    assert {name: seen["free"] for name, seen in found.items()} == dict.fromkeys(found, 8.0)
    assert found["lost"]["state"] == "REMOVED"


def test_an_engine_whose_node_is_lost_starts_on_another_one(found: dict[str, Any]) -> None:
    lost = found["lost"]
    assert lost["died"] and lost["after"]["node"] == lost["fresh"] != lost["before"]["node"]
    assert len(set(lost["after"]["devices"])) == 4


def test_each_node_fetches_the_model_once_and_is_offline_afterwards(found: dict[str, Any]) -> None:
    first, second = found["models"]["folders"]
    assert len(first) == len(second) == 1 and first != second
    assert [places[0][0].split("/")[-5] for places in (first, second)] == ["a", "b"]
    assert {offline for _, offline in first + second} == {"1"}
    assert set(found["models"]["sent"].values()) == {2}
