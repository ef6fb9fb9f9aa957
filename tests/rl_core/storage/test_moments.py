"""Moments of an optimizer: the run keeps its settings; moments of other parameters are refused by name."""

import pytest
import torch
from torch import nn

from rl_core.errors import CheckpointError
from rl_core.storage.checkpoint import extract_moments, load_moments


def build_stepped_adamw(shapes, **options):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True, **options)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def test_a_resumed_run_keeps_its_settings():
    state = extract_moments(build_stepped_adamw([(2, 3)], weight_decay=0.3, betas=(0.5, 0.6)))
    assert set(state) == {"state"} and set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    other = build_stepped_adamw([(2, 3)], weight_decay=0.7)
    load_moments(other, state)
    (group,) = other.param_groups
    assert group["weight_decay"] == 0.7 and group["betas"] == (0.9, 0.999)
    # One step with gradient 0.5 at betas 0.5 and 0.6: 0.5 * 0.5, 0.4 * 0.25.
    assert float(other.state[group["params"][0]]["exp_avg"][0, 0]) == pytest.approx(0.25)
    assert float(other.state[group["params"][0]]["exp_avg_sq"][0, 0]) == pytest.approx(0.1)


def test_moments_of_other_parameters_are_refused():
    """Refuse them, because torch's fused kernel would access memory out of bounds, which crashed the process."""
    with pytest.raises(
        CheckpointError, match=r"exp_avg of parameter 0 has shape \(2, 3\), not \(4,\)"
    ):
        load_moments(build_stepped_adamw([(4,)]), extract_moments(build_stepped_adamw([(2, 3)])))
    with pytest.raises(CheckpointError, match="moments of parameter 1, but 1 are trained"):
        load_moments(
            build_stepped_adamw([(4,)]), extract_moments(build_stepped_adamw([(4,), (2,)]))
        )
