"""Packed weights for vectors: as exact as float32, for any shape; a row depends on its own numbers alone."""

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


def packed(weight):
    return packed_gemm.PackedVectors(packed_gemm.load_packed_vectors(), weight, Arena())


def product(x, weight):
    return packed(weight).multiply_rows(x, torch.full((len(x), len(weight)), torch.nan))


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_float32(numbers, rows, inputs, outputs):
    x, weight = (
        torch.randn(rows, inputs, generator=numbers),
        torch.randn(outputs, inputs, generator=numbers),
    )
    exact = x.double() @ weight.double().t()
    assert error(product(x, weight), exact) < max(2 * error(x @ weight.t(), exact), 4e-7)
    base = torch.randn(rows, outputs, generator=numbers)
    assert error(packed(weight).multiply_rows(x, base.clone(), add=True), base + exact) < 4e-7


def test_neither_other_rows_nor_threads_change_a_bit(numbers, monkeypatch):
    x, weight = torch.randn(333, 600, generator=numbers), torch.randn(170, 600, generator=numbers)
    everything = product(x, weight)
    for rows in (slice(0, 1), slice(3, 40), slice(100, 333)):
        assert torch.equal(product(x[rows], weight), everything[rows])
    for threads in (2, 3, 7):  # by columns, where rows are few, and by rows
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(product(x, weight), everything)
        assert torch.equal(product(x[:20], weight), everything[:20])


def test_what_is_not_finite_stays_where_it_is(numbers):
    """A model that has diverged must be found out by what its loss is."""
    x, weight = torch.randn(40, 50, generator=numbers), torch.randn(20, 50, generator=numbers)
    clean = product(x, weight)
    x[7, 3] = torch.nan
    found = product(x, weight)
    assert found[7].isnan().all()
    assert torch.equal(found[:7], clean[:7]) and torch.equal(found[8:], clean[8:])
