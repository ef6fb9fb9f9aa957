"""Divergences between distributions over two vocabularies: by hand, identities, gradients in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.distributions import (
    generalized_divergence,
    gold_divergence,
    merge_span_logprobs,
    sorted_distance,
)


def log(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def draw_pair(seed, sizes=(7, 5), rows=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(1) * 1.0
        for size in sizes
    ]


def test_sorted_distance_by_hand():
    # sorted: (0.7, 0.2, 0.1) and (0.6, 0.4): |0.1| + |-0.2| + 0.1 = 0.4
    student, teacher = log([0.2, 0.7, 0.1]), log([0.4, 0.6])
    assert sorted_distance(student, teacher).tolist() == pytest.approx([0.4])
    assert sorted_distance(teacher, student).tolist() == pytest.approx([0.4])
    # another order of the same probabilities is no distance: it does not know which token is which
    assert sorted_distance(log([0.2, 0.8]), log([0.8, 0.2])).tolist() == pytest.approx([0.0])
    assert sorted_distance(log([1.0, 0.0]), log([0.25] * 4)).tolist() == pytest.approx([1.5])


def test_merged_spans_by_hand():
    # later tokens of probability 0.5 and 0.2 scale the first distribution by 0.1; 0 stands for no token
    first = log([0.5, 0.5], [0.9, 0.1])
    later = torch.tensor([[math.log(0.5), math.log(0.2)], [0.0, 0.0]], dtype=torch.float64)
    merged = merge_span_logprobs(first, later).exp()
    torch.testing.assert_close(merged, torch.tensor([[0.05, 0.05], [0.9, 0.1]]).double())


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # teacher (0.5, 0.5), student (0.8, 0.2)
        (0.0, 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)),
        (1.0, 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)),
        # m = 0.25 teacher + 0.75 student = (0.725, 0.275)
        (
            0.25,
            0.25 * (0.5 * math.log(0.5 / 0.725) + 0.5 * math.log(0.5 / 0.275))
            + 0.75 * (0.8 * math.log(0.8 / 0.725) + 0.2 * math.log(0.2 / 0.275)),
        ),
    ],
)
def test_generalized_divergence_by_hand(beta, expected):
    student, teacher = log([0.8, 0.2]), log([0.5, 0.5])
    assert generalized_divergence(student, teacher, beta=beta).tolist() == pytest.approx([expected])
    assert generalized_divergence(student, student, beta=beta).tolist() == pytest.approx([0.0])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_rows_that_do_not_sum_to_one_are_nearest_where_they_are_equal(beta):
    """A student must not win by moving probability out of the compared tokens, as it would by sum q log(q / p)."""
    teacher = log([0.3, 0.2])
    at = {
        scale: float(generalized_divergence(teacher + math.log(scale), teacher, beta=beta))
        for scale in (0.25, 0.9, 1.0, 1.1, 1.6)
    }
    assert at[1.0] == pytest.approx(0.0, abs=1e-15)
    assert min(at[0.25], at[0.9], at[1.1], at[1.6]) > 1e-5
    if beta == 1.0:  # 0.9 * 0.5 log 0.9 - 0.45 + 0.5 by hand
        assert at[0.9] == pytest.approx(0.45 * math.log(0.9) + 0.05)


def test_gold_by_hand():
    # tokens 0 and 2 of the student are 1 and 0 of the teacher; the rest is (0.1, 0.2) and (0.5,)
    student, teacher = log([0.4, 0.1, 0.3, 0.2]), log([0.2, 0.3, 0.5])
    ids = torch.tensor([0, 2]), torch.tensor([1, 0])
    reverse = 0.4 * math.log(0.4 / 0.3) + 0.3 * math.log(0.3 / 0.2) - 0.7 + 0.5
    rest = abs(0.2 - 0.5) + 0.1
    for weight in (0.0, 0.25, 1.0):
        actual = gold_divergence(student, teacher, *ids, beta=1.0, shared_weight=weight)
        assert actual.tolist() == pytest.approx([weight * reverse + (1 - weight) * rest])


def test_gold_of_equal_vocabularies_is_the_divergence_in_any_order_of_ids():
    student, teacher = draw_pair(0, (6, 6))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    ids = torch.arange(6)
    kl = (student.exp() * (student - teacher)).sum(1)
    for left, right, permuted in ((ids, ids, teacher), (order, ids, teacher[:, order])):
        actual = gold_divergence(student, permuted, left, right, beta=1.0, shared_weight=1.0)
        torch.testing.assert_close(actual, kl)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gradients_are_those_of_finite_differences_and_reach_the_student_alone(beta):
    student, teacher = draw_pair(1)
    ids = torch.tensor([0, 3, 6]), torch.tensor([4, 1, 2])
    later = torch.tensor([[-0.5, -1.0], [0.0, 0.0], [-2.0, 0.0], [-0.1, -0.1]]).double()

    def compute_loss(logits, later):
        merged = merge_span_logprobs(logits.log_softmax(1), later)
        gold = gold_divergence(merged, teacher, *ids, beta=beta, shared_weight=0.6)
        return torch.stack([gold, sorted_distance(merged, teacher)])

    inputs = student.clone().requires_grad_(), later.requires_grad_()
    assert torch.autograd.gradcheck(compute_loss, inputs)


def test_divergences_against_loops_over_tokens():
    """Compare with sums over single tokens in numpy, for random rows and weights."""
    for seed, beta in itertools.product(range(20), (0.0, 0.2, 1.0)):
        rng = np.random.default_rng([20261130, seed])
        sizes = rng.integers(1, 8, size=2)
        student, teacher = draw_pair(seed, sizes.tolist(), rows=2)
        count = int(rng.integers(1, min(sizes) + 1))
        ids = [rng.permutation(size)[:count] for size in sizes]
        weight = float(rng.uniform())
        actual = gold_divergence(
            student, teacher, *map(torch.tensor, ids), beta=beta, shared_weight=weight
        )
        for row in range(2):
            q, p = student[row].exp().tolist(), teacher[row].exp().tolist()
            shared = 0.0
            for i, j in zip(*ids, strict=True):
                m = beta * p[j] + (1 - beta) * q[i]
                forward = p[j] * math.log(p[j] / (q[i] if beta == 0 else m))
                reverse = q[i] * math.log(q[i] / (p[j] if beta == 1 else m))
                if beta == 0:
                    shared += forward - p[j] + q[i]
                elif beta == 1:
                    shared += reverse - q[i] + p[j]
                else:
                    shared += beta * forward + (1 - beta) * reverse
            rests = [
                sorted((v for k, v in enumerate(x) if k not in taken), reverse=True)
                for x, taken in ((q, ids[0]), (p, ids[1]))
            ]
            rest = sum(abs(a - b) for a, b in itertools.zip_longest(*rests, fillvalue=0.0))
            assert float(actual[row]) == pytest.approx(weight * shared + (1 - weight) * rest)


def test_impossible_tokens_are_finite_and_bad_inputs_are_refused():
    never = log([1.0, 0.0]), log([0.0, 1.0])
    for beta in (0.0, 0.5, 1.0):
        assert torch.isfinite(generalized_divergence(*never, beta=beta)).all()
    student, teacher = draw_pair(2)
    with pytest.raises(DataError, match="expected"):
        sorted_distance(student, teacher[:2])
    with pytest.raises(DataError, match="must be equal"):
        generalized_divergence(student, teacher, beta=0.5)
    with pytest.raises(DataError, match=r"beta 1\.5"):
        generalized_divergence(student, student, beta=1.5)
    with pytest.raises(DataError, match="shared_weight: 2"):
        ids = torch.tensor([0])
        gold_divergence(student, teacher, ids, ids, beta=0.5, shared_weight=2)
    with pytest.raises(DataError, match="student"):
        sorted_distance(student * math.nan, teacher)
