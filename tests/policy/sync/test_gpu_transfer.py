"""What the ranks decide and call for a transfer between GPUs. Sending itself needs GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.families import real

from tapforge_trainer.placement.settings import EngineSettings
from tapforge_trainer.sync import gpu as gpu_transfer
from tapforge_trainer.sync.gpu import DeviceMismatch, EngineWire, mismatch, send

SETTINGS = EngineSettings("m", (1,), (1,), device="cuda", dtype="bfloat16", transfer="nccl", tensor_parallel=2)


class Handle:
    """An engine's actor."""

    def __init__(self, devices: list[str] | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.worker = SimpleNamespace(remote=lambda method, arguments: self.calls.append((method, arguments)))
        self.devices = SimpleNamespace(remote=lambda: devices)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "get", lambda calls, timeout: calls)


def test_each_worker_of_each_engine_has_a_number_of_its_own_in_the_group() -> None:
    """vLLM adds the worker's number within its engine to the offset."""
    handles = [Handle() for _ in range(3)]
    EngineWire(handles, 2, 60.0).init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    offsets = [handle.calls[0][1]["init_info"]["rank_offset"] for handle in handles]
    assert offsets == [1, 3, 5] and {k + w for k in offsets for w in range(2)} == set(range(1, 7))


class Transfer:
    def __init__(self, log: list[Any]):
        self._log = log

    def send_weights(self) -> None:
        self._log.append("send")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was connected to and sent."""
    log: list[Any] = []

    def trainer_init(info: Any, *, client: Any, source: Any) -> Transfer:
        log.append(info)
        return Transfer(log)

    monkeypatch.setattr(gpu_transfer.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    meta = SimpleNamespace(shape=(4, 3), dtype=SimpleNamespace(itemsize=2))
    monkeypatch.setattr(gpu_transfer, "RankSource", lambda rank: SimpleNamespace(metadata=lambda: [meta, meta]))
    return log


def test_the_group_holds_the_first_rank_and_all_workers_and_is_made_anew_when_engines_change(
    connected: list[Any],
) -> None:
    rank = SimpleNamespace(rank=0, transfer=None)
    handles = [Handle(), Handle()]

    def sent(members: list[tuple[int, int]]) -> int:
        return send(rank, members, handles[: len(members)], SETTINGS, "tcp://10.0.0.1:29500", 60.0)

    assert sent([(0, 0), (1, 0)]) == sent([(0, 0), (1, 0)]) == 48
    (info, *rest) = connected
    assert rest == ["send", "send"]
    assert (info.world_size, info.rank, info.master_address, info.master_port) == (5, 0, "10.0.0.1", 29500)
    assert info.packed and info.packed_buffer_size_bytes == gpu_transfer.BUCKET_BYTES
    connected.clear()
    sent([(0, 0), (1, 1)])  # the second was started again
    sent([(0, 0)])
    assert [getattr(one, "world_size", one) for one in connected] == [5, "send", 3, "send"]


def test_workers_have_to_share_their_gpus_with_ranks_one_by_one() -> None:
    assert mismatch(["a", "b", "c", "d"], {0: ["a", "b"], 1: ["d", "c"]}) == ""
    assert mismatch(["a", "b"], {1: ["b"]}) == "", "engine 0 is dead"
    assert mismatch(["a", "b"], {0: ["a"], 1: ["x"]}) == (
        "worker 0 of engine 1 is on GPU x, where no learner rank is; ranks are on a, b"
    )
    said = mismatch(["a", "b"], {0: ["a", "b"], 1: ["b", "a"]})
    assert said == "worker 0 of engine 1 is on GPU b, as worker 1 of engine 0 is"


@pytest.mark.parametrize("index", [0, 1])
def test_every_rank_refuses_when_an_engine_is_on_another_gpu(
    monkeypatch: pytest.MonkeyPatch, connected: list[Any], index: int
) -> None:
    import torch
    from torch import distributed

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device))

    def gathered(found: list[Any], mine: Any) -> None:
        found[:] = [("gpu-0", {0: ["gpu-1"], 1: ["gpu-7"]}), ("gpu-1", {})]
        assert mine == found[index]

    monkeypatch.setattr(distributed, "all_gather_object", gathered)
    rank = SimpleNamespace(rank=index, world=2, device=f"gpu-{index}", transfer=None)
    settings = EngineSettings("m", (1,), (1,), device="cuda", transfer="ipc", colocated=True)
    with pytest.raises(DeviceMismatch, match=r"engine 1 is on GPU gpu-7.*placement\.mode apart"):
        send(rank, [(0, 0), (1, 0)], [Handle(["gpu-1"]), Handle(["gpu-7"])], settings, "tcp://h:1", 60.0)
    assert connected == []


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"])
def test_the_bucket_between_processes_on_a_gpu_holds_the_largest_tensor_of_a_real_model(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """vLLM's own packing, of real widths without memory: it refuses a tensor that its bucket can't hold."""
    import torch
    import transformers
    from vllm.distributed.weight_transfer import packed_tensor

    shown = real.config(name, layers=1, depth=1)
    with torch.device("meta"):
        model = getattr(transformers, shown.architectures[0])(shown)
    infos: list[Any] = []

    def trainer_init(info: Any, *, client: Any, source: Any) -> Transfer:
        infos.append((info, source))
        return Transfer([])

    monkeypatch.setattr(gpu_transfer.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(gpu_transfer, "_check_devices", lambda *_: None)
    settings = SimpleNamespace(dtype="bfloat16")
    rank = SimpleNamespace(
        rank=0, transfer=None, device=torch.device("meta"), settings=settings, policy=SimpleNamespace(model=model)
    )
    sent = send(rank, [(0, 0)], [Handle()], replace(SETTINGS, transfer="ipc", colocated=True), "tcp://h:1", 60.0)
    ((info, source),) = infos
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: allocate(*size, **kind | {"device": "meta"}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ()))
    assert (
        sum(
            sum(chunk.tensor_sizes)
            for chunk in packed_tensor.packed_ipc_producer(
                iter(source), "gpu", lambda item: item[1], info.packed_buffer_size_bytes
            )
        )
        == sent
    )
    with pytest.raises(ValueError, match="exceeds buffer_size_bytes"):
        list(packed_tensor.packed_ipc_producer(iter(source), "gpu", lambda item: item[1], gpu_transfer.BUCKET_BYTES))
