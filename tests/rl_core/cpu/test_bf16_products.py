"""Products with weights packed as bfloat16: widened weights give the bits of float32 products, dot products and tiles
those of the instructions. A row depends on its own numbers alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.tile_code import bf16_products

from rl_core.cpu import packed_gemm
from rl_core.cpu.allocator import Arena
from rl_core.cpu.packed_gemm import PackedProducts, PackedVectors

pytestmark = pytest.mark.skipif(
    packed_gemm.load_packed_vectors() is None, reason="needs a C compiler and vectors of 8 numbers"
)
KERNELS = ["widened", "dots", "tiles"]
# rows, inputs, outputs: partial panels, tiles and blocks of depth, odd depths
SHAPES = [
    (1, 1, 1),
    (1, 576, 300),
    (2, 600, 900),
    (3, 255, 130),
    (5, 64, 96),
    (6, 257, 33),
    (13, 257, 33),
    (31, 33, 170),
    (50, 128, 48),
    (300, 700, 45),
    (65, 40, 2100),
]


@pytest.fixture(params=KERNELS)
def products(request: pytest.FixtureRequest) -> PackedProducts:
    loaded = bf16_products(request.param)
    assert loaded is not None
    return loaded


def draw(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows in float32 and a weight in bfloat16."""
    numbers = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, inputs, generator=numbers),
        torch.randn(outputs, inputs, generator=numbers).bfloat16(),
    )


def multiply(
    products: PackedProducts,
    x: torch.Tensor,
    weight: torch.Tensor,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    packed = PackedVectors(products, weight, Arena())
    if base is not None:
        return packed.multiply_rows(x, base.clone(), add=True)
    return packed.multiply_rows(x, torch.full((len(x), len(weight)), torch.nan))


def emulate(
    kernel: str, x: torch.Tensor, weight: torch.Tensor, base: torch.Tensor | None
) -> torch.Tensor:
    """Compute what the instructions compute (Intel's manual), in numpy: products are exact, sums are float32.

    `vdpbf16ps` adds the product of the later number of a pair, then that of the earlier one. A tile adds the sum over
    the earlier and that over the later numbers of 16 pairs.
    """
    left, right = x.bfloat16().float().numpy(), weight.float().numpy()
    out = None if base is None else base.numpy()
    for first in range(0, left.shape[1], 256):
        width = min(256, left.shape[1] - first)
        terms = [left[:, first + k, None] * right[None, :, first + k] for k in range(width)]
        zeros = np.zeros_like(terms[0])
        terms += [zeros] * (-width % 32)
        sums = zeros
        if kernel == "dots":
            for k in range(0, len(terms), 2):
                sums = sums + terms[k + 1] + terms[k]
        else:
            for tile in range(0, len(terms), 32):
                parts = [zeros, zeros]
                for k in range(tile, tile + 32):
                    parts[k % 2] = parts[k % 2] + terms[k]
                sums = sums + (parts[0] + parts[1])
        out = sums if out is None else out + sums
    assert out is not None
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_base", [False, True])
def test_widened_weights_give_the_bits_of_float32(
    shape: tuple[int, int, int], has_base: bool
) -> None:
    x, weight = draw(*shape)
    base = torch.randn(len(x), len(weight)) if has_base else None
    floats = packed_gemm.load_packed_vectors()
    assert floats is not None
    expected = multiply(floats, x, weight.float(), base)
    widened = bf16_products("widened")
    assert widened is not None
    assert torch.equal(multiply(widened, x, weight, base), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("kernel", ["dots", "tiles"])
def test_instructions_give_the_bits_of_their_definition(
    kernel: str, shape: tuple[int, int, int], has_base: bool
) -> None:
    x, weight = draw(*shape)
    base = torch.randn(len(x), len(weight)) if has_base else None
    products = bf16_products(kernel)
    assert products is not None
    assert torch.equal(multiply(products, x, weight, base), emulate(kernel, x, weight, base))


def test_rows_are_rounded_to_nearest_even(products: PackedProducts) -> None:
    """The product with an identity returns the rows as the kernel sees them."""
    edges = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.3e38, 65504.0]
    )
    x = torch.cat([edges, torch.randn(90) * 10])[None]
    result = multiply(products, x, torch.eye(96).bfloat16())
    assert torch.equal(result, x if products.kernel == "widened" else x.bfloat16().float())


def test_neither_other_rows_nor_threads_change_a_bit(
    products: PackedProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = draw(333, 600, 170)
    all_rows = multiply(products, x, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 10), slice(3, 40), slice(100, 333)):
        assert torch.equal(multiply(products, x[rows], weight), all_rows[rows])
    for threads in (2, 3, 7):  # by columns if rows are few, and by rows
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(multiply(products, x, weight), all_rows)
        assert torch.equal(multiply(products, x[:20], weight), all_rows[:20])
        assert torch.equal(multiply(products, x[:1], weight), all_rows[:1])


def test_non_finite_numbers_stay_in_their_row(products: PackedProducts) -> None:
    """A diverged model must be visible in its loss."""
    x, weight = draw(40, 50, 20)
    clean = multiply(products, x, weight)
    x[7, 3], x[9, 49] = torch.nan, torch.inf
    result = multiply(products, x, weight)
    assert result[7].isnan().all() and not result[9].isfinite().any()
    others = [row for row in range(40) if row not in (7, 9)]
    assert torch.equal(result[others], clean[others])


def test_weights_take_half_of_the_memory(products: PackedProducts) -> None:
    floats = packed_gemm.load_packed_vectors()
    assert floats is not None
    assert 2 * products.size(1024, 576) == floats.size(1024, 576)
