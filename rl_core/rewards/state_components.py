"""Reward components of the policy's hidden states: coherence of consecutive turns, and curiosity.

Curiosity is the error of a small forward model that predicts the state after each action.
H hidden size of the policy, N states or transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from rl_core.analysis.summary import count_contradictions, count_repetitions, score_similarity_band
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent
from rl_core.rewards.running_stats import RunningNorm
from rl_core.settings import CoherenceSettings, CuriositySettings
from rl_core.storage.checkpoint import extract_moments, load_moments
from rl_core.types import Rollout


class CoherenceReward(RewardComponent):
    """Mean band score of consecutive turns - repetition (repeated turns) - contradiction (answers taken back).

    The states are the policy's own, averaged over each turn. A single turn has no predecessor and scores 1, so that
    additional turns earn nothing by themselves.
    Metrics: similarity and in_band (over pairs of turns), repetitions and contradictions (means over rollouts).
    """

    needs_states: ClassVar[bool] = True

    def __init__(self, settings: CoherenceSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout."""
        settings, values, similar = self.settings, [], []
        repeated = [count_repetitions(rollout.trajectory) for rollout in rollouts]
        taken_back = [count_contradictions(rollout.trajectory) for rollout in rollouts]
        for walk, repeats, changes in zip(states, repeated, taken_back, strict=True):
            turns_NH = walk.states_NH[1:]
            cosines = functional.cosine_similarity(turns_NH[:-1], turns_NH[1:], dim=-1).tolist()
            scores = [
                score_similarity_band(cosine, settings.low, settings.high) for cosine in cosines
            ]
            flow = fmean(scores) if scores else 1.0
            values.append(flow - settings.repetition * repeats - settings.contradiction * changes)
            similar += cosines
        self.metrics = (
            {"repetitions": fmean(repeated), "contradictions": fmean(taken_back)}
            if rollouts
            else {}
        )
        if similar:
            self.metrics["similarity"] = fmean(similar)
            self.metrics["in_band"] = fmean(
                settings.low <= cosine <= settings.high for cosine in similar
            )
        return values


class CuriosityReward(RewardComponent):
    """Prediction error of the state after an action, averaged over an episode's transitions, over its running scale.

    error = mean_H (f(state, action) - next state)^2 with layer-normed states; f is trained on each batch after the
    batch is scored, so that repeated transitions earn less and less. The error is divided by the root mean square of
    all errors so far, which stays near the size of the first ones. The mean, not the sum: more turns alone earn
    nothing. A turn without an observation is no transition; an episode without transitions earns 0.
    Metrics: error (mean over transitions, before training), scale, transitions (of the batch).
    Source: Pathak et al. 2017, arXiv:1705.05363 (forward error as reward); Burda et al. 2018, arXiv:1810.12894 (scale).
    """

    needs_states: ClassVar[bool] = True

    def __init__(self, settings: CuriositySettings, seed: int) -> None:
        """The forward model is built when the first states come in, whose width it needs."""
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.scale = RunningNorm()
        self.model: nn.Sequential | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """One number for each rollout; the forward model then learns from all their transitions."""
        pairs = [_extract_transitions(walk) for walk in states]
        counts = [len(inputs) for inputs, _ in pairs]
        self.metrics = {"transitions": float(sum(counts)), "scale": self.scale.rms}
        if not sum(counts):
            return [0.0] * len(rollouts)
        inputs_N2H = torch.cat([inputs for inputs, _ in pairs])
        targets_NH = torch.cat([targets for _, targets in pairs])
        if self.model is None:
            self._build_model(targets_NH.shape[1])
        errors = [
            part.tolist() for part in self._compute_errors(inputs_N2H, targets_NH).split(counts)
        ]
        means = [fmean(part) if part else 0.0 for part in errors]
        self.scale.add_values([mean for mean, part in zip(means, errors, strict=True) if part])
        scale = self.scale.rms
        self._train_model(inputs_N2H, targets_NH)
        self.metrics |= {"scale": scale, "error": fmean(error for part in errors for error in part)}
        return [mean / scale if scale > 1e-8 else 0.0 for mean in means]

    def state_dict(self) -> dict[str, Any]:
        """Return the forward model, its Adam state and the scale."""
        made = self.model is not None and self.optimizer is not None
        return {
            "scale": self.scale.state_dict(),
            "hidden_size": self.model[-1].out_features if self.model is not None else None,
            "model": self.model.state_dict() if made and self.model is not None else None,
            "optimizer": extract_moments(self.optimizer)
            if made and self.optimizer is not None
            else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.scale.load_state_dict(state["scale"])
        self.model = self.optimizer = None
        if state["hidden_size"] is not None:
            self._build_model(int(state["hidden_size"]))
            assert self.model is not None and self.optimizer is not None
            self.model.load_state_dict(state["model"])
            load_moments(self.optimizer, state["optimizer"])

    def _build_model(self, size: int) -> None:
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        first, last = (
            nn.utils.skip_init(nn.Linear, 2 * size, self.settings.hidden),
            nn.utils.skip_init(nn.Linear, self.settings.hidden, size),
        )
        for layer in (first, last):  # from a generator of its own: no other random number moves
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        self.model = nn.Sequential(first, nn.Tanh(), last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.settings.learning_rate)

    @torch.no_grad()
    def _compute_errors(self, inputs_N2H: torch.Tensor, targets_NH: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        return (self.model(inputs_N2H) - targets_NH).square().mean(-1)

    def _train_model(self, inputs_N2H: torch.Tensor, targets_NH: torch.Tensor) -> None:
        assert self.model is not None and self.optimizer is not None
        for _ in range(self.settings.steps):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                functional.mse_loss(self.model(inputs_N2H), targets_NH).backward()
            self.optimizer.step()


def _extract_transitions(walk: TurnEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return state and action before each observed turn [N, 2H] and the state after it [N, H], layer-normed."""
    size = walk.states_NH.shape[1]
    picked_N = torch.tensor(walk.is_observed, dtype=torch.bool)
    states_NH = functional.layer_norm(walk.states_NH, (size,))
    actions_NH = functional.layer_norm(walk.actions_NH, (size,))
    return torch.cat([states_NH[:-1], actions_NH], dim=1)[picked_N], states_NH[1:][picked_N]
