"""How new weights get into a vLLM engine on CPUs: an engine of ours for vLLM's own weight-transfer interface.

vLLM ships transfers for GPUs only. On CPUs its linear layers keep nothing but a packed copy of their weights, so
loading into the parameters is not enough. What happens between start and finish:
1. start: layerwise reload puts the parameters back in place, so that checkpoint names and shapes are welcome again;
2. receive: the model's own `load_weights` takes (checkpoint name, tensor); layers are packed as they become complete;
3. finish: what is left is packed, and then two kinds of layers by hand, which vLLM packs at the first load only: the
   run would look alive and learn from wrong probabilities. A vocabulary-parallel head that is tied to the embedding
   gets no weight of its own, so the reload leaves its first pack in place. Experts are left unpacked, because on GPUs
   captured graphs hold their addresses.

With tensor parallelism every worker gets the whole tensors and loads its share of each.

Importing this module in a vLLM worker registers the transfer; `WeightReceiver` is named as `worker_extension_cls` for
that, and on every device for the proof of what arrived (`arrivals.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from .adapters import AdapterArrival, replace_adapter
from .arrivals import Arrivals
from .received import Report

NAME = "tapforge-cpu"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    #: safetensors bytes of the whole model, as `learner/sharding.py` packs them
    payload: bytes


class CPUWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No connection is kept."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        weights = load(bytes(update_info.payload))
        self.model.load_weights(iter(weights.items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            elif hasattr(module, "w13_weight"):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """No connection is kept."""


class WeightReceiver:
    """What vLLM's workers do more, on any device. vLLM imports this before it makes the transfer engine."""

    weight_transfer_engine: Any
    model_runner: Any

    def watch_arrivals(self) -> None:
        """Called after `start_weight_update`."""
        known = vars(self).get("tapforge_pieces")
        vars(self)["tapforge_arrivals"] = Arrivals(self.weight_transfer_engine.model, known)

    def take_arrivals(self) -> Report | None:
        """`Arrivals.read` of the last round, once; None: there was none."""
        arrivals: Arrivals | AdapterArrival | None = vars(self).pop("tapforge_arrivals", None)
        if arrivals is None:
            return None
        found = arrivals.read()
        if isinstance(arrivals, Arrivals):
            vars(self)["tapforge_pieces"] = arrivals.pieces
        return found

    def load_adapter(self, adapter_id: int, payload: bytes | None) -> None:
        """`adapters.py:replace_adapter`, with what `learner/sharding.py` packed; None: one that changes nothing."""
        tensors = None if payload is None else load(bytes(payload))
        vars(self)["tapforge_arrivals"] = replace_adapter(self.model_runner, adapter_id, tensors)


def register() -> None:
    known: dict[str, Any] = WeightTransferEngineFactory._registry
    if NAME not in known:
        WeightTransferEngineFactory.register_engine(NAME, CPUWeightTransfer)


register()
