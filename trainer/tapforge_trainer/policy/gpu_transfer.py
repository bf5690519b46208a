"""Weights between GPUs by vLLM's own transfer engines: NCCL broadcast, or CUDA IPC where ranks and engines share GPUs.

Runs on the learner's ranks, all of them together: each joins in gathering a parameter, the first one sends. The
engines are paused meanwhile (`sync._transfer`). No test of this repository reaches this file: it needs GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from .sharding import EngineWeights

if TYPE_CHECKING:
    from .rank import Rank


class RankSource(WeightSource):
    """A rank's weights as engines load them."""

    def __init__(self, rank: Rank):
        self._weights = EngineWeights(rank.policy.model, getattr(torch, rank.settings.dtype))

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._weights.dtype, shape) for name, shape in self._weights.shapes()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


class EngineWire:
    """What vLLM's trainer side calls: the four steps, on every engine at once. Engine k is worker k of the group."""

    def __init__(self, actors: Sequence[Any], deadline: float):
        self._actors, self._deadline = actors, deadline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._actors]
        for k, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += k
        self._each("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._each("start_weight_update", [{}] * len(self._actors))

    def update_weights(self, update_info: Any) -> None:
        self._each("update_weights", [{"update_info": update_info}] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update", [{}] * len(self._actors))

    def _each(self, method: str, arguments: Sequence[dict[str, Any]]) -> None:
        import ray

        calls = [actor.worker.remote(method, found) for actor, found in zip(self._actors, arguments, strict=True)]
        ray.get(calls, timeout=self._deadline)


def send(
    rank: Rank, members: Sequence[tuple[int, int]], actors: Sequence[Any], backend: str, address: str, deadline: float
) -> None:
    """One full set of weights to all engines. The first call connects, and each whose `members` (index and incarnation
    of the engines) differ from the last one's: a group of ranks and engines can't change."""
    connected: tuple[tuple[int, int], ...]
    transfer: Any
    connected, transfer = rank.transfer or ((), None)
    if connected != tuple(members):
        place = urlparse(address)
        info: Any
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(
                master_address=str(place.hostname),
                master_port=int(place.port or 0),
                world_size=1 + len(actors),
                rank=rank.rank,
            )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=rank.rank)
        transfer = WeightTransferTrainerFactory.trainer_init(
            info, client=EngineWire(actors, deadline), source=RankSource(rank)
        )
        rank.transfer = (tuple(members), transfer)
    transfer.send_weights()
