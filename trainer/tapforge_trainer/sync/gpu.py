"""Weights between GPUs by vLLM's own transfer engines: NCCL broadcast, or CUDA IPC where ranks and engines share GPUs.

Runs on the learner's ranks, all of them together: each joins in gathering a parameter. Over NCCL the first one sends;
by IPC each shows its own GPU's copy to the engine's worker there, which finds it by the GPU's UUID. Workers get whole
tensors and load their share. The engines are paused meanwhile (`sync.py`). Sending itself needs GPUs, and no
test of this repository reaches it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ..learner.sharding import EngineWeights, SentWeights
from ..placement.settings import EngineSettings

if TYPE_CHECKING:
    from ..learner.rank import Rank

#: of a packed bucket, at least. While weights travel the sender and every worker hold two over NCCL, each of which may
#: exceed this by the tensor that fills it; by IPC the rank holds one (`bucket_bytes`) and the worker copies of what is
#: in it
BUCKET_BYTES = 256 * 1024 * 1024


class DeviceMismatch(RuntimeError):
    """Ranks and engines do not share GPUs one by one."""


class RankSource(WeightSource):
    """A rank's weights as engines load them, on the rank's GPU, whose wire gathers them also where shards are in the
    host's memory."""

    def __init__(self, rank: Rank):
        self._rank = rank

    def metadata(self) -> list[ParamMeta]:
        weights = self._weights(None)
        return [ParamMeta(name, weights.dtype, shape) for name, shape in weights.shapes()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._rank.sent = SentWeights(digested=self._rank.rank == 0)
        return iter(self._weights(self._rank.sent))

    def _weights(self, sent: SentWeights | None) -> EngineWeights:
        rank = self._rank
        return EngineWeights(rank.policy.model, getattr(torch, rank.settings.dtype), rank.device, sent)


class EngineWire:
    """What vLLM's trainer side calls: the four steps, on every engine at once. The first rank is number 0 of the group,
    engine k's workers are the `workers` numbers from 1 + k * workers on."""

    def __init__(self, actors: Sequence[Any], workers: int, deadline: float):
        self._actors, self._workers, self._deadline = actors, workers, deadline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._actors]
        for k, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += k * self._workers
        self._each("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._each("start_weight_update", [{}] * len(self._actors))
        self._each("watch_arrivals", [{}] * len(self._actors))

    def update_weights(self, update_info: Any) -> None:
        self._each("update_weights", [{"update_info": update_info}] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update", [{}] * len(self._actors))

    def _each(self, method: str, arguments: Sequence[dict[str, Any]]) -> None:
        import ray

        calls = [actor.worker.remote(method, found) for actor, found in zip(self._actors, arguments, strict=True)]
        ray.get(calls, timeout=self._deadline)


def send(
    rank: Rank,
    members: Sequence[tuple[int, int]],
    actors: Sequence[Any],
    settings: EngineSettings,
    address: str,
    deadline: float,
) -> int:
    """One full set of weights to all engines, in packed buckets; returns its bytes. The first call connects, and each
    whose `members` (index and incarnation of the engines) differ from the last one's: a group of ranks and engines
    can't change. What an earlier group held stays until the process ends, because closing it would wait for an engine
    that is dead. Raises DeviceMismatch on every rank, before anything is sent."""
    connected: tuple[tuple[int, int], ...]
    transfer: Any
    connected, transfer = rank.transfer or ((), None)
    source = RankSource(rank)
    if connected != tuple(members):
        place = urlparse(address)
        info: Any
        if settings.transfer == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(
                master_address=str(place.hostname),
                master_port=int(place.port or 0),
                world_size=1 + len(actors) * settings.tensor_parallel,
                rank=rank.rank,
                packed=True,
                packed_buffer_size_bytes=BUCKET_BYTES,
            )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            _check_devices(rank, members, actors, deadline)
            info = IPCTrainerInitInfo(
                rank=rank.rank, packed=True, packed_buffer_size_bytes=bucket_bytes(source.metadata())
            )
        wire = EngineWire(actors, settings.tensor_parallel, deadline)
        transfer = WeightTransferTrainerFactory.trainer_init(info, client=wire, source=source)
        rank.transfer = (tuple(members), transfer)
    transfer.send_weights()
    if settings.colocated:
        give_back_memory(rank)
    return sum(_bytes_of(one) for one in source.metadata())


def bucket_bytes(weights: Iterable[ParamMeta]) -> int:
    """Of the one bucket by IPC, which never grows: vLLM refuses a tensor that does not fit. The same on all ranks."""
    return max([BUCKET_BYTES, *(_bytes_of(one) for one in weights)])


def _bytes_of(weight: ParamMeta) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize


def give_back_memory(rank: Rank) -> None:
    """What torch keeps of the rank's GPU for later goes to the engine that shares it."""
    gc.collect()
    torch.cuda.empty_cache()


def mismatch(ranks: Sequence[str], engines: Mapping[int, Sequence[str]]) -> str:
    """What is wrong with the GPUs of ranks and engines (by index, workers in order), all given by UUID; empty if every
    worker shares its GPU with a rank and no two share one."""
    users: dict[str, str] = {}
    for index, devices in engines.items():
        for worker, device in enumerate(devices):
            name = f"worker {worker} of engine {index}"
            if device not in ranks:
                return f"{name} is on GPU {device}, where no learner rank is; ranks are on {', '.join(ranks)}"
            if device in users:
                return f"{name} is on GPU {device}, as {users[device]} is"
            users[device] = name
    return ""


def _check_devices(rank: Rank, members: Sequence[tuple[int, int]], actors: Sequence[Any], deadline: float) -> None:
    import ray
    from torch import distributed

    mine = str(torch.cuda.get_device_properties(rank.device).uuid)
    theirs: dict[int, Sequence[str]] = {}
    if rank.rank == 0:
        found = ray.get([actor.devices.remote() for actor in actors], timeout=deadline)
        theirs = {index: devices for (index, _), devices in zip(members, found, strict=True)}
    gathered: list[Any] = [None] * rank.world
    distributed.all_gather_object(gathered, (mine, theirs))
    if why := mismatch([device for device, _ in gathered], gathered[0][1]):
        raise DeviceMismatch(f"weights can't be handed over within a GPU: {why}; placement.mode apart needs no sharing")
