"""Preference losses against the oracle: random ragged rows cut into micro-batches, values and gradients to 1e-9."""

import functools

import numpy as np
import pytest
import torch

from oracles import preference_oracles as oracle
from rl_core.losses.labelled import kto_loss, kto_reference_point
from rl_core.losses.preference import bradley_terry_loss, dpo_loss, ipo_loss
from rl_core.losses.reference_free import orpo_loss, simpo_loss

CASES = range(200)
EXACT = {"rel": 1e-9, "abs": 1e-9}
STEP = 1e-5  # of the central difference


def draw_tokens(rng, count):
    """Draw log-probabilities of sampled tokens: from almost sure to very unlikely."""
    return -np.exp(rng.uniform(-6, 2, size=count))


def draw_ragged(rng, count):
    """Draw pairs of (policy, reference) tokens, 1 to 40 tokens per side."""
    return [
        tuple(
            (draw_tokens(rng, length), draw_tokens(rng, length))
            for length in rng.integers(1, 41, size=2)
        )
        for _ in range(count)
    ]


def build_columns(pairs, reduce):
    """Build (chosen, rejected, reference of both) as float64 tensors."""
    order = ((0, 0), (1, 0), (0, 1), (1, 1))
    return [
        torch.tensor([reduce(pair[side][model]) for pair in pairs], dtype=torch.float64)
        for side, model in order
    ]


def compute_in_parts(rng, loss_fn, arrays, total):
    """Compute the loss of a step in several micro-batches, and its gradient for the first two arrays."""
    leaves = [array.clone().requires_grad_(array.is_floating_point()) for array in arrays]
    cut = int(rng.integers(0, total + 1))
    parts = [slice(0, cut), slice(cut, total)] if 0 < cut < total else [slice(0, total)]
    loss = sum(loss_fn(*[leaf[part] for leaf in leaves])[0] for part in parts)
    loss.backward()
    return loss.item(), leaves


def compute_slope(oracle_loss, pairs, index, side):
    """Compute the derivative of the oracle by one token of the policy, by central differences."""
    row = pairs[index][side][0]
    values = []
    for sign in (1, -1):
        before = row[0]
        row[0] = before + sign * STEP
        values.append(oracle_loss(pairs))
        row[0] = before
    return (values[0] - values[1]) / (2 * STEP)


def draw_losses(rng):
    """Draw (name, function of tensors, reduction over the tokens, oracle) with random settings."""
    beta, share, gamma = rng.uniform(0.05, 3), rng.uniform(0, 0.49), rng.uniform(0, 2)
    return [
        (
            "dpo",
            lambda n: lambda *x: dpo_loss(*x, num_pairs=n, beta=beta),
            np.sum,
            lambda p: oracle.dpo(p, beta),
        ),
        (
            "cdpo",
            lambda n: lambda *x: dpo_loss(*x, num_pairs=n, beta=beta, label_smoothing=share),
            np.sum,
            lambda p: oracle.cdpo(p, beta, share),
        ),
        (
            "ipo",
            lambda n: lambda *x: ipo_loss(*x, num_pairs=n, beta=beta),
            np.mean,
            lambda p: oracle.ipo(p, beta),
        ),
        (
            "simpo",
            lambda n: lambda *x: simpo_loss(*x[:2], num_pairs=n, beta=beta, gamma=gamma),
            np.mean,
            lambda p: oracle.simpo(p, beta, gamma),
        ),
        (
            "orpo",
            lambda n: lambda *x: orpo_loss(*x[:2], num_pairs=n, beta=beta),
            np.mean,
            lambda p: oracle.orpo(p, beta),
        ),
    ]


@pytest.mark.parametrize("place", range(5), ids=["dpo", "cdpo", "ipo", "simpo", "orpo"])
def test_pair_losses(place):
    for case in CASES:
        rng = np.random.default_rng([place, case])
        pairs = draw_ragged(rng, int(rng.integers(1, 9)))
        _, loss_fn, reduce, expected = draw_losses(rng)[place]
        actual, leaves = compute_in_parts(
            rng, loss_fn(len(pairs)), build_columns(pairs, reduce), len(pairs)
        )
        assert actual == pytest.approx(expected(pairs), **EXACT)
        if case % 20 == 0:  # derivative by one token of each side
            for side in (0, 1):
                length = len(pairs[0][side][0]) if reduce is np.mean else 1
                mine = float(leaves[side].grad[0]) / length
                assert mine == pytest.approx(
                    compute_slope(expected, pairs, 0, side), rel=1e-4, abs=1e-7
                )


def test_kto():
    observed = set()
    for case in CASES:
        rng = np.random.default_rng([9, case])
        count = int(rng.integers(2, 12))
        rows = [pair[0] for pair in draw_ragged(rng, count)]
        mismatched = [pair[0] for pair in draw_ragged(rng, count)]
        labels = rng.uniform(size=count) < rng.uniform()
        beta, good, bad = rng.uniform(0.05, 2), rng.uniform(0, 2), rng.uniform(0, 2)
        sums = [
            sum(np.sum(policy) - np.sum(reference) for policy, reference in mismatched[k::2])
            for k in (0, 1)
        ]
        point = kto_reference_point(sum(sums), num_rows=count)
        assert point == pytest.approx(oracle.kto_point(mismatched), **EXACT)
        observed.add(point > 0)
        arrays = [
            torch.tensor([np.sum(row[k]) for row in rows], dtype=torch.float64) for k in (0, 1)
        ]
        options = {
            "reference_point": point,
            "beta": beta,
            "desirable_weight": good,
            "undesirable_weight": bad,
            "num_desirable": int(labels.sum()),
            "num_undesirable": int((~labels).sum()),
        }
        loss_fn = functools.partial(kto_loss, **options)
        actual, leaves = compute_in_parts(rng, loss_fn, [*arrays, torch.tensor(labels)], count)
        assert actual == pytest.approx(oracle.kto(rows, labels, point, beta, good, bad), **EXACT)
        if case % 20 == 0:
            pairs = [(row,) for row in rows]
            rest = (labels, point, beta, good, bad)
            by_hand = compute_slope(
                lambda p, rest=rest: oracle.kto([row for (row,) in p], *rest), pairs, 0, 0
            )
            assert float(leaves[0].grad[0]) == pytest.approx(by_hand, rel=1e-4, abs=1e-8)
    assert observed == {True, False}  # the clamp at 0 was at work, and was not


def with_margins(chosen, rejected, margins, **options):
    return bradley_terry_loss(chosen, rejected, margin_B=margins, **options)


def test_bradley_terry_with_margins():
    for case in CASES:
        rng = np.random.default_rng([11, case])
        count = int(rng.integers(1, 9))
        chosen, rejected = rng.normal(0, 4, size=(2, count))
        margins = rng.uniform(0, 3, size=count) * (rng.uniform(size=count) < 0.7)
        center = rng.uniform(0, 0.1)
        arrays = [torch.tensor(values) for values in (chosen, rejected, margins)]
        loss_fn = functools.partial(with_margins, num_pairs=count, center_coef=center)
        actual, _ = compute_in_parts(rng, loss_fn, arrays, count)
        assert actual == pytest.approx(
            oracle.bradley_terry(chosen, rejected, margins, center), **EXACT
        )
