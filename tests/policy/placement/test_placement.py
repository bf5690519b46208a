"""Who gets which GPUs: decisions. `tests/driver/test_raylets.py` has Ray carry them out."""

from __future__ import annotations

import pytest

from tapforge_trainer.placement.placement import (
    ANYWHERE,
    Bundle,
    DeviceAssignment,
    NodeDevices,
    assign_devices,
    bundles_of,
    placed,
    waits_for,
)
from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings

ENGINE, RANK = Bundle(1, True, 0), Bundle(1, False, 1)


@pytest.mark.parametrize(
    ("ranks", "engines", "parallel", "colocated", "bundles"),
    [
        (1, 1, 1, False, [ENGINE, RANK]),
        (4, 2, 2, False, [Bundle(2, True, 0)] * 2 + [RANK] * 4),
        (4, 4, 1, True, [Bundle(1, True, 1)] * 4),
        (8, 2, 4, True, [Bundle(4, True, 4)] * 2),
        (3, 0, 1, False, [RANK] * 3),
        (3, 0, 1, True, [RANK] * 3),
        (0, 2, 2, True, [Bundle(2, True, 0)] * 2),
    ],
)
def test_bundles(ranks: int, engines: int, parallel: int, colocated: bool, bundles: list[Bundle]) -> None:
    assert list(bundles_of(ranks, engines, parallel, colocated=colocated)) == bundles


def test_two_engines_get_no_gpu_in_common() -> None:
    with pytest.raises(ValueError, match="4 ranks can't share the GPUs of 3 engines of 1"):
        bundles_of(4, 3, 1, colocated=True)


def test_processes_are_numbered_by_node_and_gpu() -> None:
    bundles = bundles_of(4, 1, 2, colocated=False)
    sites = [
        NodeDevices("b", ("3", "2")),
        NodeDevices("b", ("10",)),
        NodeDevices("a", ("1",)),
        NodeDevices("b", ("9",)),
        NodeDevices("a", ("0",)),
    ]
    engines, ranks = assign_devices(bundles, sites)
    assert engines == [DeviceAssignment(0, ("2", "3"))]
    assert ranks == [
        DeviceAssignment(4, ("0",)),
        DeviceAssignment(2, ("1",)),
        DeviceAssignment(3, ("9",)),
        DeviceAssignment(1, ("10",)),
    ]


def test_colocated_rank_k_has_the_engines_kth_gpu() -> None:
    bundles = bundles_of(4, 2, 2, colocated=True)
    engines, ranks = assign_devices(bundles, [NodeDevices("a", ("3", "1")), NodeDevices("a", ("0", "2"))])
    assert engines == [DeviceAssignment(1, ("0", "2")), DeviceAssignment(0, ("1", "3"))]
    assert [seat.devices for seat in ranks] == [("0",), ("2",), ("1",), ("3",)]
    # GPUs of MIG and of some clusters have names instead of numbers.
    _, ranks = assign_devices(
        bundles_of(2, 2, 1, colocated=True), [NodeDevices("a", ("GPU-f0",)), NodeDevices("a", ("GPU-0a",))]
    )
    assert [seat.devices for seat in ranks] == [("GPU-0a",), ("GPU-f0",)]


@pytest.mark.parametrize(
    ("nodes", "free", "words"),
    [
        ([{"CPU": 4.0}], {"CPU": 4.0}, "waiting for GPUs: 0 of 6 are in the Ray cluster"),
        ([{"GPU": 3, "CPU": 9}] * 2, {}, "waiting for a node with 4 GPUs and 1 CPUs, which an engine needs: the nodes"),
        ([{"GPU": 8, "CPU": 0}], {}, "with 4 GPUs and 1 CPUs, which an engine needs: the nodes have 8 and 0"),
        (
            [{"GPU": 8, "CPU": 9}],
            {"GPU": 2, "CPU": 9},
            "waiting for 6 GPUs and 3 CPUs by nodes as engines and ranks need",
        ),
    ],
)
def test_who_waits_says_for_what(nodes: list[dict[str, float]], free: dict[str, float], words: str) -> None:
    assert words in waits_for(bundles_of(2, 1, 4, colocated=False), nodes, free)


async def test_on_cpus_ray_places_as_it_likes_and_no_group_is_asked_for() -> None:
    engine, learner = EngineSettings("m", (1,), (2,)), LearnerSettings("m", (1,), ranks=4)
    for settings in ((engine, 2, learner), (engine, 2, None), (None, 0, learner), (None, 0, None)):
        found = await placed(*settings, report=lambda words: None)
        assert (found.engines, found.ranks, found.group) == ((), (), None)
        found.close()
    assert ANYWHERE.options == {"num_cpus": 0} and not ANYWHERE.environment
