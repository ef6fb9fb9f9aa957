"""Losses by name: value and gradient against numpy float64, metrics, refusals."""

import numpy as np
import pytest
import torch
from oracles import service_oracles

from rl_core.errors import DataError, ServiceError
from rl_core.service.loss_function import LossInputs
from rl_core.service.loss_registry import LOSSES, UNSUPPORTED_LOSSES, find_loss

LENGTHS = (5, 1, 7, 3)


def draw_inputs(name, seed):
    """Draw the inputs of each datum in float64, and the values that have a gradient."""
    rng = np.random.default_rng([7, seed])
    spread = 3.0 if seed % 3 == 2 else 0.5
    rows, current = [], []
    for size in LENGTHS:
        q = -rng.exponential(2.0, size)
        current.append(q + spread * rng.standard_normal(size) * 0.9)
        row = {"logprobs": q, "advantages": rng.standard_normal(size) * (rng.random(size) < 0.7)}
        row |= {"weights": rng.standard_normal(size) * (rng.random(size) < 0.8)}
        row |= {
            "clip_low_threshold": rng.uniform(0.3, 0.9, size),
            "clip_high_threshold": rng.uniform(1.1, 3, size),
        }
        row |= {
            "sequence_ratio_mask": (rng.random(size) < 0.8).astype(float),
            "mask": (rng.random(size) < 0.8) * 1.0,
        }
        row |= {
            "rewards": rng.standard_normal(size) * row["mask"],
            "values": rng.standard_normal(size),
        }
        row |= {"ref_logprobs": q + 0.3 * rng.standard_normal(size)}
        row |= {"margin": rng.random(1), "preferred": np.array([float(len(rows) % 2 == seed % 2)])}
        rows.append(row)
    input_names = LOSSES[name].inputs
    if name == "conservative_ppo":
        rows = [{key: value for key, value in row.items() if key != "mask"} for row in rows]
    if seed % 2:  # thresholds from the options
        rows = [
            {key: value for key, value in row.items() if not key.startswith("clip")} for row in rows
        ]
    return [
        {key: value for key, value in row.items() if key in input_names} for row in rows
    ], current


def pad_arrays(arrays):
    padded = torch.full((len(arrays), max(map(len, arrays))), 0.0, dtype=torch.float64)
    for index, array in enumerate(arrays):
        padded[index, : len(array)] = torch.from_numpy(array)
    return padded


def build_loss_inputs(name, rows, options, **leaves):
    mask = pad_arrays([np.ones(size) for size in LENGTHS]) != 0
    inputs = {
        key: torch.from_numpy(np.concatenate([row[key] for row in rows]))
        if LOSSES[name].inputs[key].shape == "one"
        else pad_arrays([row[key] for row in rows])
        for key in rows[0]
    }
    return LossInputs(mask, options, inputs, **leaves)


def compute_slopes(function, arrays, step=1e-6):
    """Return central differences of a function of some arrays."""
    slopes = []
    for array in arrays:
        slope = np.zeros_like(array)
        for index in range(len(array)):
            original = array[index]
            array[index] = original + step
            above = function()
            array[index] = original - step
            slope[index] = (above - function()) / (2 * step)
            array[index] = original
        slopes.append(slope)
    return slopes


def draw_options(name, seed):
    rng = np.random.default_rng(seed)
    options = {key: option.default for key, option in LOSSES[name].options.items()}
    for key, value in {
        "entropy_coef": 0.3,
        "kl_coef": 0.4,
        "gamma": 0.9,
        "scale": 0.7,
        "beta": 0.2,
    }.items():
        if key in options:
            options[key] = value * float(rng.uniform(0.5, 1))
    return options


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"reward_modeling", "stable_reinforce"}))
def test_loss_and_gradient_are_the_formulas(name, seed):
    rows, current = draw_inputs(name, seed)
    options = draw_options(name, seed)
    rng = np.random.default_rng(seed)
    values, entropy = ([rng.standard_normal(size) for size in LENGTHS] for _ in range(2))
    extra_values = (values, entropy) if name in ("enhanced_ppo", "conservative_ppo") else ()
    oracle = getattr(service_oracles, name)
    fixed = [array.copy() for array in current]

    def expected():
        return oracle(current, fixed, rows, options, *extra_values)

    leaves = {"logprobs": pad_arrays(current).requires_grad_()}
    if extra_values:
        leaves |= {"entropy_BT": pad_arrays(entropy).requires_grad_()}
    if name == "enhanced_ppo":
        leaves |= {"values_BT": pad_arrays(values).requires_grad_()}
    loss = LOSSES[name].loss(build_loss_inputs(name, rows, options, **leaves))
    assert float(loss.detach()) == pytest.approx(expected(), rel=1e-9, abs=1e-9)
    loss.backward()
    arrays = {"logprobs": current, "entropy_BT": entropy, "values_BT": values}
    for key, leaf in leaves.items():
        expected_gradient = pad_arrays(compute_slopes(expected, arrays[key]))
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert torch.allclose(
            gradient,
            expected_gradient,
            rtol=1e-5,
            atol=1e-5 * (1 + float(expected_gradient.abs().max())),
        ), key


@pytest.mark.parametrize("seed", range(3))
def test_reward_modeling_is_bradley_terry(seed):
    rows, _ = draw_inputs("reward_modeling", seed)
    options = draw_options("reward_modeling", seed)
    scores = np.random.default_rng(seed).standard_normal(len(rows))

    def expected():
        return service_oracles.reward_modeling(scores, rows, options)

    leaf = torch.from_numpy(scores.copy()).requires_grad_()
    loss = LOSSES["reward_modeling"].loss(
        build_loss_inputs("reward_modeling", rows, options, scores_B=leaf)
    )
    assert float(loss.detach()) == pytest.approx(expected(), rel=1e-9)
    loss.backward()
    assert torch.allclose(
        leaf.grad, torch.from_numpy(compute_slopes(expected, [scores])[0]), atol=1e-7
    )


def test_values_by_hand():
    # One token with p = q + ln 2, so r = 2; A = +1 and -1.
    def loss(name, advantage, **options):
        q, a = torch.tensor([[-2.0]]), torch.tensor([[advantage]])
        p = q + np.log(2.0)
        all_options = {
            key: option.default for key, option in LOSSES[name].options.items()
        } | options
        return float(
            LOSSES[name].loss(
                LossInputs(
                    a.bool() | True, all_options, {"logprobs": q, "advantages": a}, logprobs=p
                )
            )
        )

    assert loss("importance_sampling", 1.0) == pytest.approx(-2) and loss(
        "importance_sampling", -1.0
    ) == pytest.approx(2)
    assert loss("ppo", 1.0) == pytest.approx(-1.2) and loss("ppo", -1.0) == pytest.approx(2)
    p = np.log(2.0) - 2
    assert loss("cispo", 1.0) == pytest.approx(-2 * p) and loss(
        "cispo", 1.0, clip_high_threshold=1.5
    ) == pytest.approx(-1.5 * p)
    assert loss("dro", 1.0) == pytest.approx(-(p - 0.025 * np.log(2.0) ** 2))
    assert loss("gspo", 1.0) == pytest.approx(-(1 + 4e-4)) and loss("gspo", -1.0) == pytest.approx(
        2
    )


def test_log_ratios_are_held_within_20():
    # p - q = 25: r = exp(20), and no gradient
    p = torch.tensor([[25.0]], dtype=torch.float64, requires_grad=True)
    inputs = {
        "logprobs": torch.zeros(1, 1, dtype=torch.float64),
        "advantages": torch.ones(1, 1, dtype=torch.float64),
    }
    loss = LOSSES["importance_sampling"].loss(
        LossInputs(torch.ones(1, 1, dtype=torch.bool), {}, inputs, logprobs=p)
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-np.exp(20.0)) and float(p.grad) == 0


def test_refused_and_unknown_names():
    for name in UNSUPPORTED_LOSSES:
        with pytest.raises(ServiceError, match=f"'{name}' is not supported") as refused:
            find_loss(name)
        assert refused.value.category == "user"
    with pytest.raises(ServiceError, match="there is no 'pp0'; did you mean 'ppo'"):
        find_loss("pp0")


def test_a_kl_term_needs_a_reference_and_thresholds_an_order():
    rows, current = draw_inputs("conservative_ppo", 0)
    rows = [{key: value for key, value in row.items() if key != "ref_logprobs"} for row in rows]
    options = draw_options("conservative_ppo", 0) | {"kl_coef": 0.1}
    with pytest.raises(DataError, match="needs ref_logprobs"):
        LOSSES["conservative_ppo"].loss(
            build_loss_inputs(
                "conservative_ppo",
                rows,
                options,
                logprobs=pad_arrays(current),
                entropy_BT=pad_arrays(current),
            )
        )
    rows, current = draw_inputs("ppo", 0)
    rows[0]["clip_low_threshold"][0] = 9.0
    with pytest.raises(DataError, match="clip_low_threshold <= clip_high_threshold"):
        LOSSES["ppo"].loss(
            build_loss_inputs("ppo", rows, draw_options("ppo", 0), logprobs=pad_arrays(current))
        )
