"""Policy and value networks for vector observations, discrete or continuous actions; observation statistics.

The two networks have the same hidden widths and the same input, and are computed together: half as many operations,
twice as wide. Layers this small cost little arithmetic and much bookkeeping. Each pair of hidden layers is one batched
product, forward and backward; the result is that of the two networks one after the other, up to rounding.

Suffixes: B rows, D numbers of an observation (the input), H width of a hidden layer, A actions (discrete) or numbers of
an action (continuous); a leading 2 is (first network, second network).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from rl_core.errors import DataError, SettingsError
from rl_core.losses.masking import check_finite
from rl_core.losses.supervised import token_entropy

VARIANCE_EPSILON = 1e-8
MAX_DEVIATIONS = 10.0  # standard deviations
LOG_2PI = math.log(2 * math.pi)
Activation = Literal["tanh", "relu"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class ObservationStatistics(nn.Module):
    """Normaliser of observations by the mean and variance of all rows passed to `update`, clipped to +-10 deviations.

    Before the first update observations pass unchanged. The sums are float64 buffers: part of every state of the
    module.
    """

    count: torch.Tensor
    mean_D: torch.Tensor
    squares_D: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_D", torch.zeros(size, dtype=torch.float64))
        # Sum of squared deviations.
        self.register_buffer("squares_D", torch.zeros(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, observations_BD: torch.Tensor) -> None:
        """Add rows, exactly as if all rows so far had been averaged together.

        Raises: NonFiniteTensor for an observation with NaN or infinity, before anything is changed.
        Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
        """
        check_finite(observations=observations_BD)
        rows_BD = observations_BD.double()
        num_rows, mean_D = len(rows_BD), rows_BD.mean(0)
        total = self.count + num_rows
        difference_D = mean_D - self.mean_D
        within_D = (rows_BD - mean_D).square().sum(0)
        self.squares_D += within_D + difference_D.square() * self.count * num_rows / total
        self.mean_D += difference_D * num_rows / total
        self.count.copy_(total)

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Compute (x - mean) / sqrt(variance + 1e-8), float32, clipped."""
        if not self.count:
            return observations_BD
        deviation_D = (self.squares_D / self.count + VARIANCE_EPSILON).sqrt()
        normalised_BD = (observations_BD - self.mean_D) / deviation_D
        return normalised_BD.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS).float()


def compute_paired_layers(
    inputs_BD: torch.Tensor,
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of both networks, float [B, outputs of each], with gradients to their weights (not to the
    input).

    Args:
        first, second: weight, offset, weight, offset, ... of each network's linear layers; hidden widths agree.
        activation: tanh or relu, between the layers.
    """
    function: Any = _PairedLayers  # torch's `apply` has no types
    outputs: tuple[torch.Tensor, torch.Tensor] = function.apply(
        inputs_BD, activation, len(first), *first, *second
    )
    return outputs


def compute_single_layers(
    inputs_BD: torch.Tensor, weights: Sequence[torch.Tensor], activation: str
) -> torch.Tensor:
    """Compute the outputs of one network, float [B, outputs], with the same bits as `nn.Sequential` but without module
    calls.

    Args:
        weights: weight, offset, weight, offset, ... of its linear layers.
        activation: tanh or relu, between the layers.
    """
    activate = torch.tanh if activation == "tanh" else torch.relu
    outputs = torch.nn.functional.linear(inputs_BD, weights[0], weights[1])
    for index in range(2, len(weights), 2):
        outputs = torch.nn.functional.linear(activate(outputs), weights[index], weights[index + 1])
    return outputs


class _PairedLayers(torch.autograd.Function):
    """Autograd function of two networks' linear layers, in pairs."""

    @staticmethod
    def forward(
        context: Any, inputs_BD: torch.Tensor, activation: str, count: int, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = weights[:count], weights[count:]
        states: list[torch.Tensor] = []  # [2, B, H] after each hidden layer
        matrices: list[torch.Tensor] = []  # [2, H, H'] of the hidden layers after the first
        activate_in_place = torch.tanh_ if activation == "tanh" else torch.relu_
        for index in range(0, count - 2, 2):
            offset_21H = torch.stack((first[index + 1], second[index + 1]))[:, None]
            matrix_2HH = torch.stack((first[index], second[index]))
            previous = states[-1] if states else inputs_BD.expand(2, -1, -1)
            sums_2BH = torch.baddbmm(offset_21H, previous, matrix_2HH.transpose(1, 2))
            states.append(activate_in_place(sums_2BH))
            if index:
                matrices.append(matrix_2HH)
        last = states[-1] if states else inputs_BD.expand(2, -1, -1)
        context.save_for_backward(inputs_BD, first[-2], second[-2], *states, *matrices)
        context.activation, context.depth = activation, len(states)
        first_outputs = torch.addmm(first[-1], last[0], first[-2].T)
        return first_outputs, torch.addmm(second[-1], last[1], second[-2].T)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs_BD, *saved = context.saved_tensors
        depth = context.depth
        heads, states, matrices = saved[:2], saved[2 : 2 + depth], saved[2 + depth :]
        last = states[-1] if states else inputs_BD.expand(2, -1, -1)
        weight_gradients: list[list[torch.Tensor]] = [
            [gradient.T @ last[side], gradient.sum(0)] for side, gradient in enumerate(gradients)
        ]
        if states:
            back_2BH = torch.empty_like(states[-1])
            for side in (0, 1):
                torch.mm(gradients[side], heads[side], out=back_2BH[side])
        for layer in range(depth - 1, -1, -1):
            back_2BH = _apply_activation_gradient(back_2BH, states[layer], context.activation)
            previous = states[layer - 1] if layer else inputs_BD.expand(2, -1, -1)
            matrix_2HH, offset_2H = torch.bmm(back_2BH.transpose(1, 2), previous), back_2BH.sum(1)
            for side in (0, 1):
                weight_gradients[side][:0] = [matrix_2HH[side], offset_2H[side]]
            if layer:
                back_2BH = torch.bmm(back_2BH, matrices[layer - 1])
        return (None, None, None, *weight_gradients[0], *weight_gradients[1])


def _apply_activation_gradient(
    gradient: torch.Tensor, state: torch.Tensor, activation: str
) -> torch.Tensor:
    """Compute the gradient before the activation from the gradient after it and the activation's value."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(gradient, state)
    return torch.ops.aten.threshold_backward(gradient, state, 0)


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Actions of an environment: `size` alternatives, or a vector of `size` numbers."""

    kind: Literal["discrete", "continuous"]
    size: int
    start: int = 0  # number of the first alternative
    low: tuple[float, ...] = ()  # bounds of each number, infinite without one
    high: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()  # of an action passed to the environment

    @property
    def is_discrete(self) -> bool:
        """True if an action is one of several alternatives."""
        return self.kind == "discrete"


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of an actor-critic."""

    observation_size: int
    actions: ActionSpace
    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    initial_log_std: float = 0.0  # of continuous actions
    normalises: bool = False  # observations, by running mean and variance

    def __post_init__(self) -> None:
        if min(self.observation_size, self.actions.size, *self.hidden) < 1:
            raise SettingsError(
                f"hidden: sizes {self.observation_size}, {self.hidden}, {self.actions.size} must all be at least 1"
            )


def _build_layers(
    sizes: Sequence[int], activation: Activation, gain: float, generator: torch.Generator | None
) -> nn.Sequential:
    """Build linear layers with the activation between them; orthogonal weights, offsets 0.

    Hidden layers have gain sqrt(2), the last one `gain`. Source: Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    modules: list[nn.Module] = []
    for index, (num_inputs, num_outputs) in enumerate(itertools.pairwise(sizes)):
        is_last = index == len(sizes) - 2
        layer = nn.Linear(num_inputs, num_outputs)
        layer_gain = gain if is_last else math.sqrt(2)
        nn.init.orthogonal_(layer.weight, layer_gain, generator=generator)
        nn.init.zeros_(layer.bias)
        modules.append(layer)
        if not is_last:
            modules.append(_ACTIVATIONS[activation]())
    return nn.Sequential(*modules)


class PolicyNetwork(nn.Module):
    """Distribution over actions: categorical, or a Gaussian with one learned deviation per number."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.actions = shape.actions
        sizes = (shape.observation_size, *shape.hidden, shape.actions.size)
        self.layers = _build_layers(sizes, shape.activation, 0.01, generator)
        if not shape.actions.is_discrete:
            self.log_std_A = nn.Parameter(torch.full((shape.actions.size,), shape.initial_log_std))

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Compute logits of the alternatives, or means of the numbers; float [B, A]."""
        outputs_BA: torch.Tensor = self.layers(observations_BD)
        return outputs_BA

    def logprobs_and_entropy(
        self, observations_BD: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probability (density) of the actions and the entropy of their distribution, nats; float [B]
        each.

        Args:
            actions: int64 [B], counted from 0; or float [B, A], as drawn, before clipping to bounds.
        Raises: DataError on shapes.
        """
        outputs_BA = self(observations_BD)
        return self.logprobs_of(outputs_BA, actions), self.entropy_of(outputs_BA)

    def logprobs_of(self, outputs_BA: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Compute log-probabilities of the actions from the outputs of `forward`, float [B]. Raises: DataError on
        shapes.
        """
        return self.logprob_column(outputs_BA, actions).squeeze(1)

    def logprob_column(self, outputs_BA: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Compute the same log-probabilities as a column [B, 1], the shape that losses take."""
        _check_action_shape(self.actions, outputs_BA, actions)
        if self.actions.is_discrete:
            return outputs_BA.log_softmax(-1).gather(1, actions[:, None])
        return compute_gaussian_logprobs(actions, outputs_BA, self.log_std_A)[:, None]

    def entropy_of(self, outputs_BA: torch.Tensor) -> torch.Tensor:
        """Compute entropies of the distributions from the outputs of `forward`, float [B]."""
        if self.actions.is_discrete:
            return token_entropy(outputs_BA.log_softmax(-1))
        return compute_gaussian_entropy(self.log_std_A).expand(len(outputs_BA))

    def act(
        self, observations_BD: torch.Tensor, noise_BA: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return actions, int64 [B] counted from 0 or float [B, A] (not clipped): sampled with the noise, or the
        likeliest.

        Args:
            noise_BA: standard Gumbel noise for alternatives (the largest of logit + noise is a sample of the softmax:
                Gumbel 1954), standard normal noise for numbers; None = the mode.
        """
        return self.drawn(self(observations_BD), noise_BA)

    def drawn(self, outputs_BA: torch.Tensor, noise_BA: torch.Tensor | None) -> torch.Tensor:
        """Sample actions from the outputs of `forward`; see `act`."""
        if self.actions.is_discrete:
            return (outputs_BA if noise_BA is None else outputs_BA + noise_BA).argmax(-1)
        return outputs_BA if noise_BA is None else outputs_BA + self.log_std_A.exp() * noise_BA


class ValueNetwork(nn.Module):
    """Expected discounted return from an observation."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layers = _build_layers(
            (shape.observation_size, *shape.hidden, 1), shape.activation, 1.0, generator
        )

    def forward(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Compute values, float [B]."""
        values_B: torch.Tensor = self.layers(observations_BD).squeeze(1)
        return values_B


class ActorCritic(nn.Module):
    """Separate policy and value networks over the same normalised observations.

    The statistics of the normalisation are buffers, so checkpoints and saved networks contain them with the weights.
    """

    def __init__(self, shape: NetworkShape, seed: int = 0) -> None:
        """Build the networks; weights are drawn from `seed`."""
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.statistics = (
            ObservationStatistics(shape.observation_size) if shape.normalises else None
        )
        self.policy = PolicyNetwork(shape, generator)
        self.value = ValueNetwork(shape, generator)
        # Cached because every pass needs them and the lookup is slow; weights only change in place.
        self.layer_weights = (
            tuple(self.policy.layers.parameters()),
            tuple(self.value.layers.parameters()),
        )

    def normalised(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Normalise observations for the networks."""
        return observations_BD if self.statistics is None else self.statistics(observations_BD)

    def forward(self, observations_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute outputs of the policy, float [B, A], and values, float [B], from raw observations."""
        outputs_BA, values_B1 = self.outputs_and_values(observations_BD)
        return outputs_BA, values_B1.squeeze(1)

    def outputs_and_values(
        self, observations_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same outputs with the values as a column [B, 1], the shape that losses take."""
        return compute_paired_layers(
            self.normalised(observations_BD), *self.layer_weights, self.shape.activation
        )

    def build_distribution(self, observations_BD: torch.Tensor) -> Distribution:
        """Build the policy's distribution over actions for raw observations, with gradients to the weights.

        Returns: Categorical over [B], its actions counted from 0; or independent Normals over [B, A], as one event, not
            clipped to the bounds of the space.
        Raises: NonFiniteTensor for outputs with NaN or infinity.
        """
        return self._wrap_outputs(self(observations_BD)[0])

    def get_action_and_value(
        self,
        observations_BD: torch.Tensor,
        actions: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions, log-probabilities, entropies (nats) and values of raw observations, as CleanRL's agents do.

        Args:
            actions: int64 [B], counted from 0, or float [B, A]; None = sampled.
            generator: of the samples, whose state a resumable loop saves (`generator.get_state()`); None = torch's
                global one, which gives the samples of `build_distribution(...).sample()`.
        Returns: actions; float [B] each: log-probabilities, entropies and values, with gradients.
        Raises: DataError on shapes and for alternatives that do not exist; NonFiniteTensor.
        """
        outputs_BA, values_B = self(observations_BD)
        distribution = self._wrap_outputs(outputs_BA)
        if actions is None:
            actions = _sample_actions(distribution, generator)
        else:
            self._check_actions(outputs_BA, actions)
        return actions, distribution.log_prob(actions), distribution.entropy(), values_B

    def evaluate_actions(
        self, observations_BD: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return values, log-probabilities and entropies, float [B] each, as stable-baselines3's policies do.

        Args, Raises: as `get_action_and_value`.
        """
        _, logprobs_B, entropies_B, values_B = self.get_action_and_value(observations_BD, actions)
        return values_B, logprobs_B, entropies_B

    def _wrap_outputs(self, outputs_BA: torch.Tensor) -> Distribution:
        """Build the distribution from the outputs of `forward`."""
        check_finite(outputs=outputs_BA)
        if self.shape.actions.is_discrete:
            return Categorical(logits=outputs_BA, validate_args=False)
        deviations_BA = self.policy.log_std_A.exp().expand_as(outputs_BA)
        normal = Normal(outputs_BA, deviations_BA, validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def _check_actions(self, outputs_BA: torch.Tensor, actions: torch.Tensor) -> None:
        """Raise DataError for actions of another shape, and for alternatives that do not exist."""
        _check_action_shape(self.shape.actions, outputs_BA, actions)
        if self.shape.actions.is_discrete:
            is_outside_B = (actions < 0) | (actions >= self.shape.actions.size)
            if bool(is_outside_B.any()):
                raise DataError(
                    f"actions: {int(actions[is_outside_B][0])} is not one of 0 to {self.shape.actions.size - 1}"
                )
        else:
            check_finite(actions=actions)

    @torch.no_grad()
    def values(self, observations_BD: torch.Tensor) -> torch.Tensor:
        """Compute values of raw observations, float [B], without gradient."""
        values_B1 = compute_single_layers(
            self.normalised(observations_BD), self.layer_weights[1], self.shape.activation
        )
        return values_B1.squeeze(1)

    @torch.no_grad()
    def act(
        self, observations_BD: torch.Tensor, noise_BA: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return actions for raw observations; see `PolicyNetwork.act`."""
        outputs_BA = compute_single_layers(
            self.normalised(observations_BD), self.layer_weights[0], self.shape.activation
        )
        return self.policy.drawn(outputs_BA, noise_BA)


def _check_action_shape(
    space: ActionSpace, outputs_BA: torch.Tensor, actions: torch.Tensor
) -> None:
    """Raise DataError unless there is one action per row of the outputs."""
    expected = outputs_BA.shape[:1] if space.is_discrete else outputs_BA.shape
    if actions.shape != expected:
        raise DataError(f"actions: shape {tuple(actions.shape)}, expected {tuple(expected)}")


@torch.no_grad()
def _sample_actions(distribution: Distribution, generator: torch.Generator | None) -> torch.Tensor:
    """Sample as the distribution's `sample`, which takes no generator."""
    if isinstance(distribution, Categorical):
        return torch.multinomial(distribution.probs, 1, True, generator=generator)[:, 0]
    assert isinstance(distribution, Independent)
    return torch.normal(distribution.mean, distribution.stddev, generator=generator)


def compute_gaussian_logprobs(
    actions_BA: torch.Tensor, means_BA: torch.Tensor, log_std_A: torch.Tensor
) -> torch.Tensor:
    """Compute the log-density of independent Gaussians: -sum((a - m)^2 / (2 s^2) + log s + log(2 pi) / 2); [B]."""
    scaled_BA = (actions_BA - means_BA) * (-log_std_A).exp()
    return -(0.5 * scaled_BA.square() + log_std_A + 0.5 * LOG_2PI).sum(-1)


def compute_gaussian_entropy(log_std_A: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of that Gaussian, sum(log s + (1 + log(2 pi)) / 2), nats; scalar."""
    return (log_std_A + 0.5 * (1 + LOG_2PI)).sum()
