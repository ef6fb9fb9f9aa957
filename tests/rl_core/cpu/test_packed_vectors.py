"""Weights packed for vectors: as exact as float32, for any shape; a row depends on its own numbers alone."""

import pytest
import torch

from rl_core.cpu import packed_gemm
from rl_core.cpu.allocator import Arena

pytestmark = pytest.mark.skipif(
    packed_gemm.load_packed_vectors() is None, reason="needs a C compiler and vectors of 8 numbers"
)

SHAPES = [
    (1, 1, 1),
    (12, 256, 32),
    (13, 257, 33),
    (31, 33, 170),
    (50, 128, 48),
    (300, 700, 45),
    (65, 40, 2100),
    (2, 600, 900),
]


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


def pack(weight):
    return packed_gemm.PackedVectors(packed_gemm.load_packed_vectors(), weight, Arena())


def multiply(x, weight):
    return pack(weight).multiply_rows(x, torch.full((len(x), len(weight)), torch.nan))


def relative_error(result, expected):
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_float32(numbers, rows, inputs, outputs):
    x, weight = (
        torch.randn(rows, inputs, generator=numbers),
        torch.randn(outputs, inputs, generator=numbers),
    )
    exact = x.double() @ weight.double().t()
    assert relative_error(multiply(x, weight), exact) < max(
        2 * relative_error(x @ weight.t(), exact), 4e-7
    )
    base = torch.randn(rows, outputs, generator=numbers)
    assert (
        relative_error(pack(weight).multiply_rows(x, base.clone(), add=True), base + exact) < 4e-7
    )


def test_neither_other_rows_nor_threads_change_a_bit(numbers, monkeypatch):
    x, weight = torch.randn(333, 600, generator=numbers), torch.randn(170, 600, generator=numbers)
    all_rows = multiply(x, weight)
    for rows in (slice(0, 1), slice(3, 40), slice(100, 333)):
        assert torch.equal(multiply(x[rows], weight), all_rows[rows])
    for threads in (2, 3, 7):  # by columns if rows are few, and by rows
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(multiply(x, weight), all_rows)
        assert torch.equal(multiply(x[:20], weight), all_rows[:20])


def test_non_finite_numbers_stay_in_their_row(numbers):
    """A diverged model must be visible in its loss."""
    x, weight = torch.randn(40, 50, generator=numbers), torch.randn(20, 50, generator=numbers)
    clean = multiply(x, weight)
    x[7, 3] = torch.nan
    result = multiply(x, weight)
    assert result[7].isnan().all()
    assert torch.equal(result[:7], clean[:7]) and torch.equal(result[8:], clean[8:])
