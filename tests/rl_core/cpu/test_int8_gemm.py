"""Packed weights: as exact as float32, for any shape; a row depends on its own numbers alone."""

import pytest
import torch
from helpers.tile_code import tile_code

from rl_core import timing
from rl_core.cpu import packed_gemm
from rl_core.cpu.allocator import Arena
from rl_core.cpu.packed_gemm import PackedProducts

needs_tiles = pytest.mark.skipif(tile_code() is None, reason="needs a C compiler")

SHAPES = [
    (1, 1, 1),
    (16, 64, 16),
    (17, 65, 17),
    (31, 33, 170),
    (50, 128, 48),
    (100, 90, 70),
    (300, 700, 45),
    (65, 40, 2100),
    (600, 16, 300),
    (40, 4097, 33),
    (35, 9000, 20),
    (2, 512, 900),
    (130, 200, 1000),
]
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


def pack(weight):
    return packed_gemm.PackedMatrix(PackedProducts(tile_code(), "int8"), weight, Arena())


def multiply(x, weight):
    return pack(weight).multiply_rows(x, torch.full((len(x), len(weight)), torch.nan))


def multiply_exactly(x, weight):
    return x.double() @ weight.double().t()


def relative_error(result, expected):
    return float((result - expected).norm() / expected.norm())


@needs_tiles
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_float32(numbers, rows, inputs, outputs):
    x, weight = (
        torch.randn(rows, inputs, generator=numbers),
        torch.randn(outputs, inputs, generator=numbers),
    )
    exact = multiply_exactly(x, weight)
    assert relative_error(multiply(x, weight), exact) < max(
        2 * relative_error(x @ weight.t(), exact), 2.5e-7
    )
    base = torch.randn(rows, outputs, generator=numbers)
    added = pack(weight).multiply_rows(x, base.clone(), add=True)
    assert relative_error(added, base + exact) < 2.5e-7


@needs_tiles
@pytest.mark.parametrize("outlier", [10.0, 1e3, 1e5])
def test_outliers_of_rows_cost_no_precision(numbers, outlier):
    """As in activations: a number that is much larger than the others, in every row."""
    x, weight = torch.randn(40, 512, generator=numbers), torch.randn(64, 512, generator=numbers)
    x[:, 5] = outlier
    exact = multiply_exactly(x, weight)
    assert relative_error(multiply(x, weight), exact) < 2 * relative_error(x @ weight.t(), exact)
    x, weight = torch.randn(40, 512, generator=numbers).pow(7), weight.clone()
    exact = multiply_exactly(x, weight)
    assert relative_error(multiply(x, weight), exact) < 2 * relative_error(x @ weight.t(), exact)


@needs_tiles
def test_precision_with_outliers_of_weights(numbers):
    """Weights are rounded to 2^-24 of the largest in their row."""
    x, weight = torch.randn(40, 512, generator=numbers), torch.randn(64, 512, generator=numbers)
    weight[:, 7] = 14.0  # within the bound
    exact = multiply_exactly(x, weight)
    assert len(packed_gemm.find_outlying_inputs(weight)) == 0
    assert relative_error(multiply(x, weight), exact) < 4 * relative_error(x @ weight.t(), exact)
    weight[3] *= 1e20  # affects only its own row
    weight[4] *= 1e-20
    exact = multiply_exactly(x, weight)
    for line in (2, 3, 4):
        assert relative_error(multiply(x, weight)[:, line], exact[:, line]) < 1e-6


@needs_tiles
@pytest.mark.parametrize("depth", [64, 1500])
def test_digits_do_not_overflow(depth):
    """Numbers with the largest digits of either sign, whose products all add up."""
    values = [
        1.0,
        -1.0,
        8355711 / 2**23,
        -8355711 / 2**23,
        1 - 2.0**-24,
        -(1 - 2.0**-24),
        32896 / 2**22,
        -32896 / 2**22,
    ]
    x = torch.tensor(values)[:, None].expand(-1, depth).contiguous()
    x[:, 0] = 1.0
    exact, rounding = multiply_exactly(x, x), 2.0**-24 * x.abs().sum(1, keepdim=True)
    assert ((multiply(x, x) - exact).abs() <= rounding + 2.5e-7 * exact.abs()).all()
    scaled = multiply(x * 2.0**70, x * 2.0**-70)
    assert torch.equal(scaled, multiply(x, x))


@needs_tiles
def test_tiny_numbers(numbers):
    x, weight = torch.randn(20, 70, generator=numbers), torch.randn(30, 70, generator=numbers)
    zeros = torch.zeros(30, 70)
    assert torch.equal(multiply(x, zeros), torch.zeros(20, 30)) and torch.equal(
        multiply(zeros, x), torch.zeros(30, 20)
    )
    exact = multiply_exactly(x, weight)
    for tiny, max_error in ((1e-25, 2.5e-7), (1e-28, 2.5e-7), (1e-32, 1e-3)):
        assert relative_error(multiply(x * tiny, weight), exact * tiny) < max_error
        assert relative_error(multiply(x, weight * tiny), exact * tiny) < max_error


@needs_tiles
def test_a_row_does_not_depend_on_the_others(numbers):
    x, weight = (
        torch.randn(250, 600, generator=numbers),
        pack(torch.randn(170, 600, generator=numbers)),
    )
    base = torch.randn(250, 170, generator=numbers)
    all_rows = weight.multiply_rows(x, torch.empty(250, 170))
    added = weight.multiply_rows(x, base.clone(), add=True)
    for rows in (slice(0, 1), slice(3, 40), slice(10, 60), slice(100, 190)):
        out = torch.empty(rows.stop - rows.start, 170)
        assert torch.equal(weight.multiply_rows(x[rows], out), all_rows[rows])
        assert torch.equal(weight.multiply_rows(x[rows], base[rows].clone(), add=True), added[rows])


@needs_tiles
def test_the_number_of_threads_changes_no_bit(numbers, monkeypatch):
    x, weight = torch.randn(333, 290, generator=numbers), torch.randn(130, 290, generator=numbers)
    results = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append([multiply(x[:rows], weight) for rows in (5, 40, 333)])
    for other in results[1:]:
        assert all(
            torch.equal(first, second) for first, second in zip(results[0], other, strict=True)
        )


@needs_tiles
def test_deep_weights_with_many_rows_and_threads(numbers, monkeypatch):
    """Beyond 4,096 of depth a product is a sum of several parts: each must be added by the thread that started it."""
    x, weight = torch.randn(300, 4200, generator=numbers), torch.randn(16, 4200, generator=numbers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(3):
        assert relative_error(multiply(x, weight), multiply_exactly(x, weight)) < 1e-6


@needs_tiles
def test_only_the_output_is_written(numbers):
    """Rows that are not contiguous, and the memory around them."""
    x, weight = torch.randn(50, 100, generator=numbers), torch.randn(20, 30, generator=numbers)
    out = torch.full((52, 40), 7.0)
    pack(weight).multiply_rows(x[:, 40:70], out[1:51, 10:30])
    assert torch.equal(out[1:51, 10:30], multiply(x[:, 40:70].contiguous(), weight))
    out[1:51, 10:30] = 7.0
    assert torch.equal(out, torch.full((52, 40), 7.0))


@needs_tiles
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, LARGEST])
def test_non_finite_numbers_stay_in_their_row(numbers, bad):
    """A diverged model must be visible in its loss."""
    x, weight = torch.randn(40, 50, generator=numbers), torch.randn(20, 50, generator=numbers)
    clean = multiply(x, weight)
    x[7, 3], changed = bad, weight.clone()
    changed[5, 9] = bad
    result, weight_result = multiply(x, weight), multiply(x, changed)
    assert torch.equal(result[:7], clean[:7]) and torch.equal(result[8:], clean[8:])
    if bad == LARGEST:
        exact = multiply_exactly(x[7:8], weight)[0]
        fits = exact.abs() < LARGEST
        assert (
            0 < fits.sum() < 20
            and relative_error(result[7][fits], exact[fits]) < 1e-6
            and result[7][~fits].isinf().all()
        )
        return
    assert result[7].isnan().all() and weight_result[:, 5].isnan().all()
    others = [line for line in range(20) if line != 5]
    assert torch.equal(weight_result[:7, others], clean[:7, others])


@needs_tiles
def test_python_threads_do_not_interfere(numbers, in_threads):
    """Each has its own scratch memory for its rows."""
    x = [torch.randn(200, 256, generator=numbers) for _ in range(4)]
    weight = pack(torch.randn(128, 256, generator=numbers))
    expected = [weight.multiply_rows(part, torch.empty(200, 128)) for part in x]
    wrong = []

    def work(index):
        for _ in range(30 if packed_gemm.load_int8_gemm() is not None else 3):
            if not torch.equal(
                weight.multiply_rows(x[index], torch.empty(200, 128)), expected[index]
            ):
                wrong.append(index)

    in_threads(work, 4)
    assert wrong == []


def largest_row_error(result, expected):
    """Return the largest relative error of a row of weights."""
    return float(((result - expected).norm(dim=0) / expected.norm(dim=0)).max())


def build_quiet_outliers(numbers, inputs, size=1e4):
    """Build x, and weights of about 0.01 with larger ones where x is small: in every row, in one row or in another."""
    x = torch.randn(40, inputs, generator=numbers)
    weight = torch.randn(72, inputs, generator=numbers) * 1e-2
    weight[:, 7], x[:, 7] = size, 0.0
    weight[3, 20], x[:, 20] = -size / 10, 1e-9
    weight[70, 33], x[:, 33] = 5.0, 1e-3
    return x, weight


@needs_tiles
@pytest.mark.parametrize("inputs", [40, 512, 4300])
def test_outliers_of_weights_where_the_input_is_small(numbers, inputs):
    """1e4 among 1e-2: an error of 3e-2 if three digits held the whole row."""
    x, weight = build_quiet_outliers(numbers, inputs)
    exact = multiply_exactly(x, weight)
    assert largest_row_error(multiply(x, weight), exact) < max(
        2 * largest_row_error(x @ weight.t(), exact), 4e-7
    )
    weight[:, : inputs // 3] *= 1e6  # a third of each row
    x[:, : inputs // 3] = 0.0
    exact = multiply_exactly(x, weight)
    assert largest_row_error(multiply(x, weight), exact) < max(
        2 * largest_row_error(x @ weight.t(), exact), 4e-7
    )


@needs_tiles
@pytest.mark.parametrize("tails", [3.0, 5.0])
def test_heavy_tails(numbers, tails):
    """Student's t: some weights exceed the bound, most of the large ones do not."""
    torch.manual_seed(1)
    weight = torch.distributions.StudentT(tails).sample((64, 512))
    x = torch.randn(40, 512, generator=numbers)
    assert largest_row_error(multiply(x, weight), multiply_exactly(x, weight)) < 6e-7


def test_find_outlying_inputs():
    """In a row of 1s the bound is 16 / 0.6069 = 26.36; one 27 among 400 moves it to 26.70."""
    weight = torch.ones(6, 400)
    weight[:, ::2] = -1.0
    assert packed_gemm.find_outlying_inputs(weight).tolist() == []
    weight[0, 9], weight[1, 30], weight[4, 200], weight[5, 9] = 26.3, -27.0, 1e9, 1e9
    weight[2] *= 1e20  # a row's scale does not matter
    weight[3] = 0.0
    assert packed_gemm.find_outlying_inputs(weight).tolist() == [9, 30, 200]
    weight[3, 5] = 1e30  # a row with a single weight is exact
    weight[2, 17] = torch.nan
    weight[4, 18] = torch.inf
    assert packed_gemm.find_outlying_inputs(weight).tolist() == [9, 30]
    assert (
        packed_gemm.find_outlying_inputs(
            torch.randn(500, 1000, generator=torch.Generator().manual_seed(0))
        ).tolist()
        == []
    )


def test_rows_beyond_one_part_are_checked(monkeypatch):
    monkeypatch.setattr(packed_gemm, "_WEIGHTS_PER_PART", 100)
    weight = torch.ones(40, 30)
    weight[39, 29] = weight[0, 2] = weight[20, 2] = 50.0
    assert packed_gemm.find_outlying_inputs(weight).tolist() == [2, 29]


@needs_tiles
def test_outliers_are_counted(numbers):
    _, weight = build_quiet_outliers(numbers, 512)
    with timing.collect_seconds() as totals:
        pack(weight)
        pack(torch.randn(10, 20, generator=numbers))
    assert totals == {"packed_weights": 72 * 512 + 200, "packed_weights_in_float": 72 * 3}


@needs_tiles
@pytest.mark.parametrize("inputs", [512, 4300])
def test_neither_rows_nor_threads_change_a_bit_of_outliers(numbers, monkeypatch, inputs):
    _, weight = build_quiet_outliers(numbers, inputs)
    weight = pack(weight[:70].contiguous())
    x, base = torch.randn(210, inputs, generator=numbers), torch.randn(210, 90, generator=numbers)
    expected = weight.multiply_rows(x, base.clone()[:, 5:75], add=True)
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (slice(0, 210), slice(17, 18)):
            out = base.clone()
            assert torch.equal(
                weight.multiply_rows(x[rows], out[rows, 5:75], add=True), expected[rows]
            )
            assert torch.equal(out[:, :5], base[:, :5]) and torch.equal(out[:, 75:], base[:, 75:])
