"""The table of docs/algorithms.md that compares advantages and losses by running each on one small example.

Two prompts with four rollouts of 1, 2, 3 and 4 tokens; one and two of them succeed. The entries are read off the
gradient of the shipped loss by each token's log-prob, so that nothing is stated that the code does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_core.settings import PolicySettings, SamplingSettings
from rl_core.trainers.policy_gradient.advantages import compute_relative_advantages
from rl_core.trainers.policy_gradient.losses import LossDenominators, compute_policy_loss

BEGIN, END = "<!-- normalisation: written by docs/tools/generate.py -->\n", "<!-- end -->\n"
REWARDS = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0))
LENGTHS = (1, 2, 3, 4)
OLD_LOGPROB = -0.7  # about one half: twice as much is a certain token
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("`grpo`", {"algorithm": "grpo"}),
    ("`dapo`", {"algorithm": "dapo", "overlong_buffer": 0}),
    (
        "`grpo`, `sequence_mean` (TRL's `grpo`)",
        {"algorithm": "grpo", "loss_aggregation": "sequence_mean"},
    ),
    ("`dr_grpo`", {"algorithm": "dr_grpo"}),
    ("`rloo`", {"algorithm": "rloo"}),
    ("`maxrl`", {"algorithm": "maxrl"}),
    ("`maxrl`, `maxrl_order: 2`", {"algorithm": "maxrl", "maxrl_order": 2}),
    ("`gdpo` (one component)", {"algorithm": "gdpo"}),
    ("`reinforce` (as REINFORCE++)", {"algorithm": "reinforce"}),
    ("`gspo`", {"algorithm": "gspo"}),
    ("`sapo`", {"algorithm": "sapo"}),
    ("`cispo`", {"algorithm": "cispo"}),
    ("`dppo`", {"algorithm": "dppo"}),
)


def build_normalisation_table() -> str:
    """Build the table, with its markers."""
    lines = [
        "| algorithm | $A / (R - \\bar R)$: 1, 2 of 4 succeed | tokens of a rollout of 1, of 4 | ratio 1.5, A > 0 | "
        "ratio 0.5, A < 0 |",
        "|---|---|---|---|---|",
    ]
    for label, options in VARIANTS:
        settings = PolicySettings(
            group_size=4, sampling=SamplingSettings(max_completion_tokens=10), **options
        )
        advantages = _compute_advantages(settings)
        scales = [
            _describe_scale(rewards, row) for rewards, row in zip(REWARDS, advantages, strict=True)
        ]
        slopes = _compute_slopes(settings, torch.ones(2, 4), 1.0)
        weights = f"{slopes[0][0]:.3f}, {slopes[0][3]:.3f}"
        gradients = [
            _compute_slopes(settings, torch.full((2, 4), sign), ratio)[0][0] / sign
            for ratio, sign in ((1.5, 1.0), (0.5, -1.0))
        ]
        cells = [
            label,
            ", ".join(scales),
            weights,
            *(f"{abs(gradient / slopes[0][0]):.2f}" for gradient in gradients),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def replace_table(text: str) -> str:
    """Replace the table between its markers in a page."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + build_normalisation_table() + after


def _compute_advantages(settings: PolicySettings) -> list[list[float]]:
    """Compute the advantages of the example's rollouts, by prompt."""
    groups = [torch.tensor(row, dtype=torch.float64) for row in REWARDS]
    advantages = compute_relative_advantages(
        groups, settings.algorithm, maxrl_order=settings.maxrl_order
    )
    return [row.tolist() for row in advantages]


def _describe_scale(rewards: Sequence[float], advantages: Sequence[float]) -> str:
    """Return the factor between the advantages of a group and R - mean, or a dash if there is none."""
    mean = sum(rewards) / len(rewards)
    factors = [a / (r - mean) for a, r in zip(advantages, rewards, strict=True)]
    is_one_factor = max(factors) - min(factors) < 1e-6
    return f"{factors[0]:.2f}" if is_one_factor else "no factor"


def _compute_slopes(
    settings: PolicySettings, advantages_PG: torch.Tensor, ratio: float
) -> list[list[float]]:
    """Compute minus the loss' derivative by the log-prob of each rollout's first token, as [P][G].

    Args:
        ratio: of every token.
    """
    lengths = LENGTHS * len(REWARDS)
    mask_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    old_BT = torch.full(mask_BT.shape, OLD_LOGPROB, dtype=torch.float64)
    new_BT = (old_BT + torch.tensor(ratio).log()).requires_grad_()
    advantages_BT = advantages_PG.double().reshape(-1, 1).expand(mask_BT.shape)
    tokens, rows = int(mask_BT.sum()), len(lengths)
    counts = LossDenominators(tokens, tokens, rows, rows, num_rollouts=rows)
    loss, _ = compute_policy_loss(settings, new_BT, old_BT, advantages_BT, mask_BT, counts)
    (gradient_BT,) = torch.autograd.grad(loss, new_BT)
    return (-gradient_BT[:, 0]).reshape(len(REWARDS), -1).tolist()
