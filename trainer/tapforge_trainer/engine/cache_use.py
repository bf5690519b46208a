"""What an engine's caches save, and what a sync drops of them, counted beside vLLM's scheduler. Prompts that prove a
sync don't count.
"""

from __future__ import annotations

from typing import Any

from .wire import PROBE, CacheCounts


class CacheUse:
    """Belongs to the engine's thread; `counts` may be read from any."""

    def __init__(self) -> None:
        #: tokens of answered prompts, and how many of them were in the prefix cache
        self._queries = self._hits = 0
        #: frames that the vision tower computed
        self._encoded = 0
        #: tokens whose keys and values were dropped with the weights that they come from
        self._dropped = 0

    def watch(self, llm: Any) -> None:
        """From the engine's start on. vLLM's scheduler reserves room for each frame that it has computed, and for no
        other one."""
        manager = llm.engine_core.engine_core.scheduler.encoder_cache_manager
        allocate = manager.allocate

        def counted(request: Any, input_id: int) -> None:
            self._encoded += not request.request_id.startswith(PROBE)
            allocate(request, input_id)

        manager.allocate = counted

    def answered(self, output: Any) -> None:
        if not output.request_id.startswith(PROBE):
            self._queries += len(output.prompt_token_ids)
            self._hits += output.num_cached_tokens or 0

    def dropping(self, llm: Any) -> None:
        """Right before the prefix cache is reset."""
        scheduler = llm.engine_core.engine_core.scheduler
        self._dropped += len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) * scheduler.block_size

    def counts(self, frames: int, at_hand: int) -> CacheCounts:
        """`frames`: of prompts, and how many of them needed no preparing."""
        return CacheCounts(self._queries, self._hits, frames, at_hand, self._encoded, self._dropped)
