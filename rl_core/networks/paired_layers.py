"""Two networks of the same hidden widths on the same input, computed together: half as many operations, twice as wide.

Layers as small as these cost little arithmetic and much bookkeeping. Each pair of hidden layers is one batched product,
forward and backward; the result is that of the two networks one after the other, to rounding.

Suffixes: B rows, D numbers of the input, H width of a hidden layer; a leading 2 is (first network, second network).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["paired_layers", "single_layers"]


def paired_layers(
    inputs_BD: torch.Tensor, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of both networks, float [B, outputs of each], with gradients of their weights (none of the input).

    Args:
        first, second: weight, offset, weight, offset, ... of each network's linear layers; hidden widths agree.
        activation: tanh or relu, between the layers.
    """
    function: Any = _Paired  # torch's `apply` has no types
    outputs: tuple[torch.Tensor, torch.Tensor] = function.apply(inputs_BD, activation, len(first), *first, *second)
    return outputs


def single_layers(inputs_BD: torch.Tensor, weights: Sequence[torch.Tensor], activation: str) -> torch.Tensor:
    """Outputs of one network, float [B, outputs]: the same bits as its `nn.Sequential`, without a call of each module.

    Args:
        weights: weight, offset, weight, offset, ... of its linear layers.
        activation: tanh or relu, between the layers.
    """
    act = torch.tanh if activation == "tanh" else torch.relu
    outputs = torch.nn.functional.linear(inputs_BD, weights[0], weights[1])
    for place in range(2, len(weights), 2):
        outputs = torch.nn.functional.linear(act(outputs), weights[place], weights[place + 1])
    return outputs


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, inputs_BD: torch.Tensor, activation: str, count: int, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = weights[:count], weights[count:]
        states: list[torch.Tensor] = []  # [2, B, H] after each hidden layer
        matrices: list[torch.Tensor] = []  # [2, H, H'] of the hidden layers behind the first
        act_ = torch.tanh_ if activation == "tanh" else torch.relu_
        for place in range(0, count - 2, 2):
            offset_21H = torch.stack((first[place + 1], second[place + 1]))[:, None]
            matrix_2HH = torch.stack((first[place], second[place]))
            before = states[-1] if states else inputs_BD.expand(2, -1, -1)
            states.append(act_(torch.baddbmm(offset_21H, before, matrix_2HH.transpose(1, 2))))
            if place:
                matrices.append(matrix_2HH)
        last = states[-1] if states else inputs_BD.expand(2, -1, -1)
        context.save_for_backward(inputs_BD, first[-2], second[-2], *states, *matrices)
        context.activation, context.depth = activation, len(states)
        return torch.addmm(first[-1], last[0], first[-2].T), torch.addmm(second[-1], last[1], second[-2].T)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs_BD, *heads = context.saved_tensors
        heads, states, matrices = heads[:2], heads[2 : 2 + context.depth], heads[2 + context.depth :]
        last = states[-1] if states else inputs_BD.expand(2, -1, -1)
        found: list[list[torch.Tensor]] = [
            [gradient.T @ last[side], gradient.sum(0)] for side, gradient in enumerate(gradients)
        ]
        if states:
            back_2BH = torch.empty_like(states[-1])
            for side in (0, 1):
                torch.mm(gradients[side], heads[side], out=back_2BH[side])
        for place in range(context.depth - 1, -1, -1):
            back_2BH = _derivative(back_2BH, states[place], context.activation)
            before = states[place - 1] if place else inputs_BD.expand(2, -1, -1)
            matrix_2HH, offset_2H = torch.bmm(back_2BH.transpose(1, 2), before), back_2BH.sum(1)
            for side in (0, 1):
                found[side][:0] = [matrix_2HH[side], offset_2H[side]]
            if place:
                back_2BH = torch.bmm(back_2BH, matrices[place - 1])
        return (None, None, None, *found[0], *found[1])


def _derivative(gradient: torch.Tensor, state: torch.Tensor, activation: str) -> torch.Tensor:
    """Gradient before the activation, from that behind it and the activation's value."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(gradient, state)
    return torch.ops.aten.threshold_backward(gradient, state, 0)
