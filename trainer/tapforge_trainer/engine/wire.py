"""What engines and their clients say to each other, and where a client finds the engines.

- Clients are named by incarnation: an id that no other client object ever has. Keys are a client's own.
- `submit` takes many requests in one call and answers nothing; `collect` is one long poll that returns all results
  there are for this client as soon as there is one. So a Ray call is paid per engine step, not per request.
- Asking twice for the same key is asking once: a client that isn't sure asks again.
- Frames travel once per client: later requests name them by content hash. When the bounded store has dropped one, the
  result says `missing` and the client asks again with bytes.
- An answer that was sampled with weights whose proof failed is thrown away, and its client asks again.
- Each answer of a poll says for how long the engine has stood still for new weights: deadlines stand still with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..learner.frame_store import PixelFormat

#: a result's error that begins so is about the engine, which answers no client any more
DEAD = "the engine is dead"
#: one that begins so is about the weights that sampled it: the client asks again, and is answered with the next ones
REPEAT = "asked again"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    key: str
    #: one image placeholder per frame
    ids: Sequence[int]
    #: content hashes
    frames: tuple[str, ...]
    max_tokens: int
    temperature: float
    seed: int | None = None
    ignore_stop: bool = False
    #: the result's log-probabilities are of the prompt's tokens, the first one's not a number; over the whole
    #: vocabulary, whatever may be sampled
    scored: bool = False


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Arrays are int32 and float32 bytes: they travel cheaper than lists."""

    key: str
    prompt_ids: bytes = b""
    ids: bytes = b""
    logprobs: bytes = b""
    #: (version, first token, end)
    versions: tuple[tuple[int, int, int], ...] = ()
    finish_reason: str = ""
    error: str = ""
    #: frames that are not at hand any more; ask again with their bytes
    missing: tuple[str, ...] = ()

    def row(self, key: str) -> tuple[Any, ...]:
        """As it travels: under the client's own key."""
        return (
            key,
            self.prompt_ids,
            self.ids,
            self.logprobs,
            self.versions,
            self.finish_reason,
            self.error,
            self.missing,
        )


#: keys of requests that prove an update begin with this; their results are never held back
PROBE = "probe-"


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Of an engine since its start. Prefix: tokens of prompts; multimodal: frames of prompts; encoded: frames that the
    vision tower computed; dropped: tokens that were in the prefix cache when new weights came in."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    mm_queries: int = 0
    mm_hits: int = 0
    encoded: int = 0
    dropped: int = 0

    def since(self, earlier: CacheCounts) -> CacheCounts:
        return CacheCounts(
            self.prefix_queries - earlier.prefix_queries,
            self.prefix_hits - earlier.prefix_hits,
            self.mm_queries - earlier.mm_queries,
            self.mm_hits - earlier.mm_hits,
            self.encoded - earlier.encoded,
            self.dropped - earlier.dropped,
        )

    def plus(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(
            self.prefix_queries + other.prefix_queries,
            self.prefix_hits + other.prefix_hits,
            self.mm_queries + other.mm_queries,
            self.mm_hits + other.mm_hits,
            self.encoded + other.encoded,
            self.dropped + other.dropped,
        )

    def rates(self) -> dict[str, float]:
        """Hits per query, of those caches that were asked, and what was dropped. A frame is a hit of the encoder's
        cache where no tower computed it for its prompt: embeddings, or keys and values behind them, were there."""
        found = {"sync_dropped_tokens": float(self.dropped)}
        if self.prefix_queries:
            found["prefix_cache_hit_rate"] = self.prefix_hits / self.prefix_queries
        if self.mm_queries:
            found["mm_cache_hit_rate"] = self.mm_hits / self.mm_queries
            # after a sync those under way are computed a second time
            found["encoder_cache_hit_rate"] = max(0.0, 1 - self.encoded / self.mm_queries)
        return found


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine that may be asked."""

    index: int
    #: counts the starts of the engine with this index
    incarnation: int
    #: Ray's handle
    actor: Any


@dataclass(frozen=True, slots=True)
class Replicas:
    """The engines that may be asked now. One that is missing is dead, or has no proven weights yet."""

    #: larger is newer
    serial: int
    live: tuple[Replica, ...]
    #: why none will answer any more
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """All that a process needs to ask the engines; travels to other processes through Ray."""

    form: PixelFormat
    #: the model's image placeholder
    image_id: int
    #: for an answer, with the wait for its turn; while an engine stands still for new weights, or none may be asked,
    #: they do not run, but for what exceeds `pause_seconds`
    answer_seconds: float
    pause_seconds: float
    replicas: Replicas


def engine_key(client: str, key: str) -> str:
    """A client's key among those of all clients."""
    return f"{client}/{key}"
