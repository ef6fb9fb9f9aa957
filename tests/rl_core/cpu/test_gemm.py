"""Products by tiles and by vectors: as exact as float32, for any shape; a row depends on its own numbers alone."""

import threading

import pytest
import torch
from helpers.tile_code import tile_code

from rl_core.cpu import gemm, linear_layers

SHAPES = [
    (1, 1, 1),
    (12, 256, 32),
    (31, 33, 17),
    (32, 32, 32),
    (193, 257, 33),
    (100, 90, 70),
    (300, 700, 45),
    (65, 40, 2100),
    (600, 16, 300),
]


@pytest.fixture(params=["tiles", "vectors"])
def products(request):
    if request.param == "vectors":
        loaded = gemm.load_vectors()
    else:
        loaded = (
            gemm.Gemm(tile_code(), "product", "amx_gemm_room") if tile_code() is not None else None
        )
    if loaded is None:
        pytest.skip("needs a C compiler, for vectors those of 8 numbers")
    return loaded


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


def relative_error(result, expected):
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_float32(products, numbers, rows, inputs, outputs):
    x = torch.randn(rows, inputs, generator=numbers)
    weights = [torch.randn(size, inputs, generator=numbers) for size in (outputs, 5, outputs)]
    grad = torch.randn(rows, 2 * outputs + 5, generator=numbers)
    joined = torch.cat(weights)
    pairs = [
        (products.compute_linear(x, weights), x @ joined.t(), x.double() @ joined.double().t()),
        (
            products.compute_input_grad(grad, weights),
            grad @ joined,
            grad.double() @ joined.double(),
        ),
        (products.compute_weight_grad(grad, x), grad.t() @ x, grad.double().t() @ x.double()),
    ]
    for result, torch_result, exact in pairs:
        assert result.shape == exact.shape
        assert relative_error(result, exact) < max(2 * relative_error(torch_result, exact), 4e-7)


def test_all_24_bits_count(products, numbers):
    """Numbers whose leading bits cancel: the remainder comes from the lowest part of each."""
    near_one = 1.0 + torch.randint(0, 2**23, (40, 64), generator=numbers) * 2.0**-23
    x, weight = torch.cat([near_one, -torch.ones(40, 64)], dim=1), torch.ones(8, 128)
    left_over = (near_one.double() - 1.0).sum(1, keepdim=True).expand(40, 8)
    assert relative_error(products.compute_linear(x, [weight]), left_over) < 1e-6
    assert torch.equal(
        products.compute_linear(near_one[:, :1], [torch.ones(3, 1)]), near_one[:, :1].expand(40, 3)
    )


def test_a_row_does_not_depend_on_the_others(products, numbers):
    x, weight = torch.randn(150, 600, generator=numbers), torch.randn(70, 600, generator=numbers)
    all_rows = products.compute_linear(x, [weight])
    for rows in (slice(0, 1), slice(3, 40), slice(100, 150)):
        assert torch.equal(products.compute_linear(x[rows].contiguous(), [weight]), all_rows[rows])


def test_the_number_of_threads_changes_no_bit(products, numbers, monkeypatch):
    x, weights = (
        torch.randn(333, 290, generator=numbers),
        [torch.randn(n, 290, generator=numbers) for n in (64, 130)],
    )
    grad = torch.randn(333, 194, generator=numbers)
    results = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(
            [
                products.compute_linear(x, weights),
                products.compute_input_grad(grad, weights),
                products.compute_weight_grad(grad, x),
            ]
        )
    for other in results[1:]:
        assert all(
            torch.equal(first, second) for first, second in zip(results[0], other, strict=True)
        )


def test_rows_that_are_not_contiguous(products, numbers):
    x, weight = torch.randn(50, 100, generator=numbers), torch.randn(20, 30, generator=numbers)
    part = x[:, 40:70]
    assert torch.equal(
        products.compute_linear(part, [weight]),
        products.compute_linear(part.contiguous(), [weight]),
    )
    grad = torch.randn(50, 60, generator=numbers)[:, 7:27]
    assert torch.equal(
        products.compute_weight_grad(grad, part),
        products.compute_weight_grad(grad.contiguous(), part),
    )


def test_non_finite_numbers_stay_in_their_row(products, numbers):
    """A diverged model must be visible in its loss."""
    x, weight = torch.randn(40, 50, generator=numbers), torch.randn(20, 50, generator=numbers)
    clean = products.compute_linear(x, [weight])
    for bad in (torch.nan, torch.inf, -torch.inf, float.fromhex("0x1.fffffep127")):
        x[7, 3] = bad
        result = products.compute_linear(x, [weight])
        assert not result[7].isfinite().all() or bad == x[7, 3] == torch.finfo(torch.float32).max
        assert torch.equal(result[:7], clean[:7]) and torch.equal(result[8:], clean[8:])
    # the largest NaN bit pattern
    x[7, 3] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert products.compute_linear(x, [weight])[7].isnan().all()


def test_python_threads_do_not_interfere(products, numbers, in_threads):
    """Each has its own scratch memory for packed operands."""
    x = [torch.randn(200, 256, generator=numbers) for _ in range(4)]
    weight = torch.randn(128, 256, generator=numbers)
    expected = [products.compute_linear(part, [weight]) for part in x]
    wrong = []

    def work(index):
        for _ in range(30):
            if not torch.equal(products.compute_linear(x[index], [weight]), expected[index]):
                wrong.append(index)

    in_threads(work, 4)
    assert wrong == []


def test_row_invariant_products_apply_to_the_requesting_thread(monkeypatch):
    if gemm.load_vectors() is None:
        pytest.skip("needs a C compiler and vectors of 8 numbers")
    monkeypatch.setattr(gemm, "load_tiles", lambda: None)
    monkeypatch.setattr(gemm.build, "is_intel_processor", lambda: True)
    seen = []
    assert gemm.load_gemm() is None
    with gemm.use_row_invariant_products():
        assert gemm.load_gemm() is gemm.load_vectors()
        thread = threading.Thread(target=lambda: seen.append(gemm.load_gemm()))
        thread.start()
        thread.join()
    assert gemm.load_gemm() is None and seen == [None]


def test_backward_passes_use_row_invariant_products(monkeypatch):
    """A row's gradients are also bit-identical alone and among others, on an Intel processor."""
    if gemm.load_vectors() is None:
        pytest.skip("needs a C compiler and vectors of 8 numbers")
    monkeypatch.setattr(gemm, "load_tiles", lambda: None)
    monkeypatch.setattr(gemm.build, "is_intel_processor", lambda: True)
    layer = torch.nn.Linear(80, 48, bias=False)
    x_NI = torch.randn(301, 80, generator=torch.Generator().manual_seed(1))
    grads = []
    for rows in (1, 301):
        part_NI = x_NI[:rows].clone().requires_grad_(True)
        with gemm.use_row_invariant_products():
            linear_layers.apply_linears(
                part_NI, [layer.requires_grad_(False)]
            ).square().sum().backward()
        grads.append(part_NI.grad[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_products_by_tiles_are_those_of_each_alone(numbers, threads):
    """Two products that add to the same numbers keep their order."""
    if tile_code() is None:
        pytest.skip("needs a C compiler")
    products = gemm.Gemm(tile_code(), "product", "amx_gemm_room")
    batch, expected = [], []
    for index, (rows, inputs, outputs) in enumerate(
        [(33, 20, 4), (5, 7, 17), (64, 300, 16), (1, 3, 40)] * 4
    ):
        x = torch.randn(rows, inputs, generator=numbers)
        w, addend = (torch.randn(outputs, inputs, generator=numbers) for _ in range(2))
        out = torch.full((rows, outputs + 3), float(index))
        batch.append(
            gemm.MatrixProduct(
                gemm.Operand(x), [gemm.Operand(w)], gemm.Operand(out, column=2), rows
            )
        )
        batch.append(
            gemm.MatrixProduct(
                gemm.Operand(x), [gemm.Operand(addend)], gemm.Operand(out, column=2), rows, add=True
            )
        )
        target = out.clone()
        target[:, 2 : 2 + outputs] = products.compute_linear(x, [w]) + products.compute_linear(
            x, [addend]
        )
        expected.append((out, target))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products.compute_products(batch)
    finally:
        torch.set_num_threads(num_threads)
    for result, target in expected:
        assert torch.equal(result[:, :2], target[:, :2]) and torch.equal(
            result[:, -1], target[:, -1]
        )
        assert relative_error(result, target) < 1e-6
    earlier_outs = [out.clone() for out, _ in expected]
    products.compute_products(batch)
    assert all(
        torch.equal(out, earlier) for (out, _), earlier in zip(expected, earlier_outs, strict=True)
    )
