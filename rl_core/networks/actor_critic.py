"""Policy and value networks for vector observations, discrete or continuous actions.

Suffixes: B rows, D numbers of an observation, A actions (discrete) or numbers of an action (continuous).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rl_core.errors import DataError, SettingsError
from rl_core.losses.supervised import token_entropy
from rl_core.networks.observation_statistics import ObservationStatistics
from rl_core.networks.paired_layers import paired_layers, single_layers

__all__ = ["ActionSpace", "ActorCritic", "NetworkShape", "PolicyNetwork", "ValueNetwork"]

Activation = Literal["tanh", "relu"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Actions of an environment: `size` alternatives, or a vector of `size` numbers."""

    kind: Literal["discrete", "continuous"]
    size: int
    start: int = 0  # number of the first alternative
    low: tuple[float, ...] = ()  # bounds of each number, infinite where there is none
    high: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()  # as the environment takes an action

    @property
    def is_discrete(self) -> bool:
        """True = one of several alternatives."""
        return self.kind == "discrete"


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes that an actor-critic is made from."""

    observation_size: int
    actions: ActionSpace
    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    initial_log_std: float = 0.0  # of continuous actions
    normalises: bool = False  # observations, by running mean and variance

    def __post_init__(self) -> None:
        if self.observation_size < 1 or self.actions.size < 1 or any(width < 1 for width in self.hidden):
            raise SettingsError(
                f"hidden: sizes {self.observation_size}, {self.hidden}, {self.actions.size} must all be at least 1"
            )


def _layers(
    sizes: Sequence[int], activation: Activation, gain: float, generator: torch.Generator | None
) -> nn.Sequential:
    """Linear layers with the activation between them; orthogonal weights, offsets 0.

    Hidden layers have gain sqrt(2), the last one `gain`. Source: Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    parts: list[nn.Module] = []
    last = len(sizes) - 2
    for place, (before, after) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(before, after)
        nn.init.orthogonal_(layer.weight, gain if place == last else math.sqrt(2), generator=generator)
        nn.init.zeros_(layer.bias)
        parts += [layer] if place == last else [layer, _ACTIVATIONS[activation]()]
    return nn.Sequential(*parts)


class PolicyNetwork(nn.Module):
    """Distribution over actions given an observation: categorical, or a Gaussian with one learned deviation each."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.actions = shape.actions
        sizes = (shape.observation_size, *shape.hidden, shape.actions.size)
        self.layers = _layers(sizes, shape.activation, 0.01, generator)
        if not shape.actions.is_discrete:
            self.log_std_A = nn.Parameter(torch.full((shape.actions.size,), shape.initial_log_std))

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Logits of the alternatives, or means of the numbers; float [B, A]."""
        outputs_BA: torch.Tensor = self.layers(observations_BD)
        return outputs_BA

    def logprobs_and_entropy(
        self, observations_BD: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability (density) of the actions and entropy of their distribution, nats; float [B] each.

        Args:
            actions: int64 [B], counted from 0; or float [B, A], as drawn, before they are clipped to bounds.
        Raises: DataError on shapes.
        """
        outputs_BA = self(observations_BD)
        return self.logprobs_of(outputs_BA, actions), self.entropy_of(outputs_BA)

    def logprobs_of(self, outputs_BA: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the actions from the outputs of `forward`, float [B]. Raises: DataError on shapes."""
        return self.logprob_column(outputs_BA, actions).squeeze(1)

    def logprob_column(self, outputs_BA: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The same as a column [B, 1], as losses take it."""
        expected = outputs_BA.shape[:1] if self.actions.is_discrete else outputs_BA.shape
        if actions.shape != expected:
            raise DataError(f"actions: shape {tuple(actions.shape)}, expected {tuple(expected)}")
        if self.actions.is_discrete:
            return outputs_BA.log_softmax(-1).gather(1, actions[:, None])
        return gaussian_logprobs(actions, outputs_BA, self.log_std_A)[:, None]

    def entropy_of(self, outputs_BA: torch.Tensor) -> torch.Tensor:
        """Entropies of the distributions from the outputs of `forward`, float [B]."""
        if self.actions.is_discrete:
            return token_entropy(outputs_BA.log_softmax(-1))
        return gaussian_entropy(self.log_std_A).expand(len(outputs_BA))

    def act(self, observations_BD: torch.Tensor, noise_BA: torch.Tensor | None = None) -> torch.Tensor:
        """Actions, int64 [B] counted from 0 or float [B, A] (not clipped): drawn by the noise, or the likeliest.

        Args:
            noise_BA: standard Gumbel noise for alternatives (the largest of logit + noise is a sample of the softmax:
                Gumbel 1954), standard normal noise for numbers; None = the mode.
        """
        return self.drawn(self(observations_BD), noise_BA)

    def drawn(self, outputs_BA: torch.Tensor, noise_BA: torch.Tensor | None) -> torch.Tensor:
        """Actions from the outputs of `forward`; see `act`."""
        if self.actions.is_discrete:
            return (outputs_BA if noise_BA is None else outputs_BA + noise_BA).argmax(-1)
        return outputs_BA if noise_BA is None else outputs_BA + self.log_std_A.exp() * noise_BA


class ValueNetwork(nn.Module):
    """Expected discounted return from an observation."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layers = _layers((shape.observation_size, *shape.hidden, 1), shape.activation, 1.0, generator)

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Values, float [B]."""
        values_B: torch.Tensor = self.layers(observations_BD).squeeze(1)
        return values_B


class ActorCritic(nn.Module):
    """A policy and a value network of their own layers, over the same normalised observations.

    The statistics of the normalisation are buffers, so checkpoints and saved networks hold them with the weights.
    """

    def __init__(self, shape: NetworkShape, seed: int = 0) -> None:
        """Weights are drawn from `seed`."""
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.statistics = ObservationStatistics(shape.observation_size) if shape.normalises else None
        self.policy = PolicyNetwork(shape, generator)
        self.value = ValueNetwork(shape, generator)
        # asked for at every pass, and slow to look up; weights change in place only
        self._weights = (tuple(self.policy.layers.parameters()), tuple(self.value.layers.parameters()))

    def normalised(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Observations as the networks see them."""
        return observations_BD if self.statistics is None else self.statistics(observations_BD)

    def forward(self, observations_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the policy, float [B, A], and values, float [B], from raw observations."""
        outputs_BA, values_B1 = self.outputs_and_values(observations_BD)
        return outputs_BA, values_B1.squeeze(1)

    def outputs_and_values(self, observations_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the values as a column [B, 1], as losses take them."""
        return paired_layers(self.normalised(observations_BD), *self._weights, self.shape.activation)

    @torch.no_grad()
    def values(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Values of raw observations, float [B], no gradient."""
        return single_layers(self.normalised(observations_BD), self._weights[1], self.shape.activation).squeeze(1)

    @torch.no_grad()
    def act(self, observations_BD: torch.Tensor, noise_BA: torch.Tensor | None = None) -> torch.Tensor:
        """Actions for raw observations; see `PolicyNetwork.act`."""
        outputs_BA = single_layers(self.normalised(observations_BD), self._weights[0], self.shape.activation)
        return self.policy.drawn(outputs_BA, noise_BA)


def gaussian_logprobs(actions_BA: torch.Tensor, means_BA: torch.Tensor, log_std_A: torch.Tensor) -> torch.Tensor:
    """Log-density of a Gaussian with independent numbers: -sum((a - m)^2 / (2 s^2) + log s + log(2 pi) / 2); [B]."""
    scaled_BA = (actions_BA - means_BA) * (-log_std_A).exp()
    return -(0.5 * scaled_BA.square() + log_std_A + 0.5 * LOG_2PI).sum(-1)


def gaussian_entropy(log_std_A: torch.Tensor) -> torch.Tensor:
    """Entropy of that Gaussian, sum(log s + (1 + log(2 pi)) / 2), nats; scalar."""
    return (log_std_A + 0.5 * (1 + LOG_2PI)).sum()
