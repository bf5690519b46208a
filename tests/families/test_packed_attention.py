"""torch's varlen attention on CPUs: the op is the same as on GPUs, the kernel is ours."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right

from tapforge_trainer.learner import attention

#: runs of equal lengths, a sequence of one token, an empty one
LENGTHS = (37, 64, 64, 1, 0, 90)


def packed(heads: int, keys: int, size: int, kind: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    total = sum(LENGTHS)
    shapes = ((total, heads, size), (total, keys, size), (total, keys, size))
    return tuple(
        torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(kind).requires_grad_()
        for k, shape in enumerate(shapes)
    )


def bounds() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    at = bounds().tolist()
    parts = []
    for begin, end in pairwise(at):
        one = [part[begin:end].transpose(0, 1)[None] for part in (q, k, v)]
        out = F.scaled_dot_product_attention(*one, is_causal=causal, scale=0.2, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    window = (-1, 0) if causal else (-1, -1)
    options: dict[str, Any] = {"scale": 0.2, "window_size": window, "enable_gqa": True}
    return varlen.varlen_attn(q, k, v, bounds(), bounds(), max(LENGTHS), max(LENGTHS), **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [4, 2, 1])
def test_sequences_attend_as_if_alone(keys: int, causal: bool) -> None:
    found, expected = packed(4, keys, 40), packed(4, keys, 40)
    factor = torch.randn(sum(LENGTHS), 4, 40, generator=torch.Generator().manual_seed(9))
    out, alone = attend(*found, causal), one_by_one(*expected, causal)
    assert torch.allclose(out, alone, atol=1e-5)
    (out * factor).sum().backward()
    (alone * factor).sum().backward()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4)


#: (queries, keys) of sequences whose first keys are another one's too: whole ones, long and short rests, equal ones
BRANCHES = ((37, 37), (5, 42), (5, 42), (1, 38), (1, 38), (0, 9), (64, 65), (20, 20))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [4, 2])
def test_queries_are_the_last_tokens_of_their_sequence(keys: int, causal: bool) -> None:
    """Keys of all sequences are gathered from fewer, as `learner.attention` has them."""
    queries, of_keys = (torch.tensor([0, *(one[k] for one in BRANCHES)]).cumsum(0).int() for k in (0, 1))
    total, generator = int(queries[-1]), torch.Generator().manual_seed(3)
    chosen = torch.randint(0, total, (int(of_keys[-1]),), generator=generator)
    given = [torch.randn(1, n, total, 40, generator=generator) for n in (4, keys, keys)]
    found, expected = ([part.clone().requires_grad_() for part in given] for _ in range(2))
    module, bounds = SimpleNamespace(is_causal=causal), {"cu_seq_lens_q": queries, "max_length_q": 64}
    out, _ = attention.attention(
        module, *found, None, 0.2, **bounds, cu_seq_lens_k=of_keys, max_length_k=65, keys=chosen
    )
    parts, (q, k, v) = [], (part[0] for part in expected)
    for number, (n, m) in enumerate(BRANCHES):
        mine = chosen[int(of_keys[number]) : int(of_keys[number + 1])]
        seen = causal_lower_right(n, m)._materialize("cpu").bool() if causal and n else None
        one = (q[:, int(queries[number]) : int(queries[number + 1])], k[:, mine], v[:, mine])
        parts.append(F.scaled_dot_product_attention(*one, attn_mask=seen, scale=0.2, enable_gqa=True))
    alone = torch.cat(parts, 1).transpose(0, 1)[None]
    assert torch.allclose(out, alone, atol=1e-5)
    factor = torch.randn(alone.shape, generator=generator)
    (out * factor).sum().backward()
    (alone * factor).sum().backward()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4)


def test_the_op_keeps_its_contract() -> None:
    q, k, v = packed(4, 2, 40)
    inputs = (q, k, v, bounds(), bounds(), 90, 90, True, 0.2, [-1, 0], True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn.default, inputs, test_utils=checks)
    out, lse, state = torch.ops.torch_attn._varlen_attn(*inputs)
    grads = (torch.ones_like(out), q, k, v, out, lse, bounds(), bounds(), 90, 90, True, state, 0.2, [-1, 0])
    grads = tuple(part.detach() if torch.is_tensor(part) else part for part in grads)
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn_backward.default, grads, test_utils=checks[:2])


def test_the_norm_is_the_scores_logarithm_of_sums() -> None:
    q, k, v = (part.detach() for part in packed(2, 2, 16))
    _, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, bounds(), bounds(), 90, 90, False, 0.2, [-1, -1], False)
    scores = torch.einsum("qhd,khd->hqk", q[:37], k[:37]) * 0.2
    assert torch.allclose(lse[:, :37], scores.logsumexp(-1), atol=1e-5)


def test_memory_is_linear_in_the_length() -> None:
    """A score matrix of this length would take 4 GiB."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    q, k, v = (torch.randn(16_384, 4, 16, requires_grad=True) for _ in range(3))
    at = torch.tensor([0, 16_384], dtype=torch.int32)
    varlen.varlen_attn(q, k, v, at, at, 16_384, 16_384, window_size=(-1, 0)).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def test_wide_numbers_are_narrowed_where_the_kernel_takes_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "NARROW", {"cpu"})
    seen = []
    kernel = varlen.varlen_attn

    def as_on_gpus(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(q.dtype)
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return kernel(q, *rest, **options)

    monkeypatch.setattr(varlen, "varlen_attn", as_on_gpus)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (part.transpose(0, 1)[None] for part in packed(4, 2, 40, kind))
        out, _ = attention.attention(
            SimpleNamespace(is_causal=True), q, k, v, None, scaling=0.2, cu_seq_lens_q=bounds(), max_length_q=90
        )
        assert out.dtype == kind
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float16]


def test_a_call_without_bounds_is_refused() -> None:
    more, fewer = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="9 queries of 5 keys"):
        varlen.varlen_attn(*(torch.randn(n, 4, 40) for n in (9, 5, 5)), more, fewer, 9, 5, window_size=(-1, 0))
    q, k, v = (part.transpose(0, 1)[None] for part in packed(4, 2, 40))
    with pytest.raises(ValueError, match="where they begin"):
        attention.attention(SimpleNamespace(is_causal=True), q, k, v, None)
    with pytest.raises(NotImplementedError, match="sliding windows"):
        varlen.varlen_attn(*packed(4, 4, 40), bounds(), bounds(), 90, 90, window_size=(16, 0))
