"""Adapters' products over spans of tokens: values, gradients, and independence of the other spans."""

import torch

from rl_core.cpu.low_rank import AdapterSpan, add_low_rank, compute_low_rank_grads

OUTPUTS = [(0, 40), (40, 57)]  # two layers side by side


def spans_of(seed, *given):
    """(start, stop, rank, updated layers) -> spans with random factors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start, stop, rank, layers in given:
        columns = [OUTPUTS[layer] for layer in layers]
        downs = [torch.randn(rank, 24, generator=generator) for _ in columns]
        ups = [torch.randn(end - begin, rank, generator=generator) for begin, end in columns]
        found.append(AdapterSpan(start, stop, columns, 0.5 + rank, downs, ups))
    return found


def computed(x, out, grad, spans):
    out = out.clone()
    saved = add_low_rank(out, x, spans)
    return out, *compute_low_rank_grads(grad, x, saved, spans, with_x=True)


def tensors(seed=0, rows=300):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) for size in (24, 57, 57))


def test_values_and_gradients_are_those_of_float64(way):
    x, out, grad = tensors()
    spans = spans_of(
        1, (0, 5, 3, [0, 1]), (5, 290, 9, [1]), (290, 291, 1, [0])
    )  # tokens 291.. have no adapter
    found, grad_x, grads = computed(x, out, grad, spans)
    leaf, expected = x.double().requires_grad_(), out.double()
    factors = [[f.double().requires_grad_() for f in (*span.downs, *span.ups)] for span in spans]
    parts = []
    for span, own in zip(spans, factors, strict=True):
        for index, (begin, end) in enumerate(span.columns):
            down, up = own[index], own[len(span.columns) + index]
            update = torch.zeros_like(expected)
            update[span.start : span.stop, begin:end] = (
                span.scale * leaf[span.start : span.stop] @ down.t() @ up.t()
            )
            parts.append(update)
    expected = expected + sum(parts)
    expected.backward(grad.double())
    wanted = [leaf.grad, *(factor.grad for own in factors for factor in own)]
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-3) and not grad_x[291:].any()
    for ours, true in zip([grad_x, *grads], wanted, strict=True):
        assert float((ours - true).abs().max()) < 1e-5 * (1 + float(true.abs().max()))


def test_a_span_gets_the_bits_of_the_span_alone(way):
    if way == "torch":  # each span's products are calls of their own there
        return
    x, out, grad = tensors(2)
    given = [(0, 37, 4, [0, 1]), (37, 290, 16, [1]), (290, 300, 1, [0, 1])]
    together = spans_of(3, *given)
    found, grad_x, grads = computed(x, out, grad, together)
    taken = 0
    for span in together:
        size, part = span.stop - span.start, slice(span.start, span.stop)
        alone = AdapterSpan(0, size, span.columns, span.scale, span.downs, span.ups)
        own = computed(x[part].clone(), out[part].clone(), grad[part].clone(), [alone])
        count = 2 * len(span.columns)
        assert torch.equal(own[0], found[part]) and torch.equal(own[1], grad_x[part])
        assert all(
            torch.equal(a, b) for a, b in zip(own[2], grads[taken : taken + count], strict=True)
        )
        taken += count
    assert taken == len(grads)


def test_the_number_of_threads_changes_no_bit(way, monkeypatch):
    x, out, grad = tensors(4)
    spans, found = spans_of(5, (0, 200, 33, [0, 1]), (200, 210, 2, [1])), []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        added, grad_x, grads = computed(x, out, grad, spans)
        found.append([added, grad_x, *grads])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_what_is_not_finite_stays_with_its_token_and_its_span(way):
    x, out, grad = tensors(6)
    spans = spans_of(7, (0, 100, 5, [0]), (100, 300, 5, [0]))
    clean = computed(x, out, grad, spans)
    x[50, 3], grad[50, 3] = torch.nan, torch.inf
    added, grad_x, grads = computed(x, out, grad, spans)
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
    added, grad_x, (grad_down, grad_up) = computed(x, out, grad, [span])
    part_x, part_grad = x[10:107].double(), grad[10:107, 3:1104].double()
    expected_out, expected_x = out.double(), torch.zeros(110, 1037).double()
    expected_out[10:107, 3:1104] += 0.5 * part_x @ down.double().t() @ up.double().t()
    low = 0.5 * part_grad @ up.double()
    expected_x[10:107] = low @ down.double()
    wanted = (
        expected_out,
        expected_x,
        low.t() @ part_x,
        part_grad.t() @ (0.5 * part_x @ down.double().t()),
    )
    for ours, true in zip((added, grad_x, grad_down, grad_up), wanted, strict=True):
        assert float((ours - true).abs().max()) < 1e-5 * float(true.abs().max())
