"""Samples as a token batch, and a token batch as micro-batches. Pure numpy: no torch, no Ray.

Promises:
- A sample is checked before it is learned from: it has one placeholder per frame, its spans hold one log-probability
  per token and no token that the policy may not say, and with its frames it has as many tokens as the engine saw.
  `SampleError` names episode, step and token.
- A token batch travels unexpanded; `micro_batch` expands what one micro-batch needs, where its frames are known.
- `plan_micro_batches` is a pure function of lengths and work (`work.py`): every rank gets the same number of
  micro-batches (short ranks get padding ones, marked by weight 0), no micro-batch exceeds the token budget unless one
  sample alone does.
- A micro-batch is packed: its samples end to end in one row. What samples of it share (`prompts.py`) is in the row
  once, in the first of them; those after it have what follows the prompt alone, and attend to both.
- Position ids are those of Qwen2-VL and all that came after it: text counts on; a visual token has the position at
  which its frame begins, plus its row and column; after a frame the text goes on at max(rows, columns).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapforge_trainer.records import ResponseSpan, Sample

from .positions import Positions, grid_positions
from .prompts import FirstPrompts, first_prompts


class SampleError(ValueError):
    """A sample that must not be learned from."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the learner has to know of the tokens."""

    image: int
    #: [vocabulary] bool: what the policy may say
    allowed: np.ndarray

    @staticmethod
    def of(size: int, image: int, allowed_ids: Sequence[int]) -> Vocabulary:
        """`size` is the model's (padded) vocabulary."""
        allowed = np.zeros(size, dtype=bool)
        allowed[np.asarray(allowed_ids, dtype=np.int64)] = True
        return Vocabulary(image, allowed)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Samples, one after another, as they travel: a frame is ONE placeholder, whatever its size."""

    ids: np.ndarray  # [tokens]
    offsets: np.ndarray  # [samples + 1], in `ids`
    #: [samples] tokens after expansion
    lengths: np.ndarray
    frames: tuple[tuple[str, ...], ...]
    episodes: tuple[str, ...]
    #: of the first span
    steps: tuple[int, ...]
    #: by which samples share what is computed
    prompts: FirstPrompts
    #: per response token: its index in `ids`, its sample, its span (numbered through), and what the sample says of it
    index: np.ndarray
    sample: np.ndarray
    span: np.ndarray
    behavior: np.ndarray
    advantage: np.ndarray
    score: np.ndarray
    weight: np.ndarray
    version: np.ndarray
    #: per response token, of its step: what a critic said before the update, and the return that it learns; None:
    #: there is neither
    value: np.ndarray | None = None
    target: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, sample: int) -> str:
        return f"episode {self.episodes[sample]} step {self.steps[sample]}"


def token_batch(samples: Sequence[Sample], vocabulary: Vocabulary, *, share: bool = True) -> TokenBatch:
    """Checks the samples and lays them out. `share`: whether samples share what is computed of equal prompts, where the
    model can do it (`Family.shares_prompts`)."""
    sizes = np.fromiter((len(s.ids) for s in samples), dtype=np.int64, count=len(samples))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    spans = [(k, span) for k, sample in enumerate(samples) for span in _checked_spans(sample)]
    start = np.asarray([span.start for _, span in spans], np.int64)
    count = np.asarray([span.end for _, span in spans], np.int64) - start
    owner = np.asarray([k for k, _ in spans], np.int64)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    result = TokenBatch(
        ids=_joined([s.ids for s in samples], np.int32),
        offsets=offsets,
        lengths=np.fromiter((s.length for s in samples), dtype=np.int64, count=len(samples)),
        frames=tuple(s.frames for s in samples),
        episodes=tuple(s.episode for s in samples),
        steps=tuple(s.spans[0].step if s.spans else -1 for s in samples),
        prompts=first_prompts(samples, vocabulary.image, share=share),
        index=(np.repeat(start + offsets[owner], count) + within).astype(np.int32),
        sample=np.repeat(owner.astype(np.int32), count),
        span=np.repeat(np.arange(len(spans), dtype=np.int32), count),
        behavior=_joined([span.logprobs for _, span in spans], np.float32),
        advantage=np.repeat(np.asarray([span.advantage for _, span in spans], np.float32), count),
        score=np.repeat(np.asarray([span.score for _, span in spans], np.float32), count),
        weight=np.repeat(np.asarray([span.weight for _, span in spans], np.float32), count),
        version=_joined([span.versions for _, span in spans], np.int32),
        **_of_a_critic([span for _, span in spans], count),
    )
    _check_responses(result, vocabulary)
    _check_frames(result, vocabulary)
    return result


def _of_a_critic(spans: Sequence[ResponseSpan], count: np.ndarray) -> dict[str, np.ndarray]:
    pairs = [(span.value, span.target) for span in spans if span.value is not None and span.target is not None]
    if not pairs or len(pairs) < len(spans):
        return {}
    value, target = np.asarray(pairs, np.float32).T
    return {"value": np.repeat(value, count), "target": np.repeat(target, count)}


def _joined(parts: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)


def _checked_spans(sample: Sample) -> Sequence[ResponseSpan]:
    end = 0
    for span in sample.spans:
        name = f"episode {sample.episode} step {span.step}"
        count = span.end - span.start
        if not end < span.start < span.end <= len(sample.ids):
            raise SampleError(f"{name}: span [{span.start}, {span.end}) lies outside or overlaps")
        if not count == len(span.logprobs) == len(span.versions):
            raise SampleError(
                f"{name}: {count} tokens, {len(span.logprobs)} log-probabilities and {len(span.versions)} versions; "
                "there is one per token"
            )
        end = span.end
    return sample.spans


def _check_responses(found: TokenBatch, vocabulary: Vocabulary) -> None:
    ids, size = found.ids, len(vocabulary.allowed)
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        at = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
        k = int(np.searchsorted(found.offsets, at, "right")) - 1
        raise SampleError(f"{found.name(k)}: token {ids[at]} is outside the vocabulary of {size}")
    banned = np.flatnonzero(~vocabulary.allowed[ids[found.index]])
    if len(banned):
        first = int(banned[0])
        k, at = int(found.sample[first]), int(found.index[first])
        what = "the image placeholder" if ids[at] == vocabulary.image else "a special token"
        raise SampleError(
            f"{found.name(k)}: response token {ids[at]} at position {at - found.offsets[k]} is {what}, "
            "which the policy may not say; was the sample made without the engine's mask?"
        )


def _check_frames(found: TokenBatch, vocabulary: Vocabulary) -> None:
    placeholders = np.diff(np.searchsorted(np.flatnonzero(found.ids == vocabulary.image), found.offsets))
    frames = np.fromiter((len(names) for names in found.frames), dtype=np.int64, count=len(found))
    shortest = np.diff(found.offsets)  # a frame is at least one token
    for k in np.flatnonzero((placeholders != frames) | (found.lengths < shortest)).tolist():
        raise SampleError(
            f"{found.name(k)}: {placeholders[k]} image placeholders among {shortest[k]} tokens, but {frames[k]} frames "
            f"and {found.lengths[k]} tokens after expansion"
        )


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One micro-batch of one rank: indices of samples. `padding`: it only keeps the rank in step."""

    samples: tuple[int, ...]
    padding: bool = False


def split_groups(samples: Sequence[Sample], mini_batches: int, seed: int) -> list[np.ndarray]:
    """Indices of samples per optimizer step: groups in an order drawn from the seed, dealt out so that steps get about
    equally many samples. A group stays whole; with fewer groups than steps there are fewer steps."""
    if mini_batches == 1:
        return [np.arange(len(samples))]
    groups: dict[str, list[int]] = {}
    for k, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(k)
    names = list(groups)
    order = np.random.default_rng(seed).permutation(len(names))
    steps: list[list[int]] = [[] for _ in range(min(mini_batches, len(names)))]
    for index in order:
        min(steps, key=len).extend(groups[names[index]])
    return [np.asarray(sorted(step), np.int64) for step in steps]


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    token_budget: int,
    work: Sequence[float] | np.ndarray | None = None,
) -> list[list[MicroBatchPlan]]:
    """Micro-batches per rank: as few as the budget of tokens allows, with about equal work (`work`, per sample; None:
    its tokens). Each sample, the one with the most work first, goes to the micro-batch with the least that has room; a
    sample that exceeds the budget is one alone. Those that ranks work on at the same time are neighbours in work,
    because ranks wait for each other in every layer; among them the heaviest goes to the rank with the least."""
    lengths = np.asarray(lengths, np.int64)
    costs = lengths.astype(np.float64) if work is None else np.asarray(work, np.float64)
    if not len(lengths):
        raise ValueError("there are no samples to learn from")
    order = np.argsort(-costs, kind="stable").tolist()
    count = ranks * max(1, -(-int(lengths.sum()) // (token_budget * ranks)))
    while (batches := _spread(lengths, costs, order, count, token_budget)) is None:
        count += ranks
    weight = [float(costs[batch].sum()) for batch in batches]
    heaviest = sorted((k for k in range(count) if batches[k]), key=lambda k: -weight[k])
    load = [0.0] * ranks
    dealt: list[list[MicroBatchPlan]] = [[] for _ in range(ranks)]
    for first in range(0, len(heaviest), ranks):
        for rank, k in zip(np.argsort(load, kind="stable").tolist(), heaviest[first : first + ranks], strict=False):
            dealt[rank].append(MicroBatchPlan(tuple(batches[k])))
            load[rank] += weight[k]
    most = max(map(len, dealt))
    for plans in dealt:
        plans.extend(MicroBatchPlan((order[-1],), padding=True) for _ in range(most - len(plans)))
    return dealt


def _spread(
    lengths: np.ndarray, costs: np.ndarray, order: Sequence[int], count: int, token_budget: int
) -> list[list[int]] | None:
    """Samples over `count` micro-batches; None if one of them finds no room."""
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    lightest = [(0.0, k) for k in range(count)]
    ordered = lengths[np.asarray(order)]
    #: of each sample and those after it: a micro-batch that has no room for the shortest of them is looked at no more
    shortest = np.minimum.accumulate(ordered[::-1])[::-1].tolist()
    for sample, length, least in zip(order, ordered.tolist(), shortest, strict=True):
        full = []
        while lightest and tokens[lightest[0][1]] and tokens[lightest[0][1]] + length > token_budget:
            one = heapq.heappop(lightest)
            if tokens[one[1]] + least <= token_budget:
                full.append(one)
        if not lightest:
            return None
        load, k = lightest[0]
        batches[k].append(sample)
        tokens[k] += length
        heapq.heapreplace(lightest, (load + float(costs[sample]), k))
        for one in full:
            heapq.heappush(lightest, one)
    return batches


def frames_of(data: TokenBatch, plans: Iterable[MicroBatchPlan]) -> dict[str, set[str]]:
    """Names by episode."""
    names: dict[str, set[str]] = {}
    for plan in plans:
        for k in plan.samples:
            names.setdefault(data.episodes[k], set()).update(data.frames[k])
    return names


# --- micro-batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples end to end in one row of T tokens."""

    ids: np.ndarray  # [1, T]
    positions: np.ndarray  # [3, 1, T]
    lengths: np.ndarray  # [samples] tokens of each that are in the row, in order
    #: distinct frames, equal sizes side by side
    frames: tuple[str, ...]
    visual: np.ndarray  # place of each visual token
    feature: np.ndarray  # its row among the features of `frames`
    predict: np.ndarray  # place before each response token: where it is predicted
    target: np.ndarray  # the response token
    response: np.ndarray  # its index among those of the token batch
    padding: bool
    #: [samples] tokens before these, which are in the row as those of another sample; None: there are none
    before: np.ndarray | None = None
    #: [tokens of all samples, shared ones in each] their places; None: each token is one sample's
    keys: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Computed positions."""
        return int(self.ids.size)


def micro_batch(
    data: TokenBatch,
    plan: MicroBatchPlan,
    grids: Mapping[str, tuple[int, int]],
    vocabulary: Vocabulary,
    *,
    place: Positions = grid_positions,
) -> MicroBatch:
    """Expands the planned samples. `grids` are (rows, columns) of visual tokens of, at least, their frames; `place`:
    the model family's positions. Raises
    SampleError for a sample whose frames are not of the sizes that it was sampled with."""
    rows = np.asarray(plan.samples, np.int64)
    shown = [name for k in plan.samples for name in data.frames[k]]
    sizes = np.asarray([grids[name] for name in shown], np.int64).reshape(-1, 2)
    counts = sizes.prod(1)

    starts, short = data.offsets[rows], np.diff(data.offsets)[rows]
    first = np.cumsum(short) - short
    unexpanded = data.ids[np.repeat(starts - first, short) + np.arange(int(short.sum()))]
    repeats = np.ones(len(unexpanded), np.int64)
    repeats[unexpanded == vocabulary.image] = counts
    lengths: np.ndarray = np.add.reduceat(repeats, first)
    for r in np.flatnonzero(lengths != data.lengths[rows])[:1].tolist():
        k = plan.samples[r]
        names = ", ".join(f"{name[:12]} of {grids[name][0]}x{grids[name][1]}" for name in data.frames[k])
        raise SampleError(
            f"{data.name(k)}: {data.lengths[k]} tokens when it was sampled, but {lengths[r]} with its frames: {names}"
        )

    total = int(lengths.sum())
    row = np.repeat(np.arange(len(rows)), lengths)
    begins = np.cumsum(lengths) - lengths
    column = np.arange(total) - begins[row]
    tokens = np.repeat(unexpanded, repeats).astype(np.int64)
    leads, ends = data.prompts.leads(rows), np.cumsum(repeats)
    prompts = ends[first + data.prompts.ids[rows] - 1] - begins  # tokens of first prompts
    before = np.where(leads == np.arange(len(rows)), 0, prompts)
    kept = column >= before[row]
    places = (np.cumsum(kept) - 1)[np.where(kept, np.arange(total), begins[leads][row] + column)]

    frames = tuple(sorted(set(shown), key=lambda name: (grids[name], name)))
    area = np.asarray([grids[name] for name in frames], np.int64).reshape(-1, 2).prod(1)
    begin = dict(zip(frames, np.cumsum(area) - area, strict=True))
    visual = np.flatnonzero(tokens == vocabulary.image)
    within = np.arange(len(visual)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = place(row, column, visual, within, sizes, counts, len(rows))
    feature = np.repeat(np.asarray([begin[name] for name in shown], np.int64), counts) + within

    order = np.argsort(rows)  # response tokens come in the order of samples
    found = [np.searchsorted(data.sample, rows[order], side) for side in ("left", "right")]
    owner = np.repeat(order, found[1] - found[0])
    response = np.concatenate([np.arange(a, b) for a, b in zip(*(side.tolist() for side in found), strict=True)])
    at = data.index[response] - starts[owner] + first[owner]  # in `unexpanded`
    in_row, shares = kept[visual], bool(before.any())
    return MicroBatch(
        ids=tokens[kept][None],
        positions=np.asarray(positions, np.int64)[:, None, kept],
        lengths=lengths - before,
        frames=frames,
        visual=places[visual[in_row]],
        feature=feature[in_row],
        predict=places[ends[at] - 2],
        target=unexpanded[at].astype(np.int64),
        response=response,
        padding=plan.padding,
        before=before if shares else None,
        keys=places if shares else None,
    )
