"""Products of linear layers with operands rounded to bfloat16: exact but for float32 sums, whoever computes them; a row
has the bits of the products in rollouts and depends on its own numbers alone.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.tile_code import bf16_products, dots_code, tile_code

from rl_core.cpu import build, gemm
from rl_core.cpu.allocator import Arena
from rl_core.cpu.gemm import Gemm
from rl_core.cpu.packed_gemm import PackedVectors

pytestmark = pytest.mark.skipif(build.load_library() is None, reason="needs a C compiler")
# rows, inputs, outputs: partial panels, tiles and blocks of depth, odd depths
SHAPES = [
    (1, 1, 1),
    (12, 256, 32),
    (31, 33, 17),
    (193, 257, 33),
    (100, 90, 70),
    (300, 700, 45),
    (65, 40, 2100),
    (601, 17, 300),
]


@pytest.fixture(params=["dots", "tiles"])
def products(request: pytest.FixtureRequest) -> Gemm:
    return load_products(request.param)


def load_products(kernel: str) -> Gemm:
    if kernel == "tiles":
        return Gemm(tile_code(), "bf16_tiles_linear", "amx_gemm_room")
    return Gemm(dots_code(), "bf16_dots_linear", "bf16_linear_room")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def compute_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_rounded_operands(
    products: Gemm, rows: int, inputs: int, outputs: int
) -> None:
    x, grad = draw(rows, inputs), draw(rows, 2 * outputs + 5)
    weights = [draw(size, inputs, seed=size) for size in (outputs, 5, outputs)]
    rounded_x, rounded_grad, rounded_weight = (
        operand.bfloat16().double() for operand in (x, grad, torch.cat(weights))
    )
    total = draw(2 * outputs + 5, inputs)
    expected_grad = rounded_grad.t() @ rounded_x
    for result, exact in [
        (products.compute_linear(x, weights), rounded_x @ rounded_weight.t()),
        (products.compute_input_grad(grad, weights), rounded_grad @ rounded_weight),
        (products.compute_weight_grad(grad, x), expected_grad),
    ]:
        assert compute_error(result, exact) < 5e-7
    products.add_weight_grad(sum_OI := total.clone(), grad, x)
    assert compute_error(sum_OI, total + expected_grad) < 5e-7


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("kernel", ["dots", "tiles"])
def test_products_have_the_bits_of_rollouts(
    kernel: str, rows: int, inputs: int, outputs: int
) -> None:
    """The sampler's log-probs are the trainer's but for norms and attention."""
    x, weight = draw(rows, inputs), draw(outputs, inputs)
    packed = bf16_products(kernel)
    assert packed is not None
    expected = PackedVectors(packed, weight.bfloat16(), Arena()).multiply_rows(
        x, torch.empty(rows, outputs)
    )
    assert torch.equal(load_products(kernel).compute_linear(x, [weight]), expected)


def test_operands_are_rounded_to_nearest_even(products: Gemm) -> None:
    edges = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.3e38, 65504.0]
    )
    x = torch.cat([edges, draw(90) * 10])[None]
    identity, rounded, column = torch.eye(96), x.bfloat16().float(), x.t().contiguous()
    assert torch.equal(products.compute_linear(x, [identity]), rounded)
    assert torch.equal(products.compute_linear(identity, [x])[:, 0], rounded[0])
    assert torch.equal(products.compute_input_grad(x, [identity]), rounded)
    assert torch.equal(products.compute_input_grad(torch.ones(1, 1), [x]), rounded)
    assert torch.equal(products.compute_weight_grad(column, identity), rounded)
    assert torch.equal(products.compute_weight_grad(identity, column), rounded.t())


def test_neither_other_rows_nor_threads_change_a_bit(
    products: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, grad = draw(333, 290), [draw(size, 290) for size in (64, 130)], draw(333, 194)
    all_rows = products.compute_linear(x, weights)
    weight_grad = products.compute_weight_grad(grad, x)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 40), slice(100, 333)):
        assert torch.equal(products.compute_linear(x[rows], weights), all_rows[rows])
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(products.compute_linear(x, weights), all_rows)
        assert torch.equal(products.compute_weight_grad(grad, x), weight_grad)


def test_parts_of_larger_matrices(products: Gemm) -> None:
    x, weight, grad = draw(50, 100)[:, 40:71], draw(20, 31), draw(50, 60)[:, 7:27]
    assert torch.equal(
        products.compute_linear(x, [weight]), products.compute_linear(x.contiguous(), [weight])
    )
    assert torch.equal(
        products.compute_weight_grad(grad, x),
        products.compute_weight_grad(grad.contiguous(), x.contiguous()),
    )


def test_non_finite_numbers_stay_in_their_row(products: Gemm) -> None:
    """A diverged model must be visible in its loss."""
    x, weight = draw(40, 50), draw(20, 50)
    clean = products.compute_linear(x, [weight])
    x[7, 3], x[9, 49] = torch.nan, torch.inf
    result = products.compute_linear(x, [weight])
    assert result[7].isnan().all() and not result[9].isfinite().any()
    others = [row for row in range(40) if row not in (7, 9)]
    assert torch.equal(result[others], clean[others])
    assert products.compute_weight_grad(x, x)[3].isnan().all()


def test_the_fastest_products_of_the_processor_are_loaded() -> None:
    """POSTTRAIN_BFLOAT16=1, set for all tests, accepts slow instructions."""
    code = build.load_library()
    assert code is not None
    has_instructions = bool(code.tiles_ready() or code.dots_ready())
    assert (gemm.load_bf16_gemm() is not None) == has_instructions
    assert not gemm.multiplies_in_bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gemm.multiplies_in_bfloat16() == has_instructions
    with torch.autocast("cpu", dtype=torch.float16):
        assert not gemm.multiplies_in_bfloat16()


@pytest.mark.parametrize(
    ("tiles", "dots_gain", "variable", "kernel"),
    [
        (True, 0.5, "", "tiles"),
        (False, 2.0, "", "dots"),
        (False, 0.5, "", None),  # Intel's Emerald Rapids with AMX switched off
        (False, 0.5, "1", "dots"),
        (False, 0.0, "1", None),  # no instructions
    ],
)
def test_instructions_are_chosen_by_their_speed(monkeypatch, tiles, dots_gain, variable, kernel):
    code = SimpleNamespace(
        vectors_ready=lambda: 1,
        tiles_ready=lambda: int(tiles),
        dots_ready=lambda: int(dots_gain > 0),
        dots_gain=mock.Mock(return_value=dots_gain),
    )
    monkeypatch.setattr(gemm.build, "load_library", lambda: code)
    monkeypatch.setenv("POSTTRAIN_BFLOAT16", variable)
    assert gemm.find_bf16_kernel.__wrapped__() == kernel


def test_the_gain_of_dot_products_is_timed() -> None:
    code = build.load_library()
    assert code is not None
    code.dots_gain.restype = ctypes.c_double
    assert (code.dots_gain() > 0) == bool(code.dots_ready())
