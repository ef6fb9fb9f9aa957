"""Gain of a thought: change of the correct answer's log-likelihood or probability.

Suffix: N questions.
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_finite

__all__ = ["GainKind", "thought_gain"]

GainKind = Literal["logprob_gain", "correctness_gain"]


def thought_gain(
    with_thought_N: torch.Tensor, without_N: torch.Tensor, *, kind: GainKind = "logprob_gain", clip: float = 3.0
) -> torch.Tensor:
    """Gain of each thought over none, within +-clip.

    logprob_gain:      log p(answer | history, thought) - log p(answer | history), nats, of the correct answer.
    correctness_gain:  p(answer | history, thought) - p(answer | history): the expected correctness of a sampled
                       answer, without the noise of sampling one.

    Args:
        with_thought_N, without_N: float [N], nats, log-probability of the whole correct answer.
    Returns: float [N], no gradient.
    Raises: DataError on shapes, non-finite or positive log-probabilities, an unknown kind, or a clip of 0.
    Source: Zelikman et al. 2024, arXiv:2403.09629, eq. 2 (log-probability, against the mean over thoughts there).
    """
    if with_thought_N.shape != without_N.shape or with_thought_N.ndim != 1:
        raise DataError(f"with_thought {tuple(with_thought_N.shape)} and without {tuple(without_N.shape)} must be [N]")
    if clip <= 0 or kind not in ("logprob_gain", "correctness_gain"):
        raise DataError(f"kind '{kind}' must be logprob_gain or correctness_gain, clip {clip} above 0")
    check_finite(with_thought=with_thought_N, without=without_N)
    with_N, without_N = with_thought_N.detach(), without_N.detach()
    if bool((with_N > 1e-4).any()) or bool((without_N > 1e-4).any()):  # rounding alone may pass 0
        raise DataError("a log-probability is above 0")
    gain_N = with_N - without_N if kind == "logprob_gain" else with_N.exp() - without_N.exp()
    return gain_N.clamp(-clip, clip)
