"""Running mean and variance of observations.

Suffixes: B rows, D numbers of an observation.
"""

from __future__ import annotations

import torch
from torch import nn

from rl_core.losses.masking import check_finite

__all__ = ["ObservationStatistics"]

EPS = 1e-8
LIMIT = 10.0  # standard deviations


class ObservationStatistics(nn.Module):
    """Normalises observations by the mean and variance of all that `update` was given, clipped to +-10 deviations.

    Before the first update it changes nothing. The sums are float64 buffers: part of every state of the module.
    """

    count: torch.Tensor
    mean_D: torch.Tensor
    squares_D: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_D", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares_D", torch.zeros(size, dtype=torch.float64))  # sum of squared deviations

    @torch.no_grad()
    def update(self, observations_BD: torch.Tensor) -> None:
        """Take rows in, exactly as if all rows so far had been averaged together.

        Raises: NonFiniteTensor for an observation with NaN or infinity, before anything is changed.
        Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
        """
        check_finite(observations=observations_BD)
        rows_BD = observations_BD.double()
        added, mean_D = len(rows_BD), rows_BD.mean(0)
        total = self.count + added
        apart_D = mean_D - self.mean_D
        self.squares_D += (rows_BD - mean_D).square().sum(0) + apart_D.square() * self.count * added / total
        self.mean_D += apart_D * added / total
        self.count.copy_(total)

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """(x - mean) / sqrt(variance + 1e-8), float32, clipped."""
        if not self.count:
            return observations_BD
        deviation_D = (self.squares_D / self.count + EPS).sqrt()
        return ((observations_BD - self.mean_D) / deviation_D).clamp(-LIMIT, LIMIT).float()
