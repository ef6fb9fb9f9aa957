"""Adapter products over spans of tokens: values, gradients, and independence of the other spans."""

import torch

from rl_core.cpu.low_rank import AdapterSpan, add_low_rank, compute_low_rank_grads

OUTPUTS = [(0, 40), (40, 57)]  # two layers side by side


def build_spans(seed, *shapes):
    """Build spans with random factors from (start, stop, rank, updated layers)."""
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for start, stop, rank, layers in shapes:
        columns = [OUTPUTS[layer] for layer in layers]
        downs = [torch.randn(rank, 24, generator=generator) for _ in columns]
        ups = [torch.randn(end - begin, rank, generator=generator) for begin, end in columns]
        spans.append(AdapterSpan(start, stop, columns, 0.5 + rank, downs, ups))
    return spans


def compute(x, out, grad, spans):
    out = out.clone()
    saved = add_low_rank(out, x, spans)
    return out, *compute_low_rank_grads(grad, x, saved, spans, with_x=True)


def draw_tensors(seed=0, rows=300):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) for size in (24, 57, 57))


def test_values_and_gradients_are_those_of_float64(way):
    x, out, grad = draw_tensors()
    # tokens 291.. have no adapter
    spans = build_spans(1, (0, 5, 3, [0, 1]), (5, 290, 9, [1]), (290, 291, 1, [0]))
    result, grad_x, grads = compute(x, out, grad, spans)
    leaf, expected = x.double().requires_grad_(), out.double()
    factors = [[f.double().requires_grad_() for f in (*span.downs, *span.ups)] for span in spans]
    parts = []
    for span, span_factors in zip(spans, factors, strict=True):
        for index, (begin, end) in enumerate(span.columns):
            down, up = span_factors[index], span_factors[len(span.columns) + index]
            update = torch.zeros_like(expected)
            update[span.start : span.stop, begin:end] = (
                span.scale * leaf[span.start : span.stop] @ down.t() @ up.t()
            )
            parts.append(update)
    expected = expected + sum(parts)
    expected.backward(grad.double())
    expected_grads = [
        leaf.grad,
        *(factor.grad for span_factors in factors for factor in span_factors),
    ]
    assert (
        torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-3) and not grad_x[291:].any()
    )
    for actual, exact in zip([grad_x, *grads], expected_grads, strict=True):
        assert float((actual - exact).abs().max()) < 1e-5 * (1 + float(exact.abs().max()))


def test_a_span_gets_the_bits_of_the_span_alone(way):
    if way == "torch":  # there each span's products are separate calls
        return
    x, out, grad = draw_tensors(2)
    shapes = [(0, 37, 4, [0, 1]), (37, 290, 16, [1]), (290, 300, 1, [0, 1])]
    together = build_spans(3, *shapes)
    result, grad_x, grads = compute(x, out, grad, together)
    num_grads = 0
    for span in together:
        size, part = span.stop - span.start, slice(span.start, span.stop)
        separate = AdapterSpan(0, size, span.columns, span.scale, span.downs, span.ups)
        span_result = compute(x[part].clone(), out[part].clone(), grad[part].clone(), [separate])
        count = 2 * len(span.columns)
        assert torch.equal(span_result[0], result[part]) and torch.equal(
            span_result[1], grad_x[part]
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(span_result[2], grads[num_grads : num_grads + count], strict=True)
        )
        num_grads += count
    assert num_grads == len(grads)


def test_the_number_of_threads_changes_no_bit(way, monkeypatch):
    x, out, grad = draw_tensors(4)
    spans, results = build_spans(5, (0, 200, 33, [0, 1]), (200, 210, 2, [1])), []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        added, grad_x, grads = compute(x, out, grad, spans)
        results.append([added, grad_x, *grads])
    for other in results[1:]:
        assert all(
            torch.equal(first, second) for first, second in zip(results[0], other, strict=True)
        )


def test_non_finite_numbers_stay_in_their_token_and_span(way):
    x, out, grad = draw_tensors(6)
    spans = build_spans(7, (0, 100, 5, [0]), (100, 300, 5, [0]))
    clean = compute(x, out, grad, spans)
    x[50, 3], grad[50, 3] = torch.nan, torch.inf
    added, grad_x, grads = compute(x, out, grad, spans)
    others = torch.arange(300) != 50
    assert added[50, :40].isnan().all() and torch.equal(added[others], clean[0][others])
    assert not grad_x[50].isfinite().any() and torch.equal(grad_x[others], clean[1][others])
    assert not grads[0].isfinite().all() and all(map(torch.equal, grads[2:], clean[2][2:]))


def test_wide_layers_are_computed_in_pieces(way):
    """More inputs and outputs than compiled code takes at a time, 512, and none a multiple of a vector."""
    generator = torch.Generator().manual_seed(8)
    shapes = (110, 1037), (110, 1205), (110, 1205), (7, 1037), (1101, 7)
    x, out, grad, down, up = (torch.randn(*shape, generator=generator) for shape in shapes)
    span = AdapterSpan(10, 107, [(3, 1104)], 0.5, [down], [up])
    added, grad_x, (grad_down, grad_up) = compute(x, out, grad, [span])
    part_x, part_grad = x[10:107].double(), grad[10:107, 3:1104].double()
    expected_out, expected_x = out.double(), torch.zeros(110, 1037).double()
    expected_out[10:107, 3:1104] += 0.5 * part_x @ down.double().t() @ up.double().t()
    low = 0.5 * part_grad @ up.double()
    expected_x[10:107] = low @ down.double()
    expected = (
        expected_out,
        expected_x,
        low.t() @ part_x,
        part_grad.t() @ (0.5 * part_x @ down.double().t()),
    )
    for actual, exact in zip((added, grad_x, grad_down, grad_up), expected, strict=True):
        assert float((actual - exact).abs().max()) < 1e-5 * float(exact.abs().max())
