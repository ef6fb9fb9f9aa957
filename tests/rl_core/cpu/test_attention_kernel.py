"""Compiled attention against its definition in float64: rows of any length, common prefixes, threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.cpu import attention_kernel, packed_forward
from rl_core.cpu.prefix_tree import build_prefix_tree

pytestmark = pytest.mark.skipif(
    attention_kernel.load_attention_kernel() is None, reason="needs a C compiler"
)


def compute_by_definition(heads, tokens_of_rows, owner, cos, sin, kv_heads, scale):
    """Compute attention token by token; `owner` is the row that a token's result is taken from."""
    size, query_heads = heads.shape[2], heads.shape[1] - 2 * kv_heads
    rotated = (
        heads * cos[:, None]
        + torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], -1) * sin[:, None]
    )
    q, k, v = rotated[:, :query_heads], rotated[:, query_heads:-kv_heads], heads[:, -kv_heads:]
    results = {}
    for row, tokens in enumerate(tokens_of_rows):
        for position, token in enumerate(tokens):
            if owner[token] == row:
                seen = tokens[: position + 1]
                keys, values = (
                    x[seen].repeat_interleave(query_heads // kv_heads, dim=1) for x in (k, v)
                )
                weights = torch.softmax(torch.einsum("hd,lhd->hl", q[token], keys) * scale, dim=-1)
                results[token] = torch.einsum("hl,lhd->hd", weights, values).reshape(-1)
    return torch.stack([results[token] for token in range(len(heads))])


def check_attention(rows, size, query_heads, kv_heads, scale=0.3):
    """Compare compiled attention over rows of token ids, forward and backward, with the definition."""
    lengths = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    tree = build_prefix_tree(ids, lengths)
    total = sum(lengths)
    unique = tree.nodes_T if tree is not None else torch.arange(total)
    first = tree.owners_N if tree is not None else torch.arange(total)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    tokens_of_rows = [
        unique[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)
    ]
    owner = [next(row for row, end in enumerate(ends) if index < end) for index in first.tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths])[first]
    angles = positions[:, None] / 100 ** (torch.arange(size // 2) / (size // 2))
    cos, sin = (torch.cat([x, x], dim=1) for x in (angles.cos(), angles.sin()))
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(len(first), query_heads + 2 * kv_heads, size, generator=generator)
    grad = torch.randn(len(first), query_heads * size, generator=generator)
    results = []
    for kind in (torch.float32, torch.float64):
        x = heads.to(kind, copy=True).requires_grad_()
        if kind == torch.float32:
            attend = packed_forward.build_attention(lengths, tree, size, cos, sin)
            assert isinstance(attend, packed_forward._KernelAttention)
            out = attend(x, kv_heads, scale)
        else:
            out = compute_by_definition(
                x, tokens_of_rows, owner, cos.double(), sin.double(), kv_heads, scale
            )
        out.backward(grad.to(kind))
        results.append((out.detach().double(), x.grad.double()))
    for compiled, expected in zip(*results, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5 * max(scale, 1.0))
    return results[0]


def build_rows(*lengths):
    """Build rows without common tokens."""
    return [[100 * row + i for i in range(length)] for row, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("size", "query_heads", "kv_heads"),
    [(16, 4, 2), (64, 4, 2), (32, 3, 3), (48, 5, 1), (128, 2, 1)],
)
def test_heads_of_any_size(size, query_heads, kv_heads):
    check_attention(build_rows(1, 7, 16, 17, 33, 70), size, query_heads, kv_heads)


@pytest.mark.parametrize("length", [*range(1, 20), 47, 48, 49, 53, 54, 55, 95, 97, 145])
def test_rows_of_any_length(length):
    check_attention(build_rows(length), 16, 2, 1)


def test_common_prefixes():
    long = list(range(60))
    check_attention(
        [
            long,
            [*long[:50], 80, 81, 82],
            [*long[:50], 80, 90],
            long,
            long[:3],
            [7],
            [*long[:49], 70],
        ],
        16,
        4,
        2,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6))
def test_any_common_prefixes(rows):
    check_attention(rows, 16, 2, 1)


def test_scores_with_a_single_dominant_key():
    """A large scale: the softmax is 0 or 1 except for one key, and nothing overflows."""
    out, grad = check_attention(build_rows(40), 16, 2, 1, scale=40.0)
    assert out.isfinite().all() and grad.isfinite().all()


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    long = list(range(90))
    rows = [long, [*long[:40], 100, 101], *build_rows(30, 61, 5), long[:70]]
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(check_attention(rows, 32, 4, 2))
    for other in results[1:]:
        assert all(
            torch.equal(first, second) for first, second in zip(results[0], other, strict=True)
        )


def test_nan_is_propagated():
    rows = attention_kernel.AttentionRows(
        *(torch.tensor(x) for x in ([0, 20], range(20), [0], range(21), range(20))), 20
    )
    heads = torch.randn(20, 3, 16, generator=torch.Generator().manual_seed(0))
    heads[4, 1, 2] = torch.nan
    out, _, _ = attention_kernel.load_attention_kernel().forward(
        heads, rows, torch.ones(20, 16), torch.zeros(20, 16), 1, 1.0
    )
    assert out[:4].isfinite().all() and out[4:].isnan().any(dim=1).all()


def test_heads_that_do_not_fit_are_left_to_torch():
    assert (
        not attention_kernel.AttentionKernel.supports_head_dim(24)
        and not attention_kernel.AttentionKernel.supports_head_dim(272)
        and attention_kernel.AttentionKernel.supports_head_dim(256)
    )
    cos = torch.ones(3, 24)
    assert isinstance(
        packed_forward.build_attention([3], None, 24, cos, cos), packed_forward._RectangleAttention
    )
