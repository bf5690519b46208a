"""What a policy may say, as a vLLM logits processor: banned tokens get -inf before sampling and log-probabilities.

One fixed mask for all requests. `allowed_token_ids` per request would mean the same, but copies and scatters the whole
vocabulary for every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from .vllm import BANNED

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OnlyAllowed(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        config: Any = vllm_config.additional_config
        self._banned = torch.tensor(config[BANNED], dtype=torch.int64, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The same for every request."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(1, self._banned, float("-inf"))
