"""Samples as a token batch, and a token batch as micro-batches. Pure numpy: no torch, no Ray.

Promises:
- A sample is checked before it is learned from: its visual tokens are exactly those of its frames, its spans hold one
  log-probability per token and no token that the policy may not say. `SampleError` names episode, step and token.
- `plan_micro_batches` is a pure function of lengths: every rank gets the same number of micro-batches (short ranks get
  padding ones, marked by weight 0), no micro-batch exceeds the token budget unless one sample alone does.
- Position ids are Qwen3-VL's: text counts on; a visual token has the position at which its frame begins, plus its row
  and column; after a frame the text goes on at max(rows, columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapforge_trainer.records import Sample


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
    """Samples, one after another. `grids` are (rows, columns) of visual tokens by frame."""

    ids: np.ndarray  # [tokens]
    offsets: np.ndarray  # [samples + 1]
    frames: tuple[tuple[str, ...], ...]
    grids: Mapping[str, tuple[int, int]]
    #: per response token: its index in `ids`, its sample, its span (numbered through), and what the sample says of it
    index: np.ndarray
    sample: np.ndarray
    span: np.ndarray
    behavior: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    version: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def token_batch(samples: Sequence[Sample], grids: Mapping[str, tuple[int, int]], vocabulary: Vocabulary) -> TokenBatch:
    """Checks the samples and lays them out."""
    lengths = np.fromiter((len(s.ids) for s in samples), dtype=np.int64, count=len(samples))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.fromiter((i for s in samples for i in s.ids), dtype=np.int64, count=int(offsets[-1]))
    index: list[np.ndarray] = []
    owner, span_of, advantage, weight = [], [], [], []
    behavior: list[float] = []
    version: list[int] = []
    spans = 0
    for k, sample in enumerate(samples):
        end = 0
        for span in sample.spans:
            count = span.end - span.start
            if not end < span.start < span.end <= len(sample.ids):
                raise SampleError(
                    f"{_name(sample, span.step)}: span [{span.start}, {span.end}) lies outside or overlaps"
                )
            if not count == len(span.logprobs) == len(span.versions):
                raise SampleError(
                    f"{_name(sample, span.step)}: {count} tokens, {len(span.logprobs)} log-probabilities and "
                    f"{len(span.versions)} versions; there is one per token"
                )
            end = span.end
            index.append(np.arange(span.start, span.end, dtype=np.int64) + offsets[k])
            behavior.extend(span.logprobs)
            version.extend(span.versions)
            owner.append((k, count))
            span_of.append((spans, count))
            advantage.append((span.advantage, count))
            weight.append((span.weight, count))
            spans += 1
    where = np.concatenate(index) if index else np.zeros(0, np.int64)
    _check_responses(samples, ids, where, _spread(owner, np.int64), offsets, vocabulary)
    result = TokenBatch(
        ids=ids,
        offsets=offsets,
        frames=tuple(s.frames for s in samples),
        grids={name: grids[name] for s in samples for name in s.frames if name in grids},
        index=where,
        sample=_spread(owner, np.int64),
        span=_spread(span_of, np.int64),
        behavior=np.asarray(behavior, np.float32),
        advantage=_spread(advantage, np.float32),
        weight=_spread(weight, np.float32),
        version=np.asarray(version, np.int64),
    )
    _check_frames(samples, result, vocabulary)
    return result


def _spread(pairs: list, dtype: type) -> np.ndarray:
    values: np.ndarray = np.asarray([value for value, _ in pairs], dtype)
    return np.repeat(values, np.asarray([count for _, count in pairs], np.int64)) if pairs else values


def _name(sample: Sample, step: int | None = None) -> str:
    steps = ",".join(str(span.step) for span in sample.spans) if step is None else step
    return f"episode {sample.episode} step {steps}"


def _check_responses(
    samples: Sequence[Sample],
    ids: np.ndarray,
    where: np.ndarray,
    owner: np.ndarray,
    offsets: np.ndarray,
    vocabulary: Vocabulary,
) -> None:
    size = len(vocabulary.allowed)
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        at = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
        k = int(np.searchsorted(offsets, at, "right")) - 1
        raise SampleError(f"{_name(samples[k])}: token {ids[at]} is outside the vocabulary of {size}")
    banned = np.flatnonzero(~vocabulary.allowed[ids[where]])
    if len(banned):
        first = int(banned[0])
        k, token = int(owner[first]), int(ids[where[first]])
        what = "the image placeholder" if token == vocabulary.image else "a special token"
        raise SampleError(
            f"{_name(samples[k])}: response token {token} at position {int(where[first] - offsets[k])} is {what}, "
            "which the policy may not say; was the sample made without the engine's mask?"
        )


def _check_frames(samples: Sequence[Sample], found: TokenBatch, vocabulary: Vocabulary) -> None:
    shown = np.concatenate([[0], np.cumsum(found.ids == vocabulary.image)])
    visual: np.ndarray = np.diff(shown[found.offsets])
    for k, sample in enumerate(samples):
        missing = [name for name in sample.frames if name not in found.grids]
        if missing:
            raise SampleError(f"{_name(sample)}: frame {missing[0][:12]} did not come with the samples")
        due = sum(rows * cols for rows, cols in (found.grids[name] for name in sample.frames))
        if due != visual[k]:
            raise SampleError(
                f"{_name(sample)}: {visual[k]} visual tokens in the prompt, but {due} by its "
                f"{len(sample.frames)} frames"
            )


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One micro-batch of one rank: indices of samples. `padding`: it only keeps the rank in step."""

    samples: tuple[int, ...]
    padding: bool = False


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray, ranks: int, token_budget: int
) -> list[list[MicroBatchPlan]]:
    """Micro-batches per rank. Samples are sorted by length, so that padding is small, and cut so that rows x longest
    stays within the budget; micro-batches are dealt out by size, the heaviest first to the least loaded rank."""
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths):
        raise ValueError("there are no samples to learn from")
    order = np.argsort(-lengths, kind="stable")
    batches: list[list[int]] = []
    longest = 0
    for k in order.tolist():
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(k)
        else:
            batches.append([k])
            longest = int(lengths[k])
    batches = _split_for_ranks(batches, ranks)
    load = [0] * ranks
    dealt: list[list[MicroBatchPlan]] = [[] for _ in range(ranks)]
    most = -(-len(batches) // ranks)
    for batch in sorted(batches, key=lambda b: -len(b) * int(lengths[b[0]])):
        rank = min((r for r in range(ranks) if len(dealt[r]) < most), key=lambda r: (load[r], r))
        dealt[rank].append(MicroBatchPlan(tuple(batch)))
        load[rank] += len(batch) * int(lengths[batch[0]])
    shortest = int(order[-1])
    for plans in dealt:
        plans.extend(MicroBatchPlan((shortest,), padding=True) for _ in range(most - len(plans)))
    return dealt


def _split_for_ranks(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """Halves the largest micro-batches until every rank has as many as any other, if there are samples enough."""
    while len(batches) % ranks:
        batches.sort(key=len, reverse=True)
        big = batches[0]
        if len(big) < 2:
            break
        batches[0:1] = [big[: len(big) // 2], big[len(big) // 2 :]]
    return batches


def padding_share(lengths: np.ndarray, plans: Sequence[MicroBatchPlan]) -> float:
    """Share of computed positions that hold no token of a counted sample."""
    computed = sum(len(plan.samples) * int(lengths[list(plan.samples)].max()) for plan in plans)
    useful = sum(int(lengths[list(plan.samples)].sum()) for plan in plans if not plan.padding)
    return 1.0 - useful / computed if computed else 0.0


# --- micro-batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows and the places in them. Flat places count row by row: row * width + column."""

    ids: np.ndarray  # [rows, width]
    positions: np.ndarray  # [3, rows, width]
    #: distinct frames, equal sizes side by side
    frames: tuple[str, ...]
    visual: np.ndarray  # flat place of each visual token
    feature: np.ndarray  # its row among the features of `frames`
    predict: np.ndarray  # flat place before each response token: where it is predicted
    target: np.ndarray  # the response token
    response: np.ndarray  # its index among those of the token batch
    padding: bool

    @property
    def tokens(self) -> int:
        """Computed positions."""
        return int(self.ids.size)


def micro_batch(data: TokenBatch, plan: MicroBatchPlan, vocabulary: Vocabulary, pad_id: int = 0) -> MicroBatch:
    rows = np.asarray(plan.samples, np.int64)
    starts, lengths = data.offsets[rows], data.lengths[rows]
    width = int(lengths.max())
    row = np.repeat(np.arange(len(rows)), lengths)
    column = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = row * width + column
    tokens = data.ids[np.repeat(starts, lengths) + column]
    ids = np.full(len(rows) * width, pad_id, np.int64)
    ids[flat] = tokens

    shown = [(r, name) for r, k in enumerate(plan.samples) for name in data.frames[k]]
    frames = tuple(sorted({name for _, name in shown}, key=lambda name: (data.grids[name], name)))
    sizes = np.asarray([data.grids[name] for name in frames], np.int64).reshape(-1, 2)
    first = dict(zip(frames, np.cumsum(sizes.prod(1)) - sizes.prod(1), strict=True))
    grids = np.asarray([data.grids[name] for _, name in shown], np.int64).reshape(-1, 2)
    counts = grids.prod(1)
    visual = np.flatnonzero(tokens == vocabulary.image)
    within = np.arange(len(visual)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = _positions(row, column, visual, within, grids, counts, len(rows), width, flat)
    feature = np.repeat(np.asarray([first[name] for _, name in shown], np.int64), counts) + within

    row_of = np.full(len(data), -1, np.int64)
    row_of[rows] = np.arange(len(rows))
    response = np.flatnonzero(row_of[data.sample] >= 0)
    owner = data.sample[response]
    predict = row_of[owner] * width + data.index[response] - data.offsets[owner] - 1
    return MicroBatch(
        ids=ids.reshape(len(rows), width),
        positions=positions,
        frames=frames,
        visual=flat[visual],
        feature=feature,
        predict=predict,
        target=data.ids[data.index[response]],
        response=response,
        padding=plan.padding,
    )


def _positions(
    row: np.ndarray,
    column: np.ndarray,
    visual: np.ndarray,
    within: np.ndarray,
    grids: np.ndarray,
    counts: np.ndarray,
    rows: int,
    width: int,
    flat: np.ndarray,
) -> np.ndarray:
    """[3, rows, width]: temporal, row and column position of every token. `visual` and `within` number the visual
    tokens among all tokens and inside their frame; `grids` and `counts` belong to the shown frames in order."""
    begin = visual[np.cumsum(counts) - counts]
    if not np.array_equal(np.repeat(begin, counts) + within, visual):
        raise SampleError("the visual tokens of a frame do not lie side by side in a prompt")
    # A frame of n tokens takes max(rows, columns) positions: what follows in its row moves by the difference.
    shift = grids.max(1, initial=0) - counts
    ends = np.zeros(len(row) + 1, np.int64)
    np.add.at(ends, begin + counts, shift)
    of_rows = np.bincount(row[begin], weights=shift, minlength=rows).astype(np.int64)
    moved = np.cumsum(ends[:-1]) - (np.cumsum(of_rows) - of_rows)[row]
    text = column + moved
    places = np.stack([text, text, text])
    frame_of = np.repeat(np.arange(len(counts)), counts)
    base = text[begin][frame_of]
    places[0, visual] = base
    places[1, visual] = base + within // grids[frame_of, 1]
    places[2, visual] = base + within % grids[frame_of, 1]
    result = np.zeros((3, rows * width), np.int64)
    result[:, flat] = places
    return result.reshape(3, rows, width)
